"""Expert parallelism: the ranks along an axis share the experts of a mixture, and exchange the rows for them.

Each of these ranks has other tokens, like a replica. It sorts them by expert, and sends every row to the rank that
holds the expert (Lepikhin et al., "GShard", arXiv 2006.16668); the outputs return the same way. In the backward pass
gradients take both ways back, also those of a rank that has no rows.

Everything but the experts is replicated over these ranks, and averaged over them. An expert meets the tokens of all of
them, so its gradient is already a sum over the ranks, where it has to be a mean. The exchange divides it by their
number; the average over the ranks that hold the expert is then the same as for any other parameter.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.layout import STAGES
from distlab.axes.placement import Placement, place
from distlab.comm.group import all_gather_single
from distlab.comm.names import named
from distlab.parallel.context_parallel import positions_of
from distlab.parallel.options import CPOrder
from distlab.parallel.tp_group import linear_map
from simplellm.experts import inverse_of, mixtures_in
from simplellm.recomputation import once


def own_experts(experts: int, axis: Axis) -> range:
    """Return the numbers of the experts that this rank holds, of as many as the other ranks along the axis."""
    each = experts // axis.size
    return range(each * axis.rank, each * (axis.rank + 1))


def most_rows_bytes(nets: Iterable[nn.Module]) -> int:
    """Return the bytes that the largest pass through these experts has kept."""
    return max((mixture.most_rows_bytes for mixture in mixtures_in(nets)), default=0)


def corrections_in(net: nn.Module) -> list[nn.Parameter]:
    """Return the corrections of the experts' scores, which `LoadBalance` changes."""
    return [mixture.gate.e_score_correction_bias for mixture in mixtures_in([net])]


def share_experts(nets: Iterable[nn.Module], axis: Axis) -> None:
    """Make models that have been built with `own_experts` exchange rows along an axis."""
    if axis.size == 1:
        return
    for mixture in mixtures_in(nets):
        mixture.dispatch = partial(exchange_rows, axis=axis)
        for parameter in mixture.experts.parameters():
            place(parameter, Placement(apart=(STAGES, *axis.names)))


class ChoicesOfSequences:
    """The choices of experts for sequences that ranks share; one rank may have whole sequences.

    Args:
        axis: the ranks that share each sequence, without padding.
        order: which positions each of them has.
    """

    def __init__(self, axis: Axis, order: CPOrder) -> None:
        self.axis, self._order = axis, order

    def positions(self, count: int, rank: int | None = None) -> Tensor:
        """Return the positions of a rank, by default this one, if each rank has `count` of them: (count,)."""
        size, rank = self.axis.size, self.axis.rank if rank is None else rank
        return positions_of(rank, size, size * count, self._order)

    def gather(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, positions, per_token) -> those of whole sequences, (batch, seq, per_token); this rank's positions."""
        size, count = self.axis.size, ids.shape[1]
        if size == 1:
            return ids, self.positions(count).to(ids.device)
        gathered = ids.new_empty(size, *ids.shape)
        with named("the choices of experts", "choices of experts"):
            all_gather_single(gathered, ids.contiguous(), self.axis.group)
        whole = ids.new_empty(len(ids), size * count, ids.shape[2])
        for rank, part in enumerate(gathered):
            whole[:, self.positions(count, rank).to(ids.device)] = part
        return whole, self.positions(count).to(ids.device)


def limit_experts(nets: Iterable[nn.Module], capacity: float, choices: ChoicesOfSequences) -> None:
    """Give the experts of models a capacity; see `MixtureOfExperts`."""
    for mixture in mixtures_in(nets):
        mixture.capacity, mixture.gather_places = capacity, choices.gather if choices.axis.size > 1 else None


def exchange_rows(
    rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Sequence[int]], Tensor], axis: Axis
) -> Tensor:
    """Return what the experts of all ranks make of rows (rows, dmodel), which are sorted by expert.

    Args:
        counts: rows of each expert, (experts,).
        compute: applies the experts of this rank to rows that are sorted by expert, given the rows of each.
    """
    ranks = axis.size
    to_ranks = counts.view(ranks, -1)  # (ranks, experts of a rank)
    from_ranks = once(lambda: _exchange_counts(to_ranks, axis))
    sent, received = to_ranks.sum(dim=1).tolist(), from_ranks.sum(dim=1).tolist()
    go = partial(_exchange, sent=sent, received=received, axis=axis)
    go_back = partial(_exchange, sent=received, received=sent, axis=axis)

    # Rows arrive by source, and from each source by expert; the experts need them the other way round.
    expert = torch.arange(to_ranks.shape[1], device=rows.device).repeat(ranks).repeat_interleave(from_ranks.flatten())
    by_expert = expert.argsort(stable=True)
    by_source = inverse_of(by_expert)
    arrived = linear_map(rows, lambda x: go(x)[by_expert], lambda grad: go_back(grad[by_source]).mul_(ranks))
    outputs = compute(arrived, from_ranks.sum(dim=0).tolist())
    return linear_map(outputs, lambda x: go_back(x[by_source]), lambda grad: go(grad / ranks)[by_expert])


def _exchange_counts(to_ranks: Tensor, axis: Axis) -> Tensor:
    from_ranks = torch.empty_like(to_ranks)
    with named("the number of rows for each expert", "counts of rows"):
        dist.all_to_all_single(from_ranks, to_ranks.contiguous(), group=axis.group)
    return from_ranks


def _exchange(rows: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """Send the first `sent[0]` rows to the first rank, …, and return the rows that all ranks sent to this one."""
    arrived = rows.new_empty(sum(received), rows.shape[1])
    with named("the rows of experts", "rows of experts"):
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=axis.group)
    return arrived


class LoadBalance:
    """Balances the load of experts without a loss (Wang et al., arXiv 2408.15664).

    After each step, the correction of an expert's score rises by `rate` if it had fewer tokens than the mean, and falls
    if it had more. Loads are integers, so the corrections are the same in every layout.

    Args:
        nets: this rank's stages.
        rate: 0 for no balance.
        over: the ranks that have other tokens, and the same routers; by default all ranks.

    Attributes:
        loads: tokens of each expert in the last step, (layers of this rank, experts), int64; also those that a
            capacity dropped.
        dropped: rows that it dropped, in these layers.
        smallest_gap: in the last step, on this rank; see `MixtureOfExperts`.
    """

    def __init__(self, nets: Iterable[nn.Module], rate: float, over: Axis | None = None) -> None:
        self._mixtures, self._rate, self._over = mixtures_in(nets), rate, over or all_ranks("ep")
        self.loads, self.smallest_gap = torch.zeros(0, 0, dtype=torch.int64), float("inf")
        self.dropped = 0
        self._restart()

    def _restart(self) -> None:
        for mixture in self._mixtures:
            mixture.load, mixture.dropped = torch.zeros_like(mixture.load), torch.zeros_like(mixture.dropped)
            mixture.smallest_gap = float("inf")

    @torch.no_grad()
    def step(self) -> dict[str, Any]:
        """Change the corrections by the loads since the last call; all ranks `over` which loads are summed call it.

        Returns:
            Values for the record of the step: loads by layer and expert; the fullest relative to the mean; the gap.
        """
        if not self._mixtures:
            return {}
        counts = torch.stack([torch.cat([m.load, m.dropped.to(m.load.device).view(1)]) for m in self._mixtures])
        self.smallest_gap = min(mixture.smallest_gap for mixture in self._mixtures)
        self._restart()
        if self._over.size > 1:
            with named("the loads of experts", "loads"):
                dist.all_reduce(counts, group=self._over.group)
        self.loads, self.dropped = counts[:, :-1], int(counts[:, -1].sum())
        for mixture, load in zip(self._mixtures, self.loads, strict=True):
            below_mean = load.sum() - len(load) * load  # times the number of experts, to stay an integer
            mixture.gate.e_score_correction_bias.add_(below_mean.sign(), alpha=self._rate)
        fullest = (self.loads.amax() / self.loads.double().mean()).item()  # all layers have the same mean
        limited = any(mixture.capacity for mixture in self._mixtures)
        values = {"expert_loads": self.loads.tolist(), "max_over_mean_load": fullest, "smallest_gap": self.smallest_gap}
        return values | ({"dropped_rows": self.dropped} if limited else {})
