"""The bubble of a pipeline, measured and in theory: stages sleep instead of computing, so that few cores hold many.

python bench/bubble.py
python bench/bubble.py --stages 4 --micro-batches 8 --trace-to runs/bubble
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import join
from torch import Tensor, nn

from distlab.comm.grid import Grid
from distlab.comm.processes import leave
from distlab.comm.recorder import STEP, recorder
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import ideal_bubble
from distlab.pipeline.schedules import all_stages
from distlab.reports.trace import merge, write_chrome
from distlab.run.progress import each

SCHEDULES = ("gpipe", "dapple")
WIDTH, SEQ = 16, 8


@dataclass
class Settings:
    """What to measure."""

    stages: list[int] = field(default_factory=lambda: [2, 4, 8])
    """numbers of pipeline stages"""
    micro_batches: list[int] = field(default_factory=lambda: [4, 8, 16])
    """micro-batches per step"""
    steps: int = 5
    """measured steps, after one to warm up; the median counts"""
    forward: float = 0.04
    """seconds of a forward pass"""
    backward: float = 0.08
    """seconds of a backward pass"""
    port: int = 29556
    """where rank 0 listens"""
    trace_to: Path | None = None
    """folder to keep the traces in"""


class SleepingStage(nn.Module):
    """Takes the time of a stage and none of the processor's."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.seconds = forward_seconds, backward_seconds
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(self.weight.expand(*x.shape[:2], WIDTH) + (x if x.dim() == 3 else 0), *self.seconds)
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


def measure(rank: int, stages: int, settings: Settings) -> None:
    """One rank: each schedule with each number of micro-batches; rank 0 prints the table."""
    join(rank, stages, settings.port)
    recorder.enabled = True
    net = SleepingStage(settings.forward, settings.backward)
    for micro_batches in settings.micro_batches:
        for schedule in SCHEDULES:
            programs = all_stages(schedule, stages, micro_batches)
            pipeline = Pipeline(net, programs, Grid(rank, 1, stages), lambda y, _: y.mean(), width=WIDTH)
            batch = torch.zeros(micro_batches, SEQ, dtype=torch.int64).split(1)
            recorder.events.clear()
            recorder.kept_bytes.clear()
            for step in range(1 + settings.steps):
                dist.barrier()
                with recorder.span(STEP, f"step {step}"):
                    pipeline.step(batch)
            recorded: list[Any] = [None] * stages
            dist.all_gather_object(recorded, recorder.as_json())
            if rank == 0:
                trace = merge(recorded, 1, stages, programs)
                bubble = statistics.median(
                    1 - statistics.fmean(trace.busy(stage, [step])[0] for stage in range(stages))
                    for step in trace.steps()
                )
                theory = ideal_bubble(stages, micro_batches)
                print(
                    f"| {stages} | {micro_batches} | {schedule} | {theory:.1%} | {bubble:.1%} | "
                    f"{100 * (bubble - theory):+.1f} |",
                    flush=True,
                )
                if settings.trace_to is not None:
                    settings.trace_to.mkdir(parents=True, exist_ok=True)
                    write_chrome(trace, settings.trace_to / f"{schedule}-{stages}-{micro_batches}.json")
    leave(0)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    print("| stages | micro-batches | schedule | bubble in theory | measured | difference, percentage points |")
    print("|---|---|---|---|---|---|", flush=True)
    for stages in each(settings.stages, "numbers of stages"):
        mp.spawn(measure, args=(stages, settings), nprocs=stages)


if __name__ == "__main__":
    main()
