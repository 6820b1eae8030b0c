"""Tensor parallelism: every rank holds a shard of each layer, and all ranks work on the same batch.

Split the first matrix of a pair by its outputs (columns) and the second by its inputs (rows). Each rank then computes
its attention heads, or hidden units, independently, and only the ranks' results have to be added up (Megatron-LM:
Shoeybi et al., arXiv 1909.08053). Every rank computes all norms and residuals; with sequence parallelism, each rank
computes them for its shard of the sequence (Korthikanti et al., arXiv 2205.05198). The collectives are in
`distlab.parallel.tp_group`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.placement import own_slice, placement_of
from distlab.parallel import tp_group as tp
from distlab.parallel.options import Style, check_division
from distlab.parallel.tp_group import BACKWARD, EXPERTS, LAYERS, NORMS, SEQUENCE, VOCABULARY, TPGroup
from distlab.parallel.vocabulary import VocabularyParallelEmbedding
from simplellm.blocks import Attention
from simplellm.errors import InputError, require
from simplellm.experts import MixtureOfExperts
from simplellm.layers import MLP, Linear
from simplellm.llama import LLamaPart

Exchange = Callable[[Tensor, TPGroup], Tensor]


def shard(
    net: nn.Module,
    style: Style = "megatron",
    axis: Axis | None = None,
    sequence_parallel: bool = False,
    draw: bool = True,
) -> None:
    """Replace the layers of `net`, a whole model that is the same on every rank, by this rank's shards of them.

    Weights keep their names. The model's code does not change: the collectives are hooks before and after its modules.
    Whole weights are freed one by one. A model that was built `without_weights` gets its shards of the initial weights,
    which are drawn one whole weight at a time, unless `draw` is false.

    Style "megatron": `copy_to` before each `Attention` and `MLP`, `reduce_from` after it. The embeddings and the head
    (the only `Linear` outside attention and MLP) are split over the vocabulary; use `vocabulary_parallel_loss` as the
    loss. All other parameters, such as the gains of the norms, are replicated and have the same gradients on all ranks.

    Style "naive": every `Linear` is split by its outputs, which are gathered right after it; embeddings and logits stay
    whole.

    With `sequence_parallel`, each rank holds a shard of the sequence between attention and MLP. This needs style
    "megatron" and a whole model. Experts then see this rank's positions only: `LoadBalance` needs `axis` among the
    ranks that have other tokens, and `limit_experts` the ranks' positions.

    Raises `InputError`, and leaves the module unchanged, if it cannot be split this way.
    """
    parts = _Parts(net)
    axis = axis or all_ranks("tp")
    parts.check(style, axis.size, sequence_parallel)
    if axis.size > 1:  # otherwise a slice is the whole layer
        if style == "naive":
            _split_naively(parts, axis)
        else:
            _split_in_pairs(parts, axis, sequence_parallel)
    if draw and isinstance(net, LLamaPart) and net.initial is not None:
        for name, parameter in net.named_parameters():
            own = own_slice(net.initial(name), parameter)
            parameter.data = torch.empty(own.shape, dtype=parameter.dtype, device=parameter.device).copy_(own)
        net.initial = None


class _Parts:
    """The parts of a module that can be split, by name: pairs of linear layers, other linear layers, embeddings."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        modules = dict(net.named_modules())
        self.linears = {name: module for name, module in modules.items() if isinstance(module, Linear)}
        # The slices of a layer compute all experts: only whole experts are divided, among other ranks.
        experts = [module for module in modules.values() if isinstance(module, MixtureOfExperts)]
        self.mixed = mixed = {part for mixture in experts for part in mixture.modules()}
        modules = {name: module for name, module in modules.items() if module not in mixed}
        self.pairs = {name: module for name, module in modules.items() if isinstance(module, Attention | MLP)}
        inner = {layer for pair in self.pairs.values() for layer in pair.modules()}
        self.heads = {n: linear for n, linear in self.linears.items() if linear not in inner | mixed}
        self.embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}

    def check(self, style: Style, ranks: int, sequence_parallel: bool) -> None:
        """Raise `InputError` unless all parts can be split."""
        embeddings = self.embeddings if style == "megatron" else {}
        layers: dict[str, Linear | nn.Embedding] = {**self.linears, **embeddings}
        if not (self.pairs or self.heads or self.embeddings) or "" in self.embeddings:
            raise InputError("nothing in this module can be split: it has no simplellm layers and no embeddings inside")
        if sequence_parallel and not (self.heads and embeddings):
            raise InputError("sequence parallelism needs a whole model and the style megatron")
        known = {module.weight for module in (*self.linears.values(), *self.embeddings.values())}
        for name, module in self.net.named_modules():
            if any(parameter.dim() > 1 and parameter not in known for parameter in module.parameters(recurse=False)):
                what = f"{name or 'the model'} ({type(module).__name__}) is a layer that shard cannot split"
                raise InputError(f"{what}: it knows simplellm's layers and embeddings; split the model by hand instead")
        owners: dict[Tensor, list[str]] = {}
        for name, module in self.net.named_modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, []).append(name)
        for layer in layers.values():
            names = owners[layer.weight]
            require(not placement_of(layer.weight).slices, f"{names[0]} is already split: give the whole model")
            if len(names) > 1:
                raise InputError(f"{' and '.join(names)} share a weight, which cannot be split: untie them first")
        if style == "naive":
            return
        for pair in self.pairs.values():
            if isinstance(pair, Attention):
                queries, keys = pair.q_proj.out_features, pair.k_proj.out_features
                check_division(queries // pair.head_dim, keys // pair.head_dim, ranks)
        if len(self.heads) > 1:
            raise InputError(f"{' and '.join(self.heads)}: only one linear layer may be outside attention and MLP")
        for name in (*self.heads, *embeddings):
            rows = len(layers[name].weight)
            require(rows >= ranks, f"{name} has {rows} rows, which {ranks} tensor-parallel ranks cannot share")
        for name, embedding in embeddings.items():
            if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
                raise InputError(f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse cannot be split")


def _split_naively(parts: _Parts, axis: Axis) -> None:
    """Split each linear layer separately, by its outputs: its input and its gathered output are whole."""
    for name, linear in parts.linears.items():
        tp_group = TPGroup(name, VOCABULARY if name in parts.heads else LAYERS, axis)
        whole = partial(tp.gather, length=linear.out_features)
        _keep_shard(linear, tp_group, dim=0)
        _around(linear, tp_group, before=tp.copy_to, after=whole)


def _split_in_pairs(parts: _Parts, axis: Axis, sequence_parallel: bool) -> None:
    """In each attention and MLP, split the first layers by their outputs and the last layer by its inputs."""
    enter, leave = _split_sequence(parts) if sequence_parallel else (tp.copy_to, tp.reduce_from)
    for name, pair in parts.pairs.items():
        tp_group = TPGroup(name, LAYERS, axis)
        if isinstance(pair, Attention):
            *columns, row = pair.q_proj, pair.k_proj, pair.v_proj, pair.o_proj
        else:
            *columns, row = pair.gate_proj, pair.up_proj, pair.down_proj
        for column in columns:
            _keep_shard(column, tp_group, dim=0)
        _keep_shard(row, tp_group, dim=1)
        _around(pair, tp_group, before=enter, after=leave)
        if row.bias is not None:  # it is added to the sum, not to each rank's part of it
            row.adds_bias = False
            pair.register_forward_hook(partial(_add_bias, row.bias))
        for norm in () if sequence_parallel else (getattr(pair, "q_norm", None), getattr(pair, "k_norm", None)):
            if norm is not None:  # each rank has the gradient of its heads
                norm.weight.register_hook(partial(tp_group.all_reduce, what=BACKWARD))
    for name, embedding in parts.embeddings.items():
        tp_group = TPGroup(name, VOCABULARY, axis)
        split = VocabularyParallelEmbedding(embedding, tp_group)
        _around(split, tp_group, after=leave)
        for path, module in list(parts.net.named_modules(remove_duplicate=False)):
            if module is embedding:
                parts.net.set_submodule(path, split)
    for name, head in parts.heads.items():
        tp_group = TPGroup(name, VOCABULARY, axis)
        _keep_shard(head, tp_group, dim=0)
        _around(head, tp_group, before=enter)
    if sequence_parallel:
        _add_up_gradients(parts, axis)


def _split_sequence(parts: _Parts) -> tuple[Exchange, Exchange]:
    """Shard the sequence between layers; return the collectives before and after the layers that need all of it."""
    seq = 0  # the whole length; it does not follow from a shard's length if the ranks do not divide it

    def remember_length(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal seq
        seq = args[0].shape[SEQUENCE]

    parts.net.register_forward_pre_hook(remember_length)
    return lambda x, tp_group: tp.gather_to(x, tp_group, seq), tp.reduce_scatter


def _add_up_gradients(parts: _Parts, axis: Axis) -> None:
    """Add up the gradients of parameters that are not split: a rank has those of its own positions only."""
    of_experts = {parameter for module in parts.mixed for parameter in module.parameters(recurse=False)}
    for name, parameter in parts.net.named_parameters():
        if parameter.requires_grad and not placement_of(parameter).slices:
            tp_group = TPGroup(name.rpartition(".")[0], EXPERTS if parameter in of_experts else NORMS, axis)
            parameter.register_hook(partial(tp_group.all_reduce, what=BACKWARD))


def _keep_shard(linear: Linear, tp_group: TPGroup, dim: int) -> None:
    """Replace the weight (outputs, inputs) by this rank's shard along `dim`, and a bias by the part for its outputs."""
    linear.weight = tp_group.own_parameter(linear.weight, dim)
    linear.out_features, linear.in_features = linear.weight.shape
    if dim == 0 and linear.bias is not None:
        linear.bias = tp_group.own_parameter(linear.bias, 0)


def _add_bias(bias: Tensor, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output + bias.to(output.dtype)


def _around(module: nn.Module, group: TPGroup, before: Exchange | None = None, after: Exchange | None = None) -> None:
    """Apply `before` to a module's first input, and `after` to its output."""
    if before is not None:
        module.register_forward_pre_hook(lambda _, args: (before(args[0], group), *args[1:]))
    if after is not None:
        module.register_forward_hook(lambda _module, _args, output: after(output, group))
