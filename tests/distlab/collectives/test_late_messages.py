"""The collectives over a `send` that returns at once, keeps a reference to the tensor, and delivers it late."""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives import (
    allreduce_butterfly,
    allreduce_naive,
    broadcast_naive,
    broadcast_ring,
    broadcast_tree,
    reduce_naive,
    reduce_tree,
)

pytestmark = pytest.mark.quick

LATE_SECONDS = 0.002


class LateWorld:
    """Ranks as threads, with the five functions of `torch.distributed` that the collectives may use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rank = threading.local()
        self._sent: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self._barrier = threading.Barrier(size)

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {
            "send": lambda tensor, dst: self._sent[self._rank.number, dst].put(tensor),
            "recv": self.recv,
            "get_rank": lambda: self._rank.number,
            "get_world_size": lambda: self.size,
            "barrier": self._barrier.wait,
        }

    def recv(self, tensor: Tensor, src: int) -> None:
        sent = self._sent[src, self._rank.number].get(timeout=20)
        time.sleep(LATE_SECONDS)  # meanwhile the sender continues
        tensor.copy_(sent)

    def run(self, work: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
        results: list[list[Tensor]] = [[] for _ in range(self.size)]

        def run_rank(rank: int) -> None:
            self._rank.number = rank
            results[rank] = work(rank)

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def expected(collective: Callable[..., None], rank: int, root: int, size: int) -> int:
    """What rank r, which gives r + 1, has at the end."""
    if collective.__name__.startswith("broadcast"):
        return root + 1
    return rank + 1 if collective.__name__.startswith("reduce") and rank != root else size * (size + 1) // 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "collective",
    [
        broadcast_naive,
        broadcast_tree,
        broadcast_ring,
        reduce_naive,
        reduce_tree,
        allreduce_naive,
        allreduce_butterfly,
    ],
)
def test_nothing_that_was_sent_changes_before_it_has_arrived(
    collective: Callable[..., None], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = LateWorld(size)
    for name in ("send", "recv", "isend", "irecv", "get_rank", "get_world_size", "barrier"):
        monkeypatch.setattr(dist, name, world.functions().get(name))
    roots = (0, size - 1, 0)  # one call after the other: the next one must not change what the last one has sent

    def work(rank: int) -> list[Tensor]:
        tensors = [torch.full((3, 2), 10.0**call * (rank + 1)) for call in range(len(roots))]
        for root, tensor in zip(roots, tensors, strict=True):
            collective(tensor, *(() if collective.__name__.startswith("allreduce") else (root,)))
        return tensors

    for rank, tensors in enumerate(world.run(work)):
        for call, (root, tensor) in enumerate(zip(roots, tensors, strict=True)):
            value = 10.0**call * expected(collective, rank, root, size)
            assert torch.equal(tensor, torch.full((3, 2), value)), (rank, call)
