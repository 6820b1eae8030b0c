"""Runs over NCCL as far as they can be followed without a GPU: which tensors they give to it, and in what order."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_ranks
from support.recorded_nccl import Call, run_alone
from torch import Tensor

from distlab.pipeline import rehearsal
from distlab.pipeline.actions import Action
from distlab.pipeline.executor import Pipeline

LLAMA = "--dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24 --steps 2 --data sample --eval-every 2 --eval-sequences 3"
DEEPER = f"{LLAMA} --n-layers 4 --batch-size 4 --micro-batches 4"
RING = "CP/intro_CP_ring.py"
SCHEDULES, PLAIN = "PP/schedules/intro_PP_schedules.py", "PP/microbatches/intro_PP_microbatches.py"
PIPELINES = {
    "2 stages": (2, SCHEDULES, f"{LLAMA} --world-size 2 --batch-size 3"),
    "3 stages": (3, SCHEDULES, f"{LLAMA} --n-layers 3 --world-size 3 --batch-size 3"),
    "naive": (2, "PP/1F1B/intro_PP_1F1B.py", f"{LLAMA} --world-size 2"),
    "plain dapple": (3, PLAIN, f"{LLAMA} --n-layers 3 --world-size 3 --batch-size 4 --micro-batches 4"),
    **{name: (2, SCHEDULES, f"{DEEPER} --world-size 2 --schedule {name}") for name in ("zb-v", "dualpipe-v")},
    "2 replicas, plain": (4, "hybrid/intro_hybrid_plain.py", f"{LLAMA} --dp 2 --pp 2 --batch-size 3"),
    "2 replicas, interleaved": (4, "hybrid/intro_hybrid.py", f"{DEEPER} --dp 2 --pp 2 --schedule interleaved"),
    "2 stages, sequences over 2 ranks": (4, "hybrid/intro_5d.py", f"{LLAMA} --dp 1 --pp 2 --cp 2 --batch-size 3"),
    "2 stages, split over 2 ranks": (4, "hybrid/intro_hybrid.py", f"{LLAMA} --dp 1 --pp 2 --tp 2 --batch-size 3"),
}
POST_NOTHING_AHEAD = {"naive", "plain dapple", "2 replicas, plain"}
OTHERS = {
    "dp-ga": (2, "DP/gradient_aggr/intro_DP_GA.py", f"{LLAMA} --world-size 2"),
    "dp-wa": (2, "DP/weight_aggr/intro_DP_WA.py", f"{LLAMA} --world-size 2"),
    "tp": (2, "TP/intro_TP.py", f"{LLAMA} --world-size 2"),
    "cp-ring, 2 ranks": (2, RING, f"{LLAMA} --world-size 2"),
    "cp-ring, 3 ranks": (3, RING, f"{LLAMA} --world-size 3"),
    "cp-ring, heads": (2, RING, f"{LLAMA} --world-size 2 --cp-kind heads"),
    "both-send": (3, "PP/deadlock/intro_deadlock.py", "--case both-send --cure --device cuda"),
    "order": (3, "PP/deadlock/intro_deadlock.py", "--case order --cure --device cuda"),
    "skipped": (3, "PP/deadlock/intro_deadlock.py", "--case skipped --cure --device cuda"),
}


def record(size: int, script: str, flags: str, out: Path) -> list[list[Call]]:
    """What each rank would do, recorded in a process of its own."""
    flags = f"{flags} --out {out}"
    by_rank = run_ranks(size, lambda rank: [tuple(call) for call in run_alone(rank, size, script, flags.split())])
    return [[Call(*call) for call in calls] for calls in by_rank]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[Call]]]:
    """What each rank would do in a case; recorded once for all tests."""
    return functools.cache(lambda case: record(*(PIPELINES | OTHERS)[case], tmp_path_factory.mktemp("recorded")))


@pytest.mark.parametrize("case", [*PIPELINES, *OTHERS])
def test_nccl_gets_only_tensors_of_the_gpu_and_all_ranks_end(
    case: str, recorded: Callable[[str], list[list[Call]]]
) -> None:
    calls = recorded(case)  # fails where NCCL is given a tensor that is on the CPU
    assert all(calls)
    assert stuck(calls) == []


@pytest.mark.parametrize("case", sorted({*PIPELINES} - POST_NOTHING_AHEAD))
def test_communicators_are_set_up_before_the_first_kernel_is_loaded(
    case: str, recorded: Callable[[str], list[list[Call]]]
) -> None:
    for own in recorded(case):
        first = next(index for index, call in enumerate(own) if call.what == "load")
        assert {*map(communicator, own)} - {*map(communicator, own[:first])} == set()


def test_receives_that_are_posted_before_kernels_are_loaded_are_found_to_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelines used to do so; it shows that `stuck` finds it."""

    step = Pipeline.step

    def start_cold(pipeline: Pipeline, *given: Any) -> list[Tensor]:
        pipeline.is_cold = False
        return step(pipeline, *given)

    monkeypatch.setattr(Pipeline, "step", start_cold)
    assert stuck(record(*PIPELINES["2 stages"], tmp_path)) == [0, 1]


def passes_before_the_first_step(rank: int, out: Path) -> list[tuple[int, str]]:
    """The passes that a rank of "interleaved" rehearses, in order: stage, and what it does."""
    found: list[tuple[int, str]] = []
    rehearse = rehearsal.rehearse

    def noted(actions: Sequence[Action], *given: Any) -> Iterator[tuple[Action, float]]:
        found.append((actions[0].stage, "".join(action.letter for action in actions)))
        return rehearse(actions, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "rehearse", noted)
        run_alone(rank, 2, SCHEDULES, f"{DEEPER} --world-size 2 --schedule interleaved --out {out}".split())
    return found


def test_every_kind_of_pass_runs_twice_before_the_first_step(tmp_path: Path) -> None:
    """The first time sets gradients, the second time adds to them, by another kernel."""
    found = run_ranks(2, passes_before_the_first_step, tmp_path)
    assert found == [[(stage, "FB") for stage in (rank, rank + 2) for _ in range(2)] for rank in range(2)]


MEETING = """
from dataclasses import dataclass

import torch.distributed as dist

from distlab.settings.common import RunSettings, WorldSize


@dataclass
class Settings(WorldSize, RunSettings):
    @property
    def layout(self):
        return {"dp": self.world_size}


DEFAULTS = Settings()


def compare(run):
    dist.barrier()
"""


def test_a_barrier_keeps_the_thread_waiting(tmp_path: Path) -> None:
    """As torch's does, also over NCCL: programs measure times between barriers."""
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    for own in record(2, str(script), "--world-size 2", tmp_path / "run"):
        assert "all_reduce wait read" in " ".join(call.what for call in own)


@pytest.mark.parametrize(("flags", "ranks"), [("--case both-send", [0, 1, 2]), ("--case order", [0, 1, 2])])
def test_deadlocks_are_found(flags: str, ranks: list[int], tmp_path: Path) -> None:
    assert stuck(record(3, "PP/deadlock/intro_deadlock.py", f"{flags} --device cuda", tmp_path)) == ranks


def stuck(calls: list[list[Call]]) -> list[int]:
    """The ranks that do not come to their end, by the rules of CUDA and NCCL.

    A rank's thread waits in three places. To load a kernel is to wait until all that the rank has begun is done: in the
    first run of a kind of action on a stage, and, in scripts without actions, in the forward passes of the first step.
    The first use of a communicator sets it up: so does that, and then it waits until the communicator's other ranks
    have come to it. To read a result is to wait for all that the rank has waited for on its
    stream. The rest is up to the GPU: a collective or message starts when all that the rank has waited for before is
    done, and what it has begun before on the same communicator; it is done when it has started on all its ranks.
    """
    done: set[tuple[int, int]] = set()  # (rank, number)
    made = [0] * len(calls)  # how many of its calls each rank's thread has made
    while True:
        made_before = made.copy()
        arrived: set[tuple[int, object]] = {
            (rank, communicator(call)) for rank, own in enumerate(calls) for call in own[: made[rank] + 1]
        }
        for rank, own in enumerate(calls):
            while made[rank] < len(own) and may_make(rank, own, made[rank], done, arrived):
                made[rank] += 1
        started: dict[object, list[tuple[int, Call]]] = defaultdict(list)
        for rank, own in enumerate(calls):
            for place, call in started_by(rank, own[: made[rank]], done):
                started[place].append((rank, call))
        ended = [pair for pairs in started.values() if is_complete([call for _, call in pairs]) for pair in pairs]
        if not ended and made == made_before:
            return [rank for rank, own in enumerate(calls) if not begun_by(rank, own) <= done]
        done |= {(rank, call.number) for rank, call in ended}


def communicator(call: Call) -> tuple[object, ...] | None:
    """NCCL's, over which a collective or message goes: a group's, or that of two ranks for a group's messages."""
    return (call.group, call.ranks, call.what in ("send", "receive")) if call.is_begun else None


def begun_by(rank: int, calls: list[Call]) -> set[tuple[int, int]]:
    return {(rank, call.number) for call in calls if call.is_begun}


def may_make(
    rank: int, own: list[Call], place: int, done: set[tuple[int, int]], arrived: set[tuple[int, object]]
) -> bool:
    """Whether a rank's thread gets through its next call."""
    call, before = own[place], own[:place]
    if call.what == "load":
        return begun_by(rank, before) <= done
    if call.what == "read":
        return {(rank, wait.number) for wait in before if wait.what == "wait"} <= done
    own_communicator = communicator(call)
    if own_communicator is None or own_communicator in map(communicator, before):
        return True
    return begun_by(rank, before) <= done and all((other, own_communicator) in arrived for other in call.ranks)


def started_by(rank: int, made: list[Call], done: set[tuple[int, int]]) -> Iterator[tuple[object, Call]]:
    """What has started of a rank's calls and is not done; with its channel, and its place in the order there."""
    places: Counter[object] = Counter()
    waiting: set[object] = set()  # channels in which something has started
    for call in made:
        is_done, channel = (rank, call.number) in done, communicator(call)
        if call.what == "wait" and not is_done:
            return
        if channel is None:
            continue
        if not is_done and channel not in waiting:
            waiting.add(channel)
            yield (channel, places[channel]), call
        places[channel] += 1


def is_complete(calls: list[Call]) -> bool:
    """Whether these are a collective on all its ranks, or both ends of a message."""
    kinds = {call.what for call in calls}
    return len(calls) == len(calls[0].ranks) and (kinds == {"send", "receive"} or not kinds & {"send", "receive"})
