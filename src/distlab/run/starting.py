"""The start of a process as a rank of a run: its number, its device, its folder, and its process group."""

import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from distlab.axes.grid import Grid
from distlab.axes.layout import layout_flags, layout_size, pipelines_on_host
from distlab.comm.context import Context, Options, context_of
from distlab.machine import devices
from distlab.machine.cores import binding
from distlab.machine.heap import set_up_heap
from distlab.machine.processes import started_by_torchrun
from distlab.run.terminal import say
from distlab.settings.common import ResumableSettings, RunSettings
from distlab.settings.folders import RECORDED, Claim, check_out, is_run, new_folder
from simplellm.errors import require


@dataclass
class Joined:
    """A rank that has met the others."""

    grid: Grid
    places: Sequence[devices.Place]  # of all ranks
    decided: dict[str, Any]  # by rank 0 for all: the folder, the data, the checkpoint to resume from
    claim: Claim | None  # of the folder, on rank 0
    context: Context
    store: dist.Store

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def local_ranks(self) -> int:
        """Number of ranks on this host."""
        return len(devices.local_ranks(self.places, self.grid.rank))


def identity(settings: RunSettings) -> tuple[int, int]:
    """Return the rank and the world size, from torchrun or the command line; `InputError` if they disagree."""
    asked, flags = layout_size(settings.layout), layout_flags(settings.layout)
    if started_by_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        require(size == asked, f"{flags}: torchrun started {size} ranks; make the two agree")
        sentence = f"rank {settings.rank}: torchrun made this process rank {rank}; leave the rank out"
        require(settings.rank in (-1, rank), sentence)
        return rank, size
    rank = 0 if settings.rank == -1 and asked == 1 else settings.rank
    given = "no rank given" if rank == -1 else f"rank {rank}"  # -1 is the default
    advice = "give each process its own rank as the first argument, or start all of them with launch.sh"
    ranks = f"the ranks 0 to {asked - 1}" if asked > 1 else "only rank 0"
    require(0 <= rank < asked, f"{given}: {flags} has {ranks}; {advice}")
    return rank, asked


def start_alone(settings: RunSettings, script: Path) -> Joined:
    """Start a run of one process; `InputError` if it cannot start."""
    grid = Grid(0, {})
    places = [devices.Place("", devices.visible_gpus(devices.pick_device_type(settings.device)))]
    set_up(grid, places, settings)
    store: dist.Store = dist.HashStore()
    context = init_group(settings, grid, places, store, "gloo")
    decided, claim = decide(settings, script)
    return Joined(grid, places, decided, claim, context, store)


def decide(settings: RunSettings, script: Path) -> tuple[dict[str, Any], Claim]:
    """Return rank 0's decisions for all ranks, and its claim to the run's folder."""
    out = (settings.out or new_folder(Path("runs") / script.stem)).absolute()
    decided = {"out": str(out), **settings.decide()}
    claim = Claim(out)  # before its checkpoints are touched
    check_out(out)
    has_earlier = is_run(out)
    if isinstance(settings, ResumableSettings):
        settings.check_folders()  # again: the run that had the folder may have left checkpoints
        if settings.has_checkpoints:
            from distlab.run.checkpointer import CANDIDATES, prepare_checkpoints

            decided |= prepare_checkpoints(settings, out)
            resumed = decided.get(CANDIDATES, [])[:1]
            has_earlier = has_earlier and not any(out.resolve() in Path(each).resolve().parents for each in resumed)
    if has_earlier:
        shutil.rmtree(out / RECORDED, ignore_errors=True)
        say(f"the records of an earlier run in {out} are replaced")
    return decided, claim


def set_up(grid: Grid, places: Sequence[devices.Place], settings: RunSettings) -> None:
    """Set this process's device, heap and number of threads."""
    device, local_ranks = devices.pick_device(places, grid.rank), len(devices.local_ranks(places, grid.rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # autograd's thread may start with a matrix product; torch warns of a missing context, which it then creates
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    else:
        set_up_heap()
        if local_ranks > 1 and (bound := binding()):  # launch.sh leaves them out
            say(f"{' and '.join(bound)}: binds the threads of every rank to the same cores; unset it")
    computing = pipelines_on_host(grid.layout, local_ranks) if settings.one_stage_at_a_time else local_ranks
    torch.set_num_threads(devices.threads_per_rank(computing))


def init_group(
    settings: RunSettings,
    grid: Grid,
    places: Sequence[devices.Place],
    store: dist.Store,
    library: Literal["gloo", "nccl"],
) -> Context:
    """Make the process group of all ranks."""
    options = Options(
        library=library,
        transport=settings.transport,
        timeout_seconds=settings.timeout,
        timeout_name="--timeout",
        threads=torch.get_num_threads(),
        places=places,
        describe=grid.describe,
        check=(lambda: None) if settings.can_repair else None,
    )
    dist.init_process_group(
        "lab",
        store=store,
        rank=grid.rank,
        world_size=len(places),
        timeout=timedelta(seconds=settings.timeout),
        pg_options=options,
    )
    return context_of()
