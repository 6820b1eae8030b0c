"""Pipeline schedules beside torch.distributed.pipelining: the same stages, in one run, step by step in turn.

python bench/pipeline.py
python bench/pipeline.py --stages 3 --micro-batches 6 12 --rounds 20
python bench/pipeline.py --schedules interleaved zb-h1 zb-v
python bench/pipeline.py --compile               stages through `torch.compile`, beside the lab's --compile
"""

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import group_over_gloo, run_ranks, with_threads
from tables import per_second, print_head, print_row
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from training import VOCAB_SIZE, tokens
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn, through_lab

from distlab.axes.grid import Grid
from distlab.machine.devices import cores_to_share
from distlab.pipeline.actions import stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.schedules import DEFAULT_CHUNKS, all_stages, check_schedule, stages_per_worker
from distlab.pipeline.split import PartCosts, balance, estimated_costs, multiply_adds
from distlab.pipeline.stages import build_stages
from simplellm import command_line
from simplellm.errors import InputError, require
from simplellm.llama import LLamaPart
from simplellm.losses import causalLLMLoss

DMODEL, N_LAYERS = 288, 6
TORCHS: dict[str, type[PipelineScheduleSingle | PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "dapple": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,  # with one stage a worker
    "zb-v": ScheduleZBVZeroBubble,
}

Nets = dict[int, LLamaPart]  # of a worker, by stage
Step = Callable[[Tensor], object]
Build = Callable[[str, Nets, Grid, int], Step]


@dataclass
class Settings:
    """What to measure."""

    stages: list[int] = field(default_factory=lambda: [2, 3])
    """numbers of workers, most schedules giving each one stage"""
    micro_batches: list[int] = field(default_factory=lambda: [3, 6, 12])
    """micro-batches per step, of one sequence each"""
    schedules: list[str] = field(default_factory=lambda: ["gpipe", "dapple"])
    """of the lab, each measured beside torch's"""
    rounds: int = 10
    """timed steps of each"""
    seq_len: int = 256
    """tokens per sequence"""
    compile: bool = False
    """compare compiled stages"""
    port: int = 29555
    """where rank 0 listens"""


def by_lab(schedule: str, nets: Nets, grid: Grid, micro_batches: int, cores: int | None) -> Step:
    loss = partial(causalLLMLoss, vocab_size=VOCAB_SIZE)
    programs = all_stages(schedule, grid.size, micro_batches)
    parts = parts_of(next(iter(nets.values())).ctx_size)
    costs = estimated_costs(balance(N_LAYERS, grid.size * stages_per_worker(schedule), parts), parts)
    pipeline = Pipeline(nets, programs, grid, loss, DMODEL, cores=cores, costs=costs)
    return lambda x: pipeline.step(x.chunk(micro_batches))


def one_thread(schedule: str, nets: Nets, grid: Grid, micro_batches: int) -> Step:
    return by_lab(schedule, nets, grid, micro_batches, cores=None)


def ours(schedule: str, nets: Nets, grid: Grid, micro_batches: int) -> Step:
    return by_lab(schedule, nets, grid, micro_batches, cores=cores_to_share(1))


def by_torch(
    schedule: str, nets: Nets, grid: Grid, micro_batches: int, group: "dist.ProcessGroup | None" = None
) -> Step:
    """Over the lab's backend, or over the group that is given."""
    loss, kind = partial(causalLLMLoss, vocab_size=VOCAB_SIZE), TORCHS[schedule]
    count = grid.size * stages_per_worker(schedule)
    stages = [PipelineStage(net, stage, count, torch.device("cpu"), group=group) for stage, net in nets.items()]
    held: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    runner = kind(held, n_microbatches=micro_batches, loss_fn=loss)
    inputs = (lambda x: [x]) if 0 in nets else (lambda x: [])
    return lambda x: runner.step(*inputs(x), target=x if count - 1 in nets else None, return_outputs=False)


def torch_one_thread(schedule: str, nets: Nets, grid: Grid, micro_batches: int) -> Step:
    return by_torch(schedule, nets, grid, micro_batches, group_over_gloo())


def torch_through_the_lab(schedule: str, nets: Nets, grid: Grid, micro_batches: int) -> Step:
    return by_torch(schedule, nets, grid, micro_batches)


def torch_all_cores(schedule: str, nets: Nets, grid: Grid, micro_batches: int) -> Step:
    """A thread for each core on every stage, whatever the others do."""
    return with_threads(torch_one_thread(schedule, nets, grid, micro_batches), cores_to_share(1) or 1)


OURS: list[Build] = [one_thread, ours]
VARIANTS: list[Build] = [torch_one_thread, torch_all_cores, torch_through_the_lab, *OURS]


def measure(workers: int, settings: Settings) -> None:
    """One rank: the variants in turn, for each number of micro-batches and each schedule."""
    grid = Grid(dist.get_rank(), {"pp": workers})
    for micro_batches, schedule in itertools.product(settings.micro_batches, settings.schedules):
        if not is_possible(schedule, workers, micro_batches):
            continue
        count = workers * stages_per_worker(schedule)
        split = balance(N_LAYERS, count, parts_of(settings.seq_len))
        held = stages_of(all_stages(schedule, workers, micro_batches)[grid.rank])
        nets = build_stages(held, split, VOCAB_SIZE, ctx_size=settings.seq_len)
        compiled: Nets = {stage: torch.compile(net) for stage, net in nets.items()} if settings.compile else nets  # type: ignore[misc]
        steps = {
            build: with_fresh_gradients(nets, build(schedule, nets if build in OURS else compiled, grid, micro_batches))
            for build in VARIANTS
        }
        if settings.compile:
            steps |= {build: through_lab(steps[build]) for build in OURS}
        batch_of = partial(tokens, batch_size=micro_batches, seq_len=settings.seq_len)
        check_gradients(nets, steps, batch_of(0))
        seconds = seconds_in_turn(steps, batch_of, settings.rounds, meet=dist.barrier)
        if grid.rank == 0:
            print_row(workers, micro_batches, schedule, *cells(micro_batches * settings.seq_len, seconds))


def parts_of(seq_len: int) -> PartCosts:
    return multiply_adds(vocab_size=VOCAB_SIZE, dmodel=DMODEL, seq_len=seq_len)


def is_possible(schedule: str, workers: int, micro_batches: int) -> bool:
    """Whether the schedule can do so many micro-batches: `interleaved`, multiples of the workers only."""
    try:
        check_schedule(schedule, workers, micro_batches, DEFAULT_CHUNKS)
    except InputError:
        return False
    return True


def check_gradients(nets: Nets, steps: Mapping[Build, Step], batch: Tensor) -> None:
    """Raise `RuntimeError` unless all variants compute the same gradients."""
    parameters = [parameter for net in nets.values() for parameter in net.parameters()]
    found = []
    for step in steps.values():
        step(batch)
        found.append(torch.cat([torch.as_tensor(parameter.grad).flatten() for parameter in parameters]))
    for build, own in zip(steps, found, strict=True):
        difference = ((own - found[-1]).norm() / found[-1].norm()).item()
        if not difference < 1e-4:
            raise RuntimeError(f"the gradients of {build.__name__} differ from ours by {difference:.1e} of their norm")


def with_fresh_gradients(nets: Nets, step: Step) -> Step:
    def zero_and_step(x: Tensor) -> None:
        for net in nets.values():
            net.zero_grad()
        step(x)

    return zero_and_step


def cells(token_count: int, seconds: dict[Build, list[float]]) -> list[str]:
    """Those of a row: the speeds, and of the last three also to the better one of torch's."""
    torchs = (torch_one_thread, torch_all_cores)
    found = [per_second(token_count, seconds[build]) for build in torchs]
    better = min((seconds[build] for build in torchs), key=statistics.median)
    for build in (one_thread, ours, torch_through_the_lab):
        found += [per_second(token_count, seconds[build]), *quartiles_of_ratios(better, seconds[build]).cells(3)]
    return found


def main(settings: Settings) -> None:
    require_quartiles("--rounds", settings.rounds)
    unknown = set(settings.schedules) - TORCHS.keys()
    require(not unknown, f"--schedules {' '.join(sorted(unknown))}: there are {', '.join(TORCHS)}")
    heads = ["stages", "micro-batches", "schedule", "torch, 1 thread a stage: tokens/s", "torch, all cores"]
    for name in ("ours, 1 thread a stage", "ours, cores by plan", "torch through the lab's backend, 1 thread"):
        heads += [name, "to the better torch (median)", "quartiles"]
    print_head(*heads)
    for stages in settings.stages:
        run_ranks(measure, stages, settings.port, stages, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
