"""An outer optimizer for replicas that train independently for many steps: DiLoCo, and Streaming DiLoCo.

DiLoCo (Douillard et al., arXiv 2311.08105): each replica takes H inner steps; the mean over the replicas of (outer
weights - own weights) is the gradient of an outer step of SGD with Nesterov momentum; the replicas continue from the
new outer weights. Streaming DiLoCo (Douillard et al., arXiv 2501.18512) exchanges one fragment of the weights after
another, while the next inner steps are computed, and in few bits.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.axes.grid import Axis, all_ranks
from distlab.comm.group import empty
from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.comm.transports.transport import overlapping
from distlab.parallel.options import Compression
from distlab.parallel.quantization import start_mean


@dataclass(frozen=True)
class FragmentSchedule:
    """The inner steps after which each fragment is sent, and after which it is merged.

    Attributes:
        sync_every: inner steps between two exchanges of the same fragment (H).
        fragments: number of fragments (P), which divides H; one is sent every H / P steps.
        overlap_steps: inner steps that are computed while a fragment is under way, less than H / P.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    @property
    def interval(self) -> int:
        """Steps from one fragment to the next."""
        return self.sync_every // self.fragments

    def sent_after(self, step: int) -> int | None:
        """Return the fragment that is sent after a step, numbered from 0; None if none is."""
        rounds, rest = divmod(step + 1, self.interval)
        return (rounds - 1) % self.fragments if rounds > 0 and rest == 0 else None


class OuterState:
    """The outer weights and their momentum, equal on all replicas to the last bit, and this replica's own weights.

    Args:
        weights: this replica's own weights, float32 (elements,); the inner optimizer changes them (`flatten_weights`).
            The outer weights and the momentum have the same shape.
        over: the replicas, which hold the same part of the model; by default all ranks.
    """

    def __init__(self, weights: Tensor, outer: Tensor, momentum: Tensor, over: Axis | None = None) -> None:
        self.weights, self.outer, self.momentum, self.axis = weights, outer, momentum, over or all_ranks("dp")
        first = self.axis.ranks[0]  # for the names of the tensors that the replicas share
        self.name = "outer_optimizer" if first == 0 else f"outer_optimizer.of_rank{first}"

    def held_bytes(self) -> int:
        """Return the bytes that this rank holds in addition to its own weights."""
        return self.outer.nbytes + self.momentum.nbytes

    @contextlib.contextmanager
    def as_model(self) -> Iterator[None]:
        """Make the outer weights the model's parameters inside the context, for a checkpoint or a validation."""
        own = self.weights.clone()
        self.weights.copy_(self.outer)
        yield
        self.weights.copy_(own)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors, by name, that a checkpoint needs in addition to the outer weights."""
        return {
            f"{self.name}.momentum": self.momentum,
            f"rank{dist.get_rank()}.outer_optimizer.weights": self.weights.clone(),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`; the parameters must hold the outer weights already.

        Tensors that a checkpoint lacks start afresh: the outer momentum at zero, the own weights at the outer weights.
        """
        self.outer.copy_(self.weights)
        own = self.state()
        own[f"rank{dist.get_rank()}.outer_optimizer.weights"] = self.weights
        for name, tensor in state.items():
            own[name].copy_(tensor)


class OuterOptimizer(OuterState):
    """The outer weights and their optimizer, SGD with learning rate `lr` and Nesterov `momentum` (0: plain SGD).

    The fragments are equal parts of the flat buffer of weights, in the order of the model. `weights` and `over` are as
    in `OuterState`.

    Args:
        merge_alpha: share of a replica's own weights when a fragment arrives that was sent earlier (alpha); the rest
            are the outer weights. 0 without overlap.
        compress: how a replica's outer gradient is sent; with error feedback.
    """

    def __init__(
        self,
        weights: Tensor,
        schedule: FragmentSchedule,
        lr: float = 0.7,
        momentum: float = 0.9,
        merge_alpha: float = 0.5,
        compress: Compression = "none",
        over: Axis | None = None,
    ) -> None:
        super().__init__(weights, weights.clone(), torch.zeros_like(weights), over)
        self.schedule, self._lr, self._beta = schedule, lr, momentum
        self._alpha = merge_alpha if schedule.overlap_steps else 0.0
        self._overlapping = overlapping if schedule.overlap_steps else contextlib.nullcontext
        self._residual = None if compress == "none" else torch.zeros_like(weights)
        ends = [len(weights) * number // schedule.fragments for number in range(schedule.fragments + 1)]
        self._parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        most = max(part.stop - part.start for part in self._parts)
        self._mean = weights.new_zeros(most)  # the outer gradient of the fragment that was sent last
        if compress == "none":
            with self._overlapping():
                self._mean = empty(most, weights, self.axis.group)
        self._compress = compress
        self._pending: Pending | None = None
        self._is_sent = False  # a fragment that has not been merged

    def after(self, step: int) -> None:
        """Send and merge the fragments that are due after an inner step."""
        if (fragment := self.schedule.sent_after(step)) is not None:
            self.send(fragment)
        if (fragment := self.schedule.sent_after(step - self.schedule.overlap_steps)) is not None:
            self.merge(fragment)

    @torch.no_grad()
    def send(self, fragment: int) -> None:
        """Start to average the outer gradient of a fragment, (outer weights - own weights), over the replicas."""
        part = self._parts[fragment]
        residual = None if self._residual is None else self._residual[part]
        own, mean = self.outer[part] - self.weights[part], self._mean[: part.stop - part.start]
        with named(f"the outer gradients of fragment {fragment}", "outer gradients"), self._overlapping():
            self._pending = start_mean(mean, own, self._compress, residual, self.axis)
        self._is_sent = True

    @torch.no_grad()
    def merge(self, fragment: int) -> None:
        """Take the outer step of the fragment that was sent last, and mix the outer weights into the own weights."""
        if not self._is_sent:  # the run resumed from one without fragments
            return
        self._is_sent = False
        self.wait()
        part = self._parts[fragment]
        outer, momentum, gradient = self.outer[part], self.momentum[part], self._mean[: part.stop - part.start]
        momentum.mul_(self._beta).add_(gradient)
        outer.sub_(gradient.add(momentum, alpha=self._beta), alpha=self._lr)
        self.weights[part] = torch.lerp(outer, self.weights[part], self._alpha)

    def wait(self) -> None:
        """Wait until no fragment is under way; a fragment that has arrived is still merged later."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def held_bytes(self) -> int:
        return super().held_bytes() + self._mean.nbytes + (0 if self._residual is None else self._residual.nbytes)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors, by name, that a checkpoint needs; wait for a fragment under way."""
        self.wait()
        state = super().state()
        if self._residual is not None:
            state[f"rank{dist.get_rank()}.outer_optimizer.residual"] = self._residual
        if self.schedule.overlap_steps:
            state[f"{self.name}.fragment"] = self._mean
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        self._is_sent = f"{self.name}.fragment" in state
