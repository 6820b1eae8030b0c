"""An all-reduce by hand: each rank sends chunks of its tensor to the next one, around a ring.

    python collectives/intro_collectives.py <rank>    in four terminals, with the ranks 0 to 3
    ./launch.sh collectives --elements 4000000        all ranks at once

The tensor is cut into a chunk for each rank. In the first half, a reduce-scatter, each rank adds the chunk that it
receives to its own and sends the sum on; after n - 1 rounds it has one chunk of the whole sum. In the second half, an
all-gather, these chunks go around once more. So each rank sends 2 (n - 1) / n times the tensor, however many there are
(Patarasuk and Yuan, 2009). `./launch.sh compare-collectives` measures other ways beside this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.names import named
from distlab.run.main import main
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import RunSettings, WorldSize, require_positive
from simplellm.errors import require


@dataclass
class RingSettings(WorldSize, RunSettings):
    world_size: int = 4
    """ranks"""
    elements: int = 1_000_000
    """numbers of 4 bytes in the tensor that is added up"""

    def check(self) -> None:
        super().check()
        require_positive(self, "elements")
        require(self.device == "cpu", "the chapter's collectives run on the CPU: leave --device out")


DEFAULTS = RingSettings(device="cpu", backend="gloo")
MORE = "compare_collectives.py"  # measures other ways, too


def reduce_scatter(chunks: Sequence[Tensor]) -> None:
    """Add up the ranks' chunks, in place: rank r ends with the sum of chunk r + 1, and partial sums of the others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for k in range(n - 1):  # round k
        sent, added_to = chunks[(rank - k) % n], chunks[(rank - k - 1) % n]
        received = torch.empty_like(added_to)
        sending = dist.isend(sent, (rank + 1) % n)  # a plain send, on all ranks at once, could wait forever
        dist.recv(received, (rank - 1) % n)
        sending.wait()
        added_to += received


def all_gather(chunks: Sequence[Tensor]) -> None:
    """Give all ranks all the sums, in place; at first, rank r has that of chunk r + 1."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for k in range(n - 1):
        sending = dist.isend(chunks[(rank + 1 - k) % n], (rank + 1) % n)
        dist.recv(chunks[(rank - k) % n], (rank - 1) % n)
        sending.wait()


def compare(run: Run[RingSettings]) -> None:
    own = torch.randn(run.settings.elements)  # different on each rank
    by_hand, expected = own.clone(), own.clone()
    chunks = by_hand.tensor_split(run.world_size)  # views
    with named("a chunk of the sum", "reduce-scatter by hand"):
        reduce_scatter(chunks)
    with named("a chunk of the sum", "all-gather by hand"):
        all_gather(chunks)
    with named("the sum", "dist.all_reduce"):
        dist.all_reduce(expected)
    torch.testing.assert_close(by_hand, expected)
    if run.rank == 0:
        say(f"the sum over the ranks, {own.nbytes:,} bytes on each, equals the sum of dist.all_reduce")


if __name__ == "__main__":
    main(compare, DEFAULTS, __doc__)
