"""The embedding and the loss over slices of the vocabulary are those of the whole."""

import pytest
import torch
from support.processes import run_group
from torch import nn

from distlab.comm.context import context_of
from distlab.parallel.tp_group import VOCABULARY, TPGroup
from distlab.parallel.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_loss
from simplellm.errors import InputError
from simplellm.losses import causalLLMLoss

pytestmark = pytest.mark.quick

VOCAB = 50  # does not divide by 3


def slices_of_logits(rank: int, ranks: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    whole = (100 * torch.randn(2, 5, VOCAB, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(VOCAB, (2, 5), generator=generator)
    own = whole.detach().tensor_split(ranks, dim=-1)[rank].requires_grad_()
    expected, loss = causalLLMLoss(whole, target, VOCAB), vocabulary_parallel_loss(own, target, VOCAB)
    (3 * expected).backward()
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected)
    assert whole.grad is not None
    rtol = 1e-4 if dtype == torch.float32 else 1e-2  # the gradient is rounded to the dtype of the logits
    torch.testing.assert_close(own.grad, whole.grad.tensor_split(ranks, dim=-1)[rank], rtol=rtol, atol=1e-6)
    return context_of().ledger.sent_bytes["vocabulary activations"]


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16), (3, torch.float16)]
)
def test_the_loss_of_slices_is_the_loss_of_the_whole(ranks: int, dtype: torch.dtype) -> None:
    """Computed in float32 also where the logits are not."""
    tokens_bytes = 2 * 5 * 4
    sent = 2 * (ranks - 1) * tokens_bytes // ranks + 2 * (ranks - 1) * 2 * tokens_bytes // ranks
    assert run_group(ranks, slices_of_logits, ranks, dtype) == [sent] * ranks


def test_a_loss_needs_a_token_to_predict() -> None:
    with pytest.raises(InputError, match="--seq-len 1 leaves no token to predict"):
        vocabulary_parallel_loss(torch.zeros(2, 1, VOCAB), torch.zeros(2, 1, dtype=torch.int64), VOCAB)


def look_up(rank: int) -> None:
    """The loss looks for the token that follows, the embedding for each: neither finds one that there is not."""
    torch.manual_seed(0)
    whole = nn.Embedding(VOCAB, 4)
    split = VocabularyParallelEmbedding(whole, TPGroup("the embedding", VOCABULARY))
    logits = torch.randn(1, 4, VOCAB)
    own = logits.tensor_split(3, dim=-1)[rank]
    for token in (-1, -100, VOCAB, VOCAB + 30):
        ids = torch.tensor([[0, 20, token, 49]])
        for embedding in (whole, split):
            with pytest.raises(IndexError):
                embedding(ids)
        with pytest.raises(RuntimeError, match="out of bounds"):
            causalLLMLoss(logits, ids, VOCAB)
        with pytest.raises(RuntimeError, match="out of bounds"):
            vocabulary_parallel_loss(own, ids, VOCAB)
    ends = torch.tensor([[0, 16, 17, 33, 34, VOCAB - 1]])  # of the slices
    assert torch.equal(split.tp_group.all_reduce(split(ends), "activations"), whole(ends))


def test_tokens_outside_the_vocabulary_are_refused_on_all_ranks_as_by_the_whole() -> None:
    run_group(3, look_up)
