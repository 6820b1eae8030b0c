"""Tensors of a run that are not those of the run it is compared with, and the sentences about them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from distlab_compare.mistakes import Mistake

# Share of the norm of all gradients up to which a gradient counts as rounding: the bias of an attention's keys, which
# changes nothing, has a gradient of zero in theory, and of rounding errors in practice.
ROUNDING = 1e-6
# Order of mistakes by how much they tell; those that are not here are 1. What is imprecise may follow from another one.
CLEAR = {"part": 0, "other": 2, "imprecise": 3}
LATER = 10  # tolerances after the first update, with Adam or in bfloat16, where updates make rounding larger
UNSURE = 10  # relative errors of an element's gradient, in tolerances, with which Adam's update of it is arbitrary


@dataclass(frozen=True)
class Difference:
    """A tensor of a rank that differs from the one it should be."""

    step: int
    rank: int
    name: str
    mistake: Mistake


def is_unsure(own: Tensor, right: Tensor, tolerance: float) -> Tensor:
    """Return, by element, whether Adam's update is arbitrary: the gradients agree in nothing but their smallness."""
    return (own - right).abs() > UNSURE * tolerance * right.abs()


def distance(own: Tensor, right: Tensor) -> float:
    """Return the norm of the difference of two tensors, as a share of the norm of the right one."""
    return float((own - right).norm()) / max(float(right.norm()), 1e-30)


def and_others(count: int) -> str:
    """Return the number of further parameters in words: " and 2 other parameters"; "" for none."""
    return f" and {count} other parameter{'s' * (count > 1)}" if count else ""


def tell(
    what: str, found: Sequence[Difference], describe: Callable[[int], str], held: Sequence[Collection[str]]
) -> list[str]:
    """Return sentences for two kinds of mistakes, the clearest and most frequent first, each with its first tensor.

    Args:
        what: the beginning of each sentence: "step 3: the gradient of".
        found: differences of one step and one kind of tensor, at least one.
        describe: returns the name of a rank in messages.
        held: by rank, the names of its tensors.
    """
    by_sentence: dict[str, list[Difference]] = {}
    for difference in found:
        by_sentence.setdefault(difference.mistake.sentence, []).append(difference)
    sentences = []
    ranked = sorted(by_sentence.items(), key=lambda item: (CLEAR.get(item[1][0].mistake.name, 1), -len(item[1])))
    certain = [item for item in ranked if item[1][0].mistake.name != "imprecise"]
    for sentence, same in (certain or ranked)[:2]:
        first, ranks = same[0], sorted({difference.rank for difference in same})
        names = {difference.name for difference in same}
        others = and_others(len(names) - 1)
        if names == {name for rank in ranks for name in held[rank]}:
            others = ", like every other parameter," if len(names) > 1 else ""
        on = "on all ranks" if len(ranks) == len(held) > 1 else f"on {' and '.join(map(describe, ranks))}"
        sentences.append(f"{what} {first.name}{others} {on} {sentence}{first.mistake.detail}")
    right = sorted(set(range(len(held))) - {difference.rank for difference in found})
    if right:
        sentences.append(f"{' and '.join(map(describe, right))}: right")
    return sentences
