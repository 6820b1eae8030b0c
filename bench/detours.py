"""The time of a step after a rank of a pipeline has died, planned and measured. Stages sleep instead of computing.

python bench/detours.py
"""

import re
import statistics
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from bubble import SEQ, WIDTH, SleepingStage
from ranks import run_ranks
from tables import print_head, print_row
from turns import each, seconds_in_turn

from distlab.axes.grid import Grid
from distlab.pipeline.actions import Programs, stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import simulate
from distlab.pipeline.rerouting import reroute
from distlab.pipeline.schedules import all_stages
from simplellm import command_line
from simplellm.errors import require


@dataclass
class Settings:
    """What to measure."""

    sizes: list[str] = field(default_factory=lambda: ["4x4x8", "3x4x8", "2x3x6"])
    """pipelines x stages x micro-batches of each pipeline"""
    schedule: str = "dapple"
    """of the healthy run"""
    dead: int = 1
    """the stage of the last pipeline whose rank is dead"""
    steps: int = 5
    """measured steps, after one to warm up; the median counts"""
    seconds: float = 0.04
    """seconds that a stage sleeps for each of F, I and W of a micro-batch"""
    port: int = 29557
    """where rank 0 listens"""


def measure(programs: Programs, pipelines: int, micro_batches: int, settings: Settings) -> float:
    """One rank; the median seconds of a step."""
    grid = Grid(dist.get_rank(), {"pp": len(programs)})
    nets = {stage: SleepingStage(settings.seconds) for stage in stages_of(programs[grid.rank])}
    pipeline = Pipeline(nets, programs, grid, lambda y, _: y.mean(), WIDTH, pipelines=pipelines)
    batch = torch.zeros(pipelines * micro_batches, SEQ, dtype=torch.int64).split(1)
    seconds = seconds_in_turn({"": pipeline.step}, lambda _: batch, settings.steps, warm_up=1, meet=dist.barrier)
    return statistics.median(seconds[""])


def main(settings: Settings) -> None:
    for size in settings.sizes:
        is_size = re.fullmatch(r"[2-9]x[1-9]\d*x[1-9]\d*", size) is not None
        require(is_size, f"--sizes {size}: give pipelines x stages x micro-batches, like 4x4x8")
    print_head("pipelines x stages x micro-batches", "healthy:", "one dead:", "planned:", "measured:")
    for size in each(settings.sizes, "sizes"):
        d, p, m = map(int, size.split("x"))
        require(0 <= settings.dead < p, f"--dead {settings.dead} with --sizes {size}: give a stage from 0 to {p - 1}")
        dead, programs, planned, measured = (d - 1) * p + settings.dead, all_stages(settings.schedule, p, m), [], []
        for alive in ([*range(d * p)], [worker for worker in range(d * p) if worker != dead]):
            rerouted = reroute(programs, d, alive)
            planned.append(simulate(rerouted, holders=d).makespan)
            measured.append(run_ranks(measure, len(alive), settings.port, rerouted, d, m, settings))
        times = (f"{seconds:.3f} s" for seconds in measured)
        print_row(size, *times, f"{planned[1] / planned[0]:.3f}", f"{measured[1] / measured[0]:.3f}")


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__ or "")
