"""The parts of the model that a pipeline's stages hold."""

from typing import Any

from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage, LLamaLastStage, LLamaPart, LLamaStage

Split = tuple[int, ...]  # layers of each stage


def build_stage(stage: int, split: Split, vocab_size: int, **options: Any) -> LLamaPart:
    """The part of the model that a stage holds: its layers, and the embedding or the head at the ends.

    Args:
        stage: from 0 to ``len(split) - 1``.
        split: layers of each stage.
        vocab_size: tokens in the vocabulary.
        options: those of `simplellm.llama.LLamaPart`, but its layers.
    """
    kinds = {
        (True, True): CausalLLama,
        (True, False): LLamaFirstStage,
        (False, False): LLamaStage,
        (False, True): LLamaLastStage,
    }
    kind = kinds[stage == 0, stage == len(split) - 1]
    return LLama(kind, vocab_size, **{**options, "n_layers": split[stage], "first_layer": sum(split[:stage])})


def read_split(text: str, n_layers: int, stages: int) -> Split:
    """The layers of each stage as ``--layers-per-stage 3,2,1`` gives them.

    Raises:
        InputError: they are not `stages` numbers that add up to `n_layers`, or a stage would hold nothing at all.
    """
    flag = f"--layers-per-stage {text}"
    try:
        split = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{flag}: give a number for each stage, like 3,2,1") from None
    if len(split) != stages:
        raise InputError(f"{flag}: {len(split)} numbers for {stages} stages; give one for each")
    if min(split) < 0:
        raise InputError(f"{flag}: a stage has 0 layers or more")
    if sum(split) != n_layers:
        raise InputError(
            f"{flag}: the stages must share all of --n-layers {n_layers}, and these add up to {sum(split)}"
        )
    if 0 in split[1:-1] or split == (0,):
        raise InputError(f"{flag}: a stage without layers must hold the embedding or the head, so be first or last")
    return split


def balance(
    n_layers: int, stages: int, *, vocab_size: int, dmodel: int, seq_len: int, hidden_dim: int | None = None
) -> Split:
    """The layers of each stage such that the slowest stage is as fast as it can be.

    Costs are estimated in multiply-adds per token of a forward pass; a backward pass takes twice as many everywhere,
    so it changes nothing. The embedding is a look-up, and costs almost nothing beside a layer.

    Raises:
        InputError: there are more stages than parts to give them.
    """
    hidden = 4 * dmodel if hidden_dim is None else hidden_dim
    layer = 4 * dmodel**2 + 3 * dmodel * hidden + dmodel * seq_len  # projections, MLP, causal scores and mixing
    embedding, head = dmodel, dmodel * vocab_size

    # For the stages from one on, by the layers that are left for them: cost of the slowest, sum of squares, the split.
    best: dict[int, tuple[float, float, Split]] = {0: (0.0, 0.0, ())}
    for stage in reversed(range(stages)):
        ends = (embedding if stage == 0 else 0) + (head if stage == stages - 1 else 0)
        least = 1 if 0 < stage < stages - 1 or stages == 1 else 0
        candidates: dict[int, list[tuple[float, float, Split]]] = {}
        for left, (slowest, squares, split) in best.items():
            for count in range(least, n_layers - left + 1):
                cost = count * layer + ends
                found = (max(cost, slowest), cost**2 + squares, (count, *split))
                candidates.setdefault(left + count, []).append(found)
        best = {left: min(found) for left, found in candidates.items()}
    if n_layers not in best:
        raise InputError(
            f"{stages} stages for --n-layers {n_layers}: all stages but the first and the last need a layer; "
            f"give at most {n_layers + 2} stages, or more layers"
        )
    return best[n_layers][2]
