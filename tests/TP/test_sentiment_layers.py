"""Each split layer of the sentiment classifier against its one-process twin."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from support.sentiment_ranks import load, on_ranks, split_dim
from torch import Tensor, nn

from distlab.run.model import build_optimizer
from simplellm.errors import InputError

HIDDEN, HEADS, VOCABULARY = 24, 12, 17
ROUNDS = 3
OWN_WEIGHT = {"ColWiseLinear": 0, "Embedding": 1}  # along which dimension a layer's own weight is split


def twins(layer: str) -> tuple[nn.Module, nn.Module]:
    """A layer split, and in one process, from the same seed."""
    model, tp_model = load("model"), load("tp_model")
    layers: dict[str, list[Any]] = {  # the split type, its twin's, and the arguments of both
        "ColWiseLinear": [tp_model.ColWiseLinear, partial(nn.Linear, bias=False), HIDDEN, 36],
        "Embedding": [tp_model.Embedding, nn.Embedding, VOCABULARY, HIDDEN],
        "MultiHeadSelfAttention": [*both("MultiHeadSelfAttention"), HIDDEN, HEADS, 0.3],
        "a mask for each head": [*both("MultiHeadSelfAttention"), HIDDEN, HEADS, 0.3],
        "ColRowLinearPair": [tp_model.ColRowLinearPair, model.FeedForwardBlock, HIDDEN, 48, 7, [nn.GELU()]],
        "dropout in a pair": [tp_model.ColRowLinearPair, model.FeedForwardBlock, HIDDEN, 48, 7, DROPPING],
        "FeedForwardBlock": [*both("FeedForwardBlock"), HIDDEN, 48, 7],
        "modules in a FeedForwardBlock": [*both("FeedForwardBlock"), HIDDEN, 48, 7, [nn.Tanh(), *DROPPING]],
        "Block": [*both("Block"), HIDDEN, HEADS, 0.3],
        "Classifier": [*both("Classifier"), HIDDEN, 2],
        "Transformer": [*both("Transformer"), VOCABULARY, HIDDEN, 2, HEADS, 2, 0.3],
    }
    built = []
    for number in range(2):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        built.append(layers[layer][number](*layers[layer][2:]))
        assert number == 1 or torch.equal(torch.get_rng_state(), before), "building a layer moves the generator"
    return built[0], built[1]


def both(name: str) -> list[Any]:
    return [getattr(load("tp_model"), name), getattr(load("model"), name)]


DROPPING = [nn.Sequential(nn.GELU(), nn.Dropout(0.4)), nn.Dropout(0.2)]
LAYERS = [
    "ColWiseLinear", "Embedding", "MultiHeadSelfAttention", "a mask for each head", "ColRowLinearPair",
    "dropout in a pair", "FeedForwardBlock", "modules in a FeedForwardBlock", "Block", "Classifier", "Transformer",
]  # fmt: skip


def inputs(layer: str) -> list[Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 5))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    if layer == "Embedding":
        return [tokens]
    if layer == "Transformer":
        return [tokens, padding]
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    if layer == "a mask for each head":
        return [x, torch.randn(HEADS, 5, 5, requires_grad=True)]
    mask = torch.zeros(2, 1, 1, 5).masked_fill(padding[:, None, None], float("-inf"))
    return [x, mask] if layer in ("MultiHeadSelfAttention", "Block") else [x]


def compare_with_twin(layer: str) -> None:
    """Three rounds of forward, backward and SGD step of both; everything must agree."""
    pcomm = load("pcomm")
    degree, place = pcomm.tp_degree, pcomm.tp_rank

    def dim_of(name: str) -> int | None:
        return OWN_WEIGHT[layer] if name == "weight" else split_dim(name)

    def part(name: str, whole: Tensor) -> Tensor:
        dim = dim_of(name)
        return whole if dim is None else whole.chunk(degree, dim)[place]

    split, twin = twins(layer)
    own = {re.sub(r"\b(mod|linear)\.", "", name): p for name, p in split.named_parameters()}
    assert own.keys() == dict(twin.named_parameters()).keys()
    start = {name: p.detach().clone() for name, p in twin.named_parameters()}
    for name, p in twin.named_parameters():
        assert torch.equal(own[name], part(name, p)), f"{name} is no slice of the one process's"
        assert own[name].numel() * (degree if dim_of(name) is not None else 1) == p.numel()

    optimizers = [build_optimizer("sgd", m.parameters(), 0.1) for m in (split, twin)]
    for round_number in range(ROUNDS):
        torch.manual_seed(100 + round_number)
        args = inputs(layer)
        copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
        outputs = []
        for m, xs, optimizer in zip((split, twin), (args, copies), optimizers, strict=True):
            torch.manual_seed(200 + round_number)  # dropout
            optimizer.zero_grad()
            y = m(*xs)
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(round_number))
            (y * weights).sum().backward()
            outputs.append(y.detach().clone())
        close: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5}
        torch.testing.assert_close(*outputs, **close)
        assert all(torch.equal(a, b) for a, b in zip(args, copies, strict=True)), "an input was changed"
        for own_input, whole_input in zip(args, copies, strict=True):
            if own_input.requires_grad:
                assert whole_input.grad is not None
                assert whole_input.grad.abs().max() > 0
                torch.testing.assert_close(own_input.grad, whole_input.grad, **close)
        for name, p in twin.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(own[name].grad, part(name, p.grad), **close)
        for optimizer in optimizers:
            optimizer.step()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(own[name], part(name, p.detach()), **close, check_stride=False)
    for name, p in twin.named_parameters():
        assert not torch.equal(p, start[name]), f"{name} was not trained"


def test_split_layers_do_what_their_twins_do() -> None:
    def all_layers() -> None:
        for layer in LAYERS:
            try:
                compare_with_twin(layer)
            except AssertionError as error:
                raise AssertionError(f"{layer}: {error}") from error

    on_ranks(3, 3, all_layers)


def test_each_dropout_of_the_model_is_applied_and_has_the_given_probability() -> None:
    net = load("model").Transformer(VOCABULARY, HIDDEN, 2, HEADS, dropout_prob=0.3)
    applied = list[float]()
    for module in (module for module in net.modules() if isinstance(module, nn.Dropout)):
        module.register_forward_hook(lambda module, *_: applied.append(module.p))
    net(*inputs("Transformer"))
    assert applied == [0.3] * 6, "of attention weights, after attention, after the feed-forward block, of two layers"


def test_what_cannot_be_split_is_refused() -> None:
    def work() -> None:
        tp_model = load("tp_model")
        for build, numbers in [
            (lambda: tp_model.MultiHeadSelfAttention(24, 2, 0.0), "heads of 2 .* 4 ranks"),
            (lambda: tp_model.ColWiseLinear(8, 2), "output width of 2 .* 4 ranks .*; give a multiple of 4$"),
            (lambda: tp_model.Embedding(8, 6), "width of 6 .* 4 ranks"),
            (lambda: tp_model.ColRowLinearPair(8, 6, 8, []), "inner width .* of 6 .* 4 ranks"),
            (lambda: tp_model.Block(24, 2, 0.0), "heads of 2 .* 4 ranks"),
        ]:
            with pytest.raises(InputError, match=numbers):
                build()
        before = torch.get_rng_state()
        tp_model.ColWiseLinear(8, 8)
        assert torch.equal(torch.get_rng_state(), before), "a layer after one that was refused moves the generator"
        for between, sentence in [
            (nn.AlphaDropout(0.1), "AlphaDropout.* would draw otherwise than in one process"),
            (nn.RReLU(), "RReLU.* would draw otherwise than in one process"),
            ([nn.Sequential(nn.Sequential(nn.PReLU()))], "PReLU.* has weights"),
        ]:
            with pytest.raises(InputError, match=f"(?s){sentence}"):
                tp_model.ColRowLinearPair(8, 8, 8, between)
        attention = tp_model.MultiHeadSelfAttention(24, 12, 0.0)
        for heads in (3, 4, 24):  # a rank has 3
            with pytest.raises(ValueError, match=f"a mask for {heads} heads, and 12 attention heads"):
                attention(torch.zeros(1, 2, 24), torch.zeros(heads, 2, 2))
        with pytest.raises(ValueError, match=r"24 .* 5 attention heads"):
            load("model").MultiHeadSelfAttention(24, 5, 0.0)

    on_ranks(4, 4, work)


def test_a_class_follows_from_the_first_position_alone() -> None:
    _, classifier = twins("Classifier")
    x = torch.randn(2, 5, HIDDEN)
    torch.testing.assert_close(classifier(x), classifier(x[:, :1]))
