"""What takes up a rank's memory: parameters, gradients, optimizer state, activations; counted, not measured."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.comm.recorder import recorder
from distlab.comm.traffic import traffic
from distlab.pipeline.activations import SavedActivations
from simplellm.errors import InputError

KINDS = ("parameters", "gradients", "optimizer state", "activations")


class MemoryReport:
    """Counts what a rank holds, all of whose parameters are the optimizer's, and collects all ranks' counts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._has_counted = optimizer, False
        self._saved = SavedActivations(_parameters(optimizer))

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Count what a step inside saves for its backward pass."""
        self._has_counted = True
        return self._saved.counting()

    def collect(self, rank: int, world_size: int, device: torch.device) -> list[list[int]]:
        """The counts of all ranks, which all call it."""
        if not self._has_counted:  # a run without a step held nothing
            return []
        by_rank = torch.zeros(world_size, len(KINDS), dtype=torch.int64, device=device)
        by_rank[rank] = torch.tensor(count_bytes(self._optimizer, self._saved.peak_bytes))
        traffic.all_reduce(by_rank, "what each rank holds", kind="control", op=dist.ReduceOp.SUM).wait()
        counts: list[list[int]] = by_rank.tolist()
        return counts


def keep(path: Path, by_rank: Sequence[Sequence[int]]) -> None:
    """Write the counts as JSON: for each rank an object, by kind."""
    path.write_text(json.dumps([dict(zip(KINDS, counts, strict=True)) for counts in by_rank], indent=2) + "\n")


def count_bytes(optimizer: torch.optim.Optimizer, saved_bytes: int) -> list[int]:
    """Bytes of each of `KINDS` on this rank, with what its passes saved, as counted here or by a traced pipeline."""
    parameters = _parameters(optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    activations = max([saved_bytes, *(kept for _, kept in recorder.kept_bytes)])
    return [*(sum(tensor.nbytes for tensor in kind) for kind in (parameters, gradients, values)), activations]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def as_table(by_rank: Sequence[Sequence[int]]) -> list[str]:
    """A head and a line for each rank; ranks that hold the same share a line."""
    lines = [f"{'memory, MB':<14}" + "".join(f"{kind:>17}" for kind in KINDS)]
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, counts in enumerate(by_rank):
        ranks.setdefault(tuple(counts), []).append(rank)
    for counts, same in ranks.items():
        who = f"rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}"
        lines.append(f"{who:<14}" + "".join(f"{count / 1e6:>17.2f}" for count in counts))
    return lines


def read_largest(run: Path) -> list[int]:
    """The counts of the rank of a run that holds the most; `InputError` if there are none that can be read."""
    try:
        by_rank = json.loads((run / "memory.json").read_text())
        return max(([rank[kind] for kind in KINDS] for rank in by_rank), key=sum)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run}: no counts of a run's memory there ({error})") from error
