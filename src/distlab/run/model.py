"""This rank's part of the model that a run trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm.grid import Grid
from distlab.comm.traffic import traffic
from distlab.comm.transfer import Transfer
from simplellm.llama import LLamaPart
from simplellm.losses import causalLLMLoss

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits of the whole model, token ids (batch, seq)) -> mean loss


@dataclass(frozen=True)
class ModelParts:
    """The stages of the lab's Llama that this rank holds, and the loss function."""

    stages: Mapping[int, LLamaPart]  # by their index in the model
    owners: Sequence[int]  # by stage, the rank in the pipeline that holds it
    grid: Grid  # this rank's position in the layout
    loss: Loss

    @classmethod
    def of(
        cls,
        model: nn.Module | Mapping[int, nn.Module],
        grid: Grid,
        owners: Sequence[int] | None = None,
        loss: Loss | None = None,
    ) -> "ModelParts":
        """From a model or one of its stages, wrapped or not; or from several stages by index, with `owners` given."""
        stages = {
            stage: next(module for module in part.modules() if isinstance(module, LLamaPart))
            for stage, part in (model if isinstance(model, Mapping) else {grid.stage: model}).items()
        }
        vocab_size = next(iter(stages.values())).options["vocab_size"]
        loss = loss or partial(causalLLMLoss, vocab_size=vocab_size)
        return cls(stages, range(grid.pp) if owners is None else owners, grid, loss)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that build a model of the same sizes, with the layers of this part."""
        return next(iter(self.stages.values())).options

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by their names in the whole model."""
        return {name: parameter for part in self.stages.values() for name, parameter in part.named_parameters()}

    @torch.no_grad()
    def forward_passes(self, batches: Sequence[Tensor], what: Callable[[int], str], kind: str) -> Tensor:
        """Pass batches through the whole model, without gradients.

        All ranks of a replica must call this method with the same batches.

        Args:
            batches: token ids, each (batch, seq), on the model's device.
            what: name of a batch's activations in waits and errors, given the batch's number.
            kind: the ledger's column.

        Returns:
            On the rank of the last stage, the sum of the batches' losses, each weighted by its number of rows; on other
            ranks 0; float64.
        """
        own = self.grid.stage
        device = next(iter(self.parameters().values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        sent: list[Transfer] = []
        for number, ids in enumerate(batches):
            x = ids
            for stage, owner in enumerate(self.owners):
                before = self.owners[stage - 1] if stage else owner
                if owner == own:
                    if before != owner:
                        x = torch.empty(*ids.shape, self.options["dmodel"], device=device)  # (batch, seq, dmodel)
                        traffic.receive(x, what(number), source=self.grid.rank_of(before)).wait()
                    x = self.stages[stage](x)
                elif before == own and stage:
                    sent.append(traffic.send(x, what(number), to=self.grid.rank_of(owner), kind=kind))
            if self.owners[-1] == own:
                total += self.loss(x, ids).double() * len(ids)
        for transfer in sent:
            transfer.wait()
        return total
