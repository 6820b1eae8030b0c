"""A micro-batch on a stage, with the tensors that its actions keep for each other."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from distlab.axes.shards import ReplicaShards
from simplellm.attention import SequencePart
from simplellm.autograd import backward
from simplellm.recomputation import Recomputed
from simplellm.saved_activations import SavedActivations, observers
from simplellm.weight_gradients import DeferredWeightGradients


class Part(Protocol):
    """A micro-batch of which a rank sees only a part, or whose tokens do not attend to everything before them."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def sequence(self) -> SequencePart: ...


StageLoss = Callable[[Tensor, Any], Tensor]  # (output of the last stage, token ids or `Part`) -> mean loss
PartOf = Callable[[Tensor], Part]  # from token ids (batch, seq)


class Stage:
    """A stage's module.

    Args:
        net: takes token ids (batch, seq) on the first stage, activations (batch, seq, width) on others; also `part=`,
            if micro-batches have parts.
        loss: on the last stage: the mean loss over the micro-batch's targets.
        saved: counts the tensors kept for backward passes.
    """

    def __init__(self, net: nn.Module, loss: StageLoss | None, saved: SavedActivations | None) -> None:
        self.net, self.loss, self.saved = net, loss, saved

    def output(self, x: Tensor, ids: Tensor, part: Part | None, share: float) -> Tensor:
        """Return the output for `x`; on the last stage, return the micro-batch's share of the loss."""
        y: Tensor = self.net(x) if part is None else self.net(x, part=part.sequence)
        return y if self.loss is None else self.loss(y, part or ids) * share

    def observers(self) -> list[SavedActivations]:
        """Return the observers that count the tensors kept now."""
        return [*observers, *([self.saved] if self.saved else [])]

    def keep(self, tensor: Tensor) -> object:
        """Count a tensor for as long as the returned object exists."""
        return [observer.keep(tensor) for observer in self.observers()]

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator["Stage"]:
        """Yield this stage with stand-ins for its parameters, of the same values, so that actions leave no trace.

        The stand-ins have no hooks, and their gradients are forgotten. Random states are restored.
        """
        places = [(m, name, p) for m in self.net.modules() for name, p in m.named_parameters(recurse=False)]
        stand_ins = {p: nn.Parameter(p.detach(), p.requires_grad) for _, _, p in places}
        with torch.random.fork_rng({p.device for p in stand_ins if p.is_cuda}):
            try:
                for module, name, parameter in places:
                    setattr(module, name, stand_ins[parameter])
                yield Stage(self.net, self.loss, None)
            finally:
                for module, name, parameter in places:
                    setattr(module, name, parameter)

    def rehearse_sharded(self, ids: Tensor, x: Tensor, part: Part | None) -> None:
        """Run a forward and a backward pass that leave no trace, of a stage whose replicas hold shards of the weights.

        Args:
            ids: token ids (batch, seq), the targets on the last stage.
            x: the stage's input.
            part: as of `MicroBatch`.
        """
        assert isinstance(self.net, ReplicaShards)
        with torch.random.fork_rng({p.device for p in self.net.parameters() if p.is_cuda}):
            y = self.output(x, ids, part, share=1.0)
            inputs = [tensor for tensor in (x, *self.net.parameters()) if tensor.requires_grad]
            if inputs:  # not `backward`, which would trigger the hooks that collect gradients
                torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
        self.net.release_weights()


class MicroBatch:
    """A micro-batch on a stage, and the tensors that its actions there keep for later ones.

    Args:
        ids: token ids (batch, seq), the input of the first stage and the targets of the last.
        share: its fraction of all targets of the step.
        part: the part of it that this rank sees, if that is not simply `ids`.
    """

    def __init__(self, stage: Stage, ids: Tensor, share: float = 1.0, part: Part | None = None) -> None:
        self.stage, self.ids, self.share, self.part = stage, ids, share, part
        self.loss: Tensor | None = None  # on the last stage: its share of the mean loss
        self.kept: tuple[Any, ...] = ()  # tensors that an action keeps for a later one
        self._recomputed: Recomputed | None = None  # its forward pass, to be computed again
        self._weight_gradients: DeferredWeightGradients | None = None
        self._output: object = None  # keeps the output in the count of saved tensors

    def forward(self, x: Tensor, keep_input_only: bool = False) -> Tensor:
        """Return the stage's output for `x`; on the last stage, the micro-batch's share of the loss.

        With `keep_input_only`, `recompute` has to provide the rest that the backward pass needs.
        """
        compute: Callable[[Tensor], Tensor] = partial(self.stage.output, ids=self.ids, part=self.part, share=self.share)
        if keep_input_only:
            compute = self._recomputed = Recomputed(compute)
        with contextlib.ExitStack() as contexts:
            if self.stage.saved is not None:
                contexts.enter_context(self.stage.saved.counting())
            if self._weight_gradients is not None:
                contexts.enter_context(self._weight_gradients.applied())
            y = compute(x)
        if self.stage.loss is not None:
            self.loss = y.detach()
        if y.requires_grad:
            self._output = [o.leave_out(y) if keep_input_only else o.keep(y) for o in self.stage.observers()]
        return y

    def keep_graph(self, x: Tensor, y: Tensor) -> None:
        """Keep an input and the graph of its output, without the output itself."""
        self.kept = x, get_gradient_edge(y)

    def recompute(self) -> None:
        """Compute again the tensors that a forward pass which kept only its input has not kept."""
        recomputed, self._recomputed = self._recomputed, None
        assert recomputed is not None, "no forward pass has kept its input only"
        recomputed.compute()

    def backward(self, *received: Tensor) -> Tensor:
        """Run the backward pass of `kept`, an input and its output; returns the input, which now has its gradient.

        `received` is the gradient of the stage's output, from the next stage; the last stage has none.
        """
        x, y = self.release()
        if received:
            backward(y, *received)
        else:
            torch.autograd.backward([y])
        return cast(Tensor, x)

    def release(self) -> tuple[Any, ...]:
        """Return the kept tensors, and keep them no longer."""
        kept, self.kept, self._output = self.kept, (), None
        return kept

    def defer_weight_gradients(self) -> None:
        """Make the backward pass leave the weight gradients of linear layers to `compute_weight_gradients`."""
        self._weight_gradients = DeferredWeightGradients(self.stage.keep)

    def compute_weight_gradients(self) -> None:
        deferred, self._weight_gradients = self._weight_gradients, None
        assert deferred is not None, "no weight gradients have been deferred"
        deferred.compute()
