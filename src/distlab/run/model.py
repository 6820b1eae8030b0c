"""This rank's part of the model that a run trains, and its optimizer."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from distlab.axes.grid import Grid
from distlab.axes.shards import ReplicaShards
from distlab.machine.torch_patches import without_compiler
from simplellm.llama import LLamaPart
from simplellm.losses import causalLLMLoss

if TYPE_CHECKING:
    from distlab.parallel.gradient_compression import Compressor
    from distlab.parallel.outer import OuterState

OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD}  # by the names of `--optimizer`
Loss = Callable[[Tensor, Tensor], Tensor]  # (logits of the whole model, token ids (batch, seq)) -> mean loss


# By wrapper, its attribute with the model.
_INSIDE = {"MyDP": "model", "ShardedDP": "model", "DistributedDataParallel": "module"}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the tensors of a module that this rank updates, by name: its parameters, or its shards of them."""
    return module.own_parameters() if isinstance(module, ReplicaShards) else dict(module.named_parameters())


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model, or the part of it, without a wrapper of data parallelism: its names are the model's."""
    for module in model.modules():
        if isinstance(module, LLamaPart):
            return module
    while isinstance(inner := getattr(model, _INSIDE.get(type(model).__name__, ""), None), nn.Module):
        model = inner
    return model


@dataclass(frozen=True)
class ModelParts:
    """The stages of the model that this rank holds, the loss, and the state that changes with the weights."""

    stages: Mapping[int, nn.Module]  # by their index in the model
    sizes: Mapping[str, Any]  # of the model
    owners: Sequence[int]  # by stage, the rank in the pipeline that holds it
    grid: Grid  # this rank's position in the layout
    loss: Loss
    sharded: Mapping[int, ReplicaShards] = field(default_factory=dict)  # around stages that the replicas shard
    shards: Mapping[str, nn.Parameter] = field(default_factory=dict)  # of parameters; only this rank updates them
    gather: Callable[[], object] = lambda: None  # gives all ranks all shards
    outer: "OuterState | None" = None  # of replicas that train independently; its model is the checkpoint's
    compressor: "Compressor | None" = None  # of the gradients

    @classmethod
    def of(
        cls,
        model: nn.Module | Mapping[int, nn.Module],
        grid: Grid,
        owners: Sequence[int] | None = None,
        loss: Loss | None = None,
        sizes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "ModelParts":
        """Make it from a model or one of its stages, wrapped or not; or from several stages by index and `owners`.

        `sizes` are of the whole model; of the lab's Llama, only the number of layers is needed.
        """
        parts = model if isinstance(model, Mapping) else {grid.axis("pp").rank: model}
        stages = {stage: _without_wrappers(part) for stage, part in parts.items()}
        first = next(iter(stages.values()))
        sizes = sizes or {}
        if isinstance(first, LLamaPart):  # which may have only some of the layers
            sizes = {**first.options, "n_layers": sizes.get("n_layers", first.options["n_layers"])}
        loss = loss or partial(causalLLMLoss, vocab_size=sizes["vocab_size"])
        sharded = {stage: part for stage, part in parts.items() if isinstance(part, ReplicaShards)}
        owners = range(grid.axis("pp").size) if owners is None else owners
        return cls(stages, sizes, owners, grid, loss, sharded, **options)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank updates, or its shards of them, by their names in the whole model."""
        return {name: parameter for _, name, parameter in self.by_stage()}

    def held(self) -> dict[str, nn.Parameter]:
        """Return the parameters with which this rank computes, by their names in the whole model.

        Of weights that the replicas shard, which are whole only while a block computes, it returns the shards.
        """
        found: dict[str, nn.Parameter] = {}
        for stage, part in self.stages.items():
            around = self.sharded.get(stage)
            is_in_shards = around is not None and around.shard == "weights"
            found |= own_parameters(around) if around is not None and is_in_shards else dict(part.named_parameters())
        return found

    def wait_for_weights(self) -> None:
        """Wait until all weights that replicas shard are gathered."""
        for part in self.sharded.values():
            part.wait_for_weights()

    def by_stage(self) -> list[tuple[int, str, nn.Parameter]]:
        """Return the `parameters`, each with its stage and name."""
        if self.shards:
            return [(stage, *named) for stage in self.stages for named in self.shards.items()]
        parts = {**self.stages, **self.sharded}
        return [(stage, *named) for stage, part in parts.items() for named in own_parameters(part).items()]

    @contextlib.contextmanager
    def changing_shards(self) -> Iterator[None]:
        """Allow changes of parameters inside; where replicas shard them, all replicas then get the new values."""
        self.wait_for_weights()
        yield
        for part in self.sharded.values():
            part.gather_weights()
        self.gather()


def build_optimizer(
    name: str,
    parameters: Iterable[Tensor],
    lr: float,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
) -> Optimizer:
    """Make an optimizer of `OPTIMIZERS`, with one fused kernel instead of one for each operation if all is contiguous.

    Args:
        weight_decay: applied to matrices only (`is_decayed`); None is torch's default, 0.01 for "adamw", else 0.
            "adamw" shrinks the weights by it ("decoupled": Loshchilov and Hutter, arXiv 1711.05101); the others add it
            to the gradient.
        betas: decay rates of "adam"'s and "adamw"'s moving averages of the gradient and its square; None: torch's.
    """
    kind = without_compiler(OPTIMIZERS[name])
    options: dict[str, Any] = {} if betas is None else {"betas": betas}
    parameters = list(parameters)
    # On a CPU, torch's fused kernels take any tensor for a contiguous one: they would also update what is in its gaps.
    fused = all(parameter.is_contiguous() for parameter in parameters)
    optimizer = kind(parameters, lr=lr, fused=fused, **options)  # type: ignore[call-arg]
    [group] = optimizer.param_groups
    decay = group["weight_decay"] if weight_decay is None else weight_decay
    group["weight_decay"] = 0.0
    if decay:
        decayed = [parameter for parameter in group["params"] if is_decayed(parameter)]
        group["params"] = [parameter for parameter in group["params"] if not is_decayed(parameter)]
        optimizer.add_param_group({**group, "params": decayed, "weight_decay": decay})
    return optimizer


def is_decayed(parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: yes for matrices, no for biases and the gains of norms."""
    return parameter.dim() >= 2
