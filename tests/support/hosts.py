"""Two hosts made of network namespaces: interfaces, addresses and ports of their own, on one kernel (ip-netns(8))."""

import itertools
import os
import re
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "lab0"  # what each host calls its end of the link
PAIRS = itertools.count()  # of hosts that this process has made


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        namespace: its name.
        address: on the link between the two.
    """

    namespace: str
    address: str

    def command(self, *command: object) -> list[str]:
        """A command line that runs `command` on this host."""
        return ["ip", "netns", "exec", self.namespace, *(str(part) for part in command)]

    def run(self, *command: object) -> str:
        """The standard output of a command that ends well on this host."""
        return _run(*self.command(*command))

    def listening(self) -> set[str]:
        """The addresses, without ports, at which some process of this host listens for TCP."""
        lines = self.run("ss", "--tcp", "--listening", "--numeric", "--no-header").splitlines()
        return {line.split()[3].rpartition(":")[0].strip("[]") for line in lines}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def why_not() -> str:
    """Why hosts with a cable between them cannot be made here; "" if they can."""
    try:
        with two_hosts() as (a, _):
            a.listening()
    except OSError as error:
        return f"two hosts cannot be made here: {error}"
    return ""


def why_no_tun() -> str:
    """Why a link that can be shaped cannot be made here; "" if it can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"no TUN devices here: {error}"
    return ""


@contextmanager
def namespaces() -> Iterator[tuple[Host, Host]]:
    """Two namespaces with loopback alone, which are removed in the end; and those that a killed process has left."""
    for name in re.findall(r"^(lab-\d+-\w+)", _run("ip", "netns", "list"), re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            with suppress(OSError):  # another process tidies up as well
                _run("ip", "netns", "delete", name)
    number = os.getpid() % 65536
    pair = next(PAIRS)
    hosts = [
        Host(f"lab-{os.getpid()}-{letter}{pair}", f"10.{number // 256}.{number % 256}.{place}")
        for place, letter in ((1, "a"), (2, "b"))
    ]
    made = []
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            made.append(host)
            _run("ip", "-netns", host.namespace, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        for host in made:
            _run("ip", "netns", "delete", host.namespace)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable (a veth pair) between them."""
    with namespaces() as hosts:
        a, b = hosts
        # The pair goes with its namespaces; an end in the first namespace of all would stay behind after a crash.
        peer = ["type", "veth", "peer", "name", INTERFACE, "netns", b.namespace]
        _run("ip", "link", "add", INTERFACE, "netns", a.namespace, *peer)
        for host in hosts:
            plug_in(host)
        yield hosts


def plug_in(host: Host) -> None:
    """Give a host's end of the link its address, and switch it on."""
    _run("ip", "-netns", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-netns", host.namespace, "link", "set", INTERFACE, "up")


class Link:
    """A link of two namespaces with a bandwidth and a latency, made of two TUN devices and a process between them.

    Where the kernel has netem, `tc qdisc … netem rate … delay …` on a cable's ends does the same; not every kernel has
    it, while TUN devices are nearly everywhere. Each direction is a queue without an end: a packet leaves when those
    before it have left and its own bits have, one after another, at the bandwidth, and arrives a latency later. No
    packet is lost. Packets have up to 64 kB, so that Python can pass on a gigabit a second.
    """

    MTU = 65000

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        command = [sys.executable, __file__, *(host.namespace for host in hosts)]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise OSError("the relay between the hosts did not start: is /dev/net/tun there?")
        for host in hosts:
            plug_in(host)
            # BBR, a default of some kernels, goes on for seconds with the bandwidth that it saw before a change.
            host.run("sysctl", "-w", "net.ipv4.tcp_congestion_control=reno")

    def shape(self, mbit_per_second: float, one_way_ms: float) -> None:
        """From now on let packets pass at this bandwidth (0: as fast as it goes) and this latency, each way."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{mbit_per_second} {one_way_ms}\n")
        self._relay.stdin.flush()

    def close(self) -> None:
        self._relay.kill()
        self._relay.communicate()


@contextmanager
def two_hosts_with_a_link() -> Iterator[tuple[tuple[Host, Host], Link]]:
    """Two hosts, and the link between them, which can be shaped while they talk."""
    with namespaces() as hosts:
        link = Link(hosts)
        try:
            yield hosts, link
        finally:
            link.close()


def open_tun(namespace: str) -> int:
    """A new TUN device of a namespace; leaves this process in that namespace."""
    import ctypes
    import fcntl

    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    set_interface, is_tun, no_header = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, IFF_TUN, IFF_NO_PI
    fcntl.ioctl(tun, set_interface, struct.pack("16sH14x", INTERFACE.encode(), is_tun | no_header))
    _run("ip", "link", "set", INTERFACE, "mtu", str(Link.MTU))
    return tun


def relay(tuns: tuple[int, int]) -> None:
    """Pass packets between two devices until this process is killed; a line on stdin sets bandwidth and latency."""
    bytes_per_second, latency = 0.0, 0.0
    free_at = [0.0, 0.0]  # when each direction's sender has done with what is queued
    queues: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    stdin = sys.stdin.fileno()
    while True:
        now = time.monotonic()
        due = min((queue[0][0] for queue in queues if queue), default=now + 60)
        ready, _, _ = select.select([*tuns, stdin], [], [], max(0.0, due - now))
        if stdin in ready:
            words = os.read(stdin, 4096).decode().splitlines()
            if not words:
                return
            mbit_per_second, one_way_ms = map(float, words[-1].split())
            bytes_per_second, latency = mbit_per_second * 1e6 / 8, one_way_ms / 1e3
        for way, tun in enumerate(tuns):
            if tun in ready:
                with suppress(BlockingIOError):
                    for _ in range(64):
                        packet = os.read(tun, 65536)
                        now = time.monotonic()
                        seconds = len(packet) / bytes_per_second if bytes_per_second else 0.0
                        free_at[way] = max(now, free_at[way]) + seconds
                        queues[way].append((free_at[way] + latency, packet))
            queue, now = queues[way], time.monotonic()
            while queue and queue[0][0] <= now:
                with suppress(BlockingIOError, OSError):
                    os.write(tuns[1 - way], queue.popleft()[1])


if __name__ == "__main__":
    with suppress(OSError):
        os.nice(-20)  # the link is no faster than the turns it gets
    devices = open_tun(sys.argv[1]), open_tun(sys.argv[2])
    print("ready", flush=True)
    relay(devices)
