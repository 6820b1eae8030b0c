"""The seconds of messages and collectives between ranks on a machine, by closed formula or as measured.

A collective is a ring (Patarasuk and Yuan, 2009): an all-reduce among n ranks is 2 (n - 1) messages in a row of an n-th
of the tensor. On its way, a number passes the links of the ring one after another, and each link carries 2 (n - 1)
messages; the ring takes the longer of both times. Where all links are equal, both are 2 (n - 1) (latency + size /
n / bandwidth), the simulated world's time. Ranks that share memory sum inside each host first, and then in a ring of
hosts (`distlab.comm.context.Hosts`).
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.axes.layout import coordinate, pipelines_on_host, ranks_along, stride
from distlab.comm.link import Link
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import Machine, MeasuredTransport, interpolate

SMALLEST_SHARED_BYTES = 1_000  # as in `distlab.comm.context`, which imports torch
SMALLEST_OF_HOSTS_BYTES = 250_000


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a collective: `rows` rows, `apart` from each other, with ranks that are `stride` apart.

    All other groups of this kind have theirs at the same time.
    """

    size: int  # of the group
    stride: int
    rows: int = 1
    apart: int = 1

    @property
    def length(self) -> int:
        """Consecutive ranks that hold whole groups."""
        return self.rows * self.apart if self.rows > 1 else self.size * self.stride

    def first(self, rank: int) -> int:
        """Return the first rank of the group of a rank."""
        in_row, row = rank // self.stride % (self.size // self.rows), rank // self.apart % self.rows
        return rank - in_row * self.stride - row * self.apart


@dataclass(frozen=True)
class Spread:
    """The distribution of consecutive groups on hosts; some may begin on one host and end on the next."""

    on_host: int  # ranks of a group on one host, at most
    hosts: int  # of a group, at most
    leaving: int  # groups that leave one host, at most: they share its card


@dataclass(frozen=True)
class CollectiveSeconds:
    """The seconds of a collective if no other rank computes, and whether its ranks can compute at the same time."""

    seconds: float  # while all of its ranks are busy with it
    alone: float  # the same without what its ranks slow each other, for collectives that are played as part of a pass
    overlaps: bool


def one_after_another(collectives: Sequence[CollectiveSeconds]) -> CollectiveSeconds:
    """Return the seconds of several collectives, one after another."""
    seconds, alone = sum(one.seconds for one in collectives), sum(one.alone for one in collectives)
    return CollectiveSeconds(seconds, alone, all(one.overlaps for one in collectives))


@dataclass(frozen=True)
class RanksOnHosts:
    """A layout's ranks on a machine's hosts, in order, as many on each as it has room for."""

    machine: Machine
    layout: RunLayout

    @functools.cached_property
    def per_host(self) -> int:
        """Ranks on a host."""
        return min(self.layout.ranks, self.machine.ranks_per_host)

    @functools.cached_property
    def replicas(self) -> RankGroup:
        """The ranks with the same weights, which see different sequences or parts of them."""
        near = self.layout.size("ep") * self.layout.size("cp")  # whose ranks are neighbors, apart from slices
        return self._with_replicas(RankGroup(near, self.layout.size("tp")))

    @functools.cached_property
    def expert_holders(self) -> RankGroup:
        """The ranks with the same experts."""
        return self._with_replicas(self.parts)

    def _with_replicas(self, near: RankGroup) -> RankGroup:
        dp = self.layout.size("dp")
        return RankGroup(dp * near.size, near.stride, dp, stride(self.layout.axes, "dp"))

    @functools.cached_property
    def sharing_experts(self) -> RankGroup:
        """The ranks that share the experts of each layer."""
        return RankGroup(self.layout.size("ep"), stride(self.layout.axes, "ep"))

    @functools.cached_property
    def parts(self) -> RankGroup:
        """The ranks that share sequences."""
        return RankGroup(self.layout.size("cp"), stride(self.layout.axes, "cp"))

    @functools.cached_property
    def slices(self) -> RankGroup:
        return RankGroup(self.layout.size("tp"), 1)

    def host_of(self, worker: int) -> int:
        """Return the host of a worker of the first replica: that of its first rank."""
        return self.layout.first_rank(worker) // self.per_host

    def alike(self, worker: int) -> int:
        """Return the number of ranks on a worker's host that do the same at once: its slices and replicas there."""
        layout, first = self.layout, self.host_of(worker) * self.per_host
        ranks = range(first, min(first + self.per_host, layout.ranks))
        return sum(coordinate(layout.axes, rank, "pp") == worker for rank in ranks)

    @property
    def pipelines(self) -> int:
        """Number of pipelines with workers on a host, as a run counts them."""
        return pipelines_on_host(self.layout.axes, self.per_host)

    def message(self, sender: int, receiver: int, size_bytes: float) -> float:
        """Return the seconds of a message between two workers, in the replica for which it takes longest.

        Messages of other replicas and slices that leave the same host share its card; those inside are sent together.
        """
        return self._link(sender, receiver).latency_seconds + self.carrying(sender, receiver, size_bytes)

    def carrying(self, sender: int, receiver: int, size_bytes: float) -> float:
        """Return the part of these seconds for which the next message between the two workers has to wait."""
        sharing = max(1, self._leaving(sender, receiver))
        return size_bytes * sharing / self._link(sender, receiver).bytes_per_second

    def _link(self, sender: int, receiver: int) -> Link:
        if self._leaving(sender, receiver):
            return self.machine.between
        return self.machine.inside_of(self.alike(sender))

    def _leaving(self, sender: int, receiver: int) -> int:
        return most_leaving(tuple(self.layout.axes.items()), self.per_host, sender, receiver)

    def message_in_ring(self, group: RankGroup, size_bytes: float) -> float:
        """Return the seconds of a message from each rank of a group to the next, and of those that handle it."""
        machine, spread = self.machine, self.spread(group)
        inside = machine.inside_of(self.per_host).seconds(size_bytes)
        across = machine.between.seconds(size_bytes * spread.leaving) if spread.hosts > 1 else 0.0
        return max(inside, across) + 2 * machine.message_seconds

    def spread(self, group: RankGroup) -> Spread:
        return spread_of(self.layout.ranks, self.per_host, group)

    def is_inside(self, group: RankGroup) -> bool:
        """Return whether each group of this kind is on one host."""
        return self.spread(group).hosts == 1

    def all_reduce(
        self, group: RankGroup, size_bytes: float, transport: MeasuredTransport = "gloo"
    ) -> CollectiveSeconds:
        """Return the seconds of an all-reduce of `size_bytes`; "shared" is used where the ranks can share memory."""
        if group.size == 1:
            return CollectiveSeconds(0.0, 0.0, True)
        if self.is_inside(group):
            asked = transport if size_bytes >= SMALLEST_SHARED_BYTES else "gloo"
            for kind in dict.fromkeys((asked, "gloo")):
                seconds = measured_all_reduce(self.machine, group.size, size_bytes, kind)
                if seconds is not None:
                    # Measured while all of the group's ranks were busy with it.
                    alone = seconds / self.machine.slowdown_of(group.size)
                    return CollectiveSeconds(seconds, alone, overlaps=kind == "gloo")
        by_host = self._host_by_host(group, size_bytes) if transport == "shared" else None
        seconds = self._ring(group, size_bytes, rounds=2) if by_host is None else by_host
        return CollectiveSeconds(seconds, seconds, overlaps=True)

    def half(self, group: RankGroup, size_bytes: float, transport: MeasuredTransport = "gloo") -> CollectiveSeconds:
        """Return the seconds of a reduce-scatter or an all-gather of a tensor of `size_bytes`.

        In a ring it is half of an all-reduce. In shared memory it carries half as much, but its ranks meet as often.
        """
        if not self.is_inside(group):
            seconds = self._ring(group, size_bytes, rounds=1)
            return CollectiveSeconds(seconds, seconds, overlaps=True)
        whole = self.all_reduce(group, size_bytes, transport)
        if whole.overlaps:
            return CollectiveSeconds(whole.seconds / 2, whole.alone / 2, overlaps=True)
        meeting = self.all_reduce(group, SMALLEST_SHARED_BYTES, transport)
        return CollectiveSeconds((whole.seconds + meeting.seconds) / 2, (whole.alone + meeting.alone) / 2, False)

    def all_to_all(self, group: RankGroup, size_bytes: float) -> CollectiveSeconds:
        """Return the seconds in which each rank of a group sends parts of its `size_bytes` to all others.

        In messages, it sends as much as in a reduce-scatter. In shared memory, it copies all of its parts there, and
        those for it from there, as many bytes as in an all-reduce. Between hosts, all ranks of a host send at once.
        """
        if self.is_inside(group):
            whole = self.all_reduce(group, size_bytes, "shared")
            return self.half(group, size_bytes, "shared") if whole.overlaps else whole
        part, on_host = size_bytes / group.size, self.spread(group).on_host
        inside = (on_host - 1) * self.machine.inside.seconds(part)
        seconds = inside + (group.size - on_host) * self.machine.between.seconds(part * self.per_host)
        return CollectiveSeconds(seconds, seconds, False)

    def _host_by_host(self, group: RankGroup, size_bytes: float) -> float | None:
        """Return the seconds of an all-reduce in each host's memory, with a ring of the hosts' first ranks in between.

        None where a run would not do it: for small tensors, or where ranks do not share memory.
        """
        if size_bytes < SMALLEST_OF_HOSTS_BYTES:
            return None
        spread = self.spread(group)
        inside = measured_all_reduce(self.machine, spread.on_host, size_bytes, "shared")
        if inside is None:
            return None
        across = self.machine.between.seconds(size_bytes / spread.hosts * spread.leaving)
        return inside + 2 * (spread.hosts - 1) * across

    def _ring(self, group: RankGroup, size_bytes: float, rounds: int) -> float:
        messages, part = rounds * (group.size - 1), size_bytes / group.size
        inside, between, spread = self.machine.inside, self.machine.between, self.spread(group)
        if spread.hosts == 1:
            return messages * inside.seconds(part)
        across = between.seconds(part * spread.leaving)
        passing = messages * (spread.hosts * across + (group.size - spread.hosts) * inside.seconds(part)) / group.size
        carrying = between.latency_seconds + messages * part * spread.leaving / between.bytes_per_second
        return max(passing, carrying)


@functools.lru_cache(maxsize=4096)
def spread_of(ranks: int, per_host: int, group: RankGroup) -> Spread:
    """Return the distribution of groups of ranks on hosts; a group's ranks, and its ring, are in ascending order."""
    group_hosts, on_host = 1, 1
    rings: Counter[int] = Counter()  # by host, the rings that leave it
    repeats = math.lcm(per_host, group.length)  # then the first ranks of a group and of a host meet again
    by_group: dict[int, Counter[int]] = {}  # by the first rank, its ranks on each host
    for rank in range(min(ranks, repeats)):
        by_group.setdefault(group.first(rank), Counter())[rank // per_host] += 1
    for members in by_group.values():
        group_hosts, on_host = max(group_hosts, len(members)), max(on_host, *members.values())
        rings.update(members.keys() if len(members) > 1 else ())
    return Spread(on_host, group_hosts, max(rings.values(), default=0))


@functools.lru_cache(maxsize=65536)
def most_leaving(axes: tuple[tuple[str, int], ...], per_host: int, sender: int, receiver: int) -> int:
    """Return the maximum number of ranks of one host that send to other hosts when a worker sends to another."""
    pipelines = ranks_along(dict(axes), ["pp"])
    hosts = [(ranks[sender] // per_host, ranks[receiver] // per_host) for ranks in pipelines]
    return max(Counter(own for own, other in hosts if own != other).values(), default=0)


def measured_all_reduce(machine: Machine, ranks: int, size_bytes: float, transport: MeasuredTransport) -> float | None:
    """Return the seconds of an all-reduce among ranks of one host from measurements; None if there are none.

    Between the measured numbers of ranks, and beyond, it follows from the number and the size of the messages.
    """
    known = [entry for entry in machine.all_reduces if entry.transport == transport]
    if not known:
        return None
    nearest = min(known, key=lambda entry: abs(entry.ranks - ranks))
    same_share = size_bytes * nearest.ranks / ranks  # a message carries as much
    seconds = interpolate(same_share, (0.0, *nearest.size_bytes), (nearest.seconds[0], *nearest.seconds))
    return seconds * (ranks - 1) / (nearest.ranks - 1)
