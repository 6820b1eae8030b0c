"""This rank's part of the model that a run trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm.grid import Grid
from simplellm.llama import LLamaPart
from simplellm.losses import causalLLMLoss

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelParts:
    """The stages of the lab's Llama that this rank holds, and what computes the loss.

    Attributes:
        stages: by their index in the model.
        owners: by stage, its rank in the pipeline.
        grid: where this rank stands.
        loss: (logits of the whole model, token ids (batch, seq)) -> the mean loss over their targets.
    """

    stages: Mapping[int, LLamaPart]
    owners: Sequence[int]
    grid: Grid
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
        stages = model if isinstance(model, Mapping) else {grid.stage: model}
        unwrapped = {
            stage: next(module for module in part.modules() if isinstance(module, LLamaPart))
            for stage, part in stages.items()
        }
        vocab_size = next(iter(unwrapped.values())).options["vocab_size"]
        loss = loss or partial(causalLLMLoss, vocab_size=vocab_size)
        return cls(unwrapped, range(grid.pp) if owners is None else owners, grid, loss)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make a model of the same sizes; its layers are this part's."""
        return next(iter(self.stages.values())).options

    @property
    def width(self) -> int:
        """Of the activations between stages: (batch, seq, `width`), float32."""
        return int(self.options["dmodel"])

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters().values())).device

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names in the whole model."""
        return {name: parameter for part in self.stages.values() for name, parameter in part.named_parameters()}

    def modules(self) -> dict[str, nn.Module]:
        """By their names in the whole model, in the order in which they are computed."""
        return {name: module for part in self.stages.values() for name, module in part.named_modules()}
