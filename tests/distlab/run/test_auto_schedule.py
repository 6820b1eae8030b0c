"""The rehearsal of `--schedule auto`: what it measures, and that a pipeline keeps what was planned from it."""

import time
from typing import Any

import pytest
import torch
from support.pipeline_models import LOSS, OPTIONS, SEQ, VOCAB, WIDTH, batch
from support.processes import free_port, process_group, run_ranks

from distlab.axes.grid import Grid
from distlab.comm.context import context_of
from distlab.pipeline.actions import ActionCosts
from distlab.pipeline.auto import Limit, placement
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.stages import build_stages
from distlab.run.auto_schedule import measure
from distlab.settings.stages import ScheduledPipelineSettings

PIPELINES, WORKERS, MICRO_BATCHES, ROWS = 2, 2, 6, 2
SLOW = 0.1  # seconds that stage 2 takes: far more than any other, on a machine with other work


def rehearse_and_run(rank: int, port: int, recompute: bool) -> tuple[ActionCosts, list[float], int]:
    """The costs that a rank has, what each worker keeps by the plan, and what this rank keeps."""
    with process_group(rank, PIPELINES * WORKERS, port):
        torch.manual_seed(rank)
        options: dict[str, Any] = {**OPTIONS, "recompute": "all" if recompute else "none"}
        sizes: dict[str, Any] = {
            "batch_size": ROWS,
            "micro_batches": 1,
            "seq_len": SEQ,
            "dmodel": WIDTH,
            "recompute": options["recompute"],
        }
        args = ScheduledPipelineSettings(world_size=WORKERS, schedule="auto", **sizes)
        nets = build_stages(placement(WORKERS, 2)[rank % WORKERS], (1, 2, 1, 0), VOCAB, **options)
        hooks = [nets[2].register_forward_pre_hook(lambda *_: time.sleep(SLOW))] if 2 in nets else []
        grid = Grid(rank, {"dp": PIPELINES, "pp": WORKERS})
        state = torch.random.get_rng_state()
        costs = measure(args, grid, torch.device("cpu"), nets, LOSS)
        for hook in hooks:
            hook.remove()
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(parameter.grad is None for net in nets.values() for parameter in net.parameters())
        programs = all_stages("auto", WORKERS, MICRO_BATCHES, 2, costs, Limit(2.5), recompute)
        context_of().recorder.enabled = True
        pipeline = Pipeline(nets, programs, grid, LOSS, WIDTH)
        for step in range(2):
            pipeline.step(batch(step, rows=ROWS * MICRO_BATCHES).chunk(MICRO_BATCHES))
        assert pipeline.kept is not None
        return costs, simulate(programs, costs).peak_bytes, pipeline.kept.peak_bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_all_ranks_know_what_passes_take_and_keep_what_was_planned(recompute: bool) -> None:
    found = run_ranks(PIPELINES * WORKERS, rehearse_and_run, free_port(), recompute)
    (costs, planned, own), (_, _, others), *_ = found
    assert all(each[0] == costs for each in found)
    each: Any = costs
    assert SLOW <= each.forward[2] < 10 * SLOW
    assert max(each.forward[0], each.forward[1], each.forward[3]) < SLOW
    assert all(0 < share < 1 for share in (*each.weight_share, *each.weight_bytes_share))
    assert 0 < each.transfer < SLOW
    assert each.activation_bytes[1] > 1.8 * each.activation_bytes[2] > 0
    assert [own, others] == pytest.approx(planned, rel=0.05)
    if recompute:
        assert all(0 < share < 1 for share in each.input_bytes_share)
        assert each.input_bytes_share[1] < 0.05 < each.input_bytes_share[3], "two layers, and the head alone"
        assert SLOW <= each.measured["R", 2] < 10 * SLOW
