"""The rehearsal of `--schedule auto`: what it measures, and that a pipeline keeps what was planned from it."""

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pipeline_models import LOSS, OPTIONS, SEQ, VOCAB, WIDTH, batch
from support.processes import run_group

from distlab.axes.grid import Grid
from distlab.axes.layout import layout_size
from distlab.comm.context import context_of
from distlab.pipeline.actions import ActionCosts
from distlab.pipeline.auto import Limit, placement
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.stages import build_stages
from distlab.run.auto_schedule import find_schedule, measure
from distlab.settings.stages import ScheduledPipelineSettings
from simplellm.documents import within_documents

MICRO_BATCHES, ROWS = 6, 2
SLOW = 0.1  # seconds that stage 2 takes: far more than any other, on a machine with other work
LATE = 0.05  # seconds that a message takes


def rehearse_and_run(
    rank: int, layout: dict[str, int], split: tuple[int, ...], recompute: bool
) -> tuple[ActionCosts, list[float], int]:
    """The costs that a rank has, what each worker keeps by the plan, and what this rank keeps."""
    workers = layout["pp"]
    torch.manual_seed(rank)
    options: dict[str, Any] = {**OPTIONS, "recompute": "all" if recompute else "none"}
    sizes: dict[str, Any] = {
        "batch_size": ROWS,
        "micro_batches": 1,
        "seq_len": SEQ,
        "dmodel": WIDTH,
        "recompute": options["recompute"],
    }
    args = ScheduledPipelineSettings(world_size=workers, schedule="auto", **sizes)
    nets = build_stages(placement(workers, 2)[rank % workers], split, VOCAB, **options)
    hooks = [nets[2].register_forward_pre_hook(lambda *_: time.sleep(SLOW))] if 2 in nets else []
    grid = Grid(rank, layout)
    state = torch.random.get_rng_state()
    send = dist.send

    def send_late(*arguments: Any) -> None:
        time.sleep(LATE)
        send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", send_late)
        costs = measure(args, grid, torch.device("cpu"), nets, LOSS)
    for hook in hooks:
        hook.remove()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for net in nets.values() for parameter in net.parameters())
    programs = all_stages("auto", workers, MICRO_BATCHES, 2, costs, Limit(2.5), recompute)
    context_of().recorder.enabled = True
    pipeline = Pipeline(nets, programs, grid, LOSS, WIDTH)
    for step in range(2):
        pipeline.step(batch(step, rows=ROWS * MICRO_BATCHES).chunk(MICRO_BATCHES))
    assert pipeline.kept is not None
    return costs, simulate(programs, costs).peak_bytes, pipeline.kept.peak_bytes


@pytest.mark.parametrize(
    ("layout", "split", "recompute"), [({"dp": 2, "pp": 2}, (1, 2, 1, 0), False), ({"pp": 3}, (1, 2, 1, 1, 1, 0), True)]
)
def test_all_ranks_know_what_passes_take_and_keep_what_was_planned(
    layout: dict[str, int], split: tuple[int, ...], recompute: bool
) -> None:
    found = run_group(layout_size(layout), rehearse_and_run, layout, split, recompute)
    costs, planned, _ = found[0]
    assert all(each[0] == costs for each in found)
    each: Any = costs
    assert SLOW <= each.forward[2] < 10 * SLOW
    assert max(seconds for stage, seconds in enumerate(each.forward) if stage != 2) < SLOW
    assert all(0 < share < 1 for share in (*each.weight_share, *each.weight_bytes_share))
    assert LATE <= each.transfer < 1.8 * LATE, "of each link, however many there are"
    assert each.activation_bytes[1] > 1.8 * each.activation_bytes[2] > 0
    assert [kept for *_, kept in found[: layout["pp"]]] == pytest.approx(planned, rel=0.05)
    if recompute:
        assert all(0 < share < 1 for share in each.input_bytes_share)
        assert each.input_bytes_share[1] < 0.05 < each.input_bytes_share[-1], "two layers, and the head alone"
        assert SLOW <= each.measured["R", 2] < 10 * SLOW


def rehearse_a_part(_: int) -> list[bool]:
    """Whether each forward pass of a rehearsal has the part of the sequences that this rank computes."""
    sizes: dict[str, Any] = {"batch_size": ROWS, "micro_batches": 1, "seq_len": SEQ, "dmodel": WIDTH}
    args = ScheduledPipelineSettings(world_size=1, schedule="auto", **sizes)
    nets, seen = build_stages([0, 1], (1, 1), VOCAB, **OPTIONS), list[bool]()
    ids = torch.zeros(ROWS, SEQ, dtype=torch.int64)
    part: Any = SimpleNamespace(ids=ids, sequence=within_documents(ids, 0))
    for net in nets.values():
        net.register_forward_pre_hook(
            lambda *given: seen.append(given[2].get("part") is part.sequence), with_kwargs=True
        )
    measure(args, Grid(0, {"pp": 1}), torch.device("cpu"), nets, lambda x, own: LOSS(x, own.ids), lambda _: part)
    return seen


def test_a_rehearsal_is_of_the_part_of_the_sequences_that_a_rank_computes() -> None:
    [seen] = run_group(1, rehearse_a_part)
    assert seen
    assert all(seen)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_rank_0_tells_what_was_measured_and_planned(
    recompute: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = {("R", stage): 0.25 for stage in range(4)}
    costs = ActionCosts(0.25, 0.75, 0.03125, 2e6, measured=again, input_bytes_share=0.25)
    monkeypatch.setattr("distlab.run.auto_schedule.measure", lambda *_: costs)
    args = ScheduledPipelineSettings(world_size=2, schedule="auto", micro_batches=4, recompute=recompute)
    for rank in (0, 1):
        run: Any = SimpleNamespace(settings=args, grid=Grid(rank, {"pp": 2}), rank=rank, device=torch.device("cpu"))
        plan = simulate(find_schedule(run, {0: torch.nn.Identity(), 3: torch.nn.Identity()}, LOSS), costs)
        if rank:
            assert not capsys.readouterr().out
            continue
        measured, planned = re.findall(r": .*", capsys.readouterr().out)
        ms = ["F 500.0", *["R 500.0"] * (recompute == "all"), "I 750.0", "W 750.0"]
        assert re.findall(r"[A-Z] [\d.]+(?=,| ms)", measured) == ms, "of its two stages together"
        assert "a message 31.2 ms" in measured
        assert 0 < sum(plan.bubble) < 1
        assert f"idle {sum(plan.bubble) / 2:.1%} of a step" in planned
        assert re.findall(r"[\d.]+(?=,| MB)", planned) == [f"{kept / 1e6:.4g}" for kept in plan.peak_bytes]
