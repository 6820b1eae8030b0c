"""How a rank of a benchmark joins the others."""

import signal
from contextlib import nullcontext

import torch
import torch.distributed as dist

from distlab.comm.devices import keep_to_loopback, patient_threads
from distlab.comm.heap import set_up_heap
from distlab.comm.processes import end_with_parent
from distlab.rendezvous.ranks import open_store


def join(rank: int, world_size: int, port: int, patient: bool = True) -> None:
    """Set up a process group over gloo, as a run of the lab does on a CPU: on loopback, with one thread a rank.

    Args:
        rank: of this process.
        world_size: number of ranks, all on this computer.
        port: where rank 0 listens.
        patient: whether gloo's threads are patient (`patient_threads`) and the heap is set up (`set_up_heap`), as in
            the lab's runs.
    """
    end_with_parent(signal.SIGKILL)  # torch's SIGINT does not reach what a script started in the background
    keep_to_loopback()
    if patient:
        set_up_heap()
    torch.set_num_threads(1)
    store = open_store(rank, "localhost", port, timeout_seconds=300, say=lambda _: None)
    with patient_threads() if patient else nullcontext():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
