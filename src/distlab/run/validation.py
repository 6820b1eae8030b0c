"""The loss on the validation split; up to rounding, it is the same in every layout."""

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from distlab.axes.layout import EXPERTS, REPLICAS, STAGES
from distlab.comm.names import counted_as, named
from distlab.run.forward_passes import forward_passes, queues_for_passes
from distlab.run.model import ModelParts


class Validator:
    """Computes the model's loss on a fixed set of sequences: token ids (sequences, seq), the same on all ranks.

    The sequences are divided among the replicas, and evaluated in batches of at most `rows`. Where the replicas share
    weights or experts, each does as many forward passes as the others, because all take part in each pass.
    """

    def __init__(self, parts: ModelParts, sequences: Tensor, rows: int) -> None:
        self._parts, self._sequences, self._rows = parts, sequences, rows
        replicas = parts.grid.axis(REPLICAS, EXPERTS)
        self.divide(replicas.rank, replicas.size)

    def divide(self, replica: int, replicas: int) -> None:
        """Take this rank's share of the sequences, as one of a number of replicas."""
        sequences, rows = self._sequences, self._rows
        self._count = len(sequences)
        own = sequences[replica::replicas]
        self._batches: Sequence[Tensor] = own.split(rows) if len(own) else ()
        most = math.ceil(math.ceil(self._count / replicas) / rows)  # passes of the first replica
        sharded, grid = self._parts.sharded, self._parts.grid
        is_shared = any(part.shard == "weights" for part in sharded.values()) or grid.axis(EXPERTS).size > 1
        self._not_counted = [sequences[:1]] * (most - len(self._batches)) if is_shared else []

    def loss(self, step: int) -> float:
        """Return the mean loss over all sequences after a step, on every rank; all ranks must call this method."""
        name = f"the activations of validation batch {{}} after step {step}".format
        self._parts.wait_for_weights()  # a replica without sequences has no forward pass that would wait for them
        with counted_as("validation"):
            queues_for_passes(self._parts, [*self._batches, *self._not_counted])
            total = forward_passes(self._parts, self._batches, name, kind="validation")
            forward_passes(self._parts, self._not_counted, name, kind="validation")
            with named(f"the validation loss after step {step}", "validation"):
                dist.all_reduce(total)
        grid = self._parts.grid
        counted = grid.size // grid.axis(STAGES, REPLICAS, EXPERTS).size  # times that each sequence is in the sum
        return total.item() / (self._count * counted)

    def described(self, loss: float) -> str:
        """Return a loss, and its perplexity, for a message."""
        return f"loss {loss:.6f}, perplexity {perplexity(loss):,.2f}"


def perplexity(loss: float) -> float:
    """Return exp(loss): the number of equally likely tokens that would give this loss."""
    return math.exp(min(loss, 700))
