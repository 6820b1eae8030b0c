"""The loss of stories that are not trained on: the same number, but for rounding, in every layout."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.grid import Grid
from distlab.comm.traffic import Transfer, traffic

Loss = Callable[[Tensor, Tensor], Tensor]


class Validation:
    """A fixed set of sequences, dealt out to the replicas, and the model's loss on it.

    Args:
        net: the model, or this rank's part of it.
        loss: (logits of the whole model, token ids (batch, seq)) -> the mean over their targets.
        grid: where this rank stands.
        sequences: token ids (sequences, seq), the same on all ranks and on the model's device.
        rows: sequences to a forward pass, at most.
        width: of the activations between stages: (batch, seq, `width`), float32.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Loss,
        grid: Grid,
        sequences: Tensor,
        rows: int,
        width: int,
    ) -> None:
        self.net, self.loss_of, self.grid, self.width = net, loss, grid, width
        self.count, self.device = len(sequences), sequences.device
        own = sequences[grid.replica :: grid.dp]
        self.batches = own.split(rows) if len(own) else ()

    @torch.no_grad()
    def loss(self, step: int) -> float:
        """The mean loss over all sequences, on every rank, which all must call it; `step` names the messages."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        sent: list[Transfer] = []
        with traffic.ledger.counted_as("validation"):
            for number, ids in enumerate(self.batches):
                y = self.net(self._input(ids, f"{number} after step {step}"))
                if self.grid.is_last_stage:
                    total += self.loss_of(y, ids).double() * len(ids)
                else:
                    sent.append(self._hand_on(y, f"{number} after step {step}"))
            for transfer in sent:
                transfer.wait()
            traffic.all_reduce(
                total, f"the validation loss after step {step}", kind="validation", op=dist.ReduceOp.SUM
            ).wait()
        return total.item() / (self.count * self.grid.tp)

    def _input(self, ids: Tensor, batch: str) -> Tensor:
        if self.grid.stage == 0:
            return ids
        activations = torch.empty(*ids.shape, self.width, device=ids.device)
        source = self.grid.rank_of(self.grid.stage - 1)
        traffic.receive(activations, f"the activations of validation batch {batch}", source=source).wait()
        return activations

    def _hand_on(self, activations: Tensor, batch: str) -> Transfer:
        to = self.grid.rank_of(self.grid.stage + 1)
        return traffic.send(activations, f"the activations of validation batch {batch}", to=to, kind="validation")


def perplexity(loss: float) -> float:
    """exp(loss): the number of tokens that the model hesitates between, on average."""
    return math.exp(min(loss, 700))
