"""Builds the models of a pipeline's stages; `Stage` in `distlab.pipeline.activations` is such a model in training."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from distlab.pipeline.actions import FACTORS
from distlab.pipeline.split import Split
from simplellm.errors import say
from simplellm.layers import Linear
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage, LLamaLastStage, LLamaPart, LLamaStage


def build_stage(stage: int, split: Split, vocab_size: int, **options: Any) -> LLamaPart:
    """Build the part of the model that a stage holds: its layers, on the first stage the embedding, on the last a head.

    `options` are those of `simplellm.llama.LLamaPart`, except `n_layers` and `first_layer`.
    """
    is_first, is_last = stage == 0, stage == len(split) - 1
    kind = (CausalLLama if is_last else LLamaFirstStage) if is_first else (LLamaLastStage if is_last else LLamaStage)
    return LLama(kind, vocab_size, **{**options, "n_layers": split[stage], "first_layer": sum(split[:stage])})


def build_stages(stages: Iterable[int], split: Split, vocab_size: int, **options: Any) -> dict[int, LLamaPart]:
    """Build the parts of the model that a worker holds, by stage; see `build_stage`."""
    return {stage: build_stage(stage, split, vocab_size, **options) for stage in stages}


def remark_on_weight_gradients(stages: Iterable[nn.Module], programs: Sequence[Sequence[Any]]) -> None:
    """Print a remark if a schedule defers weight gradients that linear layers compute at once."""
    modules = [found for stage in stages for found in stage.named_modules()]
    names = [name for name, module in modules if isinstance(module, nn.Linear) and not isinstance(module, Linear)]
    if not names or all(FACTORS not in action.gives for program in programs for action in program):
        return
    what = f"{names[0]} and {len(names) - 1} others compute" if len(names) > 1 else f"{names[0]} computes"
    say(f"{what} weight gradients in I, which leaves nothing to W; use simplellm.layers.Linear, which defers them")
