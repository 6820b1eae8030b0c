"""The executor: gradients of one process for every schedule, what it keeps, and the threads that it uses."""

import itertools
from statistics import fmean
from typing import Any

import pytest
import torch
from support.pipeline_models import LOSS, OPTIONS, SEQ, VOCAB, WIDTH, assert_near, batch, grad_of, louder
from support.processes import run_group
from torch import Tensor, nn

from distlab.axes.grid import Grid
from distlab.comm.context import TransportName, context_of
from distlab.pipeline.actions import Action, ActionCosts, Backward, BackwardWeight, Forward, Programs, stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import SCHEDULES, Schedule, all_stages, stages_per_worker, with_recomputation
from distlab.pipeline.stages import build_stage, build_stages
from simplellm.errors import InputError


def split_of(stages: int) -> tuple[int, ...]:
    """An uneven split; the last stage has the head alone where it can."""
    return (*(1 + stage % 2 for stage in range(stages - 1)), 0 if stages > 1 else 2)


PipelineRun = tuple[str, int, int, int]  # schedule, chunks, micro-batches, steps


def gradients(
    rank: int, workers: int, runs: list[PipelineRun], dtype: torch.dtype, recompute: bool = False
) -> list[tuple[float, dict[str, Tensor]]]:
    """For each run, the sum of this rank's losses of the last step, and its gradients, added up over the steps."""
    results = []
    for name, chunks, micro_batches, steps in runs:
        programs: Programs = all_stages(name, workers, micro_batches, chunks)
        if recompute:
            programs = with_recomputation(programs)
        split, held = split_of(workers * stages_per_worker(name, chunks)), stages_of(programs[rank])
        options: dict[str, Any] = {**OPTIONS, "dtype": dtype, "recompute": "all" if recompute else "none"}
        nets = build_stages(held, split, VOCAB, **options)
        for net in nets.values():
            louder(net)
        pipeline = Pipeline(nets, programs, Grid(rank, {"pp": workers}), LOSS, WIDTH)
        for step in range(steps):
            losses = pipeline.step(batch(step, 12).tensor_split(micro_batches))
        found = {name: grad_of(p) for net in nets.values() for name, p in net.named_parameters()}
        results.append((sum(loss.item() for loss in losses), found))
    return results


@pytest.mark.parametrize(
    ("workers", "dtype", "recompute", "transport", "sizes"),  # which are micro-batches: steps
    [
        (1, torch.float32, False, "auto", {1: 1, 2: 2}),
        (3, torch.float32, False, "gloo", {1: 1, 5: 1, 6: 2}),
        (4, torch.float32, False, "auto", {8: 1}),
        (2, torch.bfloat16, True, "auto", {4: 1}),
        (3, torch.float32, True, "auto", {6: 1}),
    ],
    ids=str,
)
def test_every_schedule_gives_the_gradients_of_gpipe_bit_for_bit(
    workers: int, dtype: torch.dtype, recompute: bool, transport: TransportName, sizes: dict[int, int]
) -> None:
    """With as many stages in one process, which are the gradients of the whole model; also with recomputation.

    A second step, which adds to the gradients of the first, where every schedule fits.
    """
    chosen = {"interleaved": (1, 2, 3), "auto": (1, 2)}
    named = [(name, chunks) for name in SCHEDULES for chunks in chosen.get(name, (2,))]
    runs = [(*run, m, steps) for run in named for m, steps in sizes.items() if SCHEDULES[run[0]].fits(workers, m)]
    assert {run[:2] for run in runs if run[3] == max(sizes.values())} == set(named)
    by_rank = run_group(workers, gradients, workers, runs, dtype, recompute, transport=transport, deadline=240)
    same = [(IN_ONE_PROCESS, workers * stages_per_worker(*run[:2]), *run[2:]) for run in runs]
    in_one = list(dict.fromkeys(same))
    expected = dict(zip(in_one, run_group(1, gradients_of_one_process, in_one, dtype)[0], strict=True))
    for number, run in enumerate(runs):
        loss, wanted = expected[same[number]]
        own: dict[str, Tensor] = {}
        for rank in range(workers):
            assert not own.keys() & by_rank[rank][number][1].keys()
            own |= by_rank[rank][number][1]
        assert sum(by_rank[rank][number][0] for rank in range(workers)) == pytest.approx(loss)
        assert own.keys() == wanted.keys()
        for name, grad in own.items():
            assert torch.equal(grad, wanted[name]), f"{run}: {name}"
            assert grad.abs().max() > 0 or dtype == torch.bfloat16


IN_ONE_PROCESS = "gpipe in one process"


def gradients_of_one_process(
    rank: int, runs: list[PipelineRun], dtype: torch.dtype
) -> list[tuple[float, dict[str, Tensor]]]:
    """The same, for (_, stages, ...): all stages on one worker, all passes forward, then all back."""

    def one_worker(_: int, micro_batches: int, chunks: int) -> list[list[Action]]:
        forward: list[Action] = [Forward(stage, k) for k in range(micro_batches) for stage in range(chunks)]
        return [forward + [Backward(stage, k) for k in range(micro_batches) for stage in reversed(range(chunks))]]

    SCHEDULES[IN_ONE_PROCESS] = Schedule(one_worker, 0, lambda *_: True, "")
    return gradients(rank, 1, runs, dtype)


def test_a_schedule_for_another_number_of_micro_batches_is_refused() -> None:
    net = build_stage(0, (1,), VOCAB, **OPTIONS)
    pipeline = Pipeline(net, all_stages("gpipe", 1, 3), Grid(0, {"pp": 1}), LOSS, WIDTH)
    for count in (2, 4):
        with pytest.raises(InputError, match=f"^{count} micro-batches: the schedule is for 3$"):
            pipeline.step(batch(0).chunk(count))
    assert all(parameter.grad is None for parameter in net.parameters())


def test_micro_batches_of_sequences_of_other_lengths_have_the_loss_of_all_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And room on their way to other stages."""
    whole, net = (build_stage(0, (1,), VOCAB, **OPTIONS) for _ in range(2))
    pipeline, room = Pipeline(net, all_stages("gpipe", 1, 2), Grid(0, {"pp": 1}), LOSS, WIDTH), list[int]()
    monkeypatch.setattr(pipeline.links, "make_room", lambda elements, _: room.append(elements))
    parts = [batch(1)[:, :3], batch(0)]
    counts = [ids[:, 1:].numel() for ids in parts]
    losses = [LOSS(whole(ids), ids) * count / sum(counts) for ids, count in zip(parts, counts, strict=True)]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(pipeline.step(parts), [loss.detach() for loss in losses])
    assert room == [parts[1].numel() * WIDTH]
    for (name, own), parameter in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert_near(grad_of(own), parameter.grad, name)


def keep(rank: int) -> list[int]:
    """The most that a stage keeps with GPipe, with DAPPLE, and with both when it recomputes."""
    peaks = []
    context_of().recorder.enabled = True
    for recompute, schedule in itertools.product((False, True), ("gpipe", "dapple")):
        options: dict[str, Any] = {**OPTIONS, "recompute": "all" if recompute else "none"}
        net = build_stage(rank, (2, 2, 2), VOCAB, **options)
        programs: Programs = all_stages(schedule, 3, 12)
        programs = with_recomputation(programs) if recompute else programs
        pipeline, told = Pipeline(net, programs, Grid(rank, {"pp": 3}), LOSS, WIDTH), context_of().recorder.kept_bytes
        told.clear()
        for step in range(2):
            pipeline.step(batch(step, rows=12).chunk(12))
        assert pipeline.kept is not None
        assert max(size for _, size in told) == pipeline.kept.peak_bytes, "also within an action"
        assert pipeline.kept.now_bytes == 0, "nothing is kept after a step"
        peaks.append(pipeline.kept.peak_bytes)
    return peaks


def test_dapple_and_recomputation_keep_a_fraction_of_what_gpipe_keeps() -> None:
    gpipe, dapple, gpipe_again, dapple_again = zip(*run_group(3, keep), strict=True)
    inputs = SEQ * WIDTH * 4  # bytes of a micro-batch's
    for stage in range(3):
        one = gpipe[stage] / 12
        assert gpipe_again[stage] == pytest.approx(one + inputs * 12 * (stage > 0), rel=0.15), "one, and 12 inputs"
    for stage in range(2):
        one = gpipe[stage] / 12
        assert dapple_again[stage] == pytest.approx(one + inputs * (3 - stage) * (stage > 0), rel=0.15)
    assert dapple_again[2] < 0.8 * dapple[2], "its backward passes follow at once: block by block"
    for stage, (ours, all_of_them) in enumerate(zip(dapple, gpipe, strict=True)):
        assert ours / all_of_them == pytest.approx((3 - stage) / 12, rel=0.1), f"stage {stage}"


KEPT = ["gpipe", "dapple", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]


def count_kept(rank: int, workers: int, micro_batches: int) -> list[tuple[int, dict[int, tuple[float, float]]]]:
    """For each schedule, the peak, and by stage what F keeps of a micro-batch and what W frees of it, in the mean."""
    found = []
    context_of().recorder.enabled = True
    for name in KEPT:
        programs = all_stages(name, workers, micro_batches)
        split = (1,) * (workers * stages_per_worker(name))
        nets = build_stages(stages_of(programs[rank]), split, VOCAB, **OPTIONS)
        pipeline = Pipeline(nets, programs, Grid(rank, {"pp": workers}), LOSS, WIDTH)
        context_of().recorder.kept_bytes.clear()
        pipeline.step(batch(0, rows=micro_batches).chunk(micro_batches))
        after_actions = context_of().recorder.kept_bytes[1::2]  # the others are at most within an action
        kept = [0, *(size for _, size in after_actions)]
        change = {action: kept[n + 1] - kept[n] for n, action in enumerate(programs[rank])}
        by_stage = {
            stage: (
                fmean(change[Forward(stage, k)] for k in range(micro_batches)),
                fmean([-change[w] for w in change if isinstance(w, BackwardWeight) and w.stage == stage] or [0]),
            )
            for stage in nets
        }
        assert pipeline.kept is not None
        found.append((pipeline.kept.peak_bytes, by_stage))
    return found


def test_every_schedule_keeps_what_its_plan_says() -> None:
    workers, micro_batches = 4, 8
    peaks: dict[str, list[int]] = {}
    by_rank = run_group(workers, count_kept, workers, micro_batches, deadline=120)
    for name, own in zip(KEPT, zip(*by_rank, strict=True), strict=True):
        counted = {stage: sizes for _, by_stage in own for stage, sizes in by_stage.items()}
        forward, weight = zip(*(counted[stage] for stage in sorted(counted)), strict=True)
        assert min(forward) > 0
        shares = [later / size for later, size in zip(weight, forward, strict=True)]
        costs = ActionCosts(activation_bytes=forward, weight_bytes_share=shares)
        peaks[name] = [peak for peak, _ in own]
        assert peaks[name] == pytest.approx(
            simulate(all_stages(name, workers, micro_batches), costs).peak_bytes, rel=0.05
        )
    assert max(peaks["zb-h1"]) <= 1.1 * peaks["dapple"][0]
    assert max(peaks["zb-v"]) <= 1.1 * min(peaks["zb-v"])


def count_threads(rank: int) -> list[int]:
    """The threads of each action of a stage of GPipe with two stages and two micro-batches on four cores."""
    seen: list[int] = []

    class Watched(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            y: Tensor = self.net(x)
            y.register_hook(lambda _: seen.append(torch.get_num_threads()))
            return y

    net = Watched(build_stage(rank, (1, 1), VOCAB, **OPTIONS))
    pipeline = Pipeline(net, all_stages("gpipe", 2, 2), Grid(rank, {"pp": 2}), LOSS, WIDTH, cores=4)
    pipeline.step(batch(0).chunk(2))
    return [*seen, torch.get_num_threads()]


def test_a_stage_takes_the_cores_of_idle_stages() -> None:
    # Ticks: F0 of stage 0 alone; F1 beside F0 of stage 1; its F1 and B0 alone; B1 beside B0; B1 of stage 0 alone.
    assert run_group(2, count_threads) == [[4, 2, 2, 4, 1], [2, 4, 4, 2, 1]]
