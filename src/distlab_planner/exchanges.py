"""The exchanges of a rank within a pass with those that share its layers, its experts or its sequences.

The seconds of a pass and the bytes that a step sends both follow from this list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from distlab_planner.activations import Activations
from distlab_planner.machine import KIND_OF
from distlab_planner.model import NUMBER_BYTES

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Size:
    """The size of a message or of a collective's tensor."""

    numbers: int
    words: str
    number_bytes: int = NUMBER_BYTES

    @property
    def bytes(self) -> int:
        return self.numbers * self.number_bytes


@dataclass(frozen=True)
class Exchange:
    """Equal collectives, one after another: all-reduces along "tp", or their halves; all-to-alls along "ep".

    Along "cp", messages to the next rank; with the kind "heads", queries, keys, values and results, each once around.
    """

    axis: Literal["tp", "ep", "cp"]
    kind: str  # as the ledger of a run names it
    count: int
    size: Size
    rounds: int = 1  # around a ring: an all-reduce has two, its halves one each


def in_pass(kept: Activations, letter: str, stage: int) -> Iterator[Exchange]:
    """Yield what an action of a stage exchanges; unknown for new kinds of actions. Experts have equal loads."""
    layout, sizes, attention, tokens = kept.layout, kept.sizes, kept.attention, kept.tokens
    kind, parts, again = KIND_OF.get(letter, "W"), layout.parts(stage), layout.computes_blocks_again(letter)
    if kind == "W" or max(layout.size(axis) for axis in ("tp", "ep", "cp")) == 1:
        return
    blocks, is_forward, is_backward = parts["block"], kind == "F", kind != "F"
    forward, backward = blocks * (is_forward + again), blocks * is_backward  # passes through blocks
    wide = f"{tokens:,} tokens {TIMES} {sizes.dmodel} wide"
    inner = Size(tokens * sizes.dmodel, wide, sizes.inner_bytes)
    if layout.size("tp") > 1:
        loss = [Size(tokens, f"{tokens:,} tokens"), Size(2 * tokens, f"2 {TIMES} {tokens:,} tokens")]
        for size in loss:  # the largest logit of each token; two sums
            yield Exchange("tp", "vocabulary activations", parts["head"] * is_forward, size, 2)
    if layout.sequence_parallel:
        yield from _of_parts(kept, letter, stage)
    elif layout.size("tp") > 1:
        unneeded = again * blocks + (letter == "R" and not parts["head"])  # products that only the output needs
        products, unneeded = (1, 0) if sizes.experts else (2, unneeded)  # each slice computes all experts
        yield Exchange("tp", "layer activations", products * forward - unneeded, inner, 2)
        yield Exchange("tp", "layer gradients", products * backward, inner, 2)
        gains = Size(sizes.head_dim, f"{sizes.head_dim} gains")
        yield Exchange("tp", "layer gradients", 2 * sizes.qk_norm * backward, gains, 2)
        whole = Size(tokens * sizes.dmodel, wide)
        yield Exchange("tp", "vocabulary activations", parts["embedding"] * is_forward, whole, 2)
        yield Exchange("tp", "vocabulary gradients", parts["head"] * is_backward, inner, 2)
    if layout.size("ep") > 1:  # a row for each expert of a token, there and back
        k = sizes.experts_per_token
        rows = Size(k * inner.numbers, f"{k} {TIMES} {wide} at equal loads", inner.number_bytes)
        yield Exchange("ep", "rows of experts", 2 * (forward + backward), rows)
    if (ranks := layout.size("cp")) > 1:
        forward = blocks * (is_forward or (again and not layout.keeps_attention))
        if layout.cp_kind == "heads":
            exchanged = Size(attention.heads, f"{attention.heads:,} numbers", sizes.inner_bytes)
            yield Exchange("cp", "heads", forward + backward, exchanged)
            return
        is_ring, words = layout.cp_kind == "ring", f"{attention.keys:,} numbers"
        visits = forward + backward * is_ring  # in a ring, keys and values travel again for gradients
        of_gradients = NUMBER_BYTES if is_ring else sizes.inner_bytes  # a ring adds them up on the way
        yield Exchange("cp", "keys and values", (ranks - 1) * visits, Size(attention.keys, words, sizes.inner_bytes))
        gradients = Size(attention.keys, words, of_gradients)
        yield Exchange("cp", "gradients of keys and values", (ranks - 1) * backward, gradients)


def _of_parts(kept: Activations, letter: str, stage: int) -> Iterator[Exchange]:
    """Yield what slices exchange that hold parts of the sequences between layers: each all-reduce is two halves.

    The activations are gathered before a layer, and summed and scattered after it; their gradients likewise.
    """
    layout, sizes, parts = kept.layout, kept.sizes, kept.layout.parts(stage)
    blocks, is_forward = parts["block"], KIND_OF[letter] == "F"
    tokens = kept.residual_tokens * layout.size("tp")  # of all parts
    numbers, words = tokens * sizes.dmodel, f"{tokens:,} tokens {TIMES} {sizes.dmodel} wide"
    inner, whole = Size(numbers, words, sizes.inner_bytes), Size(numbers, words)
    again = layout.computes_blocks_again(letter)  # but for the last half, which only the output needs
    logits_again = letter in "bi"
    yield Exchange("tp", "layer activations", blocks * (4 * is_forward + 3 * again), inner)
    yield Exchange("tp", "layer gradients", 4 * blocks * (not is_forward), inner)
    yield Exchange("tp", "vocabulary activations", parts["embedding"] * is_forward, whole)
    yield Exchange("tp", "vocabulary activations", parts["head"] * (is_forward or logits_again), inner)
    yield Exchange("tp", "vocabulary gradients", parts["head"] * (not is_forward), inner)
    yield Exchange("tp", "vocabulary gradients", parts["embedding"] * (not is_forward), whole)
