"""The seconds of messages and collectives between ranks on a machine, by closed formula or as measured.

A collective is a ring (Patarasuk and Yuan, 2009): an all-reduce among n ranks is 2 (n - 1) messages in a row of an n-th
of the tensor. On its way, a number passes the links of the ring one after another, and each link carries 2 (n - 1)
messages; the ring takes the longer of both times. Where all links are equal, both are 2 (n - 1) (latency + size /
n / bandwidth), the simulated world's time. Ranks that share memory sum inside each host first, and then in a ring of
hosts (`distlab.comm.context.Hosts`).
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.axes.layout import coordinate, pipelines_on_host, ranks_along
from distlab.comm.link import Link
from distlab_planner.layouts import Axes, RunLayout
from distlab_planner.machine import Machine, MeasuredTransport, interpolate

SMALLEST_SHARED_BYTES = 1_000  # as in `distlab.comm.context`, which imports torch
SMALLEST_OF_HOSTS_BYTES = 250_000


@dataclass(frozen=True)
class Spread:
    """The distribution of groups of ranks on hosts; some may begin on one host and end on the next."""

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
    """A layout's ranks on a machine's hosts, in order, as many on each as it has room for.

    The ranks of a collective are those along some axes; all groups of such ranks have theirs at the same time.
    """

    machine: Machine
    layout: RunLayout

    @functools.cached_property
    def per_host(self) -> int:
        """Ranks on a host."""
        return min(self.layout.ranks, self.machine.ranks_per_host)

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

    def message_in_ring(self, axes: Axes, size_bytes: float) -> float:
        """Return the seconds of a message from each rank of a group to the next, and of those that handle it."""
        machine, spread = self.machine, self.spread(axes)
        inside = machine.inside_of(self.per_host).seconds(size_bytes)
        across = machine.between.seconds(size_bytes * spread.leaving) if spread.hosts > 1 else 0.0
        return max(inside, across) + 2 * machine.message_seconds

    def spread(self, axes: Axes) -> Spread:
        return spread_of(tuple(self.layout.axes.items()), self.per_host, axes)

    def is_inside(self, axes: Axes) -> bool:
        """Return whether the ranks along these axes are on one host, in each group of them."""
        return self.spread(axes).hosts == 1

    def all_reduce(self, axes: Axes, size_bytes: float, transport: MeasuredTransport = "gloo") -> CollectiveSeconds:
        """Return the seconds of an all-reduce of `size_bytes`; "shared" is used where the ranks can share memory."""
        ranks = self.layout.size(*axes)
        if ranks == 1:
            return CollectiveSeconds(0.0, 0.0, True)
        if self.is_inside(axes):
            asked = transport if size_bytes >= SMALLEST_SHARED_BYTES else "gloo"
            for kind in dict.fromkeys((asked, "gloo")):
                seconds = measured_all_reduce(self.machine, ranks, size_bytes, kind)
                if seconds is not None:
                    # Measured while all of the group's ranks were busy with it.
                    alone = seconds / self.machine.slowdown_of(ranks)
                    return CollectiveSeconds(seconds, alone, overlaps=kind == "gloo")
        by_host = self._host_by_host(axes, size_bytes) if transport == "shared" else None
        seconds = self._ring(axes, size_bytes, rounds=2) if by_host is None else by_host
        return CollectiveSeconds(seconds, seconds, overlaps=True)

    def half(self, axes: Axes, size_bytes: float, transport: MeasuredTransport = "gloo") -> CollectiveSeconds:
        """Return the seconds of a reduce-scatter or an all-gather of a tensor of `size_bytes`.

        In a ring it is half of an all-reduce. In shared memory it carries half as much, but its ranks meet as often.
        """
        if not self.is_inside(axes):
            seconds = self._ring(axes, size_bytes, rounds=1)
            return CollectiveSeconds(seconds, seconds, overlaps=True)
        whole = self.all_reduce(axes, size_bytes, transport)
        if whole.overlaps:
            return CollectiveSeconds(whole.seconds / 2, whole.alone / 2, overlaps=True)
        meeting = self.all_reduce(axes, SMALLEST_SHARED_BYTES, transport)
        return CollectiveSeconds((whole.seconds + meeting.seconds) / 2, (whole.alone + meeting.alone) / 2, False)

    def all_to_all(self, axes: Axes, size_bytes: float) -> CollectiveSeconds:
        """Return the seconds in which each rank of a group sends parts of its `size_bytes` to all others.

        In messages, it sends as much as in a reduce-scatter. In shared memory, it copies all of its parts there, and
        those for it from there, as many bytes as in an all-reduce. Between hosts, all ranks of a host send at once.
        """
        if self.is_inside(axes):
            whole = self.all_reduce(axes, size_bytes, "shared")
            return self.half(axes, size_bytes, "shared") if whole.overlaps else whole
        ranks, on_host = self.layout.size(*axes), self.spread(axes).on_host
        part = size_bytes / ranks
        inside = (on_host - 1) * self.machine.inside.seconds(part)
        seconds = inside + (ranks - on_host) * self.machine.between.seconds(part * self.per_host)
        return CollectiveSeconds(seconds, seconds, False)

    def _host_by_host(self, axes: Axes, size_bytes: float) -> float | None:
        """Return the seconds of an all-reduce in each host's memory, with a ring of the hosts' first ranks in between.

        None where a run would not do it: for small tensors, or where ranks do not share memory.
        """
        if size_bytes < SMALLEST_OF_HOSTS_BYTES:
            return None
        spread = self.spread(axes)
        inside = measured_all_reduce(self.machine, spread.on_host, size_bytes, "shared")
        if inside is None:
            return None
        across = self.machine.between.seconds(size_bytes / spread.hosts * spread.leaving)
        return inside + 2 * (spread.hosts - 1) * across

    def _ring(self, axes: Axes, size_bytes: float, rounds: int) -> float:
        ranks = self.layout.size(*axes)
        messages, part = rounds * (ranks - 1), size_bytes / ranks
        inside, between, spread = self.machine.inside, self.machine.between, self.spread(axes)
        if spread.hosts == 1:
            return messages * inside.seconds(part)
        across = between.seconds(part * spread.leaving)
        passing = messages * (spread.hosts * across + (ranks - spread.hosts) * inside.seconds(part)) / ranks
        carrying = between.latency_seconds + messages * part * spread.leaving / between.bytes_per_second
        return max(passing, carrying)


@functools.lru_cache(maxsize=4096)
def spread_of(layout: tuple[tuple[str, int], ...], per_host: int, axes: Axes) -> Spread:
    """Return the distribution on hosts of the groups of ranks along some axes; a group's ring is in ascending order."""
    hosts, on_host = 1, 1
    rings: Counter[int] = Counter()  # by host, the rings that leave it
    for ranks in ranks_along(dict(layout), axes):
        members = Counter(rank // per_host for rank in ranks)
        hosts, on_host = max(hosts, len(members)), max(on_host, *members.values())
        rings.update(members.keys() if len(members) > 1 else ())
    return Spread(on_host, hosts, max(rings.values(), default=0))


@functools.lru_cache(maxsize=65536)
def most_leaving(layout: tuple[tuple[str, int], ...], per_host: int, sender: int, receiver: int) -> int:
    """Return the maximum number of ranks of one host that send to other hosts when a worker sends to another."""
    pipelines = ranks_along(dict(layout), ["pp"])
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
