"""A whole model in memory: sizes, parameters, tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama


@dataclass(frozen=True)
class SavedModel:
    """A whole model, for example from a checkpoint.

    Attributes:
        options: keyword arguments for the models of `simplellm.llama`, except device, dtype and seed.
        parameters: by name, float32.
        tokenizer: path of the tokenizer, as `SPTokenizer` reads it.
        step: number of training steps so far; None if unknown.
        document_mask: whether it was trained with tokens that attend only within their documents.
    """

    options: dict[str, Any]
    parameters: dict[str, Tensor]
    tokenizer: Path
    step: int | None = None
    document_mask: bool = False

    @property
    def after_steps(self) -> str:
        """How long it has been trained, as the end of a phrase: " after 20 steps"; "" if unknown."""
        return "" if self.step is None else f" after {self.step:,} steps"

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def build(self, device: torch.device | str = "cpu") -> CausalLLama:
        """Return the whole model with the saved parameters.

        Raises:
            InputError: a parameter is not finite, as after a run that has diverged.
        """
        for name, parameter in self.parameters.items():
            if not parameter.isfinite().all():
                raise InputError(f"{name} is not finite: the run has diverged; give an earlier checkpoint")
        model = LLama(CausalLLama, **self.options, device=device)
        model.load_state_dict(self.parameters, strict=True)
        return model
