"""What takes up a rank's memory: parameters, gradients, optimizer state, activations; counted, not measured."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from simplellm.errors import InputError

KINDS = ("parameters", "gradients", "optimizer state", "activations")


def count_bytes(optimizer: torch.optim.Optimizer, kept_bytes: int) -> list[int]:
    """Bytes of each of `KINDS` on this rank.

    Args:
        optimizer: of all the parameters that this rank holds.
        kept_bytes: of activations, the most that a step keeps for its backward pass.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return [*(sum(tensor.nbytes for tensor in kind) for kind in (parameters, gradients, state)), kept_bytes]


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


def keep(path: Path, by_rank: Sequence[Sequence[int]]) -> None:
    """Write the counts as JSON: for each rank an object, by kind."""
    path.write_text(json.dumps([dict(zip(KINDS, counts, strict=True)) for counts in by_rank], indent=2) + "\n")


def read_largest(run: Path) -> list[int]:
    """The counts of the rank of a run that holds the most.

    Raises:
        InputError: the run's folder has no readable counts.
    """
    try:
        by_rank = json.loads((run / "memory.json").read_text())
        return max(([rank[kind] for kind in KINDS] for rank in by_rank), key=sum)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run}: no counts of a run's memory there ({error})") from error
