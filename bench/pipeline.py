"""Pipeline schedules beside torch.distributed.pipelining: the same stages, in one run, step by step in turn.

python bench/pipeline.py
python bench/pipeline.py --stages 3 --micro-batches 6 12 --rounds 20
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import join
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.comm.devices import cores_to_share
from distlab.comm.grid import Grid
from distlab.comm.processes import leave
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.split import balance
from distlab.pipeline.stages import build_stage
from simplellm.losses import causalLLMLoss

VOCAB_SIZE, DMODEL = 4096, 288
TORCHS = {"gpipe": ScheduleGPipe, "dapple": Schedule1F1B}

Step = Callable[[Tensor], object]
Build = Callable[[str, nn.Module, Grid, int], Step]


@dataclass
class Settings:
    """What to measure."""

    stages: list[int] = field(default_factory=lambda: [2, 3])
    """numbers of pipeline stages"""
    micro_batches: list[int] = field(default_factory=lambda: [3, 6, 12])
    """micro-batches per step, of one sequence each"""
    rounds: int = 10
    """timed steps of each"""
    seq_len: int = 256
    """tokens per sequence"""
    port: int = 29555
    """where rank 0 listens"""


def one_thread(schedule: str, net: nn.Module, grid: Grid, micro_batches: int, cores: int | None = None) -> Step:
    loss = partial(causalLLMLoss, vocab_size=VOCAB_SIZE)
    programs = all_stages(schedule, grid.pp, micro_batches)
    pipeline = Pipeline(net, programs, grid, loss, width=DMODEL, cores=cores)
    return lambda x: pipeline.step(x.chunk(micro_batches))


def ours(schedule: str, net: nn.Module, grid: Grid, micro_batches: int) -> Step:
    return one_thread(schedule, net, grid, micro_batches, cores=cores_to_share(1))


def torch_one_thread(schedule: str, net: nn.Module, grid: Grid, micro_batches: int) -> Step:
    loss = partial(causalLLMLoss, vocab_size=VOCAB_SIZE)
    runner = TORCHS[schedule](
        PipelineStage(net, grid.stage, grid.pp, torch.device("cpu")), n_microbatches=micro_batches, loss_fn=loss
    )
    inputs = (lambda x: [x]) if grid.stage == 0 else (lambda x: [])
    return lambda x: runner.step(*inputs(x), target=x if grid.is_last_stage else None, return_outputs=False)


def torch_all_cores(schedule: str, net: nn.Module, grid: Grid, micro_batches: int) -> Step:
    """A thread for each core on every stage, whatever the others do."""
    step, threads = torch_one_thread(schedule, net, grid, micro_batches), cores_to_share(1) or 1

    def with_all_cores(x: Tensor) -> None:
        torch.set_num_threads(threads)
        step(x)
        torch.set_num_threads(1)

    return with_all_cores


VARIANTS: list[Build] = [torch_one_thread, torch_all_cores, one_thread, ours]


def measure(rank: int, stages: int, settings: Settings) -> None:
    """One rank: the variants in turn, for each number of micro-batches and each schedule."""
    join(rank, stages, settings.port)
    grid = Grid(rank, dp=1, pp=stages)
    split = balance(6, stages, vocab_size=VOCAB_SIZE, dmodel=DMODEL, seq_len=settings.seq_len)
    net = build_stage(rank, split, VOCAB_SIZE, ctx_size=settings.seq_len)
    for micro_batches in settings.micro_batches:
        for schedule in TORCHS:
            steps = {build: with_fresh_gradients(net, build(schedule, net, grid, micro_batches)) for build in VARIANTS}
            batch_of = partial(tokens, micro_batches, settings.seq_len)
            seconds = seconds_in_turn(steps, batch_of, settings.rounds, meet=dist.barrier)
            if rank == 0:
                report(f"| {stages} | {micro_batches} | {schedule} ", micro_batches * settings.seq_len, seconds)
    leave(0)


def with_fresh_gradients(net: nn.Module, step: Step) -> Step:
    def zero_and_step(x: Tensor) -> None:
        net.zero_grad()
        step(x)

    return zero_and_step


def tokens(rows: int, seq_len: int, turn: int) -> Tensor:
    """Token ids (rows, seq), the same on all ranks."""
    return torch.randint(VOCAB_SIZE, (rows, seq_len), generator=torch.Generator().manual_seed(turn))


def report(cell: str, token_count: int, seconds: dict[Build, list[float]]) -> None:
    """One line of the table."""
    torchs = (torch_one_thread, torch_all_cores)
    line = cell + "".join(f"| {token_count / statistics.median(seconds[build]):,.0f} " for build in torchs)
    better = seconds[min(torchs, key=lambda build: statistics.median(seconds[build]))]
    for build in (one_thread, ours):
        low, middle, high = quartiles_of_ratios(better, seconds[build])
        line += f"| {token_count / statistics.median(seconds[build]):,.0f} | {middle:.3f} | {low:.3f} to {high:.3f} "
    print(line + "|", flush=True)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.rounds < 2:
        raise SystemExit(f"--rounds {settings.rounds}: quartiles need at least 2")
    heads = ["stages", "micro-batches", "schedule", "torch, 1 thread a stage: tokens/s", "torch, all cores"]
    for name in ("ours, 1 thread a stage", "ours, cores by plan"):
        heads += [name, "to the better torch (median)", "quartiles"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for stages in settings.stages:
        mp.spawn(measure, args=(stages, settings), nprocs=stages)


if __name__ == "__main__":
    main()
