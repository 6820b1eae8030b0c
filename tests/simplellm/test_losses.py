"""The loss against torch's own cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simplellm.errors import InputError
from simplellm.losses import causalLLMLoss, next_token_loss

pytestmark = pytest.mark.quick

VOCAB_SIZE = 17


def random_pair(batch: int, seq: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(batch, seq, VOCAB_SIZE, generator=generator).mul(4).to(dtype)
    return logits.requires_grad_(), torch.randint(VOCAB_SIZE, (batch, seq), generator=generator)


def expected_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), target[:, 1:].flatten())


@pytest.mark.parametrize(("batch", "seq"), [(3, 7), (1, 2), (4, 1 + VOCAB_SIZE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_cross_entropy_of_the_next_tokens(batch: int, seq: int, dtype: torch.dtype) -> None:
    logits, target = random_pair(batch, seq, dtype)
    loss = causalLLMLoss(logits, target, VOCAB_SIZE)
    expected = expected_loss(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    part = next_token_loss(logits, target.roll(-1, 1), predictions=0.5)
    torch.testing.assert_close(part, expected * batch * (seq - 1) / 0.5)
    # Scaled, as the parts of a divided batch scale it.
    (grad,) = torch.autograd.grad(loss / 3, logits)
    (expected_grad,) = torch.autograd.grad(expected / 3, logits)
    assert grad.dtype == dtype
    assert grad.abs().max() > 0.001
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-7)


def test_it_neither_changes_its_inputs_nor_wears_out() -> None:
    logits, target = random_pair(2, 5)
    before = logits.detach().clone(), target.clone()
    loss = causalLLMLoss(logits, target, VOCAB_SIZE)
    (once,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(once, twice, rtol=0, atol=0)
    torch.testing.assert_close((logits.detach(), target), before, rtol=0, atol=0)


def test_far_fetched_logits_stay_finite() -> None:
    logits = torch.zeros(1, 2, VOCAB_SIZE)
    logits[0, 0, 4] = 1e4
    logits.requires_grad_()
    loss = causalLLMLoss(logits, torch.tensor([[0, 5]]), VOCAB_SIZE)
    loss.backward()
    assert loss.item() == 1e4
    assert logits.grad is not None
    assert logits.grad[0, 0, [4, 5]].tolist() == [1, -1]


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_what_all_logits_have_in_common_costs_no_precision(offset: float) -> None:
    logits, target = random_pair(2, 5)
    moved = logits.detach().round() + offset  # exact in float32
    torch.testing.assert_close(
        causalLLMLoss(moved, target, VOCAB_SIZE), expected_loss(logits.detach().round(), target), rtol=1e-6, atol=0
    )


def test_a_confident_prediction_keeps_its_small_loss() -> None:
    logits = torch.zeros(1, 2, VOCAB_SIZE)
    logits[0, 0, 5] = 14.0
    loss = causalLLMLoss(logits, torch.tensor([[0, 5]]), VOCAB_SIZE)
    exact = torch.tensor(1 + (VOCAB_SIZE - 1) * 2.718281828459045**-14, dtype=torch.float64).log()
    assert 1e-5 < exact.item() < 2e-5
    assert abs(loss.item() - exact.item()) < 1e-7


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_a_loss_that_is_not(bad: float) -> None:
    logits, target = random_pair(2, 5)
    with torch.no_grad():
        logits[1, 2, 3] = bad
    assert not causalLLMLoss(logits, target, VOCAB_SIZE).isfinite()


def test_logits_in_another_memory_order() -> None:
    logits, target = random_pair(3, 7)
    transposed = logits.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    causalLLMLoss(transposed, target, VOCAB_SIZE).backward()
    torch.testing.assert_close(transposed.grad, torch.autograd.grad(expected_loss(logits, target), logits)[0])


def test_a_sequence_of_one_token_is_refused() -> None:
    logits, target = random_pair(3, 1)
    with pytest.raises(InputError) as error:
        causalLLMLoss(logits, target, VOCAB_SIZE)
    assert str(error.value) == "a sequence of length 1 has no token to predict: it must be at least 2"


def test_each_sequence_ignores_its_own_positions() -> None:
    logits, next_tokens = torch.randn(2, 4, 7, requires_grad=True), torch.arange(8).view(2, 4) % 7
    ignored = torch.tensor([[True, False, False, True], [False, False, False, True]])
    expected = F.cross_entropy(logits[~ignored], next_tokens[~ignored], reduction="sum") / 3.5
    own = next_token_loss(logits, next_tokens, ignored, 3.5)
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(next_token_loss(logits, next_tokens, ignored), expected * 3.5 / 6)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (own, expected)))
