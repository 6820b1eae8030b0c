"""How a rank of a benchmark joins the others."""

import io
import signal
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from distlab.comm.context import Options
from distlab.machine.devices import Place
from distlab.machine.heap import set_up_heap
from distlab.machine.network import keep_to_loopback, patient_threads
from distlab.machine.processes import end_with_parent
from distlab.rendezvous.ranks import open_store

SECONDS = 300.0  # that any wait may take


def join(rank: int, world_size: int, port: int, patient: bool = True, backend: Literal["lab", "gloo"] = "lab") -> None:
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
