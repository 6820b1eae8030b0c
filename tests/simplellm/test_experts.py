"""A mixture of experts: against its formula, its ties, its balance, and what a second forward pass keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simplellm.experts import MixtureOfExperts
from simplellm.initial_weights import initialize
from simplellm.layers import MLP
from simplellm.llama import CausalLLama, LLama
from simplellm.options import Mixture, Recompute

DMODEL, HIDDEN, TOKENS = 8, 12, 50


def mixture_of(sizes: Mixture) -> MixtureOfExperts:
    """A mixture in float64, with weights as after training."""
    net = MixtureOfExperts(DMODEL, HIDDEN, sizes)
    initialize(net, seed=3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(20)
    return net.double()


def by_formula(net: MixtureOfExperts, x: Tensor) -> Tensor:
    """One token after another, and one expert after another."""
    sizes, rows = net.sizes, []
    for row in x:
        logits = net.gate.weight @ row
        scores = logits.softmax(0) if sizes.scores == "softmax" else logits.sigmoid()
        choice = (scores + net.gate.e_score_correction_bias).tolist()
        ids = sorted(range(sizes.experts), key=lambda number: (-choice[number], number))[: sizes.per_token]
        weights = scores[ids] / scores[ids].sum()
        y = sum(weight * net.experts[str(number)](row) for weight, number in zip(weights, ids, strict=True))
        rows.append(y + (net.shared_experts(row) if net.shared_experts else 0))
    return torch.stack(rows)


@pytest.mark.quick
@pytest.mark.parametrize(
    "sizes", [Mixture(5, 2), Mixture(5, 1, True, "sigmoid"), Mixture(3, 3, False, "sigmoid"), Mixture(1, 1)]
)
def test_is_its_formula(sizes: Mixture) -> None:
    net = mixture_of(sizes)
    with torch.no_grad():
        net.gate.e_score_correction_bias[0] = -9 if sizes.experts > sizes.per_token else 0  # without tokens
    x = torch.randn(TOKENS, DMODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [parameter for parameter in net.parameters() if parameter.requires_grad]
    outputs: list[Tensor] = []
    gradients: list[list[Tensor]] = []
    ways: list[Callable[[Tensor], Tensor]] = [net, lambda x: by_formula(net, x)]
    for forward in ways:
        own = x.clone().requires_grad_()
        outputs.append(forward(own))
        found = torch.autograd.grad(outputs[-1].square().sum(), [own, *leaves], allow_unused=True)
        gradients.append([torch.zeros_like(p) if g is None else g for p, g in zip([own, *leaves], found, strict=True)])
    assert outputs[1].std() > 0.1
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)
    assert net.load.sum() == TOKENS * sizes.per_token, "no token is lost"
    assert net.load.numel() == sizes.experts
    assert (net.load[0] == 0) == (sizes.experts > sizes.per_token)


@pytest.mark.quick
def test_a_model_is_built_again_from_its_options() -> None:
    sizes: dict[str, Any] = {"dmodel": 32, "num_heads": 4, "n_layers": 1, "ctx_size": 9, "experts": 5, "seed": 1}
    others = {"head_dim": 6, "experts_per_token": 3, "shared_expert": True, "router_scores": "sigmoid", "qk_norm": True}
    for unusual in (others, {"experts": 0, "attention_bias": True}, {"experts": 0, "mlp_bias": True}):
        net = LLama(CausalLLama, 50, **sizes | unusual)
        again, ids = LLama(CausalLLama, **net.options, seed=1), torch.arange(9)[None]
        assert again.state_dict().keys() == net.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(again(ids), net(ids))


def test_routers_are_not_rounded_to_bfloat16() -> None:
    sizes: dict[str, Any] = {"dmodel": 8, "num_heads": 2, "n_layers": 1, "ctx_size": 4, "experts": 3}
    net = LLama(CausalLLama, 50, **sizes, dtype=torch.bfloat16)
    rounded = set(map(id, net.rounded_parameters()))
    exact = {name for name, parameter in net.named_parameters() if id(parameter) not in rounded}
    of_layer = "mlp.gate.weight mlp.gate.e_score_correction_bias input_layernorm.weight post_attention_layernorm.weight"
    of_model = {"model.embed_tokens.weight", "model.norm.weight"}
    assert exact == of_model | {f"model.layers.0.{name}" for name in of_layer.split()}
    assert LLama(CausalLLama, 50, **sizes).rounded_parameters() == []
    net, dtypes = LLama(CausalLLama, 50, **sizes, dtype=torch.bfloat16, shared_expert=True), list[torch.dtype]()
    for module in (module for module in net.modules() if isinstance(module, MLP)):
        module.register_forward_hook(lambda _, inputs, output: dtypes.extend((inputs[0].dtype, output.dtype)))
    net(torch.arange(4)[None])
    assert dtypes == 2 * (3 + 1) * [torch.bfloat16], "of all experts, and of the shared one"


def test_a_capacity_drops_the_last_rows_of_each_sequence() -> None:
    """Nothing is added for them, and the weights of a token's other experts stay; validation drops none."""
    net, x = mixture_of(Mixture(4, 2)), torch.randn(3, 8, DMODEL, dtype=torch.float64)
    with torch.no_grad():
        whole = net(x)
    net.capacity = 0.6
    most, dropped, expected = 3, 0, []  # 0.6 * 8 * 2 / 4, rounded up
    for sequence in x:
        taken = [0] * 4
        for row in sequence:
            scores = (net.gate.weight @ row).softmax(0)
            weights, ids = scores.topk(2)
            y = torch.zeros_like(row)
            for weight, number in zip(weights / weights.sum(), ids.tolist(), strict=True):
                taken[number] += 1
                dropped += taken[number] > most
                y = y + weight * net.experts[str(number)](row) * (taken[number] <= most)
            expected.append(y)
    torch.testing.assert_close(net(x).flatten(0, 1), torch.stack(expected), rtol=1e-13, atol=1e-13)
    assert int(net.dropped) == dropped > 0
    with torch.no_grad():
        assert net(x).equal(whole)
    assert net.load.sum() == 3 * 8 * 2, "rows that were asked for in training"
    net(x)
    assert (int(net.dropped), int(net.load.sum())) == (2 * dropped, 2 * 3 * 8 * 2), "of all passes"


def test_the_rows_that_are_told_are_those_of_the_largest_pass_of_training() -> None:
    net, told = mixture_of(Mixture(4, 2)), []
    for tokens in (4, 6, 2):
        net(torch.randn(tokens, DMODEL, dtype=torch.float64))
        told.append(net.most_rows_bytes / net.hidden_dim)
    with torch.no_grad():
        net(torch.randn(9, DMODEL, dtype=torch.float64))
    assert told[0] < told[1] == told[2] == 1.5 * told[0]
    assert net.most_rows_bytes == 6 * 2 * (DMODEL + 4 * net.hidden_dim) * 8


def test_ties_go_to_the_lower_number() -> None:
    net = mixture_of(Mixture(40, 3))  # torch's sort happens to keep the order of up to 16
    with torch.no_grad():
        net.gate.weight.zero_()
    net(torch.randn(TOKENS, DMODEL, dtype=torch.float64))
    assert net.load.tolist() == [TOKENS] * 3 + [0] * 37
    assert net.smallest_gap == 0
    other, x = mixture_of(Mixture(7, 3)), torch.randn(TOKENS, DMODEL, dtype=torch.float64)
    other(x)
    ranked = (x @ other.gate.weight.T).softmax(1).sort(descending=True).values
    assert other.smallest_gap == pytest.approx(float((ranked[:, 2] - ranked[:, 3]).detach().min())) != 0
    initialize(net, seed=3)
    net(x)
    assert net.smallest_gap == 0, "of all passes"


@pytest.mark.parametrize("recompute", ["except-attention", "blocks", "all"])
def test_recomputation_keeps_the_routes(recompute: Recompute) -> None:
    """Also if the router has changed its mind, as it may on another number of threads; and it counts once."""
    sizes: dict[str, Any] = {"dmodel": 8, "num_heads": 2, "n_layers": 2, "hidden_dim": 12, "experts": 6, "ctx_size": 16}
    ids = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(1))
    gradients, loads = [], []
    for way in ("none", recompute):
        net = LLama(CausalLLama, 99, **sizes, recompute=way)
        mixtures = [module for module in net.modules() if isinstance(module, MixtureOfExperts)]
        loss = net(ids).logsumexp(-1).mean()
        for mixture in mixtures:
            mixture.gate.e_score_correction_bias.data.copy_(torch.arange(6.0))
        loss.backward()
        gradients.append([parameter.grad for parameter in net.parameters() if parameter.requires_grad])
        loads.append([mixture.load.tolist() for mixture in mixtures])
    assert loads[0] == loads[1]
    for expected, own in zip(*gradients, strict=True):
        assert own.equal(expected)
        assert own.abs().max() > 0
