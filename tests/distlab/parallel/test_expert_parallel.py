"""Experts that ranks share: outputs, gradients, loads and bytes against one process, in float64."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks
from torch import Tensor

from distlab.axes.grid import Axis, Grid
from distlab.parallel.expert_parallel import LoadBalance, exchange_rows, own_experts, share_experts
from simplellm.feed_forward import MixtureOfExperts
from simplellm.initial_weights import initialize
from simplellm.options import Mixture

EXPERTS, DMODEL, TOKENS = 12, 8, 24
IDLE = range(4)  # experts that get no tokens: all that rank 0 of three holds
Found = tuple[Tensor, dict[str, Tensor], Tensor]


def mixture_of(own: range) -> MixtureOfExperts:
    net = MixtureOfExperts(DMODEL, 10, Mixture(EXPERTS, 2, own=own))
    initialize(net, seed=3)
    for name, parameter in net.named_parameters():
        parameter.data.mul_(20).add_(0.1 * parameter.data.abs() if "gate" in name else 0)
    net.gate.e_score_correction_bias.data[list(IDLE)] = -9
    return net.double()


def values(seed: int) -> Tensor:
    return torch.randn(TOKENS, DMODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(net: MixtureOfExperts, axis: Axis, sizes: list[int]) -> Found:
    """This rank's outputs beside the gradients of its inputs, those of the weights, and the new corrections."""
    x, weights = (values(seed).split(sizes)[axis.rank] for seed in (0, 1))
    balance = LoadBalance([net], 0.01, axis)
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    (axis.size * (y * weights).sum()).backward()  # the loss of one process is the mean over the ranks
    assert leaf.grad is not None
    balance.step()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return torch.stack([y.detach(), leaf.grad / axis.size]), gradients, net.gate.e_score_correction_bias.detach()


def train_shared(rank: int, sizes: list[int], fault: str, port: int) -> tuple[Found, dict[str, int]]:
    grid = Grid(rank, {"ep": len(sizes)})
    with process_group(rank, len(sizes), port) as context:
        axis = grid.axis("ep")
        net = mixture_of(own_experts(EXPERTS, axis))
        share_experts([net], axis)
        if fault == "not exchanged":
            net.passage = lambda rows, counts, compute: compute(rows, [len(rows), *[0] * (len(net.experts) - 1)])
        if fault == "sums":

            def unscaled(rows: Tensor, counts: Tensor, compute: Any) -> Tensor:
                def scaled(own: Tensor, counts: Any) -> Tensor:
                    outputs = compute(own, counts)
                    return outputs * axis.size - outputs.detach() * (axis.size - 1)  # only the gradient differs

                return exchange_rows(rows, counts, scaled, axis)

            net.passage = unscaled
        found = train(net, axis, sizes)
        for name, gradient in found[1].items():
            if "experts" not in name:
                dist.all_reduce(gradient, dist.ReduceOp.AVG)
        return found, dict(context.ledger.sent_bytes)


def chosen(x: Tensor) -> Tensor:
    """The experts of each token, (tokens, 2)."""
    gate = mixture_of(range(EXPERTS)).gate
    return ((x @ gate.weight.T).softmax(1) + gate.e_score_correction_bias).topk(2).indices


@pytest.fixture(scope="module")
def alone() -> Found:
    return train(mixture_of(range(EXPERTS)), Grid(0, {}).axis("ep"), [TOKENS])


def differences(ended: list[tuple[Found, dict[str, int]]], alone: Found) -> float:
    """The largest relative difference between the ranks' results and those of one process."""
    outputs = torch.cat([found[0] for found, _ in ended], dim=1)
    merged = {name: gradient for found, _ in ended for name, gradient in found[1].items()}
    assert merged.keys() == alone[1].keys()
    pairs = [(outputs, alone[0]), *((merged[name], expected) for name, expected in alone[1].items())]
    return max(float((own - expected).abs().max()) / max(float(expected.abs().max()), 1) for own, expected in pairs)


@pytest.mark.parametrize("sizes", [[24], [10, 14], [11, 0, 13], [6, 6, 6, 6]], ids=str)
def test_is_one_process(sizes: list[int], alone: Found) -> None:
    """Also where a rank has no tokens, or its experts get none."""
    ended = run_ranks(len(sizes), train_shared, sizes, "", free_port())
    assert alone[0].std() > 0.1
    assert differences(ended, alone) < 1e-13
    assert all(found[2].equal(alone[2]) for found, _ in ended), "the loads are integers"
    assert alone[2].unique().numel() > 2
    leaving = sum(
        int((ids // (EXPERTS // len(sizes)) != rank).sum()) for rank, ids in enumerate(chosen(values(0)).split(sizes))
    )
    sent = sum(ledger.get("rows of experts", 0) for _, ledger in ended)
    assert sent == 4 * leaving * DMODEL * 8, "two ways, forward and backward"


@pytest.mark.parametrize("fault", ["not exchanged", "sums"])
def test_faults_show(fault: str, alone: Found) -> None:
    """Rows that stay where they are; gradients of experts that are multiplied by the ranks."""
    assert differences(run_ranks(2, train_shared, [10, 14], fault, free_port()), alone) > 1e-2
