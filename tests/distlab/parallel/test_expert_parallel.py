"""Experts that ranks share: outputs, gradients, loads and bytes against one process, in float64."""

import itertools
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from support.processes import run_group
from torch import Tensor, nn

from distlab.axes.grid import Axis, Grid
from distlab.comm.context import context_of
from distlab.parallel.expert_parallel import ChoicesOfSequences, LoadBalance, own_experts, share_experts
from distlab.parallel.routes import Routes
from simplellm.errors import InputError
from simplellm.experts import MixtureOfExperts, equal_loads
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


def train_shared(rank: int, sizes: list[int]) -> tuple[Found, dict[str, int]]:
    axis = Grid(rank, {"ep": len(sizes)}).axis("ep")
    net = mixture_of(own_experts(EXPERTS, axis))
    share_experts([net], axis)
    found = train(net, axis, sizes)
    for name, gradient in found[1].items():
        if "experts" not in name:
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
    return found, dict(context_of().ledger.sent_bytes)


def ranked(x: Tensor, of: MixtureOfExperts | None = None) -> tuple[Tensor, Tensor]:
    """The three best scores for each token, and their experts, (tokens, 3) each."""
    gate = (of or mixture_of(range(EXPERTS))).gate
    scores, ids = ((x @ gate.weight.T).softmax(1) + gate.e_score_correction_bias).detach().topk(3)
    return scores, ids


def chosen(x: Tensor) -> Tensor:
    """The experts of each token, (tokens, 2)."""
    return ranked(x)[1][:, :2]


@pytest.mark.parametrize("sizes", [[10, 14], [11, 0, 13]], ids=str)
def test_is_one_process(sizes: list[int]) -> None:
    """Also where a rank has no tokens, or its experts get none."""
    alone = train(mixture_of(range(EXPERTS)), Grid(0, {}).axis("ep"), [TOKENS])
    ended = run_group(len(sizes), train_shared, sizes)
    outputs = torch.cat([found[0] for found, _ in ended], dim=1)
    gradients = {name: gradient for found, _ in ended for name, gradient in found[1].items()}
    assert alone[0].std() > 0.1
    torch.testing.assert_close((outputs, gradients), alone[:2], rtol=1e-13, atol=1e-13)
    assert all(found[2].equal(alone[2]) for found, _ in ended), "the loads are integers"
    load, start = chosen(values(0)).flatten().bincount(minlength=EXPERTS), mixture_of(range(EXPERTS))
    signs = (load.double().mean() - load).sign()
    assert {*signs.tolist()} == {-1, 0, 1}
    torch.testing.assert_close(alone[2], start.gate.e_score_correction_bias.detach() + 0.01 * signs)
    held = EXPERTS // len(sizes)
    leaving = sum(int((ids // held != rank).sum()) for rank, ids in enumerate(chosen(values(0)).split(sizes)))
    sent = sum(ledger.get("rows of experts", 0) for _, ledger in ended)
    assert sent == 4 * leaving * DMODEL * 8, "two ways, forward and backward"


def test_the_record_of_a_step_is_that_of_its_micro_batches_in_all_layers() -> None:
    nets = [mixture_of(range(EXPERTS)) for _ in range(3)]
    nets[0].gate.e_score_correction_bias.data[9] = 0.05  # the third layer has the smallest gap
    nets[1].gate.e_score_correction_bias.data[5] = 9  # the second has the fullest expert
    for net in nets:
        net.capacity = 0.75
    balance, mean, gaps = LoadBalance(nets, 0, Grid(0, {}).axis("ep")), 2 * TOKENS / EXPERTS, list[float]()
    for seeds in ((0, 3), (1, 2)):
        loads, found = torch.zeros(2, 3, EXPERTS, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.float64)
        for (number, seed), (layer, net) in itertools.product(enumerate(seeds), enumerate(nets)):
            net(values(seed))
            scores, ids = ranked(values(seed), net)
            loads[number, layer] = ids[:, :2].flatten().bincount(minlength=EXPERTS)
            found[number, layer] = (scores[:, 1] - scores[:, 2]).min()
        record, of_step = balance.step(), loads.sum(0)
        assert record["expert_loads"] == of_step.tolist()
        assert record["max_over_mean_load"] == of_step.max() / (2 * mean) > of_step[0].max() / (2 * mean)
        assert record["dropped_rows"] == (loads - 0.75 * mean).clamp(min=0).sum()
        assert record["smallest_gap"] == pytest.approx(float(found.min()))
        assert found.min() < found[:, 0].min()
        gaps.append(float(found.min()))
    assert gaps[0] < gaps[1], "the second step does not count the first"


def test_in_a_measurement_all_experts_have_equal_loads_which_leave_no_trace() -> None:
    nets = [mixture_of(range(EXPERTS)) for _ in range(2)]
    nets[0](values(1))
    balance, before = LoadBalance(nets, 0, Grid(0, {}).axis("ep")), [net(values(0)) for net in nets]
    loads = chosen(values(0)).flatten().bincount(minlength=EXPERTS).tolist()
    record = balance.step()
    assert record["expert_loads"] == [loads] * 2, "without the pass before it was made"
    assert "dropped_rows" not in record, "without a capacity"
    counted = "load", "dropped", "smallest_gap", "most_rows_bytes"
    kept = [[float(torch.as_tensor(getattr(net, name)).sum()) for name in counted] for net in nets]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), equal_loads(nets):
        nets[0](values(0)[:, 1:])  # a measurement that fails
    with equal_loads(nets):
        for net in nets:
            net(values(0))
            assert net.load.tolist() == [2 * TOKENS // EXPERTS] * EXPERTS
            net.capacity = 0.5
            net(torch.zeros(4 * TOKENS, DMODEL, dtype=torch.float64))
            assert net.dropped == 4 * TOKENS
            net.capacity = 0
    assert [[float(torch.as_tensor(getattr(net, name)).sum()) for name in counted] for net in nets] == kept
    assert all(net(values(0)).equal(y) for net, y in zip(nets, before, strict=True))
    assert balance.step()["expert_loads"] == [loads] * 2, "without the pass of the measurement"


def test_routes_that_are_not_those_of_such_a_run_are_refused(tmp_path: Path) -> None:
    grid = Grid(0, {})
    axes = grid.axis("dp"), grid.axis("tp")
    net, other = mixture_of(range(EXPERTS)), MixtureOfExperts(DMODEL, 10, Mixture(EXPERTS, 1))

    def routes(way: Literal["record", "replay"], tokens: int = TOKENS, of: nn.Module = net) -> Routes:
        choices = ChoicesOfSequences(grid.axis("cp"), "contiguous")
        return Routes([nn.ModuleDict({"mlp": of})], way, tmp_path, *axes, choices, tokens, TOKENS)

    with pytest.raises(InputError, match=r"has no routes\.json that can be read; --record-routes writes it"):
        routes("replay")
    recorded = routes("record")
    net(values(0))
    recorded.step()
    with pytest.raises(InputError, match="a step had 24 tokens, and has 48; give the same global batch"):
        routes("replay", 2 * TOKENS)
    with pytest.raises(InputError, match="a token had 2 experts"):
        routes("replay", of=other)
    replayed = routes("replay")
    net(values(0))
    replayed.step()
    with pytest.raises(InputError, match=r"mlp\.0 has no routes of step 1"):
        net(values(0))
    (tmp_path / "mlp.0").unlink()
    with pytest.raises(InputError, match=r"mlp\.0 cannot be read \(No such file or directory\)"):
        net(values(0))


def replay_with_a_favourite(rank: int, folder: Path) -> list[float]:
    """Both ranks compute the same tokens; in the replay, a free choice would take expert 5 for each of them.

    The first micro-batch has the four tokens that take it anyway.
    """
    grid, net = Grid(rank, {"tp": 2}), mixture_of(range(EXPERTS))
    choices = ChoicesOfSequences(grid.axis("cp"), "contiguous")
    nets, of_both = [nn.ModuleDict({"mlp": net})], (grid.axis("dp"), grid.axis("tp"), choices, TOKENS, 4)
    x = values(0)[(chosen(values(0)) != 5).all(dim=1).int().argsort(stable=True)]
    for recording in (values(1), x):  # the second replaces the first
        recorded = Routes(nets, "record", folder, *of_both)
        for _ in range(2):
            right = [net(part) for part in recording.split(4)]
            recorded.step()
    dist.barrier()
    net.gate.e_score_correction_bias.data[5] = 9
    replayed = Routes(nets, "replay", folder, *of_both)
    others = []
    for _ in range(2):
        assert all(net(part).equal(y) for part, y in zip(x.split(4), right, strict=True))
        others.append(replayed.step()["other_routes"])
    _, second, third = ranked(x[4:5], net)[0][0]
    assert replayed.parted == f"step 0, mlp, token 4: gap {second - third:.1e}", "the first one"
    return others


def test_a_replay_counts_each_token_with_other_routes_once(tmp_path: Path) -> None:
    expected = int((chosen(values(0)) != 5).all(dim=1).sum())
    assert 0 < expected < TOKENS
    assert run_group(2, replay_with_a_favourite, tmp_path) == [[expected] * 2] * 2
