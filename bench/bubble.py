"""The bubble of each schedule, planned and measured. Stages sleep instead of computing, so that few cores suffice.

python bench/bubble.py
python bench/bubble.py --sizes 4x8 --in-a-row 0 --trace-to runs/bubble
"""

import itertools
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from tables import print_head, print_row
from torch import Tensor, nn
from turns import each

from distlab.axes.grid import Grid
from distlab.comm.context import context_of
from distlab.comm.recorder import STEP
from distlab.pipeline.actions import ActionCosts, Programs, stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import in_a_row, simulate
from distlab.pipeline.schedules import AUTO, SCHEDULES, all_stages
from distlab.reports.trace import Trace, merge, write_chrome
from simplellm import command_line
from simplellm.errors import require
from simplellm.weight_gradients import DeferredWeightGradients, current

NAMES = [name for name in SCHEDULES if name not in ("naive", AUTO)]  # `auto` is for costs that differ
WIDTH, SEQ = 16, 8
FREE_MESSAGES = ActionCosts()  # a backward pass takes twice as long as a forward pass, half of it for W


@dataclass
class Settings:
    """What to measure."""

    sizes: list[str] = field(default_factory=lambda: ["4x8", "2x16", "8x16"])
    """workers x micro-batches per step"""
    schedules: list[str] = field(default_factory=lambda: NAMES)
    """schedules to measure"""
    steps: int = 3
    """measured steps at the end of which all ranks wait for each other, after one to warm up; the median counts"""
    in_a_row: int = 10
    """measured steps that run on without that wait, after one to warm up"""
    seconds: float = 0.04
    """seconds that a stage sleeps for each of F, I and W of a micro-batch"""
    same_work: bool = False
    """divide --seconds among the stages of a worker"""
    port: int = 29556
    """where rank 0 listens"""
    trace_to: Path | None = None
    """folder for the traces of the --steps"""


Later = DeferredWeightGradients | None


class SleepingStage(nn.Module):
    """Takes as long as a stage, but hardly any processor time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:  # token ids (batch, seq)
            x = torch.zeros(*x.shape, WIDTH, requires_grad=True)
        later = current()
        y: Tensor = _Sleep.apply(x, self.weight if later is None else self.weight.detach(), self, later)
        return y

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the weight, from that of the outputs (batch, seq, width)."""
        time.sleep(self.seconds)
        return grad.sum((0, 1))


class _Sleep(torch.autograd.Function):
    """Activations (batch, seq, width) plus a weight (width,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepingStage, later: Later) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stage, ctx.later = stage, later
        time.sleep(stage.seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        time.sleep(ctx.stage.seconds)
        if ctx.later is None:
            return grad, ctx.stage.gradient(x, grad), None, None
        ctx.later.add(ctx.stage.weight, ctx.stage.gradient, x, grad)
        return grad, None, None, None


def measure(workers: int, micro_batches: int, settings: Settings) -> None:
    """One rank: each schedule; rank 0 prints the rows of the table."""
    rank = dist.get_rank()
    for name in settings.schedules:
        programs = all_stages(name, workers, micro_batches)
        held = stages_of(programs[rank])
        seconds = settings.seconds / (len(held) if settings.same_work else 1)
        nets = {stage: SleepingStage(seconds) for stage in held}
        both = (settings.steps, False), (settings.in_a_row, True)
        traces = [traced_steps(rank, nets, programs, count, run_on) for count, run_on in both if count]
        if rank == 0:
            print_row(workers, micro_batches, name, *cells(programs, traces))
            if settings.trace_to is not None:
                settings.trace_to.mkdir(parents=True, exist_ok=True)
                write_chrome(traces[0], settings.trace_to / f"{name}-{workers}-{micro_batches}.json")


def traced_steps(rank: int, nets: dict[int, SleepingStage], programs: Programs, steps: int, run_on: bool) -> Trace:
    """Run a step to warm up and `steps` more, after a barrier each unless `run_on`; rank 0 has the trace."""
    workers, micro_batches = len(programs), 1 + max(action.micro_batch for action in programs[rank])
    pipeline = Pipeline(nets, programs, Grid(rank, {"pp": workers}), lambda y, _: y.mean(), WIDTH, run_on=run_on)
    batch = torch.zeros(micro_batches, SEQ, dtype=torch.int64).split(1)
    context_of().recorder.events.clear()
    context_of().recorder.enabled = True  # from here on, as a pipeline made before does not count what it keeps
    for step in range(1 + steps):
        if step < 2 or not run_on:
            dist.barrier()
        with context_of().recorder.span(STEP, f"step {step}"):
            pipeline.step(batch)
    recorded: list[Any] = [None] * workers
    context_of().recorder.enabled = False
    dist.all_gather_object(recorded, context_of().recorder.as_json())
    return Trace(merge(recorded), {"pp": workers}, programs, run_on)


def cells(programs: Programs, traces: Sequence[Trace]) -> list[str]:
    """The bubbles of a row, planned and measured; they are means over the workers."""
    found = []
    for trace in traces:
        steps = trace.steps()
        parts = [steps] if trace.run_on else [[step] for step in steps]
        busy = [statistics.fmean(trace.busy(worker, part)[0] for worker in range(len(programs))) for part in parts]
        plan = simulate(in_a_row(programs, len(parts[0])), FREE_MESSAGES)
        found += [f"{statistics.fmean(plan.bubble):.1%}", f"{1 - statistics.median(busy):.1%}"]
    return found


def main(settings: Settings) -> None:
    for name in settings.schedules:
        require(name in SCHEDULES, f"--schedules {name}: there are {', '.join(SCHEDULES)}")
    for size in settings.sizes:
        require(
            re.fullmatch(r"[1-9]\d*x[1-9]\d*", size) is not None,
            f"--sizes {size}: give workers x micro-batches, like 4x8",
        )
    sizes = [tuple(map(int, size.split("x"))) for size in settings.sizes]
    for (workers, micro_batches), name in itertools.product(sizes, settings.schedules):
        all_stages(name, workers, micro_batches)  # raises InputError for an impossible combination
    heads = ["workers", "micro-batches", "schedule"]
    heads += ["idle in the plan:", "measured:"] * bool(settings.steps)
    heads += [f"{settings.in_a_row} steps that run on: in the plan:", "measured:"] * bool(settings.in_a_row)
    print_head(*heads)
    for workers, micro_batches in each(sizes, "sizes"):
        run_ranks(measure, workers, settings.port, workers, micro_batches, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__ or "")
