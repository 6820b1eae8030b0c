"""Pipelines that change their schedule between two steps, and links that are closed and opened again."""

import os
import time

import pytest
from support.held import mappings, threads
from support.pipeline_models import LOSS, OPTIONS, VOCAB, WIDTH, BesideWhole, batch
from support.processes import run_group

from distlab.axes.grid import Grid
from distlab.comm.context import TransportName, context_of
from distlab.parallel.context_parallel import ContextParallel
from distlab.pipeline.actions import stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.stages import build_stage, build_stages
from simplellm.attention import SequencePart
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama

ONE_STAGE = ["dapple", "zb-h1", "gpipe", "zb-h1"]
IN_A_V = ["zb-v", "dualpipe-v", "auto", "zb-v"]
MICRO_BATCHES = {"gpipe": 5, "zb-v": 3}  # others have 6


def train(rank: int, workers: int, names: list[str], run_on: bool) -> int:
    """Two steps of each schedule next to the whole model; the number of parameters compared."""
    schedules = [all_stages(name, workers, MICRO_BATCHES.get(name, 6)) for name in names]
    held = stages_of(schedules[0][rank])
    split = (1,) * (workers * len(held))
    nets = build_stages(held, split, VOCAB, **OPTIONS)
    beside = BesideWhole(nets, len(split))
    pipeline = Pipeline(nets, schedules[0], Grid(rank, {"pp": workers}), LOSS, WIDTH, run_on=run_on)
    for step in range(2 * len(names)):
        if step > 0 and step % 2 == 0:
            pipeline.follow(schedules[step // 2])
        beside.step(pipeline, batch(step, 12).tensor_split(MICRO_BATCHES.get(names[step // 2], 6)))
    pipeline.links.close()
    return len(beside.compared())


@pytest.mark.parametrize(
    ("workers", "names", "transport", "run_on"),
    [
        (3, ONE_STAGE, "auto", False),
        (3, ONE_STAGE, "gloo", True),
        (2, IN_A_V, "auto", True),
        (3, IN_A_V, "gloo", False),
    ],
)
def test_a_schedule_changes_in_the_middle_of_a_run_and_nothing_else_does(
    workers: int, names: list[str], transport: TransportName, run_on: bool
) -> None:
    compared = run_group(workers, train, workers, names, run_on, transport=transport, deadline=120)
    assert sum(compared) == 3 + 9 * workers * (1 if names is ONE_STAGE else 2)


def follow_what_it_cannot(rank: int) -> list[float]:
    """The refusals come on both ranks, before any of them waits for the other; then the pipeline goes on."""
    nets = build_stages(stages_of(all_stages("zb-v", 2, 4)[rank]), (1, 1, 1, 1), VOCAB, **OPTIONS)
    pipeline = Pipeline(nets, all_stages("zb-v", 2, 4), Grid(rank, {"pp": 2}), LOSS, WIDTH)
    for programs, sentence in (
        (all_stages("interleaved", 2, 4), "stage 2 is on worker 1; in the schedule to follow, it is on worker 0"),
        (all_stages("dapple", 2, 4), "stage 2 is on worker 1; in the schedule to follow, it is on no worker"),
        (all_stages("zb-v", 3, 6), "the schedule is for 3 workers but the pipeline has 2"),
    ):
        with pytest.raises(InputError, match=f"^{sentence}$"):
            pipeline.follow(programs)
    half = build_stage(rank, (1, 1), VOCAB, **OPTIONS)
    short = Pipeline(half, all_stages("dapple", 2, 4), Grid(rank, {"pp": 2}), LOSS, WIDTH)
    with pytest.raises(InputError, match=r"^stage 2 is on no worker; in the schedule to follow, it is on worker 1$"):
        short.follow(all_stages("zb-v", 2, 4))
    return [loss.item() for loss in pipeline.step(batch(0).chunk(4))]


def test_a_schedule_whose_stages_are_on_other_workers_is_refused() -> None:
    losses, _ = run_group(2, follow_what_it_cannot)
    whole = LLama(CausalLLama, VOCAB, n_layers=4, **OPTIONS)
    assert sum(losses) == pytest.approx(LOSS(whole(batch(0)), batch(0)).item(), rel=1e-6)


def test_over_nccl_the_first_step_of_each_schedule_loads_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_of(), "library", "nccl")  # this process is alone: it sends nothing
    net, passes = LLama(CausalLLama, VOCAB, n_layers=1, **OPTIONS), list[SequencePart]()
    part_of = ContextParallel(Grid(0, {}).axis("cp"), document_end=1).part
    dapple = all_stages("dapple", 1, 3)
    pipeline = Pipeline(net, dapple, Grid(0, {}), lambda y, part: part.loss(y), WIDTH, part_of=part_of)
    net.register_forward_pre_hook(lambda _, args, kwargs: passes.append(kwargs["part"]), with_kwargs=True)
    taken = list[int]()
    for name in ("dapple", "dapple", "zb-h1", "zb-h1"):
        if len(taken) == 2:
            pipeline.follow(all_stages(name, 1, 3))
        passes.clear()
        pipeline.step(batch(0, 6).chunk(3))
        taken.append(len(passes))
    assert taken == [2 + 3, 3, 2 + 3, 3]


def holdings() -> tuple[int, ...]:
    """Shared mappings, descriptors and threads of this process: the fewest of some looks.

    Twice a second, the watch of the other ranks' notices asks the store in a thread that lives for a moment.
    """
    looks = []
    for _ in range(4):
        looks.append((mappings(), len(os.listdir("/proc/self/fd")), threads()))
        time.sleep(0.02)
    return tuple(map(min, zip(*looks, strict=True)))


def reopen(rank: int, times: int) -> list[tuple[int, ...]]:
    """What this rank holds after a step, and after as many steps again with changes of the schedule in between."""
    held, before = list[tuple[int, ...]](), mappings()
    schedules = [all_stages(name, 2, 4) for name in ("zb-v", "dualpipe-v")]  # both need a group of their own
    nets = build_stages(stages_of(schedules[0][rank]), (1, 1, 1, 1), VOCAB, **OPTIONS)
    pipeline = Pipeline(nets, schedules[0], Grid(rank, {"pp": 2}), LOSS, WIDTH)
    for number in range(times + 2):
        pipeline.step(batch(0).chunk(4))
        if number > 0:
            held.append(holdings())
        if number <= times:
            pipeline.follow(schedules[number % 2])
    until = time.monotonic() + 5
    while holdings()[::2] > held[0][::2] and time.monotonic() < until:  # a thread of gloo may be about to end
        time.sleep(0.05)
    after = holdings()
    pipeline.links.close()
    assert mappings() == before
    return [held[0], after]


@pytest.mark.parametrize(("transport", "times"), [("auto", 5), ("gloo", 5)])
def test_links_that_are_closed_and_opened_many_times_leave_nothing(transport: TransportName, times: int) -> None:
    for before, after in run_group(2, reopen, times, transport=transport, deadline=120):
        assert (before[0] > 0) == (transport == "auto")
        assert after[::2] == before[::2]
        assert after[1] <= before[1] + 3, "a connection may come late, but not one each time"
