"""Building the stages of a pipeline."""

from collections.abc import Iterable
from typing import Any

from distlab.pipeline.split import Split
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
