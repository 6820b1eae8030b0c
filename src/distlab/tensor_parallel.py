"""Tensor parallelism: every rank holds a slice of each layer, and all of them work on the same batch.

Split the first matrix of a pair by its outputs (columns) and the second by its inputs (rows): each rank then computes
its share of what lies between them, attention heads or hidden units, on its own, and the ranks' results only have to be
added up (Megatron-LM: Shoeybi et al., arXiv 1909.08053). Norms and residuals are computed by every rank, or, with
sequence parallelism, by each for its slice of the sequence (Korthikanti et al., arXiv 2205.05198).

Each exchange is a linear map, so the backward pass through it is the transposed map:

    function            forward          backward
    copy_to             nothing          all-reduce         Megatron's f
    reduce_from         all-reduce       nothing            Megatron's g
    gather              all-gather       own slice          what follows is the same on all ranks
    gather_to           all-gather       reduce-scatter     what follows differs, as behind f
    reduce_scatter      reduce-scatter   all-gather
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp

from distlab.traffic import members, rank, traffic
from simplellm.errors import InputError
from simplellm.llama import MLP, Attention, Linear, LLamaPart, RMSNorm

Style = Literal["naive", "megatron"]
LAYERS, VOCABULARY, NORMS = "layer", "vocabulary", "norm"  # whose traffic it is
FORWARD, BACKWARD = "activations", "gradients"  # and of what; the ledger's kinds are "layer activations", …
SEQUENCE = 1  # the dimension of activations (batch, seq, dmodel)


def shares(total: int, ranks: int) -> list[int]:
    """What each rank holds of `total` rows: the same number, and one more on the first ranks where they do not divide.

    The boundaries are those of `torch.tensor_split`.
    """
    return [total // ranks + (r < total % ranks) for r in range(ranks)]


@dataclass(frozen=True)
class Team:
    """The ranks that share a module, and what their messages about it are called.

    Its methods are the collectives out of place: they leave their input as it is.

    Attributes:
        module: the module's name in the model.
        kind: `LAYERS`, `VOCABULARY` or `NORMS`.
        group: the ranks; by default, all.
    """

    module: str
    kind: str
    group: "dist.ProcessGroup | None" = None

    @property
    def size(self) -> int:
        return len(members(self.group))

    @property
    def place(self) -> int:
        """This rank's number among them."""
        return members(self.group).index(rank())

    def all_reduce(self, x: Tensor, what: str, op: "ReduceOp.RedOpType" = ReduceOp.SUM) -> Tensor:
        """The ranks' `x` (any shape) combined."""
        total = x.clone(memory_format=torch.contiguous_format)
        traffic.all_reduce(total, self._name(what), kind=f"{self.kind} {what}", op=op, group=self.group).wait()
        return total

    def all_gather(self, x: Tensor, what: str, dim: int, length: int) -> Tensor:
        """The ranks' slices along `dim`, `shares(length, size)` long, side by side."""
        sizes = shares(length, self.size)
        own = _pad(x, dim, sizes[0])
        parts = own.new_empty(self.size, *own.shape)
        traffic.all_gather(parts, own, self._name(what), kind=f"{self.kind} {what}", group=self.group).wait()
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def reduce_scatter(self, x: Tensor, what: str, dim: int) -> Tensor:
        """This rank's slice along `dim` of the sum of the ranks' `x`."""
        sizes = shares(x.shape[dim], self.size)
        parts = torch.stack([_pad(part, dim, sizes[0]) for part in x.split(sizes, dim)])
        own = torch.empty_like(parts[0])
        traffic.reduce_scatter(own, parts, self._name(what), kind=f"{self.kind} {what}", group=self.group).wait()
        return own.narrow(dim, 0, sizes[self.place])

    def own_slice(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice of `x` along `dim`, a view."""
        return x.tensor_split(self.size, dim)[self.place]

    def _name(self, what: str) -> str:
        return f"the {what} of {self.module}"


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    """`x`, contiguous, with zeros after it up to `length`: the parts of a collective are of equal size."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


class _LinearMap(torch.autograd.Function):
    """A linear map of a tensor, with the transposed one for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]) -> Any:
        ctx.transposed = transposed
        return linear(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(grad), None, None


def _unchanged(x: Tensor) -> Tensor:
    return x.view_as(x)


def copy_to(x: Tensor, team: Team) -> Tensor:
    """Hand `x`, the same on all ranks, to a slice of a layer on each; the slices' gradients of `x` add up."""
    y: Tensor = _LinearMap.apply(x, _unchanged, partial(team.all_reduce, what=BACKWARD))
    return y


def reduce_from(x: Tensor, team: Team) -> Tensor:
    """Add up the ranks' `x`; the gradient of a sum is the gradient of each of its terms."""
    y: Tensor = _LinearMap.apply(x, partial(team.all_reduce, what=FORWARD), _unchanged)
    return y


def gather(x: Tensor, team: Team, length: int, dim: int = -1) -> Tensor:
    """Lay the ranks' slices side by side: `length` along `dim`. All ranks must compute the same from the result."""
    whole = partial(team.all_gather, what=FORWARD, dim=dim, length=length)
    y: Tensor = _LinearMap.apply(x, whole, partial(team.own_slice, dim=dim))
    return y


def gather_to(x: Tensor, team: Team, length: int, dim: int = SEQUENCE) -> Tensor:
    """Like `gather`, but for a slice of a layer on each rank, whose gradients of the whole add up.

    What a layer keeps of the whole for its backward pass stays whole. (Korthikanti et al. keep the slice and gather
    again: less memory, more traffic.)
    """
    whole = partial(team.all_gather, what=FORWARD, dim=dim, length=length)
    y: Tensor = _LinearMap.apply(x, whole, partial(team.reduce_scatter, what=BACKWARD, dim=dim))
    return y


def reduce_scatter(x: Tensor, team: Team, dim: int = SEQUENCE) -> Tensor:
    """Add up the ranks' `x` and keep a slice along `dim` on each."""
    whole = partial(team.all_gather, what=BACKWARD, dim=dim, length=x.shape[dim])
    y: Tensor = _LinearMap.apply(x, partial(team.reduce_scatter, what=FORWARD, dim=dim), whole)
    return y


Exchange = Callable[[Tensor, Team], Tensor]


def shard(
    net: LLamaPart,
    style: Style = "megatron",
    group: "dist.ProcessGroup | None" = None,
    sequence_parallel: bool = False,
) -> None:
    """Leave this rank's slices of the layers in `net`, which so far holds the whole of each, on every rank the same.

    Weights keep their names, and become slices of what they were; nothing random happens. The model's code stays what
    it is: what the ranks have to exchange hangs before and after its modules, as hooks.

    With the style "megatron", `copy_to` comes before the attention and before the MLP of each layer, and `reduce_from`
    after each. The embedding and the head are split over the vocabulary; the loss of the head's slice of
    the logits is `vocabulary_parallel_loss`. The gains of the norms are on every rank, with the same gradients.

    With the style "naive" every linear layer is split by its outputs, which are gathered at once; the embedding is
    whole, and so are the logits.

    Args:
        net: the model, or a stage of it.
        style: what is split, and how.
        group: the ranks that share the model; by default, all.
        sequence_parallel: between attention and MLP, each rank has a slice of the sequence; "megatron" only, and only
            for the whole model.

    Raises:
        InputError: the attention heads do not divide among the ranks, the head and the embedding are one tensor, or
            sequence parallelism is asked for where there is none.
    """
    if sequence_parallel and (style == "naive" or net.model.embed_tokens is None or net.lm_head is None):
        raise InputError("sequence parallelism is for a whole model whose layers are split in pairs")
    head, embedding = net.lm_head, net.model.embed_tokens
    if head is not None and embedding is not None and head.weight is embedding.weight:
        raise InputError("the head and the embedding are one tensor, which would become two: untie them first")
    if style == "naive":
        _split_naively(net, group)
    else:
        _split_in_pairs(net, group, sequence_parallel)


def _split_naively(net: LLamaPart, group: "dist.ProcessGroup | None") -> None:
    """Split each linear layer on its own by its outputs: its input comes whole, its output leaves whole."""
    for name, module in net.named_modules():
        if isinstance(module, Linear):
            team = Team(name, VOCABULARY if module is net.lm_head else LAYERS, group)
            whole = partial(gather, length=module.out_features)
            _keep_slice(module, team, dim=0)
            _around(module, team, before=copy_to, after=whole)


def _split_in_pairs(net: LLamaPart, group: "dist.ProcessGroup | None", sequence_parallel: bool) -> None:
    """Split by their outputs the layers that begin attention and MLP, by its inputs the one that ends them."""
    enter, leave = _split_sequence(net, group) if sequence_parallel else (copy_to, reduce_from)
    for name, module in net.named_modules():
        team = Team(name, LAYERS, group)
        if isinstance(module, Attention):
            columns, row = [module.q_proj, module.k_proj, module.v_proj], module.o_proj
            num_heads, num_kv_heads = (layer.out_features // module.head_dim for layer in columns[:2])
            check_division(num_heads, num_kv_heads, team.size)
        elif isinstance(module, MLP):
            columns, row = [module.gate_proj, module.up_proj], module.down_proj
        else:
            continue
        for column in columns:
            _keep_slice(column, team, dim=0)
        _keep_slice(row, team, dim=1)
        _around(module, team, before=enter, after=leave)
    if net.model.embed_tokens is not None:
        team = Team("model.embed_tokens", VOCABULARY, group)
        net.model.embed_tokens = VocabularyParallelEmbedding(net.model.embed_tokens, team)
        _around(net.model.embed_tokens, team, after=leave)
    if net.lm_head is not None:
        team = Team("lm_head", VOCABULARY, group)
        _keep_slice(net.lm_head, team, dim=0)
        _around(net.lm_head, team, before=enter)


def _split_sequence(net: LLamaPart, group: "dist.ProcessGroup | None") -> tuple[Exchange, Exchange]:
    """Give the norms slices of the sequence; returns what to do before and after the layers, which take it whole."""
    seq = 0  # a slice does not tell the length of the whole, if the ranks do not divide it

    def remember_length(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal seq
        seq = args[0].shape[SEQUENCE]

    net.register_forward_pre_hook(remember_length)
    for name, module in net.named_modules():
        if (
            isinstance(module, RMSNorm) and module.weight.requires_grad
        ):  # each rank sees the gradient of its own positions only
            module.weight.register_hook(partial(Team(name, NORMS, group).all_reduce, what=BACKWARD))
    return lambda x, team: gather_to(x, team, seq), reduce_scatter


def check_division(num_heads: int, num_kv_heads: int, ranks: int) -> None:
    """Raise `InputError` unless each rank can hold as many heads, of queries and of keys and values, as the others."""
    for flag, heads in (("--num-heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads % ranks:
            raise InputError(
                f"{flag} {heads} among {ranks} tensor-parallel ranks: each must hold as many heads as the others; "
                f"give a multiple of {ranks}, or a number of ranks that divides {heads}"
            )


def _keep_slice(linear: Linear, team: Team, dim: int) -> None:
    """Cut the weight (outputs, inputs) down to this rank's slice along `dim`, a copy: the whole can be forgotten."""
    whole = linear.weight
    linear.weight = nn.Parameter(team.own_slice(whole.detach(), dim).clone(), requires_grad=whole.requires_grad)
    linear.out_features, linear.in_features = linear.weight.shape


def _around(module: nn.Module, team: Team, before: Exchange | None = None, after: Exchange | None = None) -> None:
    """Have a module's first input go through `before`, and its output through `after`."""
    if before is not None:
        module.register_forward_pre_hook(lambda _, args: (before(args[0], team), *args[1:]))
    if after is not None:
        module.register_forward_hook(lambda _module, _args, output: after(output, team))


class VocabularyParallelEmbedding(nn.Embedding):
    """The embeddings of this rank's slice of the vocabulary; zero for all other tokens, so that the ranks' add up.

    Args:
        whole: the embedding of the whole vocabulary.
        team: the ranks that share it.
    """

    def __init__(self, whole: nn.Embedding, team: Team) -> None:
        self.first, last = own_range(whole.num_embeddings, team)
        padding_idx = whole.padding_idx
        if padding_idx is not None:
            padding_idx = padding_idx - self.first if self.first <= padding_idx < last else None
        rows = whole.weight.detach()[self.first : last].clone()
        super().__init__(len(rows), whole.embedding_dim, padding_idx, _weight=rows)
        self.weight.requires_grad_(whole.weight.requires_grad)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, seq) -> this rank's part of their embeddings (batch, seq, dmodel)."""
        rows = ids - self.first
        elsewhere = (rows < 0) | (rows >= self.num_embeddings)
        return super().forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)


def own_range(length: int, team: Team) -> tuple[int, int]:
    """The first row of this rank's slice of `length` rows, and the first one after it."""
    sizes = shares(length, team.size)
    first = sum(sizes[: team.place])
    return first, first + sizes[team.place]


def vocabulary_parallel_loss(
    logits: Tensor, target: Tensor, vocab_size: int, group: "dist.ProcessGroup | None" = None
) -> Tensor:
    """What `causalLLMLoss` is for whole logits, on every rank, from the ranks' slices of them.

    The ranks exchange three numbers for each token, and nothing in the backward pass.

    Args:
        logits: (batch, seq, own slice of vocab), in any floating dtype.
        target: (batch, seq), int64.
        vocab_size: of the whole vocabulary.
        group: the ranks that share the head; by default, all.

    Raises:
        InputError: the sequences are too short to predict anything.
    """
    if target.shape[1] < 2:
        raise InputError(f"--seq-len {target.shape[1]} leaves no token to predict: it must be at least 2")
    team = Team("the loss", VOCABULARY, group)
    first, _ = own_range(vocab_size, team)
    loss: Tensor = _VocabularyParallelLoss.apply(logits.float(), target.to(logits.device) - first, team)
    return loss


class _VocabularyParallelLoss(torch.autograd.Function):
    """Cross-entropy is log(sum of exp(logits)) - the logit of the next token: a maximum and two sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, team: Team) -> Tensor:
        next_token = target.roll(-1, dims=1).unsqueeze(-1)
        elsewhere = (next_token < 0) | (next_token >= logits.shape[-1])
        next_token = next_token.masked_fill(elsewhere, 0)

        greatest = team.all_reduce(logits.amax(-1, keepdim=True), FORWARD, ReduceOp.MAX)
        shifted = logits - greatest  # no logit is above 0, so that exp() cannot overflow
        own_logit = shifted.gather(-1, next_token).masked_fill(elsewhere, 0)
        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(-1, keepdim=True), own_logit])
        total, logit = team.all_reduce(sums, FORWARD)
        ctx.save_for_backward(probabilities.div_(total), next_token, elsewhere)
        # The last position has no next token, as in causalLLMLoss.
        return (total.log() - logit)[:, :-1].mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        probabilities, next_token, elsewhere = ctx.saved_tensors
        own = (~elsewhere).to(probabilities.dtype)
        grad = probabilities.scatter_add(-1, next_token, -own)  # softmax - one_hot, this rank's slice of both
        grad[:, -1] = 0
        return grad.mul_(grad_loss / next_token[:, 1:].numel()), None, None


def bytes_per_layer(
    style: Style,
    ranks: int,
    batch: int,
    seq: int,
    dmodel: int,
    element_bytes: int,
    sequence_parallel: bool = False,
) -> tuple[int, int]:
    """What a rank sends for one layer of the lab's Llama, forward and backward, for activations (batch, seq, dmodel).

    Round a ring, an all-reduce sends 2 (ranks - 1) / ranks times the tensor's bytes from each rank; an all-gather or a
    reduce-scatter (ranks - 1) times the bytes of the longest slice, about half as much.
    """
    token_bytes = batch * seq * element_bytes

    def all_reduce(width: int) -> int:
        return 2 * (ranks - 1) * width * token_bytes // ranks

    def all_gather(width: int) -> int:
        return (ranks - 1) * shares(width, ranks)[0] * token_bytes

    if style == "naive":
        hidden = 4 * dmodel
        shapes = [(dmodel, dmodel)] * 4 + [(dmodel, hidden)] * 2 + [(hidden, dmodel)]  # q, k, v, o, gate, up, down
        return sum(all_gather(outputs) for _, outputs in shapes), sum(all_reduce(inputs) for inputs, _ in shapes)
    pair = all_reduce(dmodel)
    if sequence_parallel:  # an all-gather before the pair and a reduce-scatter after it, or the other way round
        pair = 2 * (ranks - 1) * shares(seq, ranks)[0] * batch * dmodel * element_bytes
    return 2 * pair, 2 * pair
