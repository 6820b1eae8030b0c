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
    n_layers: int,
    stages: int,
    *,
    vocab_size: int,
    dmodel: int,
    seq_len: int,
    hidden_dim: int | None = None,
    kv_width: int | None = None,
) -> Split:
    """The layers of each stage such that the slowest stage is as fast as it can be.

    Costs are estimated in multiply-adds per token of a forward pass; a backward pass takes twice as many everywhere,
    so it changes nothing. The embedding is a look-up, and costs almost nothing beside a layer.

    Args:
        n_layers: of the model.
        stages: of the pipeline.
        vocab_size, dmodel, seq_len, hidden_dim: the model's sizes.
        kv_width: of the keys of all heads together, or of the values; less than `dmodel` where heads share them.

    Raises:
        InputError: there are more stages than parts to give them.
    """
    hidden = 4 * dmodel if hidden_dim is None else hidden_dim
    projections = 2 * dmodel**2 + 2 * dmodel * (dmodel if kv_width is None else kv_width)
    layer = projections + 3 * dmodel * hidden + dmodel * seq_len  # the last: causal scores and mixing
    embedding, head = dmodel, dmodel * vocab_size

    # Only the last stage has something that can be as dear as a layer: try what is left for it, and share out the rest
    # evenly, the first stage being none of those that get one more.
    found: list[tuple[int, int, Split]] = []  # cost of the slowest, sum of squares, the split
    for last in range(1 if stages == 1 else 0, n_layers + 1):
        share, more = divmod(n_layers - last, max(1, stages - 1))
        split = ((share,) * (stages - 1 - more) + (share + 1,) * more + (last,))[-stages:]
        costs = [count * layer for count in split]
        costs[0] += embedding
        costs[-1] += head
        if sum(split) == n_layers and 0 not in split[1:-1]:
            found.append((max(costs), sum(cost**2 for cost in costs), split))
    if not found:
        raise InputError(
            f"{stages} stages for --n-layers {n_layers}: all stages but the first and the last need a layer; "
            f"give at most {n_layers + 2} stages, or more layers"
        )
    return min(found)[2]
