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

Loss = Callable[[Tensor, Tensor], Tensor]  # of the whole model's logits and the token ids (batch, seq): the mean


@dataclass(frozen=True)
class ModelParts:
    """The stages of the lab's Llama that this rank holds, and what computes the loss."""

    stages: Mapping[int, LLamaPart]  # by their index in the model
    owners: Sequence[int]  # by stage, its rank in the pipeline
    grid: Grid  # this rank's place
    loss: Loss

    @classmethod
    def of(
        cls,
        model: nn.Module | Mapping[int, nn.Module],
        grid: Grid,
        owners: Sequence[int] | None = None,
        loss: Loss | None = None,
    ) -> "ModelParts":
        """Of a model or a stage of it, wrapped or not; or of several stages by their index, with all stages' owners."""
        stages = {
            stage: next(module for module in part.modules() if isinstance(module, LLamaPart))
            for stage, part in (model if isinstance(model, Mapping) else {grid.stage: model}).items()
        }
        vocab_size = next(iter(stages.values())).options["vocab_size"]
        loss = loss or partial(causalLLMLoss, vocab_size=vocab_size)
        return cls(stages, range(grid.pp) if owners is None else owners, grid, loss)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make a model of the same sizes; its layers are this part's."""
        return next(iter(self.stages.values())).options

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names in the whole model."""
        return {name: parameter for part in self.stages.values() for name, parameter in part.named_parameters()}

    @torch.no_grad()
    def forward_passes(self, batches: Sequence[Tensor], what: Callable[[int], str], kind: str) -> Tensor:
        """Pass batches through the whole model, without gradients; all ranks of a replica call it with the same ones.

        Args:
            batches: token ids, each (batch, seq), on the model's device.
            what: what the activations of a batch are called, by its number, in waits and errors.
            kind: the ledger's column.

        Returns:
            The sum of the batches' losses, each weighted by its rows, where this rank computes them, else 0; float64.
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
