"""Who waits for whom when a run stands still, drawn from the wait that each rank publishes.

Ranks are the nodes of a graph; an edge goes from a rank to one without which its wait does not end. A cycle is a
deadlock (Holt, "Some deadlock properties of computer systems", 1972). Without one, all paths end at a rank that waits
for nobody: it is stopped, still computes, or has ended, and holds up all others.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from distlab.comm.wait_graph import find_cycle
from distlab.comm.waits import Wait, group_key, list_ranks


@dataclass
class Notice:
    """What a rank publishes when another one asks: a sign of life, and its wait."""

    rank: int
    wait: Wait | None  # None if it has not waited for anything for long
    begun: dict[str, int] = field(default_factory=dict)  # how many collectives it has begun, by their ranks ("0,1,2")
    failure_number: int = 0  # of its wait among those that failed, from 1 in order of time; 0 if it has not failed
    lost_a_peer: bool = False  # its wait failed because a connection was closed

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Notice":
        fields = json.loads(text)
        wait = fields["wait"]
        return cls(**{**fields, "wait": wait and Wait(**{**wait, "peers": tuple(wait["peers"])})})


@dataclass(frozen=True)
class Diagnosis:
    """Why a run stands still."""

    picture: list[str]  # lines that show every rank and whom it waits for
    sentence: str  # the cycle, or the rank that all others end up waiting for
    is_partial: bool = False  # the other ranks' notices could not be read


def diagnose(
    notices: Mapping[int, Notice],
    ended: Mapping[int, str],
    world_size: int,
    describe: Callable[[int], str],
    timeout_seconds: float,
) -> Diagnosis:
    """Draw who waits for whom, and name who holds up the others.

    Args:
        notices: by rank, of those that gave a sign of life after the first wait had failed; at least one waits.
        ended: by rank, why it ended, from those that reported it.
        describe: what a rank is called, e.g. "rank 4 (stage 1 of replica 1)".
    """

    def names(ranks: Sequence[int]) -> str:
        return " and ".join(map(describe, ranks))

    waits = {rank: notice.wait for rank, notice in notices.items() if notice.wait is not None and rank not in ended}
    edges = {rank: list(_held_up_by(rank, wait, waits, notices)) for rank, wait in waits.items()}
    width = max(len(describe(rank)) for rank in range(world_size))
    picture = ["who waits for whom:"]
    for rank in range(world_size):
        if rank in ended:
            state = f"has ended: {ended[rank]}"
        elif rank not in notices:
            state = "waits for nothing that it has named: it computes, is stopped, or has ended"
        elif rank not in waits:
            state = "answers, and waits for nothing that it has named: it computes"
        else:
            to_send = "to send " if waits[rank].way == "send" else "for "
            arrow = f"  -> {list_ranks(edges[rank])}" if edges[rank] else ""
            state = f"waits {to_send}{waits[rank].what}{arrow}"
        picture.append(f"  {describe(rank):<{width}}  {state}")

    ends = sorted({peer for peers in edges.values() for peer in peers if peer not in waits})
    # gloo closes a rank's connections when its wait fails, so only the first failure tells how it began.
    failures = [notice for notice in notices.values() if notice.failure_number]
    first = min(failures, key=lambda notice: notice.failure_number, default=None)
    lost_a_peer = first is not None and first.lost_a_peer
    silent = [rank for rank in range(world_size) if rank not in notices and rank not in ended]
    failed = [rank for rank in ends if rank in ended] or (sorted(ended) if lost_a_peer else [])
    gone = [rank for rank in ends if rank in silent] or (silent if lost_a_peer else [])
    cycle = find_cycle(edges)
    too_long = f"computing for longer than --timeout {timeout_seconds:g}"
    if failed:
        return Diagnosis(picture, list_causes({rank: ended[rank] for rank in failed}, describe))
    if gone and lost_a_peer:
        cause = "has ended without reporting a cause: it was killed, or left the run too early"
        return Diagnosis(picture, f"{'one of ' * (len(gone) > 1)}{names(gone)} {cause}")
    if gone:
        do = "does" if len(gone) == 1 else "do"
        why = "not answer, and the others wait: stopped, cut off, or computing for longer than --timeout "
        return Diagnosis(picture, f"{names(gone)} {do} {why}{timeout_seconds:g}")
    if first is not None and first.wait is not None and lost_a_peer:
        lost = f"{describe(first.rank)} lost its connection to {list_ranks(first.wait.peers)}"
        return Diagnosis(picture, f"{lost}, though all ranks answer: see their last lines")
    if cycle:  # none of its ranks can continue, whatever the others do
        picture.append(f"  cycle: {' -> '.join(f'rank {rank}' for rank in [*cycle, cycle[0]])}")
        start, *others = cycle
        chain = "".join(f" waits for {describe(rank)}, which" for rank in others)
        return Diagnosis(picture, f"deadlock: {describe(start)}{chain} waits for {describe(start)}")
    if ends:
        answer = "answers, but has" if len(ends) == 1 else "answer, but have"
        late = f"{names(ends)} {answer} not reached this point, and the others wait: {too_long}"
        return Diagnosis(picture, late)
    what = next(iter(waits.values())).what if waits else "each other"
    stuck = f"all ranks do their part of {what}, and it does not end: is the network between them up?"
    return Diagnosis(picture, stuck)


def _held_up_by(rank: int, wait: Wait, waits: Mapping[int, Wait], notices: Mapping[int, Notice]) -> Iterator[int]:
    """The ranks that have not done their part of what `rank` waits for."""
    group = group_key([rank, *wait.peers])
    for peer in wait.peers:
        if wait.way == "other" and peer in waits:
            continue
        if wait.way == "collective" and peer in waits:
            own = waits[peer]
            elsewhere = own.way == "collective" and own.number == wait.number and own.what != wait.what
            same_ranks = group_key([peer, *own.peers]) == group
            if notices[peer].begun.get(group, 0) > wait.number and not (same_ranks and elsewhere):
                continue
        yield peer


def list_causes(ended: Mapping[int, str], describe: Callable[[int], str]) -> str:
    """ "rank 1 failed: out of memory": why ranks have ended, by rank."""
    return "; ".join(f"{describe(rank)} failed: {cause}" for rank, cause in ended.items())
