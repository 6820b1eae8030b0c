"""A rank's memory by kind (parameters, gradients, optimizer state, activations), computed from tensor sizes."""

import contextlib
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from distlab.axes.shards import ReplicaShards
from distlab.comm.recorder import Recorder
from distlab.machine.saved_activations import SavedActivations
from simplellm.errors import InputError

MEMORY_KINDS = ("parameters", "gradients", "optimizer state", "copy to undo", "gathered", "activations")
# The kinds that only some runs have: the copy that `--run-on` keeps; at the peak, blocks that are temporarily whole
# (see distlab.parallel.sharded).
ONLY_SOME = ("copy to undo", "gathered")
WITHOUT_RECOMPUTE = "activations without recomputation"  # counted as well with recomputation
ROWS = "rows of experts"  # of the activations, those of the largest pass through experts in the run


class MemoryReport:
    """Counts the tensors of a rank. The optimizer must have all its parameters.

    If replicas shard a model, the optimizer has shards of it, and either `sharded` has the parts of the model, or
    `parameters` are the model's, which each replica holds whole. `further_bytes` return the bytes of an outer
    optimizer and of error feedback, which count as optimizer state; `rows_bytes` those of the largest pass through
    this rank's experts.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharded: Collection[ReplicaShards] = (),
        further_bytes: Collection[Callable[[], int]] = (),
        parameters: Collection[torch.Tensor] | None = None,
        rows_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._optimizer, self._sharded, self._has_counted = optimizer, sharded, False
        self._rows_bytes = rows_bytes
        self.copied_bytes: Callable[[], int] = lambda: 0  # of this rank's "copy to undo"
        self._further_bytes, self._parameters = further_bytes, parameters
        weights = [flat for part in sharded for flat in part.flat_weights()]
        self._saved = SavedActivations([*_parameters(optimizer), *weights, *(parameters or ())])

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Inside, count the tensors that a step saves for its backward pass."""
        self._has_counted = True
        return self._saved.counting()

    def counts(self, recorder: Recorder) -> list[int]:
        """Return this rank's bytes by kind, and two further numbers; [] if no step was taken."""
        if not self._has_counted:
            return []
        saved_bytes = max([self._saved.peak_bytes, *(kept for _, kept in recorder.kept_bytes)])
        own = count_bytes(self._optimizer, saved_bytes, self._sharded, self.copied_bytes(), self._parameters)
        own[MEMORY_KINDS.index("optimizer state")] += sum(held_bytes() for held_bytes in self._further_bytes)
        further = max(own[-1], self._saved.usual_peak_bytes), self._rows_bytes() if self._rows_bytes else 0
        return [*own, *further]


def keep(path: Path, by_rank: Sequence[Sequence[int]]) -> None:
    """Write the counts as JSON: for each rank, an object with the bytes by kind."""
    kinds = (*MEMORY_KINDS, WITHOUT_RECOMPUTE) if _has_recomputation(by_rank) else MEMORY_KINDS
    path.write_text(json.dumps([dict(zip(kinds, counts, strict=False)) for counts in by_rank], indent=2) + "\n")


def _has_recomputation(by_rank: Sequence[Sequence[int]]) -> bool:
    """Return whether recomputation has avoided keeping some activations."""
    return any(counts[len(MEMORY_KINDS)] > counts[len(MEMORY_KINDS) - 1] for counts in by_rank)


def count_bytes(
    optimizer: torch.optim.Optimizer,
    saved_bytes: int,
    sharded: Collection[ReplicaShards] = (),
    copied_bytes: int = 0,
    parameters: Collection[torch.Tensor] | None = None,
) -> list[int]:
    """Return the bytes of each of `MEMORY_KINDS` on this rank; `parameters` are by default the optimizer's."""
    parameters = _parameters(optimizer) if parameters is None else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    held = [sum(tensor.nbytes for tensor in kind) for kind in (parameters, gradients, values)]
    if sharded:
        *held[:2], gathered = map(sum, zip(*(part.held_bytes() for part in sharded), strict=True))
        return [*held, copied_bytes, gathered, saved_bytes]
    return [*held, copied_bytes, 0, saved_bytes]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def as_table(by_rank: Sequence[Sequence[int]], numbers: Sequence[int] | None = None) -> list[str]:
    """Return a header and a line for each rank; ranks whose line would be the same share it.

    `numbers` are those of the ranks; by default, from 0.
    """
    columns = (*MEMORY_KINDS, "without --recompute", ROWS)[: len(by_rank[0])]
    unused = {kind for i, kind in enumerate(columns) if kind in (*ONLY_SOME, ROWS) and not any(c[i] for c in by_rank)}
    if not _has_recomputation(by_rank):
        unused.add("without --recompute")
    shown = [i for i, kind in enumerate(columns) if kind not in unused]
    ranks: dict[str, list[int]] = {}
    for rank, counts in zip(numbers or range(len(by_rank)), by_rank, strict=True):
        shares = "".join(f"{counts[index] / 1e6:>{_width(columns[index])}.2f}" for index in shown)
        ranks.setdefault(shares, []).append(rank)
    rows = {f"rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}": shares for shares, same in ranks.items()}
    head = "".join(f"{columns[index]:>{_width(columns[index])}}" for index in shown)
    first = max(14, *map(len, rows))
    return [f"{who:<{first}}{shares}" for who, shares in {"memory, MB": head, **rows}.items()]


def _width(column: str) -> int:
    return max(17, len(column) + 2)


def read_largest(run: Path) -> list[int]:
    """Return the counts of the rank that holds the most; `InputError` if they cannot be read."""
    try:
        by_rank = json.loads((run / "memory.json").read_text())
        return max(([(dict.fromkeys(ONLY_SOME, 0) | rank)[kind] for kind in MEMORY_KINDS] for rank in by_rank), key=sum)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run}: there are no memory counts of a run ({error})") from error
