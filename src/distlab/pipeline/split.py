"""Dividing the layers of a model among the stages of a pipeline."""

import math
from typing import NamedTuple

from distlab.pipeline.actions import ActionCosts
from simplellm.errors import InputError, require

Split = tuple[int, ...]  # layers of each stage


def read_split(text: str, n_layers: int, stages: int) -> Split:
    """Return the layers of each stage from ``--layers-per-stage 3,2,1``; `InputError` if they do not fit the model."""
    flag = f"--layers-per-stage {text}"
    try:
        split = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{flag}: give one number for each stage, like 3,2,1") from None
    require(len(split) == stages, f"{flag}: {len(split)} numbers for {stages} stages; give one for each")
    require(min(split) >= 0, f"{flag}: the number of layers of a stage cannot be negative")
    shared = f"{flag}: the numbers must add up to --n-layers {n_layers}, but add up to {sum(split)}"
    require(sum(split) == n_layers, shared)
    ends = f"{flag}: only the first or the last stage, with the embedding or the head, may have no layers"
    require(0 not in split[1:-1] and split != (0,), ends)
    return split


class PartCosts(NamedTuple):
    """The costs of the parts of a model."""

    layer: float
    embedding: float
    head: float

    def of_stages(self, split: Split) -> list[float]:
        """Return the cost of each stage."""
        costs = [count * self.layer for count in split]
        costs[0] += self.embedding
        costs[-1] += self.head
        return costs


def multiply_adds(
    *, vocab_size: int, dmodel: int, seq_len: int, hidden_dim: int | None = None, kv_width: int | None = None
) -> PartCosts:
    """Return the multiply-adds of a forward pass over one token; a backward pass takes twice as many, in every part.

    The embedding is a look-up, which costs almost nothing compared with a layer. `hidden_dim` is the width of the
    feed-forward layers, by default 4 * dmodel; `kv_width` is the total width of all key heads, by default dmodel.
    """
    projections = 2 * dmodel**2 + 2 * dmodel * (kv_width or dmodel)
    feed_forward = 3 * dmodel * (hidden_dim or 4 * dmodel)
    layer = projections + feed_forward + dmodel * seq_len  # the last term: causal attention
    return PartCosts(layer, embedding=dmodel, head=dmodel * vocab_size)


def estimated_costs(
    split: Split, parts: PartCosts, blocks_again: bool = False, tokens: float = math.inf, tp: int = 1
) -> ActionCosts:
    """Return the costs of the passes of each stage, relative to each other, and the multiply-adds of a layer.

    Args:
        parts: the costs of the parts of the model, in multiply-adds per token.
        blocks_again: every backward pass computes the blocks again.
        tokens: tokens of a micro-batch; by default, enough for further threads always to pay.
        tp: ranks that share each layer.
    """
    forward, blocks = parts.of_stages(split), [count * parts.layer for count in split]
    backward = [2 * cost + blocks_again * again for cost, again in zip(forward, blocks, strict=True)]
    return ActionCosts(forward, backward, blocks=blocks, layer_multiply_adds=tokens * parts.layer / tp)


def balance(n_layers: int, stages: int, parts: PartCosts) -> Split:
    """Return the layers of each stage such that the slowest stage is as fast as possible, given the costs of the parts.

    `InputError` if there are too many stages for the model.
    """
    what = f"{stages} stages for --n-layers {n_layers}: every stage except the first and the last needs a layer"
    require(stages <= n_layers + 2, f"{what}; give at most {n_layers + 2} stages, or more layers")
    # Besides layers, only the last stage holds something that can cost as much as a layer: the head. Try each number of
    # layers for that stage, and divide the other layers evenly; the first stage gets none of the remainder. Of splits
    # whose slowest stages are equally fast, `min` takes the one with the fewest layers in front: the most even one.
    found: list[tuple[float, Split]] = []  # cost of the slowest stage, split
    for last in range(1 if stages == 1 else 0, n_layers + 1):
        share, more = divmod(n_layers - last, max(1, stages - 1))
        split = ((share,) * (stages - 1 - more) + (share + 1,) * more + (last,))[-stages:]
        if sum(split) == n_layers and 0 not in split[1:-1]:
            found.append((max(parts.of_stages(split)), split))
    return min(found)[1]
