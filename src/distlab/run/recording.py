"""`--record-gradients N`: the gradients and weights of a run's first N steps, as each rank has them, for `compare`.

    <run>/recorded/step-00000003/rank0.safetensors

Before the update of a step, each rank writes `gradient.<name>`, with which it will update, and `weights.<name>`, with
which it has computed, by the names in the whole model. The metadata hold the place of each slice in its whole tensor.
After the last of these steps, only the weights follow. One process also writes `share.<k>.<name>`: the part of the
gradient that micro-batch k has added. With them, `compare` can name the parts that a wrong gradient lacks.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.checkpoints.slices import Slice, as_held
from distlab.settings.folders import RECORDED
from simplellm.errors import InputError, require
from simplellm.exit_status import about_system

MOST_BYTES = 4 << 30  # that a rank writes


def file_of(run: Path, step: int, rank: int) -> Path:
    return run / RECORDED / f"step-{step:08}" / f"rank{rank}.safetensors"


class Recording:
    """Writes the gradients and weights of some steps of a rank.

    Args:
        updated: the parameters that this rank's optimizer updates, or its shards of them, by name.
        held: the parameters with which it computes, by name.
        optimizer: of `updated`; a step is recorded just before its update.
        shares: number of micro-batches whose shares to record; 0 for a rank among several, which averages them.
        wait_for_weights: called before the weights are written that follow the last of these steps.

    Raises:
        InputError: these would be too many bytes.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        steps: range,
        updated: Mapping[str, nn.Parameter],
        held: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        shares: int = 0,
        wait_for_weights: Callable[[], object] = lambda: None,
    ) -> None:
        self._run, self._rank, self._steps = run, rank, steps
        self._wait_for_weights = wait_for_weights
        self._shares = shares if shares > 1 else 0  # a single one is the gradient
        self._updated = {name: parameter for name, parameter in updated.items() if parameter.requires_grad}
        self.held = held
        self._step = -1
        self._sums: dict[str, list[Tensor]] = {}  # of each parameter's gradients, after each micro-batch of this step
        gradients_bytes, weights_bytes = (sum(p.nbytes for p in kept.values()) for kept in (self._updated, held))
        step_bytes = weights_bytes + (1 + self._shares) * gradients_bytes
        told = f"--record-gradients {len(steps)}: rank {rank} would write {len(steps) * step_bytes / 1e9:.1f} GB"
        most = MOST_BYTES // max(1, step_bytes)
        require(len(steps) <= most, f"{told}; give at most {most}" if most else f"{told}, too much for one step")
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        for name, parameter in self._updated.items() if self._shares else ():
            parameter.register_post_accumulate_grad_hook(partial(self._add_share, name))

    def begin(self, step: int) -> None:
        """Begin a step, perhaps again; the one after the last recorded step begins with the weights that follow it."""
        self._step = step
        if step == self._steps.stop:
            self._wait_for_weights()
            self._write(step, self._weights())

    def end(self) -> None:
        """End the run: if the last recorded step was its last one, write the weights after it."""
        self.begin(self._step + 1)

    def _add_share(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and self._step in self._steps:
            self._sums.setdefault(name, []).append(parameter.grad.clone())

    def _before_update(self) -> None:
        if self._step not in self._steps:
            return
        tensors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter in self._updated.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            tensors[f"gradient.{name}"] = gradient, parameter
            sums = self._sums.get(name, [])
            if self._shares and len(sums) == self._shares:  # else something defers them, or calls backward twice
                for k, total in enumerate(sums):
                    tensors[f"share.{k}.{name}"] = total - sums[k - 1] if k else total, parameter
        self._sums = {}
        self._write(self._step, tensors | self._weights())

    def _weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {f"weights.{name}": (parameter, parameter) for name, parameter in self.held.items()}

    def _write(self, step: int, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Write tensors, each with the parameter that says which part of the whole it is."""
        path, parts, kept = file_of(self._run, step, self._rank), {}, {}
        for key, (tensor, parameter) in tensors.items():
            held = as_held(tensor.detach(), parameter)
            parts[key] = _blocks(held)
            kept[key] = tensor.detach().flatten().cpu().contiguous().clone()
        unfinished = path.with_suffix(".unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(kept, unfinished, metadata={"parts": json.dumps(parts)})
            os.replace(unfinished, path)
        except Exception as error:  # safetensors has its own for a full disk
            told = about_system(error) or str(error)
            raise InputError(f"--record-gradients: cannot write {path} ({told})") from error


def _blocks(held: Tensor) -> tuple[Sequence[int], list[tuple[Sequence[int], Sequence[int]]]]:
    """Return the shape of the whole tensor, and of each block in the order of memory its offsets and sizes."""
    if isinstance(held, Slice):
        return [*held.whole], [([*offsets], [*view.shape]) for offsets, view in held.views.items()]
    return [*held.shape], [([0] * held.dim(), [*held.shape])]
