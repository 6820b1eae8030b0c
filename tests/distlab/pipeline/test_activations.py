"""The count of what autograd keeps, by hand on small graphs of float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.pipeline.actions import Backward, Forward
from distlab.pipeline.activations import MicroBatch, Stage
from distlab.pipeline.rehearsal import warm_up
from simplellm.experts import mixtures_in
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.saved_activations import SavedActivations

pytestmark = pytest.mark.quick

WEIGHT = nn.Parameter(torch.ones(8, 8))


GRAPHS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "the factor and the result": (lambda x: (x * x).exp(), 8 + 8),
    "nothing for a sum": (lambda x: x + x, 0),
    "both results": (lambda x: x.exp().exp(), 8 + 8),
    "views of one storage": (lambda x: x[:4] * x[4:], 8),
    "the whole storage of a view": (lambda x: x[:2] * x[:2], 8),
    "the constant factor only": (lambda x: x * torch.ones(3, 8), 24),
    "no parameter": (lambda x: x @ WEIGHT, 8),
    "no view of a parameter": (lambda x: x @ WEIGHT.T @ WEIGHT, 8 + 8),
    "nothing where nothing is differentiated": (lambda x: x.detach().exp() + x, 0),
}


@pytest.mark.parametrize(("graph", "kept_elements"), GRAPHS.values(), ids=GRAPHS.keys())
def test_each_saved_storage_counts_once_and_parameters_do_not(
    graph: Callable[[Tensor], Tensor], kept_elements: int
) -> None:
    kept = SavedActivations([WEIGHT])
    x = torch.ones(8, requires_grad=True)
    with kept.counting():
        y = graph(x)
    assert kept.now_bytes == kept.peak_bytes == 4 * kept_elements
    y.sum().backward()
    assert (kept.now_bytes, kept.peak_bytes) == (0, 4 * kept_elements)


def test_counts_several_forward_passes_until_their_backward_passes() -> None:
    kept = SavedActivations([])
    x = torch.ones(8, requires_grad=True)
    now = []
    with kept.counting():
        outputs = [(x * x).exp() for _ in range(3)]
    now.append(kept.now_bytes)
    for y in outputs:
        y.sum().backward()
        now.append(kept.now_bytes)
    x.exp()
    assert now == [32 * 4, 32 * 3, 32 * 2, 0], "the input, and each pass's result"
    assert kept.peak_bytes == 32 * 4


def test_what_is_dropped_without_a_backward_pass_is_no_longer_kept() -> None:
    kept = SavedActivations([])
    with kept.counting():
        y = torch.ones(8, requires_grad=True).exp()
    assert kept.now_bytes == 32
    del y
    assert (kept.now_bytes, kept.peak_bytes) == (0, 32)


def test_a_tensor_kept_by_hand_counts_while_it_is_held_and_once() -> None:
    kept = SavedActivations([WEIGHT])
    with kept.counting():
        y = torch.ones(8, requires_grad=True).exp()
    holds = [kept.keep(y), kept.keep(WEIGHT), kept.keep(torch.ones(2)), kept.keep(y[:3])]
    assert kept.now_bytes == 32 + 8
    y.sum().backward()
    assert kept.now_bytes == 32 + 8
    del holds[2]
    assert kept.now_bytes == 32
    del holds
    assert (kept.now_bytes, kept.peak_bytes) == (0, 32 + 8)


def test_what_is_still_kept_counts_among_the_most_since_the_last_look() -> None:
    kept = SavedActivations([])
    holds = [kept.keep(torch.ones(8)), kept.keep(torch.ones(2))]
    assert kept.take_recent_peak() == 40
    holds[1] = None
    holds[1] = kept.keep(torch.ones(1))
    assert kept.take_recent_peak() == 40, "it was there before the last tensor"
    assert kept.take_recent_peak() == 36


def test_a_rehearsal_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    collected: list[Tensor] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(collected.append)
    parameters, x = [*net.parameters()], torch.ones(2, 3, 4)
    state = torch.get_rng_state()
    with Stage(net, lambda y, _: y.mean(), None).rehearsed() as rehearsed:
        here = MicroBatch(rehearsed, torch.zeros(2, 3, dtype=torch.int64))
        for action in (Forward(1, 0), Backward(1, 0)):
            action.run(here, *[x] * isinstance(action, Forward))
        assert all(p.grad is not None and p.grad.any() for p in net.parameters()), "it computes gradients"
    assert torch.equal(torch.get_rng_state(), state)
    assert collected == []
    assert all(p is q for p, q in zip(net.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in parameters)


def test_before_the_first_message_the_tokens_of_experts_do_not_count() -> None:
    sizes: dict[str, Any] = {"dmodel": 8, "num_heads": 2, "n_layers": 2, "ctx_size": 6}
    net = LLama(CausalLLama, 32, **sizes, experts=4)
    chosen: list[Tensor] = []

    def routes(ids: Tensor, gaps: Tensor) -> Tensor:
        chosen.append(ids)
        return ids

    ids, (mixture, _) = torch.zeros(2, 6, dtype=torch.int64), mixtures_in([net])
    mixture.routes = routes
    net(ids)
    counts = mixture.load.tolist(), mixture.smallest_gap, mixture.most_rows_bytes
    assert len(chosen) == 1
    held = {0: Stage(net, partial(causalLLMLoss, vocab_size=32), None)}
    warm_up([Forward(0, 0), Backward(0, 0)], held, ids, None, 1, 8)
    assert len(chosen) == 1, "the routes of a run are recorded, or replayed, in training only"
    assert (mixture.load.tolist(), mixture.smallest_gap, mixture.most_rows_bytes) == counts
    net(ids)
    assert mixture.load.tolist() == [2 * tokens for tokens in counts[0]]
    assert len(chosen) == 2


def test_mixed_precision_keeps_no_copies_of_weights() -> None:
    """Only the residual stream, the norms and the logits are as large as in float32."""
    kept = {}
    for dtype in (torch.float32, torch.bfloat16):
        net = LLama(CausalLLama, 256, dmodel=64, num_heads=4, n_layers=2, ctx_size=32, dtype=dtype)
        counted = SavedActivations(net.parameters())
        with counted.counting():
            net(torch.zeros(1, 32, dtype=torch.int64))
        kept[dtype] = counted.peak_bytes
    assert kept[torch.bfloat16] < 0.6 * kept[torch.float32]
