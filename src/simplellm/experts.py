"""A mixture of experts: what a block may have in place of its feed-forward network (`simplellm.layers.MLP`).

A router sends each token to a few of many networks, the experts, so that a model can have many more
weights than it multiplies for a token (Shazeer et al., arXiv 1701.06538; Mixtral: arXiv 2401.04088). The names of its
parameters are those of Hugging Face's Qwen3-MoE and GLM-4-MoE.

The choice of experts is a step function: a difference of 1e-7 in a score can send a token elsewhere. So ties go to the
expert with the lower number, the router computes in float32, and the order of every sum is fixed.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from simplellm.layers import MLP, Linear
from simplellm.options import Mixture
from simplellm.recomputation import once

# (rows (rows, dmodel), sorted by expert; rows of each expert, (experts,); the experts of this process)
# -> what the experts make of the rows, in the same order
Dispatch = Callable[[Tensor, Tensor, Callable[[Tensor, Sequence[int]], Tensor]], Tensor]


class Router(Linear):
    """The scores of each expert for each token, and a correction of them that balances the load.

    The correction is a parameter without a gradient: it is a part of the model's state, and training changes it.
    """

    def __init__(self, dmodel: int, experts: int) -> None:
        super().__init__(dmodel, experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts), requires_grad=False)


class RowsOfChoices(torch.autograd.Function):
    """A token's row for each of its choices, x[order // k]; gradients of its rows are added in the choices' order.

    Handwritten, because autograd would add them up in an order that is not fixed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        by_choice = grad.index_select(0, inverse).unflatten(0, (-1, ctx.k)).unbind(dim=1)
        return sum(by_choice[1:], by_choice[0]), None, None, None


class WeightedSum(torch.autograd.Function):
    """The sum over a token's choices, in their order, of weight * output; outputs (tokens * k, dmodel) are in an order.

    Handwritten, because autograd would make three tensors of the size of all outputs, and keep two.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        placed = outputs.index_select(0, inverse).unflatten(0, weights.shape)
        ctx.save_for_backward(placed, weights, order)
        y = weights[:, :1] * placed[:, 0]
        for choice in range(1, weights.shape[1]):
            y.addcmul_(weights[:, choice : choice + 1], placed[:, choice].to(y.dtype))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        placed, weights, order = ctx.saved_tensors
        grad_weights = (placed.to(grad.dtype) @ grad.unsqueeze(2)).squeeze(2)
        grad_placed = (weights.unsqueeze(2) * grad.unsqueeze(1)).to(placed.dtype)
        return grad_placed.flatten(0, 1).index_select(0, order), grad_weights, None, None


def inverse_of(order: Tensor) -> Tensor:
    """Return the permutation that undoes a permutation (elements,)."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class MixtureOfExperts(nn.Module):
    """The weighted sum of the outputs of the experts that a router chooses for each token.

    No token is dropped, unless there is a `capacity`. Rows are sorted by expert, so that each expert does one matrix
    product on contiguous rows, and an expert without tokens does one on no rows: every parameter has a gradient in each
    backward pass.

    Attributes:
        load: tokens of each expert in the forward passes of training since it was set to zero, (experts,), int64.
        capacity: rows that an expert takes of each sequence in these passes, as a multiple of the mean; of the others,
            the last, nothing is added to the sum. Sequences are the largest groups of tokens that every layout computes
            together, so that no layout drops other rows than one process (groups: GShard, arXiv 2006.16668). 0 for no
            limit.
        dropped: rows that were dropped since it was set to zero, int64.
        gather_places: where this process has a part of each sequence: (batch, positions, per_token) -> the choices for
            whole sequences, (batch, seq, per_token), and the positions of this part, (positions,).
        most_rows_bytes: of the activations, those that the largest pass through the experts of this process keeps: the
            rows, and four results inside of their networks. Without a capacity, it depends on the tokens.
        smallest_gap: in these passes, the smallest difference between a chosen score and the best that was not chosen.
        routes: called in these passes with the choice (tokens, per_token) and each token's gap, (tokens,); returns the
            choice to use.
        dispatch: brings rows to their experts and the outputs back; by default all experts are here.
    """

    def __init__(self, dmodel: int, hidden_dim: int, sizes: Mixture) -> None:
        super().__init__()
        self.sizes, self.hidden_dim = sizes, hidden_dim
        self.gate = Router(dmodel, sizes.experts)
        own = range(sizes.experts) if sizes.own is None else sizes.own
        self.experts = nn.ModuleDict({str(number): MLP(dmodel, hidden_dim) for number in own})
        self.shared_experts = MLP(dmodel, hidden_dim) if sizes.shared else None
        self.load = torch.zeros(sizes.experts, dtype=torch.int64, device="cpu")  # also if the model is without weights
        self.smallest_gap, self.most_rows_bytes = float("inf"), 0
        self.capacity, self.dropped = 0.0, torch.zeros((), dtype=torch.int64, device="cpu")
        self.gather_places: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.routes: Callable[[Tensor, Tensor], Tensor] | None = None
        self.dispatch: Dispatch = lambda rows, counts, compute: compute(rows, counts.tolist())

    def forward(self, x: Tensor) -> Tensor:
        """(…, dmodel) -> the same shape, in float32."""
        tokens, k = x.reshape(-1, x.shape[-1]), self.sizes.per_token
        ids, weights = self._route(tokens)
        if self.capacity and torch.is_grad_enabled():
            ids = once(lambda: self._without_dropped(ids.view(*x.shape[:-1], k)))
        order = ids.flatten().argsort(stable=True)  # by expert, and for each expert by token; at the end those dropped
        inverse, counts = inverse_of(order), self._counts(ids)
        rows = RowsOfChoices.apply(tokens, order, inverse, k)
        y = WeightedSum.apply(self._through_experts(rows, counts), weights, order, inverse)
        if self.shared_experts is not None:
            y = y + self.shared_experts(tokens)
        assert isinstance(y, Tensor)
        return y.view(x.shape)

    def _through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if not self.capacity:
            return self.dispatch(rows, counts, self.compute)
        number = int(counts.sum())  # the rest is dropped
        outputs = self.dispatch(rows[:number], counts, self.compute)
        return F.pad(outputs, (0, 0, 0, len(rows) - number))

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply the experts of this process to their rows: the first `counts[0]` belong to its first expert, …"""
        if torch.is_grad_enabled():
            inside = 4 * self.hidden_dim * len(rows) * rows.element_size()
            self.most_rows_bytes = max(self.most_rows_bytes, rows.nbytes + inside)
        parts = zip(self.experts.values(), rows.split(list(counts)), strict=True)
        return torch.cat([expert(part) for expert, part in parts])

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, the best first, and their weights: (tokens, per_token) each."""
        logits = self.gate(tokens.to(self.gate.weight.dtype))
        scores = logits.softmax(dim=1) if self.sizes.scores == "softmax" else logits.sigmoid()
        ids = once(lambda: self._choose(scores.detach()))
        chosen = scores.gather(1, ids)  # the correction takes part in the choice, not in the weights
        return ids, chosen / chosen.sum(dim=1, keepdim=True)

    def _choose(self, scores: Tensor) -> Tensor:
        k = self.sizes.per_token
        ranked, order = (scores + self.gate.e_score_correction_bias).sort(dim=1, descending=True, stable=True)
        ids = order[:, :k]
        if torch.is_grad_enabled():  # not in validation
            following = ranked[:, k] if k < self.sizes.experts else ranked.new_full((len(ranked),), -torch.inf)
            gaps = ranked[:, k - 1] - following
            ids = ids if self.routes is None else self.routes(ids, gaps)
            self.load = self.load.to(ids.device) + self._counts(ids)
            if len(gaps):
                self.smallest_gap = min(self.smallest_gap, gaps.min().item())
        return ids

    def _without_dropped(self, ids: Tensor) -> Tensor:
        """Return choices (…, positions, per_token) with the number of experts in place of those beyond the capacity."""
        experts, positions = self.sizes.experts, None
        whole = ids.view(-1, *ids.shape[-2:])
        if self.gather_places is not None:
            whole, positions = self.gather_places(whole)
        most = math.ceil(self.capacity * whole[0].numel() / experts)
        chosen = F.one_hot(whole.flatten(1), experts)  # (batch, seq * per_token, experts)
        places = (chosen.cumsum(dim=1) * chosen).sum(dim=2)  # 1 for an expert's first row of the sequence, …
        is_dropped = (places > most).view_as(whole)
        if positions is not None:
            is_dropped = is_dropped[:, positions]
        self.dropped = self.dropped.to(ids.device) + is_dropped.sum()
        return ids.masked_fill(is_dropped.view_as(ids), experts).flatten(0, -2)

    def _counts(self, ids: Tensor) -> Tensor:
        return ids.flatten().bincount(minlength=self.sizes.experts)[: self.sizes.experts]


def mixtures_in(nets: Iterable[nn.Module]) -> list[MixtureOfExperts]:
    return [module for net in nets for module in net.modules() if isinstance(module, MixtureOfExperts)]


@contextlib.contextmanager
def equal_loads(nets: Iterable[nn.Module]) -> Iterator[None]:
    """Send tokens to all experts in turn inside, and count none of them: for passes on made-up inputs."""
    kept = "load", "dropped", "smallest_gap", "most_rows_bytes", "routes"
    before = [(mixture, {name: getattr(mixture, name) for name in kept}) for mixture in mixtures_in(nets)]

    def in_turn(ids: Tensor, _: Tensor, experts: int) -> Tensor:
        return (torch.arange(ids.numel(), device=ids.device) % experts).view_as(ids)

    for mixture, _ in before:
        mixture.routes = partial(in_turn, experts=mixture.sizes.experts)
    try:
        yield
    finally:
        for mixture, values in before:
            for name, value in values.items():
                setattr(mixture, name, value)
