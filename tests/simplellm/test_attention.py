"""Attention within documents, and to blocks of keys: the kernels and the formulas give the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from simplellm import mixed_precision
from simplellm.attention import attend_to_earlier
from simplellm.attention_blocks import (
    LARGEST_IN_FLOAT32,
    Mask,
    attention_block,
    attention_block_backward,
    merge,
    plain_backward,
    plain_forward,
)
from simplellm.documents import within_documents
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama, LLamaLastStage

END = 7


@pytest.mark.parametrize("end", [0, END])
def test_documents_in_one_sequence_are_computed_as_if_each_were_alone(
    end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document ends with its end token, which attends to the document."""
    documents = [torch.tensor([[*tokens, end]]) for tokens in ([1, 2, 3], [], [4, 4], [5])]
    ids = torch.cat([*documents, torch.tensor([[6, 1]])], 1)
    sizes: dict[str, Any] = {"dmodel": 12, "num_heads": 2, "n_layers": 2, "ctx_size": 16, "document_end": end}
    net = LLama(CausalLLama, 8, **sizes)
    together = net(ids).split([part.shape[1] for part in documents] + [2], dim=1)
    for logits, alone in zip(together, [*documents, ids[:, -2:]], strict=True):
        torch.testing.assert_close(logits, net(alone))
    monkeypatch.setattr(mixed_precision, "CPU_IS_FASTER_IN_BFLOAT16", False)
    rounded = LLama(CausalLLama, 8, **sizes, dtype=torch.bfloat16)(ids)
    assert (rounded - net(ids)).norm() < 0.03 * net(ids).norm()
    with torch.no_grad():
        cache = net.new_cache()
        continued = torch.cat([net(part, cache) for part in documents[0].split(2, dim=1)], dim=1)
    torch.testing.assert_close(continued, net(documents[0]))
    assert within_documents(ids, end).positions.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 0, 1]]


def test_a_stage_without_token_ids_has_to_be_given_the_documents() -> None:
    net = LLama(LLamaLastStage, 8, dmodel=12, num_heads=2, n_layers=1, ctx_size=16, first_layer=1, document_end=END)
    x, ids = torch.randn(1, 3, 12), torch.tensor([[1, END, 2]])
    with pytest.raises(InputError, match=r"needs the part of the sequence \(part=\) to mask documents"):
        net(x)
    torch.testing.assert_close(
        net(x, part=within_documents(ids, END))[:, 2:], net(x[:, 2:], part=net.part_of(ids[:, 2:]))
    )


def random(heads: int, length: int, seed: int) -> Tensor:
    return torch.randn(2, heads, length, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("mask", [None, "causal", torch.ones(5, 5, dtype=torch.bool).tril(-1).expand(2, 1, 5, 5)])
def test_a_block_has_the_output_and_the_gradients_of_the_formulas(mask: Mask, key_heads: int) -> None:
    """In the second of two blocks, some queries may see no key."""
    q, k, v, grad = random(4, 5, 0), random(key_heads, 5, 1), random(key_heads, 5, 2), random(4, 5, 3)
    first = attention_block(q, random(key_heads, 3, 4), random(key_heads, 3, 5), None)
    results = []
    for forward, backward in (attention_block, attention_block_backward), (plain_forward, plain_backward):
        out, total = (part.clone() for part in first)
        taken = forward(q, k, v, mask)
        merge(out, total, *taken)
        results.append((*taken, out, *backward(grad, q, k, v, out, total, mask)))
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("tokens", [LARGEST_IN_FLOAT32 // 64, LARGEST_IN_FLOAT32 // 64 + 1])
def test_attention_in_bfloat16_has_nearly_the_gradients_of_the_formulas(tokens: int, key_heads: int) -> None:
    """Also where its backward pass computes in float32: the results are rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, heads, tokens, 64, generator=generator).bfloat16() for heads in (4, key_heads, key_heads, 4)
    )
    narrow = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend_to_earlier(*narrow)
    found = torch.autograd.grad(out, narrow, grad)
    wide_out, total = plain_forward(q.float(), k.float(), v.float(), "causal")
    wide = plain_backward(grad.float(), q.float(), k.float(), v.float(), wide_out, total, "causal")
    plain = plain_forward(q, k, v, "causal"), plain_backward(grad, q, k, v, wide_out, total, "causal")
    assert all(map(torch.equal, plain[0], (wide_out, total))), "the formulas compute in float32"
    assert all(map(torch.equal, plain[1], (gradient.bfloat16() for gradient in wide)))
    for own, expected in zip((out, *found), (wide_out, *wide), strict=True):
        assert own.dtype == torch.bfloat16
        torch.testing.assert_close(own.float(), expected, rtol=0.02, atol=0.03)
