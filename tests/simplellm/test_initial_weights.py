"""Initial weights follow from seed, name and shape, and from nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor

from simplellm.absent_weights import is_absent
from simplellm.initial_weights import initial_weight, initialize
from simplellm.llama import CausalLLama, LLama

pytestmark = pytest.mark.quick

NAME = "model.layers.1.mlp.up_proj.weight"
SIZES: dict[str, Any] = {"dmodel": 32, "num_heads": 4, "n_layers": 3, "ctx_size": 8}


def weights(seed: int) -> dict[str, Tensor]:
    return dict(LLama(CausalLLama, 64, **SIZES, seed=seed).state_dict())


def test_matrices_are_normal_and_vectors_ones() -> None:
    weight = initial_weight(0, NAME, (300, 500))
    assert weight.dtype == torch.float32
    assert weight.shape == (300, 500)
    assert weight.mean().abs() < 0.0005
    assert (weight.std() - 0.02).abs() < 0.0005
    assert (weight.abs() > 0.04).float().mean().sub(0.0455).abs() < 0.005  # beyond two standard deviations
    assert torch.equal(initial_weight(0, "model.norm.weight", (5,)), torch.ones(5))
    for bias in ("self_attn.q_proj.bias", "mlp.gate.e_score_correction_bias"):
        assert torch.equal(initial_weight(0, bias, (5,)), torch.zeros(5))


def test_seed_name_and_shape_decide() -> None:
    weight = initial_weight(0, NAME, (6, 20))
    assert torch.equal(weight, initial_weight(0, NAME, torch.Size([6, 20])))
    assert not torch.equal(weight, initial_weight(1, NAME, (6, 20)))
    assert not torch.equal(weight, initial_weight(0, NAME.replace("1", "2"), (6, 20)))
    assert not torch.equal(weight.flatten(), initial_weight(0, NAME, (20, 6)).flatten())
    # Seed and name must not run into each other.
    assert not torch.equal(initial_weight(1, "2", (6, 20)), initial_weight(12, "", (6, 20)))


@pytest.mark.parametrize(
    "build", [lambda: weights(0), lambda: initial_weight(0, NAME, (6, 20))], ids=["model", "weight"]
)
def test_the_global_random_generator_stays_where_it_is(build: Any) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    torch.testing.assert_close(build(), first, rtol=0, atol=0)


def test_a_model_without_weights_has_those_of_the_whole_one_by_one() -> None:
    usual, without = (LLama(CausalLLama, 64, **SIZES, experts=2, without_weights=each) for each in (False, True))
    assert without.initial is not None
    for (name, parameter), absent in zip(usual.named_parameters(), without.parameters(), strict=True):
        assert is_absent(absent)
        assert absent.requires_grad == parameter.requires_grad, "corrections of a router are not trained"
        assert torch.equal(without.initial(name), parameter)


def test_initialize_overwrites_every_parameter() -> None:
    model = LLama(CausalLLama, 64, **SIZES, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize(model, 3)
    torch.testing.assert_close(dict(model.state_dict()), weights(3), rtol=0, atol=0)
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in model.parameters())
