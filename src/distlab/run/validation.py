"""The loss on stories that are not trained on: the same number, but for rounding, in every layout."""

import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.traffic import traffic
from distlab.comm.transfer import Transfer
from distlab.run.model import ModelParts


@torch.no_grad()
def forward_passes(parts: ModelParts, batches: Sequence[Tensor], what: Callable[[int], str], kind: str) -> Tensor:
    """Pass batches through the whole model, without gradients; all ranks of a replica call it with the same ones.

    Args:
        parts: this rank's part of the model.
        batches: token ids, each (batch, seq), on the model's device.
        what: what the activations of a batch are called, by its number, in waits and errors.
        kind: the ledger's column.

    Returns:
        The sum of the batches' losses, each weighted by its rows, where this rank computes them, else 0; float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=parts.device)
    sent: list[Transfer] = []
    for number, ids in enumerate(batches):
        x = ids
        for stage, owner in enumerate(parts.owners):
            before = parts.owners[stage - 1] if stage else owner
            if owner == parts.grid.stage:
                if before != owner:
                    x = torch.empty(*ids.shape, parts.width, device=parts.device)
                    traffic.receive(x, what(number), source=parts.grid.rank_of(before)).wait()
                x = parts.stages[stage](x)
            elif before == parts.grid.stage and stage:
                sent.append(traffic.send(x, what(number), to=parts.grid.rank_of(owner), kind=kind))
        if parts.owners[-1] == parts.grid.stage:
            total += parts.loss(x, ids).double() * len(ids)
    for transfer in sent:
        transfer.wait()
    return total


class Validator:
    """A fixed set of sequences, dealt out to the replicas, and the model's loss on it.

    Args:
        parts: this rank's part of the model.
        sequences: token ids (sequences, seq), the same on all ranks and on the model's device.
        rows: sequences to a forward pass, at most.

    Attributes:
        seconds: that evaluating took.
    """

    def __init__(self, parts: ModelParts, sequences: Tensor, rows: int) -> None:
        self._parts, self._count = parts, len(sequences)
        own = sequences[parts.grid.replica :: parts.grid.dp]
        self._batches: Sequence[Tensor] = own.split(rows) if len(own) else ()
        self.seconds = 0.0

    def loss(self, step: int) -> float:
        """The mean loss over all sequences after a step, on every rank, which all must call it."""
        started, grid = time.perf_counter(), self._parts.grid
        with traffic.ledger.counted_as("validation"):
            total = forward_passes(
                self._parts,
                self._batches,
                lambda number: f"the activations of validation batch {number} after step {step}",
                kind="validation",
            )
            traffic.all_reduce(
                total, f"the validation loss after step {step}", kind="validation", op=dist.ReduceOp.SUM
            ).wait()
        self.seconds += time.perf_counter() - started
        return total.item() / (self._count * grid.tp)


def perplexity(loss: float) -> float:
    """exp(loss): the number of tokens that the model hesitates between, on average."""
    return math.exp(min(loss, 700))
