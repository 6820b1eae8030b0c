"""The ranks of a benchmark: how they are started, and how each joins the others.

seconds = run_ranks(measure, 2, port, settings)     calls measure(settings) on two ranks, and returns rank 0's result
"""

import io
import pickle
import signal
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distlab.comm.context import Options
from distlab.machine.devices import Place
from distlab.machine.heap import set_up_heap
from distlab.machine.network import keep_to_loopback, patient_threads
from distlab.machine.processes import end_with_parent, leave
from distlab.rendezvous.ranks import open_store

Backend = Literal["lab", "gloo"]
Batch = TypeVar("Batch")
SECONDS = 300.0  # that any wait may take


def run_ranks(
    work: Callable[..., object],
    ranks: int,
    port: int,
    *arguments: object,
    patient: bool = True,
    backend: Backend = "lab",
) -> Any:
    """Do the work on each of some ranks, which are processes that have joined each other; return rank 0's result."""
    with tempfile.NamedTemporaryFile() as file:
        options = port, patient, backend
        mp.spawn(run_rank, args=(ranks, options, work, arguments, file.name), nprocs=ranks)
        return pickle.load(file)  # noqa: S301  # it is rank 0's


def run_rank(
    rank: int,
    ranks: int,
    options: tuple[int, bool, Backend],
    work: Callable[..., object],
    arguments: tuple[object, ...],
    result_file: str,
) -> None:
    """Do the work of one rank; rank 0 writes the result to a file."""
    join(rank, ranks, *options)
    result = work(*arguments)
    if rank == 0:
        Path(result_file).write_bytes(pickle.dumps(result))
    leave(0)  # without the process group's destructor, which can hang: see distlab.run.run.Run.close


def join(rank: int, world_size: int, port: int, patient: bool = True, backend: Backend = "lab") -> None:
    """Set up a process group as a run of the lab does on a CPU: on loopback, with one thread a rank.

    Args:
        rank: of this process.
        world_size: number of ranks, all on this computer.
        port: where rank 0 listens.
        patient: whether gloo's threads are patient (`patient_threads`) and the heap is set up (`set_up_heap`), as in
            the lab's runs. The lab's own groups always have such threads.
        backend: of the group of all ranks.
    """
    end_with_parent(signal.SIGKILL)  # torch's SIGINT does not reach what a script started in the background
    keep_to_loopback()
    if patient:
        set_up_heap()
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()):  # a benchmark prints its table alone
        store = open_store(rank, "localhost", port, SECONDS)
    options = Options(places=[Place("here")] * world_size) if backend == "lab" else None
    with patient_threads() if patient else nullcontext():
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=SECONDS),
            pg_options=options,
        )


def group_over_gloo(patient: bool = True) -> dist.ProcessGroup:
    """All ranks in a group of torch's own, over gloo, to compare with; see `join`."""
    with patient_threads() if patient else nullcontext():
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS))
    return group


def with_threads(step: Callable[[Batch], object], threads: int) -> Callable[[Batch], None]:
    """The step of a rank with so many threads, instead of the one that it has otherwise."""

    def step_with_threads(batch: Batch) -> None:
        torch.set_num_threads(threads)
        step(batch)
        torch.set_num_threads(1)

    return step_with_threads


def on_rank_0(step: Callable[[Batch], object]) -> Callable[[Batch], object]:
    """The step of one process, with as many threads as there are ranks, while the other ranks wait for it."""
    return with_threads(step, dist.get_world_size()) if dist.get_rank() == 0 else lambda _: None
