"""Ranks that share sequences compute what one process computes of the whole ones, forward and backward."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from support.processes import run_group
from torch import Tensor

from distlab.axes.grid import Axis, Grid, all_ranks
from distlab.comm.context import TransportName, context_of
from distlab.parallel.context_parallel import ContextParallel, positions_of, visible
from distlab.parallel.options import CPKind, CPOrder
from distlab.parallel.ring_attention import KeyBlock, Ring, ring_attention
from simplellm.documents import within_documents
from simplellm.layers import RMSNorm
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.saved_activations import SavedActivations

END, VOCAB = 7, 50
KINDS: tuple[CPKind, ...] = get_args(CPKind)
ORDERS: tuple[CPOrder, ...] = get_args(CPOrder)


def sequences(seq: int, seed: int = 0) -> Tensor:
    """Token ids (2, seq), of several documents."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (2, seq), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = END
    return ids


def model(key_heads: int) -> CausalLLama:
    return LLama(CausalLLama, VOCAB, dmodel=24, num_heads=12, num_kv_heads=key_heads, n_layers=2, hidden_dim=40)


def loss_of(net: CausalLLama, ids: Tensor, end: int | None) -> Tensor:
    """What one process computes."""
    part = None if end is None else within_documents(ids, end)
    return causalLLMLoss(net(ids, part=part), ids, VOCAB)


def exact_model(key_heads: int) -> CausalLLama:
    """The model in float64, whose norms would else return float32."""
    net = model(key_heads).double()
    for module in net.modules():
        if isinstance(module, RMSNorm):
            module.dtype = torch.float64
    return net


def test_attention_around_a_ring_has_the_dtype_of_the_queries() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.bfloat16)
    ring = Ring(Grid(0, {}).axis("cp"), [KeyBlock(0, (slice(None), slice(None)))])
    assert ring_attention(q, k, v, ring).dtype == torch.bfloat16


def train_exactly(_: int, lengths: tuple[int, ...]) -> None:
    """Loss and gradients of the whole model in float64; with labels shifted within the parts, they are others."""
    axis = all_ranks("cp")
    for end, seq in itertools.product((None, END), lengths):
        net, ids = exact_model(4 if seq == 13 else 12), sequences(seq)
        expected = loss_of(net, ids, end)
        expected.backward()
        gradients = [torch.as_tensor(parameter.grad) for parameter in net.parameters()]
        for kind, order in itertools.product(KINDS, ORDERS):
            net.zero_grad()
            part, chunks = ContextParallel(axis, kind, order, end).part(ids), 1 + (order == "zigzag")
            assert part.ids.shape[1] == chunks * math.ceil(seq / (chunks * axis.size)), "no more padding than it takes"
            logits = net(part.ids, part=part.sequence)
            loss = part.loss(logits)
            loss.backward()
            rolled = replace(part, next_tokens=part.ids.roll(-1, dims=1)).loss(logits.detach())
            own = [loss.detach(), rolled, *(p.grad for p in net.parameters() if p.grad is not None)]
            loss, rolled, *averages = mean_over(axis, own)
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
            for average, gradient in zip(averages, gradients, strict=True):
                assert (average - gradient).abs().max() <= 1e-13 * gradient.abs().max() > 0, (kind, order, end, seq)
            assert (rolled - expected).abs() > 1e-6, "the control: these labels are wrong"


@pytest.mark.parametrize(("ranks", "transport", "lengths"), [(3, "gloo", (24, 13)), (4, "auto", (13,))])
def test_losses_and_gradients_are_those_of_one_process(
    ranks: int, transport: TransportName, lengths: tuple[int, ...]
) -> None:
    run_group(ranks, train_exactly, lengths, transport=transport, deadline=120)


def count_kept(rank: int, ranks: int, seq: int) -> int:
    """Bytes that the blocks of a model keep for the backward pass."""
    net, part = model(12), ContextParallel(all_ranks("cp"), "ring").part(sequences(seq))
    saved = SavedActivations(net.parameters())
    with saved.counting():
        net(part.ids, part=part.sequence).sum().backward()
    return saved.peak_bytes


def test_activations_fall_to_a_fraction_and_four_ranks_hold_four_times_the_sequence() -> None:
    kept = {size: run_group(size[0], count_kept, *size) for size in ((1, 64), (2, 64), (4, 64), (4, 256))}
    [whole] = kept[1, 64]
    assert kept[2, 64] == pytest.approx([whole / 2] * 2, rel=0.05)
    assert kept[4, 64] == pytest.approx([whole / 4] * 4, rel=0.05)
    assert kept[4, 256] == pytest.approx([whole] * 4, rel=0.05)


def mean_over(axis: Axis, tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        dist.all_reduce(tensor)
    return [tensor / axis.size for tensor in tensors]


def count_bytes(rank: int, ranks: int, kind: CPKind) -> dict[str, int]:
    batch, seq, heads, key_heads, head_dim = 2, 8 * ranks, 12, 4, 6
    context = context_of()
    part = ContextParallel(all_ranks("cp"), kind).part(torch.zeros(batch, seq, dtype=torch.long))
    q, k, v = (torch.randn(batch, n, seq // ranks, head_dim, requires_grad=True) for n in (heads, key_heads, key_heads))
    before = context.ledger.sent_bytes.copy()
    part.sequence.attend(q, k, v).sum().backward()
    return {kind: sent for kind, sent in (context.ledger.sent_bytes - before).items() if kind != "control"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(ranks: int, kind: CPKind) -> None:
    batch, seq, heads, key_heads, head_dim, element = 2, 8 * ranks, 12, 4, 6, 4
    whole = 2 * batch * seq * key_heads * head_dim * element  # all keys and values of a layer
    once = whole * (ranks - 1) // ranks
    expected = {
        "ring": {"keys and values": 2 * once, "gradients of keys and values": once},
        "gather": {"keys and values": once, "gradients of keys and values": once},
        "heads": {
            "heads": 2 * (2 * heads + 2 * key_heads) * batch * seq * head_dim * element * (ranks - 1) // ranks**2
        },
    }[kind]
    assert run_group(ranks, count_bytes, ranks, kind) == [expected] * ranks


def test_zigzag_gives_all_ranks_the_same_work() -> None:
    most: dict[CPOrder, list[float]] = {"contiguous": [1.5, 1.75], "zigzag": [1, 1]}  # over the mean
    for order, expected in most.items():
        for ranks, most_work in zip((2, 4), expected, strict=True):
            work = [sum(2 * p + 1 for p in positions_of(r, ranks, 2 * ranks, order).tolist()) for r in range(ranks)]
            assert max(work) * ranks / sum(work) == most_work


def test_zigzag_gives_each_rank_the_same_work_in_each_step_of_the_ring() -> None:
    for own, source in itertools.permutations(range(4), 2):
        seen = visible(own, source, 2, "zigzag")
        assert seen is not None
        queries, keys = (len(range(2)[part]) for part in seen)
        assert queries * keys == 2


def divide_heads(rank: int) -> str:
    q, k = torch.zeros(1, 3, 4, 2), torch.zeros(1, 1, 4, 2)
    part = ContextParallel(all_ranks("cp"), "heads").part(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="cannot exchange") as refused:
        part.sequence.attend(q, k, k)
    assert context_of().world_size == 2
    return str(refused.value)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    assert run_group(2, divide_heads) == ["2 ranks cannot exchange 3 heads: each needs as many as the others"] * 2
