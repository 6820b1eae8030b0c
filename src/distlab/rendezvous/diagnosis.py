"""Which rank waits for which in a blocked run, derived from the wait that each rank publishes.

Ranks are the nodes of a graph; an edge leads from a waiting rank to one that it waits for. A cycle is a deadlock (Holt,
"Some deadlock properties of computer systems", 1972). Without a cycle, all paths end at a rank that waits for no other:
it is stopped, is still computing, or has exited, and it blocks all others.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from distlab.comm.wait_graph import find_cycle
from distlab.comm.waits import Wait, group_key, list_ranks


@dataclass
class Notice:
    """A rank's answer when another rank asks: it is alive, and this is its wait."""

    rank: int
    wait: Wait | None  # None if it is not in a long wait
    begun: dict[str, int] = field(default_factory=dict)  # collectives that it has started, by their ranks ("0,1,2")
    failure_number: int = 0  # position of its failed wait among all failed waits, from 1; 0 if it has not failed
    lost_a_peer: bool = False  # its wait failed because a connection was closed
    held_back: dict[str, list[int]] = field(default_factory=dict)  # those of `begun` without its share, by their ranks

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Notice":
        fields = json.loads(text)
        if fields["wait"]:
            what, way, peers, *more = fields["wait"]
            fields["wait"] = Wait(what, way, tuple(peers), *more)
        return cls(**fields)


@dataclass(frozen=True)
class Diagnosis:
    """Why a run is blocked."""

    picture: list[str]  # lines that show every rank and which ranks it waits for
    sentence: str  # names the cycle, or the rank that blocks all others
    is_partial: bool = False  # the other ranks' notices could not be read
    gone: int | None = None  # the rank that has exited and reported nothing, if it can only be one


def diagnose(
    notices: Mapping[int, Notice],
    ended: Mapping[int, str],
    world_size: int,
    describe: Callable[[int], str],
    timeout_seconds: float,
    timeout_name: str = "--timeout",
) -> Diagnosis:
    """Show which rank waits for which, and name the rank that blocks the others.

    Args:
        notices: by rank, from the ranks that answered after the first wait had failed; at least one of them waits.
        ended: by rank, why it exited, for the ranks that reported it.
    """

    def names(ranks: Sequence[int]) -> str:
        return " and ".join(map(describe, ranks))

    waits = {rank: notice.wait for rank, notice in notices.items() if notice.wait is not None}
    edges = {rank: list(_held_up_by(rank, wait, waits, notices)) for rank, wait in waits.items()}
    picture = _picture(notices, ended, edges, world_size, describe)
    ends = sorted({peer for peers in edges.values() for peer in peers if peer not in waits})
    # gloo closes a rank's connections when its wait fails, so only the first failure shows the original cause.
    failures = [notice for notice in notices.values() if notice.failure_number]
    first = min(failures, key=lambda notice: notice.failure_number, default=None)
    lost_a_peer = first is not None and first.lost_a_peer
    silent = [rank for rank in range(world_size) if rank not in notices and rank not in ended]
    failed = [rank for rank in ends if rank in ended] or (sorted(ended) if lost_a_peer else [])
    gone = [rank for rank in ends if rank in silent] or (silent if lost_a_peer else [])
    cycle = find_cycle(edges)
    too_long = f"computing for longer than {timeout_name} {timeout_seconds:g}"
    if failed:
        return Diagnosis(picture, list_causes({rank: ended[rank] for rank in failed}, describe))
    if gone and lost_a_peer:
        cause = "has exited without reporting a cause: it was killed, or finished too early"
        if len(gone) == 1:
            return Diagnosis(picture, f"{names(gone)} {cause}", gone=gone[0])
        return Diagnosis(picture, f"one of {names(gone)} {cause}")
    if gone:
        do = "does" if len(gone) == 1 else "do"
        why = f"stopped, cut off, or {too_long}"
        return Diagnosis(picture, f"{names(gone)} {do} not answer, and the others wait: {why}")
    if first is not None and first.wait is not None and lost_a_peer:
        lost = f"{describe(first.rank)} lost its connection to {list_ranks(first.wait.peers)}"
        return Diagnosis(picture, f"{lost}, though all ranks answer: see their last lines")
    if cycle:  # none of these ranks can continue, whatever the others do
        picture.append(f"  cycle: {' -> '.join(f'rank {rank}' for rank in [*cycle, cycle[0]])}")
        start, *others = cycle
        chain = "".join(f" waits for {describe(rank)}, which" for rank in others)
        return Diagnosis(picture, f"deadlock: {describe(start)}{chain} waits for {describe(start)}")
    if ends:
        answer = "answers, but has" if len(ends) == 1 else "answer, but have"
        return Diagnosis(picture, f"{names(ends)} {answer} not reached this point, and the others wait: {too_long}")
    for rank, wait in waits.items():
        if _is_met(rank, wait, waits):
            sending = f"{describe(rank)} is sending {wait.what} to {list_ranks(wait.peers)}, where it has not arrived"
            why = f"it was {too_long}, or the network between them is slow"
            return Diagnosis(picture, f"{sending}, and the others wait: {why}")
    what = next(iter(waits.values())).what
    stuck = f"all ranks take part in {what}, but it does not finish: is the network between them up?"
    return Diagnosis(picture, stuck)


def _picture(
    notices: Mapping[int, Notice],
    ended: Mapping[int, str],
    edges: Mapping[int, Sequence[int]],
    world_size: int,
    describe: Callable[[int], str],
) -> list[str]:
    """Return a line for each rank: its wait, and by `edges` the ranks that it waits for, or why it has none."""
    width = max(len(describe(rank)) for rank in range(world_size))
    picture = ["who waits for whom:"]
    for rank in range(world_size):
        wait = notices[rank].wait if rank in notices else None
        if rank in ended:
            state = f"has exited: {ended[rank]}"
        elif rank not in notices:
            state = "has published no wait: it is computing, is stopped, or has exited"
        elif wait is None:
            state = "answers, and has published no wait: it is computing"
        else:
            arrow = f"  -> {list_ranks(edges[rank])}" if edges[rank] else ""
            way, line = "to send" if wait.way == "send" else "for", ""
            if wait.line:  # it has the name of the operation
                way, line = "in", f" ({wait.line})"
            state = f"waits {way} {wait.what}{line}{arrow}"
        picture.append(f"  {describe(rank):<{width}}  {state}")
    return picture


def _held_up_by(rank: int, wait: Wait, waits: Mapping[int, Wait], notices: Mapping[int, Notice]) -> Iterator[int]:
    """Yield the ranks that `rank` waits for, which have not done their part."""
    if _is_met(rank, wait, waits):
        return
    group = group_key([rank, *wait.peers])
    for peer in wait.peers:
        if wait.way == "other" and peer in waits:
            continue
        if wait.way == "collective" and peer in waits:
            own = waits[peer]
            elsewhere = own.way == "collective" and own.number == wait.number and own.what != wait.what
            same_ranks = group_key([peer, *own.peers]) == group
            is_held_back = wait.number in notices[peer].held_back.get(group, ())
            if notices[peer].begun.get(group, 0) > wait.number and not (same_ranks and elsewhere) and not is_held_back:
                continue
        yield peer


def _is_met(rank: int, wait: Wait, waits: Mapping[int, Wait]) -> bool:
    """Return whether `rank` waits to send a message to a rank that waits for it, so that neither blocks the other."""
    return wait.way == "send" and any(
        peer in waits and waits[peer].way == "receive" and rank in waits[peer].peers and waits[peer].what == wait.what
        for peer in wait.peers
    )


def list_causes(ended: Mapping[int, str], describe: Callable[[int], str]) -> str:
    """Return in words why ranks exited: "rank 1 failed: out of memory"."""
    return "; ".join(f"{describe(rank)} failed: {cause}" for rank, cause in ended.items())
