"""A rank's memory by kind (parameters, gradients, optimizer state, activations), computed from tensor sizes."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from distlab.axes.shards import ReplicaShards
from distlab.comm.recorder import Recorder
from simplellm.saved_activations import SavedActivations

MEMORY_KINDS = ("parameters", "gradients", "optimizer state", "copy to undo", "gathered", "activations")
# The kinds that only some runs have: the copy that `--run-on` keeps; at the peak, blocks that are temporarily whole
# (see distlab.parallel.sharded).
ONLY_SOME = ("copy to undo", "gathered")
WITHOUT_RECOMPUTE = "activations without recomputation"  # counted as well with recomputation
ROWS = "rows of experts"  # of the activations, those of the largest pass through experts in the run; not in the file
Counts = Mapping[str, int]  # a rank's bytes by kind


class MemoryReport:
    """Counts the tensors of a rank. The optimizer must have all its parameters.

    If replicas shard a model, the optimizer has shards of it, and either `sharded` has the parts of the model, or
    `parameters` are the model's, which each replica holds whole. `further_bytes` return the bytes of an outer
    optimizer and of error feedback, which count as optimizer state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharded: Collection[ReplicaShards] = (),
        further_bytes: Collection[Callable[[], int]] = (),
        parameters: Collection[torch.Tensor] | None = None,
    ) -> None:
        self._optimizer, self._sharded, self._has_counted = optimizer, sharded, False
        self._further_bytes = further_bytes
        # Set by runs that have them:
        self.gradient_sums = 1  # sums of each gradient that the rank keeps
        self.copied_bytes: Callable[[], int] = lambda: 0  # of the "copy to undo"
        self.rows_bytes: Callable[[], int] = lambda: 0  # of the largest pass through this rank's experts
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = own if parameters is None else parameters
        weights = [flat for part in sharded for flat in part.flat_weights()]
        self._saved = SavedActivations([*own, *weights, *self._parameters])

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Inside, count the tensors that a step saves for its backward pass."""
        self._has_counted = True
        return self._saved.counting()

    def counts(self, recorder: Recorder) -> Counts:
        """Return this rank's bytes by kind; none if no step was taken."""
        if not self._has_counted:
            return {}
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        held = {
            "parameters": sum(parameter.nbytes for parameter in self._parameters),
            "gradients": sum(gradient.nbytes for gradient in gradients) * self.gradient_sums,
            "optimizer state": sum(value.nbytes for value in values if torch.is_tensor(value)),
            "copy to undo": self.copied_bytes(),
            "gathered": 0,
            "activations": max([self._saved.peak_bytes, *(kept for _, kept in recorder.kept_bytes)]),
        }
        held["optimizer state"] += sum(held_bytes() for held_bytes in self._further_bytes)
        if self._sharded:
            of_parts = zip(*(part.held_bytes() for part in self._sharded), strict=True)
            held |= zip(("parameters", "gradients", "gathered"), map(sum, of_parts), strict=True)
        held[WITHOUT_RECOMPUTE] = max(held["activations"], self._saved.usual_peak_bytes)
        return held | {ROWS: self.rows_bytes()}


def keep(path: Path, by_rank: Sequence[Counts]) -> None:
    """Write the counts as JSON: for each rank, an object with the bytes by kind."""
    kinds = (*MEMORY_KINDS, WITHOUT_RECOMPUTE) if _has_recomputation(by_rank) else MEMORY_KINDS
    path.write_text(json.dumps([{kind: counts[kind] for kind in kinds} for counts in by_rank], indent=2) + "\n")


def _has_recomputation(by_rank: Iterable[Counts]) -> bool:
    """Return whether recomputation has avoided keeping some activations."""
    return any(counts[WITHOUT_RECOMPUTE] > counts["activations"] for counts in by_rank)


def as_table(by_rank: Mapping[int, Counts]) -> list[str]:
    """Return a header and a line for each rank; ranks whose line would be the same share it."""
    heads = {kind: kind for kind in MEMORY_KINDS} | {WITHOUT_RECOMPUTE: "without --recompute", ROWS: ROWS}
    for kind in (*ONLY_SOME, ROWS):
        if not any(counts[kind] for counts in by_rank.values()):
            del heads[kind]
    if not _has_recomputation(by_rank.values()):
        del heads[WITHOUT_RECOMPUTE]
    widths = {kind: max(17, len(head) + 2) for kind, head in heads.items()}
    ranks: dict[str, list[int]] = {}
    for rank, counts in by_rank.items():
        shares = "".join(f"{counts[kind] / 1e6:>{width}.2f}" for kind, width in widths.items())
        ranks.setdefault(shares, []).append(rank)
    rows = {f"rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}": shares for shares, same in ranks.items()}
    first = max(14, *map(len, rows))
    head = "".join(f"{head:>{widths[kind]}}" for kind, head in heads.items())
    return [f"{who:<{first}}{shares}" for who, shares in {"memory, MB": head, **rows}.items()]
