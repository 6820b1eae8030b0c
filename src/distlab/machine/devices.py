"""A rank's device, backend, network interface and number of threads."""

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from distlab.machine.threads import asked_threads, cores
from simplellm.errors import require


@dataclass(frozen=True)
class Place:
    """A rank's host and GPUs."""

    host: str
    gpus: tuple[str, ...] = ()  # UUIDs of the GPUs that the rank sees; none for a rank on the CPU


def pick_device_type(name: str) -> str:
    """Return the device type, "cpu" or "cuda", for a value of `--device`; `auto` is CUDA if present.

    Also sets the environment variables that CUDA reads at its start. With "cpu", this process no longer sees any GPU.

    Raises:
        InputError: CUDA was requested but is not available.
    """
    if name == "cpu":  # otherwise torch's checkpoint writer would open a visible GPU and use some of its memory
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    # Over NCCL, the groups and links of a hybrid need more streams than the default of 8 queues, and streams that share
    # a queue wait for each other (CUDA C++ Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS; 32 is the maximum).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    is_there = torch.cuda.is_available()
    require(is_there or name != "cuda", "--device cuda: torch sees no CUDA device here; use --device cpu")
    return "cuda" if is_there else "cpu"


def own_place(device_type: str, master_addr: str) -> Place:
    """Return this rank's host, and the GPUs that it sees."""
    gpus = range(torch.cuda.device_count() if device_type == "cuda" else 0)
    return Place(host_name(master_addr), tuple(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus))


def local_ranks(places: Sequence[Place], rank: int) -> list[int]:
    """Return all ranks on the host of `rank`, given the places of all ranks."""
    return [other for other, place in enumerate(places) if place.host == places[rank].host]


def pick_device(places: Sequence[Place], rank: int) -> torch.device:
    """Return the device of `rank`: the CPU, or one of the GPUs that it sees."""
    return torch.device("cuda", _gpu_of(places, rank)) if places[rank].gpus else torch.device("cpu")


def _gpu_of(places: Sequence[Place], rank: int) -> int:
    """Return the index of the GPU that a rank uses: the ranks of a host are assigned to its GPUs in turn."""
    return local_ranks(places, rank).index(rank) % len(places[rank].gpus)


def pick_backend(name: str, places: Sequence[Place]) -> str:
    """Return the backend for a value of `--backend`; `auto` is NCCL when every rank has its own GPU, else gloo.

    Raises:
        InputError: NCCL was requested but cannot work, for example with two ranks on one GPU; or only some of the ranks
            see a GPU.
    """
    other = next((rank for rank, place in enumerate(places) if bool(place.gpus) != bool(places[0].gpus)), 0)
    kinds = ["cuda" if places[rank].gpus else "cpu" for rank in (0, other)]
    both = f"--device auto: rank 0 would compute on {kinds[0]} and rank {other} on {kinds[1]}"
    require(other == 0, f"{both}; give all ranks --device cpu")
    if not places[0].gpus:
        on_cpu = "--backend nccl: NCCL moves CUDA tensors only and this run computes on the CPU; use gloo"
        require(name != "nccl", on_cpu)
        return "gloo"
    users: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        users.setdefault(place.gpus[_gpu_of(places, rank)], []).append(rank)
    shared = next((ranks for ranks in users.values() if len(ranks) > 1), None)
    who = "" if shared is None else f"ranks {shared[0]} and {shared[1]} share a GPU of {places[shared[0]].host}"
    require(shared is None or name != "nccl", f"--backend nccl: {who}, which NCCL refuses; use --backend gloo")
    return name if name != "auto" else "gloo" if shared else "nccl"


def check_transport(name: str, places: Sequence[Place]) -> None:
    """Raise `InputError` if `--transport shared` is requested and the ranks are not on the CPU of one host."""
    other = next((rank for rank, place in enumerate(places) if place.host != places[0].host), None)
    hosts = "" if other is None else f"ranks 0 and {other} are on {places[0].host} and {places[other].host}"
    require(name != "shared" or other is None, f"--transport shared: {hosts}, which have no memory in common; use auto")
    on_gpu = "--transport shared: this run computes on GPUs, and only ranks on the CPU share memory; use auto"
    require(name != "shared" or not any(place.gpus for place in places), on_gpu)


def tf32_override() -> str | None:
    """Return the environment variable that makes float32 products use TF32 (10 bits of fraction); None if not set."""
    names = "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    return next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name) == "1"), None)


def threads_per_rank(local_ranks: int) -> int:
    """Return the number of threads for each rank that shares this host's cores; OMP_NUM_THREADS overrides it."""
    return asked_threads() or max(1, cores() // local_ranks)


def cores_to_share(parties: int) -> int | None:
    """Return this host's cores for each of `parties`, at least 1; None if OMP_NUM_THREADS sets the threads."""
    return None if asked_threads() else max(1, cores() // parties)


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
    """Make gloo listen only on the loopback interface, whatever this host's name resolves to."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def keep_to_interface(master_addr: str, on_one_host: bool) -> None:
    """Make gloo and NCCL listen only on the interface that leads to the master; on one host, on loopback.

    `master_addr` is where rank 0, or torchrun's rendezvous, listens. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME
    override the choice if they are set.
    """
    address = "127.0.0.1" if on_one_host else own_address(master_addr)
    if address is not None and ipaddress.ip_address(address).is_loopback:
        keep_to_loopback()
    elif address is not None and (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this one; a bare name is a prefix


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


def host_name(master_addr: str) -> str:
    """Return this host's name, and the address from which it reaches the master."""
    return f"{socket.gethostname()} ({own_address(master_addr) or 'no route to the master'})"
