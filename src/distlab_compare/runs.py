"""The first step at which two recorded runs diverge: which tensors differ there, on which ranks, and by which factor.

In each step, losses are compared first, then gradients, then the weights after the update. All ranks of a run are
compared with the whole tensors of the other run, which may have a different layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distlab.axes.layout import replica_of
from distlab_compare import mistakes
from distlab_compare.differences import LATER, ROUNDING, Difference, distance, is_unsure, tell
from distlab_compare.mistakes import Mistake
from distlab_compare.records import Recordings, TensorPart

BEGINNINGS = {  # of sentences, by what differs
    "start": "before step {}: the weights",
    "gradient": "step {}: the gradient of",
    "weights": "after step {}: the weights",
}


@dataclass(frozen=True)
class Divergence:
    """A step at which two runs diverge.

    Attributes:
        step: its number.
        sentences: what differs.
        differences: the tensors that differ, those of the lowest rank first.
    """

    step: int
    sentences: list[str]
    differences: list[Difference]


class Pair:
    """A recorded run, and another one that it should equal.

    A subclass that knows more about the runs may name the mistakes itself: `name_gradient` and `name_weights`.

    Args:
        run: the run to judge.
        other: the run that counts as right.
        tolerance: relative error of a tensor that counts as rounding.
        losses: by step, of `run` and of `other`.
        micro_batches: of `run`.
        has_moments: the optimizer divides gradients by their size (Adam): the update of an element whose gradient is
            only rounding is arbitrary.
    """

    def __init__(
        self,
        run: Recordings,
        other: Recordings,
        tolerance: float,
        losses: tuple[Mapping[int, float], Mapping[int, float]] = ({}, {}),
        micro_batches: int = 1,
        has_moments: bool = False,
    ) -> None:
        self.run, self.other, self.tolerance = run, other, tolerance
        self.micro_batches, self._losses, self._has_moments = micro_batches, losses, has_moments
        self._unsure: dict[str, Tensor] = {}  # by parameter, its elements whose gradients are rounding
        self._negligible: set[str] = set()  # parameters whose gradients in the current step are rounding
        self.largest = 0.0  # the largest relative difference so far

    @property
    def steps(self) -> list[int]:
        """The steps that both runs have recorded with their gradients."""
        both = [step for step in self.run.steps if step in self.other.steps]
        return [step for step in both if all(one.names(step, "gradient") for one in (self.run, self.other))]

    def first_divergence(self) -> Divergence | None:
        """Return the first step at which the runs diverge; None if they are equal in all steps."""
        for step in self.steps:
            if step == self.steps[0] and (divergence := self.divergence("start", step)):
                return divergence
            divergence, loss = self.divergence("gradient", step), self._loss(step)
            if divergence:
                return replace(divergence, sentences=[*loss, *divergence.sentences])
            if loss:
                return Divergence(step, loss, [])
            self._note_unsure(step)
            has_weights = step + 1 in self.run.steps and step + 1 in self.other.steps
            if has_weights and (divergence := self.divergence("weights", step)):
                return divergence
        return None

    def divergence(self, what: str, step: int) -> Divergence | None:
        """Return how the runs diverge in what a step has: "gradient", or the weights before ("start") or after it."""
        kind, at = ("gradient", step) if what == "gradient" else ("weights", step + (what == "weights"))
        if not (found := self._differing(kind, at)):
            return None
        left_out = self._negligible if kind == "gradient" else set()
        held = [set(rank.names(kind)) - left_out for rank in self.run.ranks(at)]
        return Divergence(step, tell(BEGINNINGS[what].format(step), found, self.run.describe, held), found)

    def _loss(self, step: int) -> list[str]:
        own, right = (losses.get(step) for losses in self._losses)
        if own is None or right is None or abs(own - right) <= max(self.tolerance, 1e-5) * abs(right):
            return []
        mistake = mistakes.name_loss(own, right, self.run.replicas, self.micro_batches)
        return [f"step {step}: the loss {mistake.sentence} ({own:.6f} instead of {right:.6f})"]

    def _differing(self, kind: str, step: int) -> list[Difference]:
        """Return the differences of all tensors of a kind at a step, by rank and in the model's order."""
        wholes = {name: self.other.whole(step, kind, name) for name in self.other.names(step, kind)}
        floor = 0.0
        if kind == "gradient":
            floor = ROUNDING * float(torch.stack([whole.norm() for whole in wholes.values()]).norm())
            self._negligible = {name for name, whole in wholes.items() if float(whole.norm()) <= floor}
        found = []
        for name, whole in wholes.items():
            for rank, part in self.run.parts(step, kind, name):
                if part.whole != [*whole.shape]:
                    mistake = Mistake("shape", f"is {tuple(part.whole)}, and should be {tuple(whole.shape)}")
                elif self._differs(kind, step, name, part, whole, floor):
                    mistake = self._name(kind, step, rank, name, part, part.of(whole))
                else:
                    continue
                found.append(Difference(step, rank, name, mistake))
        return sorted(found, key=lambda difference: difference.rank)  # stable

    def tolerance_at(self, step: int) -> float:
        """Return the tolerance of gradients, and of the weights before them, at a step.

        After the first update it is larger with Adam, and if it is larger than that of float32, as in bfloat16.
        """
        grows = self._has_moments or self.tolerance > mistakes.TOLERANCE
        return self.tolerance * (LATER if grows and step > self.steps[0] else 1)

    def _differs(self, kind: str, step: int, name: str, part: TensorPart, whole: Tensor, floor: float) -> bool:
        own, right = part.flat, part.of(whole)
        if kind == "weights" and name in self._unsure:
            sure = ~part.of(self._unsure[name])
            own, right = own[sure], right[sure]
        tolerance = self.tolerance_at(step)
        # A few elements may be small, where the others of their tensor were larger in the sums that round them.
        usual = float(whole.norm()) * (right.numel() / max(1, whole.numel())) ** 0.5
        if mistakes.differs(own, right, tolerance, max(floor, tolerance * usual)):
            return True
        error, norm = float((own - right).norm()), float(right.norm())
        self.largest = max(self.largest, error / max(norm, usual) if error > floor else 0.0)
        return False

    def _note_unsure(self, step: int) -> None:
        """With Adam, note the elements whose gradients agree in nothing but their smallness."""
        recorded = self.run.names(step, "gradient") if self._has_moments else []
        for name in (name for name in self.other.names(step, "gradient") if name in recorded):
            own, right = (run.whole(step, "gradient", name) for run in (self.run, self.other))
            unsure = is_unsure(own, right, self.tolerance)
            self._unsure[name] = unsure | self._unsure.get(name, torch.zeros_like(unsure))

    def _name(self, kind: str, step: int, rank: int, name: str, part: TensorPart, right: Tensor) -> Mistake:
        if not part.flat.isfinite().all():
            return Mistake("not-finite", "is not finite" if kind == "gradient" else "are not finite")
        if kind == "gradient":
            return self.name_gradient(step, rank, name, part, right)
        return self.name_weights(step, rank, name, part, right)

    def name_gradient(self, step: int, rank: int, name: str, part: TensorPart, right: Tensor) -> Mistake:
        n, m = self.run.replicas, self.micro_batches
        before = None
        if step - 1 in self.steps:
            before = part.of(self.other.whole(step - 1, "gradient", name))
        factor = mistakes.fit(part.flat, [right])
        shown = f" (factor {factor[0]:.4g})" if factor and factor[0] else ""
        if parts := self.shares_of(step, name, part):
            mistake = mistakes.name_gradient(
                part.flat, parts, before, self.replica_of("gradient", step, rank, name, part)
            )
        elif float(part.flat.norm()) < 1e-9 * float(right.norm()):
            mistake, shown = Mistake("zero", "is zero or None: nothing was added to it, or it was cleared"), ""
        elif factor:
            mistake = mistakes.name_ratios([[factor[0]] * m] * n, -1)
        elif before is not None and (found := mistakes.fit(part.flat, [right, before])) and abs(found[0] - 1) < 0.05:
            mistake = Mistake("not-cleared", "also contains the gradient of the step before")
        else:
            mistake = Mistake("other", "is not a multiple of the other run's")
        return Mistake(mistake.name, mistake.sentence, shown or _away(part.flat, right))

    def shares_of(self, step: int, name: str, part: TensorPart) -> list[list[Tensor]]:
        """Return, by replica and micro-batch, its share of a gradient, such that their mean is the right one.

        Empty if the other run, one process with as many micro-batches, has not recorded them.
        """
        n, m = self.run.replicas, self.micro_batches
        if n * m < 2 or any(name not in self.other.names(step, f"share.{k}") for k in range(n * m)):
            return []
        flat = [part.of(self.other.whole(step, f"share.{k}", name)) for k in range(n * m)]
        right = part.of(self.other.whole(step, "gradient", name))
        scale = mistakes.fit(right, [torch.stack(flat).mean(0)])  # less than n * m where gradients are clipped
        if scale is None or self.other.names(step, f"share.{n * m}"):
            return []
        flat = [scale[0] * share for share in flat]
        return [flat[r * m : (r + 1) * m] for r in range(n)]

    def replica_of(self, kind: str, step: int, rank: int, name: str, part: TensorPart) -> int:
        """Return the number of a rank's replica; -1 if all copies of this part, at least two, have the same values."""
        copies = [other.flat for _, other in self.run.parts(step, kind, name) if other.blocks == part.blocks]
        are_same = all(not mistakes.differs(copy, part.flat) for copy in copies)
        is_one_of_many = len(copies) > 1 and self.run.replicas > 1
        return -1 if is_one_of_many and are_same else replica_of(self.run.layout, rank)

    def name_weights(self, step: int, rank: int, name: str, part: TensorPart, right: Tensor) -> Mistake:
        away = _away(part.flat, right)
        if step - 1 in self.run.steps and step - 1 in self.other.steps:
            before = self.run.ranks(step - 1)[rank].part("weights", name).flat
            right_before = part.of(self.other.whole(step - 1, "weights", name))
            if not mistakes.differs(part.flat, before):
                return Mistake("not-updated", "are those before the update", away)
            if (scale := mistakes.scale_of(part.flat - before, right - right_before)) is not None:
                return Mistake("update-scaled", f"have changed by {scale:.3g} times as much as they should", away)
        if (scale := mistakes.scale_of(part.flat, right)) is not None:
            return Mistake("weights-scaled", f"are {scale:.4g} times what they should be", away)
        return Mistake("other", "differ", away)


def _away(own: Tensor, right: Tensor) -> str:
    return f" ({100 * distance(own, right):.3g} % away)"
