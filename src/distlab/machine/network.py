"""This host's name and network interfaces, and the threads of gloo."""

import array
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from distlab.machine.devices import Place, visible_gpus


def own_place(device_type: str, master_addr: str) -> Place:
    """Return this rank's host, with the address from which it reaches the master, and the GPUs that it sees."""
    host = f"{socket.gethostname()} ({own_address(master_addr) or 'no route to the master'})"
    return Place(host, visible_gpus(device_type))


def report_place(store: dist.Store, rank: int, own: Place) -> None:
    """Put this rank's host and GPUs into the ranks' store."""
    store.set(f"place/{rank}", json.dumps([own.host, own.gpus]))


def read_places(store: dist.Store, world_size: int) -> list[Place]:
    """Return the hosts and GPUs that all ranks have reported, or will."""
    told = store.multi_get([f"place/{rank}" for rank in range(world_size)])
    return [Place(host, tuple(gpus)) for host, gpus in map(json.loads, told)]


@contextmanager
def patient_threads() -> Iterator[None]:
    """Start threads that do not preempt a running thread when they wake up (SCHED_BATCH).

    Meant for gloo's thread. While another thread of the rank writes to a connection, gloo's thread spins on its lock.
    Where ranks share cores, gloo's thread often wakes up on the core of the writing thread. If it preempted that thread
    it would spin until the end of its time slice: milliseconds, for a message that takes a tenth of one. (NCCL's
    threads only monitor, so this does not slow them down.)
    """
    try:
        is_changed = os.sched_getscheduler(0) == os.SCHED_OTHER  # do not override a policy that the user has set
        if is_changed:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or a container that forbids it
        is_changed = False
    try:
        yield
    finally:
        if is_changed:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def keep_to_loopback() -> None:
    """Make gloo and NCCL listen only on the loopback interface, whatever this host's name resolves to."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        _keep_to(names[0])


def keep_to_interface(master_addr: str, on_one_host: bool) -> None:
    """Make gloo and NCCL listen only on the interface that leads to the master; on one host, on loopback.

    `master_addr` is where rank 0, or torchrun's rendezvous, listens. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME
    override the choice if they are set.
    """
    address = "127.0.0.1" if on_one_host else own_address(master_addr)
    if address is not None and ipaddress.ip_address(address).is_loopback:
        keep_to_loopback()
    elif address is not None and (name := interface_of(address)) is not None:
        _keep_to(name)


def _keep_to(interface: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one; a bare name is a prefix


def let_ranks_share_gpus(rank: int) -> None:
    """Make NCCL take each rank for a host of its own, which it reaches through sockets.

    NCCL refuses two ranks of one host on one GPU; from version 2.30 on, `devices.SHARE_GPUS` changes that. A name of a
    host for each rank works with earlier versions too, but not over InfiniBand.
    """
    os.environ.setdefault("NCCL_HOSTID", f"lab-rank-{rank}")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")


def own_address(towards: str) -> str | None:
    """Return this host's address on the route to another host, from the routing table; nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, UnicodeError):
        return None


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address; None if there is none, or if the system is not Linux."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        try:
            lines = Path("/proc/net/if_inet6").read_text().splitlines()
        except OSError:  # /proc is missing
            return None
        return next((line.split()[-1] for line in lines if int(line.split()[0], 16) == int(wanted)), None)
    get_configuration, entry = 0x8912, 40  # SIOCGIFCONF; sizeof(struct ifreq): a name of 16 bytes, a sockaddr
    buffer = array.array("B", bytes(entry * 1024))
    start, capacity = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, get_configuration, struct.pack("iP", capacity, start))
    used, _ = struct.unpack("iP", answer)
    for at in range(0, used, entry):
        if bytes(buffer[at + 20 : at + 24]) == wanted.packed:
            return bytes(buffer[at : at + 16]).partition(b"\0")[0].decode()
    return None
