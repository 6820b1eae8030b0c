"""A whole model as it is kept: sizes, parameters, tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama


@dataclass(frozen=True)
class SavedModel:
    """A model out of a checkpoint, whole.

    Attributes:
        options: keyword arguments of `simplellm.llama`'s models, but for device, dtype and seed.
        parameters: by name, float32.
        tokenizer: a SentencePiece model.
        step: steps that it has been trained for; None if that is not known.
    """

    options: dict[str, Any]
    parameters: dict[str, Tensor]
    tokenizer: Path
    step: int | None = None

    @property
    def after_steps(self) -> str:
        """How long it has been trained, to follow the number of its parameters; nothing if that is not known."""
        return "" if self.step is None else f" after {self.step:,} steps"

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def build(self, device: torch.device | str = "cpu") -> CausalLLama:
        """The whole model with the saved parameters.

        Raises:
            InputError: the parameters are no numbers any more, as after a loss that was none.
        """
        for name, parameter in self.parameters.items():
            if not parameter.isfinite().all():
                raise InputError(f"{name} is not finite: the run has diverged; give an earlier checkpoint")
        model = LLama(CausalLLama, **self.options, device=device)
        model.load_state_dict(self.parameters, strict=True)
        return model
