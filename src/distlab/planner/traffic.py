"""What messages and collectives between ranks cost on a machine, by closed formula or as measured.

A collective is a ring (Patarasuk and Yuan, 2009): an all-reduce among n ranks is 2 (n - 1) messages in a row of an n-th
of the tensor. On its way, a number passes the links of the ring one after another, and each link carries 2 (n - 1)
messages; whichever takes longer is what the ring takes. Where all links are equal, both are 2 (n - 1) (latency + size /
n / bandwidth), the simulated world's time. Ranks that share memory sum inside each host first, and then in a ring of
hosts (`distlab.comm.hosts`).
"""

import math
from dataclasses import dataclass

from distlab.comm.layout import pipelines_on_host
from distlab.comm.link import Link
from distlab.planner.layouts import Layout
from distlab.planner.machine import Machine, Transport, interpolate

SMALLEST_SHARED_BYTES = 1_000  # `smallest_shared_bytes` and `smallest_of_hosts_bytes` of `distlab.comm.traffic.Traffic`
SMALLEST_OF_HOSTS_BYTES = 250_000


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `size` of them, `stride` apart, while all other groups of this kind have theirs."""

    size: int
    stride: int


@dataclass(frozen=True)
class Collective:
    """What a collective takes if no other rank computes, and whether its ranks can compute meanwhile."""

    seconds: float
    overlaps: bool


@dataclass(frozen=True)
class Placement:
    """A layout's ranks on a machine's hosts, in their order, as many on each as it has room for."""

    machine: Machine
    layout: Layout

    @property
    def per_host(self) -> int:
        """Ranks on a host."""
        return min(self.layout.ranks, self.machine.ranks_per_host)

    @property
    def replicas(self) -> Group:
        layout = self.layout
        return Group(layout.dp, layout.tp if layout.neighbors == "replicas" else layout.pp * layout.tp)

    @property
    def slices(self) -> Group:
        return Group(self.layout.tp, 1)

    def host_of(self, worker: int) -> int:
        """The host of a worker of the first replica: that of its first rank."""
        layout = self.layout
        stride = layout.dp * layout.tp if layout.neighbors == "replicas" else layout.tp
        return worker * stride // self.per_host

    def alike(self, worker: int) -> int:
        """How many ranks of a worker's host do what it does at the same time: its slices, and its replicas there."""
        layout = self.layout
        if layout.neighbors == "replicas":
            return min(layout.dp * layout.tp, self.per_host)
        whole = self.per_host // (layout.pp * layout.tp)
        return layout.tp * whole if whole else min(layout.tp, self.per_host)

    @property
    def pipelines(self) -> int:
        """Of how many pipelines a host runs workers, as `Grid.pipelines_on_host` counts them."""
        layout = self.layout
        return pipelines_on_host(self.per_host, layout.pp, layout.dp * layout.tp, layout.neighbors)

    def message(self, sender: int, receiver: int, size_bytes: float) -> float:
        """Seconds of a message between two workers; those of ranks alike share the card of their host."""
        return self._link(sender, receiver).latency_seconds + self.carrying(sender, receiver, size_bytes)

    def carrying(self, sender: int, receiver: int, size_bytes: float) -> float:
        """Seconds of these for which the next message between the two workers has to wait."""
        ranks = 1 if self.host_of(sender) == self.host_of(receiver) else self.alike(sender)
        return size_bytes * ranks / self._link(sender, receiver).bytes_per_second

    def _link(self, sender: int, receiver: int) -> Link:
        is_inside = self.host_of(sender) == self.host_of(receiver)
        return self.machine.inside if is_inside else self.machine.between

    def members_per_host(self, group: Group) -> int:
        """How many ranks of a group a host has."""
        return min(group.size, max(1, self.per_host // group.stride))

    def is_inside(self, group: Group) -> bool:
        """Whether a group is on one host."""
        return (group.size - 1) * group.stride < self.per_host

    def all_reduce(self, group: Group, size_bytes: float, transport: Transport = "gloo") -> Collective:
        """An all-reduce of a tensor of so many bytes; "shared" is what it is where the ranks can share memory."""
        if group.size == 1:
            return Collective(0.0, False)
        if self.is_inside(group):
            asked = transport if size_bytes >= SMALLEST_SHARED_BYTES else "gloo"
            for kind in dict.fromkeys((asked, "gloo")):
                seconds = measured_all_reduce(self.machine, group.size, size_bytes, kind)
                if seconds is not None:
                    # Measured while all of the group's ranks were busy with it.
                    return Collective(seconds / self.machine.slowdown_of(group.size), overlaps=kind == "gloo")
        seconds = self._host_by_host(group, size_bytes) if transport == "shared" else None
        return Collective(self._ring(group, size_bytes, rounds=2) if seconds is None else seconds, overlaps=True)

    def half(self, group: Group, size_bytes: float, transport: Transport = "gloo") -> Collective:
        """A reduce-scatter or an all-gather of a tensor of so many bytes.

        In a ring it is half of an all-reduce. In shared memory it carries half as much, but its ranks meet as often.
        """
        if not self.is_inside(group):
            return Collective(self._ring(group, size_bytes, rounds=1), overlaps=True)
        whole = self.all_reduce(group, size_bytes, transport)
        meeting = 0.0 if whole.overlaps else self.all_reduce(group, SMALLEST_SHARED_BYTES, transport).seconds
        return Collective((whole.seconds + min(meeting, whole.seconds)) / 2, whole.overlaps)

    def _host_by_host(self, group: Group, size_bytes: float) -> float | None:
        """Seconds of an all-reduce in the memory of each host, with a ring of the hosts' first ranks in between.

        None where a run would not do it: with one rank on each host, or where ranks do not share memory.
        """
        on_host = self.members_per_host(group)
        if on_host == 1 or size_bytes < SMALLEST_OF_HOSTS_BYTES:
            return None
        inside = measured_all_reduce(self.machine, on_host, size_bytes, "shared")
        if inside is None:
            return None
        hosts = math.ceil(group.size / on_host)
        groups = max(1, self.per_host // on_host)  # that leave each host, over one card
        return inside + 2 * (hosts - 1) * self.machine.between.seconds(size_bytes / hosts * groups)

    def _ring(self, group: Group, size_bytes: float, rounds: int) -> float:
        messages, part = rounds * (group.size - 1), size_bytes / group.size
        inside = self.machine.inside
        if self.is_inside(group):
            return messages * inside.seconds(part)
        on_host = self.members_per_host(group)
        rings = max(1, self.per_host // on_host)  # that leave each host, over one card
        between = self.machine.between
        across = between.seconds(part * rings)
        passing = messages * (across + (on_host - 1) * inside.seconds(part)) / on_host
        carrying = between.latency_seconds + messages * part * rings / between.bytes_per_second
        return max(passing, carrying)


def measured_all_reduce(machine: Machine, ranks: int, size_bytes: float, transport: Transport) -> float | None:
    """Seconds of an all-reduce among ranks of one host by what was measured; None if it was not.

    Between numbers of ranks that were measured, and beyond, by the number of messages and what each carries.
    """
    known = [entry for entry in machine.all_reduces if entry.transport == transport]
    if not known:
        return None
    nearest = min(known, key=lambda entry: abs(entry.ranks - ranks))
    same_share = size_bytes * nearest.ranks / ranks  # a message carries as much
    seconds = interpolate(same_share, (0.0, *nearest.size_bytes), (nearest.seconds[0], *nearest.seconds))
    return seconds * (ranks - 1) / (nearest.ranks - 1)
