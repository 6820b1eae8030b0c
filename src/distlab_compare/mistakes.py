"""Names the mistake behind a wrong gradient, from the parts that it is made of.

The gradient of the global batch is the mean of shares, one for each replica and micro-batch. A wrong gradient is often
a different combination of the same shares. A least-squares fit finds its coefficients, which show the mistake: all are
n times too large if n ranks' gradients were added up but not divided; one rank's are zero if it was left out.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXPLAINED = 1e-2  # relative error of a fit that counts as an explanation
LOOKS = "looks as if "  # the beginning of a sentence about a wrong gradient
TOLERANCE = 1e-4  # relative error of a right result in float32; sums in other orders give about 1e-6


@dataclass(frozen=True)
class Mistake:
    """A mistake that has a name."""

    name: str  # for machines: "summed", "rank-missing"
    sentence: str  # goes on after "the gradient of `head.weight` on rank 1 …"
    detail: str = ""  # the end of the sentence, which may differ between tensors with the same mistake


def differs(own: Tensor, right: Tensor, tolerance: float = TOLERANCE, floor: float = 1e-16) -> bool:
    """Return whether two tensors differ by more than a share of the norm of the right one, and by more than `floor`."""
    return not (own - right).norm().item() <= max(tolerance * right.norm().item(), floor)  # true for NaN


def fit(observed: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """Return coefficients with which the columns (tensors of one shape) add up to `observed`; None if they do not."""
    matrix = torch.stack([column.flatten().double() for column in columns], 1)
    target = observed.flatten().double()
    if not (matrix.isfinite().all() and target.isfinite().all()):
        return None
    scales = matrix.norm(dim=0).clamp_min(1e-30)
    solution = torch.linalg.lstsq(matrix / scales, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    error = (matrix / scales @ solution - target).norm()
    if error > EXPLAINED * max(float(target.norm()), 1e-12):
        return None
    return [float(x) for x in solution / scales]


def scale_of(observed: Tensor, right: Tensor) -> float | None:
    """Return the factor by which a tensor is too large; None if it is right, or not a multiple of the right one."""
    found = fit(observed, [right])
    return found[0] if found and abs(found[0] - 1) > 1e-3 else None


def name_gradient(
    observed: Tensor, shares: Sequence[Sequence[Tensor]], before: Tensor | None, own: int, member: str = "rank"
) -> Mistake:
    """Name the mistake in a gradient.

    Args:
        shares: by replica and micro-batch, its part of the gradient: tensors whose mean is the right one.
        before: the right gradient of the step before.
        own: the replica that has this gradient; -1 if all replicas have the same.
        member: the word for a replica: "rank" or "pipeline".
    """
    replicas, micro_batches = len(shares), len(shares[0])
    flat = [share for row in shares for share in row]
    if float(observed.norm()) < 1e-9 * float(torch.stack(flat).norm()):
        return Mistake("zero", "is zero or None: nothing was added to it, or it was cleared before the update")
    found = fit(observed, flat)
    if found is None and before is not None:
        with_before = fit(observed, [*flat, before])
        if with_before is not None and math.isclose(with_before[-1], 1, abs_tol=0.05):
            return Mistake("not-cleared", "still contains the gradient of the step before: it was not set to zero")
    if found is None:
        parts = f"{replicas} {member}s" if replicas > 1 else "micro-batches"
        of = f"no combination of the {parts}' gradients" if len(flat) > 1 else "not a multiple of the right one"
        return Mistake("other", f"is {of}: other numbers went into it")
    ratios = [found[r * micro_batches : (r + 1) * micro_batches] for r in range(replicas)]
    return name_ratios([[c * replicas * micro_batches for c in row] for row in ratios], own, member)


def name_ratios(ratios: Sequence[Sequence[float]], own: int, member: str = "rank") -> Mistake:
    """Return the mistake behind coefficients, each relative to the right one: by replica and micro-batch."""
    n, m = len(ratios), len(ratios[0])
    everything = [x for row in ratios for x in row]
    if _same(everything):
        return _uniform(everything[0], n, m, member)
    if all(_same(row) for row in ratios):
        return _by_replica([row[0] for row in ratios], own, n, member)
    columns = list(zip(*ratios, strict=True))
    if all(_same(column) for column in columns):
        return _by_micro_batch([column[0] for column in columns], n, m)
    own_only = all(abs(x) < 0.02 for r, row in enumerate(ratios) for x in row if r != own)
    if own_only:
        inner = _by_micro_batch([x / n for x in ratios[own]], n, m)
        return Mistake("not-averaged", f"has nothing of the other {member}s; and it {inner.sentence}")
    parts = [f"{member} {r}'s micro-batch {k} {_times(x)}" for r, row in enumerate(ratios) for k, x in enumerate(row)]
    return Mistake("other-weights", f"weighs its parts wrongly: it has {', '.join(parts)}")


def _uniform(k: float, n: int, m: int, member: str) -> Mistake:
    times = _factor(k)
    large, other = f"is {times} too large", f"is {times} what it should be"
    for factor, name, sentence in (  # with one replica or micro-batch, another line says it before
        (1, "imprecise", "differs a little from that of one process: it was rounded, or scaled by nearly 1"),
        (n, "summed", f"{large}: added up over the {n} {member}s, but not divided by {n}"),
        (1 / n, "divided-twice", f"{other}: divided by the {n} {member}s twice"),
        (m, "micro-batches-summed", f"{large}: the {m} micro-batches' losses are not divided by {m}"),
        (1 / m, "micro-batches-divided-twice", f"{other}: divided by the {m} micro-batches twice"),
        (n * m, "all-summed", f"{large}: divided neither by the {n} {member}s nor the micro-batches"),
    ):
        if _near(k, factor):
            return Mistake(name, sentence)
    if n > 1 and k > 0 and _near(k, n ** round(math.log(k, n))):
        again = f"added up over the {member}s" if k > 1 else f"divided by the {n} {member}s"
        return Mistake("scaled-again", f"{other}: it was {again} again and again")
    return Mistake("scaled", other)


def _by_replica(rows: list[float], own: int, n: int, member: str) -> Mistake:
    present = [r for r, x in enumerate(rows) if abs(x) > 0.02]
    if present == [own]:
        its_own = f"is that of this {member}'s own sequences"
        if _near(rows[own], 1):
            return Mistake("not-added-up", f"{its_own}, divided by {n}, but not added up")
        scale = "" if _near(rows[own], n) else f", {_factor(rows[own] / n)} as large"
        return Mistake("not-averaged", f"{its_own}{scale}: it was not averaged, or the average went elsewhere")
    if len(present) == 1 < n - 1:
        return Mistake("one-rank-only", f"is that of {member} {present[0]}'s sequences alone; the others' are lost")
    if len(present) < n:
        lost = [r for r in range(n) if r not in present]
        shares = f"{member} {lost[0]}'s share" if len(lost) == 1 else f"the shares of {member}s {_list(lost)}"
        scale = f"; the others count {_factor(rows[present[0]])}" if not _near(rows[present[0]], 1) else ""
        return Mistake("rank-missing", f"{LOOKS}{shares} {'was' if len(lost) == 1 else 'were'} lost{scale}")
    parts = ", ".join(f"{member} {r}'s {_times(x)}" for r, x in enumerate(rows))
    return Mistake("unequal", f"weighs the {member}s' shares differently: it has {parts}")


def _by_micro_batch(columns: list[float], n: int, m: int) -> Mistake:
    present = [k for k, x in enumerate(columns) if abs(x) > 0.02]
    if present == [m - 1]:
        return Mistake("last-micro-batch", "is that of the last micro-batch alone: the ones before were not added")
    if len(present) == 1:
        return Mistake("one-micro-batch", f"is that of micro-batch {present[0]} alone: the others were not added")
    if len(present) < m:
        lost = [k for k in range(m) if k not in present]
        return Mistake("micro-batch-missing", f"{LOOKS}nothing was added of micro-batch {_list(lost)}")
    grows = [_near(a / b, n) or _near(b / a, n) for a, b in itertools.pairwise(columns)]
    parts = ", ".join(f"micro-batch {k} {_times(x)}" for k, x in enumerate(columns))
    if n > 1 and all(grows):
        again = "what had been combined over the ranks was combined again with each micro-batch"
        return Mistake("combined-again", f"has {parts}: {again}")
    return Mistake("unequal-micro-batches", f"weighs the micro-batches differently: it has {parts}")


def name_weights(
    observed: Tensor, before: Tensor, shares: Sequence[Sequence[Tensor]], lr: float, own: int, member: str = "rank"
) -> Mistake:
    """Name the mistake in weights after an update; `before` are the weights before it, which were right."""
    n, m = len(shares), len(shares[0])
    flat = [share for row in shares for share in row]
    if not differs(observed, before):
        return Mistake("not-updated", "are those before the update: the update was undone, or changed other memory")
    found = fit(observed, [before, *flat])
    if found is not None and not _near(found[0], 1):
        if _near(found[0], n):
            return Mistake("weights-summed", f"are {_factor(n)} too large: added up over the {member}s, not averaged")
        if _near(found[0], 1 / n):
            return Mistake("weights-divided-twice", f"are {_factor(1 / n)} what they should be: divided by {n} twice")
        return Mistake("weights-scaled", f"are {_factor(found[0])} what they should be")
    update = fit((before - observed) / lr, flat)
    if update is None:
        return Mistake("other", "follow from no combination of the gradients")
    ratios = [[c * n * m for c in update[r * m : (r + 1) * m]] for r in range(n)]
    inner = name_ratios(ratios, own, member)
    if inner.name == "not-averaged":
        return Mistake(
            "not-averaged", f"are this {member}'s own: they were not averaged, or the average went elsewhere"
        )
    if inner.name == "imprecise":  # within the tolerance of a fit, but not of a run
        return Mistake("imprecise", "differ slightly from those of one process")
    if inner.sentence.startswith(LOOKS):
        return Mistake(inner.name, f"are wrong as if, in the gradient used, {inner.sentence.removeprefix(LOOKS)}")
    return Mistake(inner.name, f"are wrong as if the gradient used {inner.sentence}".replace("used is", "used were"))


def name_loss(observed: float, expected: float, n: int, m: int) -> Mistake:
    """Name the mistake in a printed loss."""
    k = observed / expected if expected else math.inf
    or_average, or_replicas = (f", or average over the {n} replicas", f" or {n} replicas") if n == m else ("", "")
    for factor, name, sentence in (
        (m, "loss-not-divided", f"too large: divide each micro-batch's by their number, {m}{or_average}"),
        (n, "loss-summed", f"too large: added up over {n} replicas, not averaged"),
        (1 / m, "loss-divided-twice", f"what it should be: divided by {m} micro-batches{or_replicas} twice"),
        (1 / n, "loss-divided-twice", f"what it should be: divided by {n} replicas twice"),
    ):
        if factor != 1 and _near(k, factor):
            return Mistake(name, f"is {_factor(k)} {sentence}")
    return Mistake("loss", "differs: compare the sequences, the labels, the forward pass and the divisor")


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=0.02)


def _same(values: Sequence[float]) -> bool:
    return all(math.isclose(x, values[0], rel_tol=0.02, abs_tol=0.02) for x in values)


def _factor(k: float) -> str:
    """Return a factor in words: "3 times", "1/3 of", "1.37 times"."""
    if k > 0 and _near(1 / k, round(1 / k)) and round(1 / k) > 1:
        return f"1/{round(1 / k)} of"
    return f"{round(k) if _near(k, round(k)) else f'{k:.3g}'} times"


def _times(k: float) -> str:
    return "not at all" if abs(k) < 0.02 else "once" if _near(k, 1) else _factor(k).removesuffix(" of")


def _list(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last
