"""Activations computed again: the same losses and gradients, bit for bit, from less that is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.parallel.data import GradientBuckets
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.options import Recompute
from simplellm.recomputation import Recomputed, once
from simplellm.saved_activations import SavedActivations
from simplellm.weight_gradients import DeferredWeightGradients

VOCAB = 11
IDS = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))


def model(recompute: Recompute, **options: Any) -> CausalLLama:
    return LLama(CausalLLama, VOCAB, dmodel=16, num_heads=4, n_layers=3, ctx_size=8, recompute=recompute, **options)


def train(net: nn.Module) -> list[Tensor]:
    """Two micro-batches: the losses, and the sums of their gradients."""
    losses = [causalLLMLoss(net(ids), ids, VOCAB) for ids in IDS.chunk(2)]
    for loss in losses:
        loss.backward()
    return [*losses, *(torch.as_tensor(parameter.grad) for parameter in net.parameters())]


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2}, {"dtype": torch.bfloat16}, {"hidden_dim": 5, "n_layers": 1}], ids=str
)
@pytest.mark.parametrize("recompute", ["blocks", "except-attention", "all"])
def test_losses_and_gradients_are_those_without_recomputation(recompute: Recompute, options: dict[str, Any]) -> None:
    options = {"n_layers": 3, **options}
    usual, again = (
        train(LLama(CausalLLama, VOCAB, dmodel=16, num_heads=4, ctx_size=8, recompute=kind, **options))
        for kind in ("none", recompute)
    )
    assert all(torch.equal(a, b) for a, b in zip(usual, again, strict=True))
    assert usual[-1].abs().max() > 0


def kept_bytes(net: CausalLLama, ids: Tensor, vocab_size: int) -> tuple[int, int]:
    """At the peak, and what that would have been without recomputation."""
    saved = SavedActivations(net.parameters())
    with saved.counting():
        causalLLMLoss(net(ids), ids, vocab_size).backward()
    assert saved.now_bytes == 0, "nothing is kept after the backward pass"
    return saved.peak_bytes, saved.usual_peak_bytes


def test_at_most_the_blocks_inputs_and_one_block_are_kept() -> None:
    """With the default model's width, layers and heads, of which all that is kept is proportional to the tokens."""
    ids, options = torch.zeros(1, 8, dtype=torch.int64), {"dmodel": 288, "n_layers": 6, "ctx_size": 8, "device": "cpu"}
    [usual, blocks, everything], if_kept = zip(
        *(
            kept_bytes(LLama(CausalLLama, 4096, recompute=kind, **options), ids, 4096)
            for kind in ("none", "blocks", "all")
        ),
        strict=True,
    )
    assert set(if_kept) == {usual}
    one_block, two_blocks = (
        kept_bytes(LLama(CausalLLama, 4096, **{**options, "n_layers": n}), ids, 4096)[0] for n in (1, 2)
    )
    block, stream = two_blocks - one_block, ids.numel() * 288 * 4
    assert everything <= blocks == pytest.approx(block + 5 * stream, abs=2 * stream)
    assert everything <= 0.2 * usual


def test_what_follows_the_last_tensor_that_is_needed_is_not_computed_again() -> None:
    net = model("blocks")
    passes = {"down_proj": 0, "up_proj": 0}
    block: Any = net.model.layers["1"]
    for name in passes:
        getattr(block.mlp, name).register_forward_hook(lambda *_, name=name: passes.update({name: passes[name] + 1}))
    causalLLMLoss(net(IDS), IDS, VOCAB).backward()
    assert passes == {"down_proj": 1, "up_proj": 2}


def test_attention_that_is_kept_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, attend = list[Tensor](), nn.functional.scaled_dot_product_attention

    def count_and_attend(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(q)
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", count_and_attend)
    for kind, count in (("none", 3), ("blocks", 6), ("except-attention", 3)):
        calls.clear()
        train(model(kind))  # type: ignore[arg-type]
        assert len(calls) == 2 * count, "two micro-batches"


def test_hooks_see_each_gradient_once_and_buckets_are_filled_as_usual() -> None:
    net, full = model("all"), list[int]()
    buckets = GradientBuckets(net.parameters(), on_full=lambda bucket: full.append(bucket.index), bucket_bytes=5000)
    seen: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda _, name=name: seen.append(name))
    causalLLMLoss(net(IDS), IDS, VOCAB).backward()
    assert full == list(range(len(list(buckets))))
    assert len(full) > 2
    assert sorted(seen) == sorted(name for name, _ in net.named_parameters())


def test_gradients_of_weights_that_are_left_for_later_come_from_what_was_computed_again() -> None:
    results = []
    for kind in ("none", "blocks", "except-attention", "all"):
        net, later = model(kind), DeferredWeightGradients()
        with later.applied():
            loss = causalLLMLoss(net(IDS), IDS, VOCAB)
        loss.backward()
        assert all(parameter.grad is None for name, parameter in net.named_parameters() if "proj" in name)
        later.compute()
        results.append([torch.as_tensor(parameter.grad) for parameter in net.parameters()])
    assert all(torch.equal(same[0], other) for same in zip(*results, strict=True) for other in same[1:])


def test_a_call_within_a_call_keeps_nothing_by_itself_and_is_computed_again_once() -> None:
    calls: list[str] = []

    def inner(x: Tensor) -> Tensor:
        calls.append("inner")
        return x.exp()

    def outer(x: Tensor) -> Tensor:
        calls.append("outer")
        return Recomputed(inner)(x * x).sin()

    x = torch.linspace(0, 1, 5, requires_grad=True)
    [gradient] = torch.autograd.grad(Recomputed(outer)(x).sum(), x)
    assert calls == ["outer", "inner"] * 2
    torch.testing.assert_close(gradient, (x * x).exp().cos() * (x * x).exp() * 2 * x)


def test_a_second_backward_pass_through_one_graph_computes_again() -> None:
    calls = 0

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (x.exp() * x).sum()

    x = torch.linspace(0, 1, 5, requires_grad=True)
    y = Recomputed(function)(x)
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert calls == 3, "what the first has used is not kept"
    assert torch.equal(first, second)
    torch.testing.assert_close(first, x.exp() * (1 + x))


def test_random_numbers_are_drawn_again_and_those_that_follow_are_as_usual() -> None:
    """Dropout in a call, and another use of the generator after its backward pass."""
    results = []
    for recomputed in (False, True):
        torch.manual_seed(5)
        x = torch.linspace(1, 2, 100, requires_grad=True)

        def call(x: Tensor) -> Tensor:
            return nn.functional.dropout(x.exp(), 0.5).sin().exp()

        y = Recomputed(call)(x) if recomputed else call(x)
        [gradient] = torch.autograd.grad(y.sum() + torch.rand(()), x)
        results.append((y, gradient, torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert 20 < (results[0][1] == 0).sum() < 80, "about half are dropped"


def test_without_gradients_nothing_is_kept_or_counted() -> None:
    net = model("all")
    saved = SavedActivations(net.parameters())
    with torch.no_grad(), saved.counting():
        net(IDS)
    assert saved.peak_bytes == 0


def test_a_result_of_the_first_run_that_the_second_one_uses_counts() -> None:
    saved = SavedActivations([])
    with saved.counting():
        y = Recomputed(lambda x: x * once(lambda: torch.arange(1000.0)))(torch.ones(1000, requires_grad=True))
    assert saved.now_bytes == 8000, "with the input"
    y.sum().backward()
    del y
    assert saved.now_bytes == 0


def test_an_error_within_the_function_is_the_callers_and_leaves_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    saved, of_the_error = SavedActivations([]), SavedActivations([])
    with pytest.raises(RuntimeError, match="on purpose"), of_the_error.counting():
        Recomputed(fail)(torch.ones(1, requires_grad=True))
    with saved.counting():
        Recomputed(lambda x: x.exp().exp().sum())(torch.ones(1000, requires_grad=True))
    assert saved.peak_bytes == 4000, "only its input: other calls are computed again as before"
    assert of_the_error.peak_bytes < 4000, "no longer"
