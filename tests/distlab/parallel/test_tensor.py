"""Slices of layers on several ranks compute what the whole layer does, forward and backward."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_group
from torch import Tensor, nn

from distlab.axes.grid import Axis
from distlab.comm.context import context_of
from distlab.parallel.options import Style
from distlab.parallel.tensor import shard
from distlab.parallel.tp_group import LAYERS, TPGroup
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from distlab.run.model import build_optimizer
from simplellm.blocks import Attention, Block
from simplellm.errors import InputError
from simplellm.experts import MixtureOfExperts
from simplellm.initial_weights import initialize
from simplellm.layers import MLP, Linear, RMSNorm, rotary_tables
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage
from simplellm.losses import causalLLMLoss

STYLES = {"naive": False, "megatron": False, "sequence": True}
VOCAB, PADDING = 50, 20  # 50 divides by neither 3 nor 4; the padding is in the middle of a slice
BIASES = {"attention_bias": True, "mlp_bias": True}
SIZES: dict[str, Any] = dict(
    dmodel=48, num_heads=6, n_layers=2, ctx_size=11, padding_idx=PADDING, hidden_dim=40, device="cpu"
)


def split_like(own: Tensor, whole: Tensor, place: int, ranks: int) -> Tensor:
    """The slice of `whole` that has the place and the shape of `own`."""
    for dim in range(whole.dim()):
        piece = whole.tensor_split(ranks, dim)[place]
        if own.shape != whole.shape and own.shape == piece.shape:
            return piece
    assert own.shape == whole.shape
    return whole


def twins(style: str, axis: Axis | None = None, **sizes: Any) -> tuple[CausalLLama, CausalLLama]:
    """The whole model, and this rank's slices of it."""
    whole, sliced = (LLama(CausalLLama, VOCAB, **{**SIZES, **sizes}) for _ in range(2))
    states = torch.get_rng_state()
    shard(sliced, "naive" if style == "naive" else "megatron", axis, sequence_parallel=STYLES[style])
    assert torch.equal(torch.get_rng_state(), states), "nothing random happens"
    return whole, sliced


def assert_same(sliced: Tensor | None, whole: Tensor | None, what: str) -> None:
    assert sliced is not None
    assert whole is not None
    assert whole.abs().max() > 0, what
    torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")


def without_tokens(net: nn.Module) -> int:
    """The number of experts to which no token went since this was last asked."""
    mixtures = [module for module in net.modules() if isinstance(module, MixtureOfExperts)]
    found = sum(int((mixture.load == 0).sum()) for mixture in mixtures)
    for mixture in mixtures:
        mixture.load.zero_()
    return found


def train_both(whole: nn.Module, sliced: nn.Module, style: str) -> tuple[int, int]:
    """Three steps of SGD on the whole model and on the slices: losses, gradients and parameters, slice by slice.

    Their batches are of several lengths. Returns how often an expert had no token, in the whole model and on this rank.
    """
    rank, ranks, idle, own_idle = dist.get_rank(), dist.get_world_size(), 0, 0
    before = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    loss_of = causalLLMLoss if style == "naive" else vocabulary_parallel_loss
    optimizers = [build_optimizer("sgd", net.parameters(), lr=0.5) for net in (whole, sliced)]
    generator = torch.Generator().manual_seed(0)
    for seq in (11, 7, 10):
        ids = torch.randint(VOCAB, (2, seq), generator=generator)
        ids[0, 3] = PADDING
        losses = causalLLMLoss(whole(ids), ids, VOCAB), loss_of(sliced(ids), ids, VOCAB)
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        idle, own_idle = idle + without_tokens(whole), own_idle + without_tokens(sliced)
        wholes, trained = dict(whole.named_parameters()), dict(sliced.named_parameters())
        assert wholes.keys() == trained.keys()
        trained = {name: own for name, own in trained.items() if own.requires_grad}
        for name, own in trained.items():
            assert own.grad is not None
            expected = wholes[name].grad
            assert expected is not None
            if ".experts." in name and not expected.any():  # it had no token, or only last ones, with no loss
                assert not own.grad.any(), f"the gradient of {name} is zero"
            else:
                assert_same(own.grad, split_like(own, expected, rank, ranks), f"the gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        for name, own in trained.items():
            assert_same(own, split_like(own, wholes[name], rank, ranks), name)
    for name in trained:
        assert (wholes[name] - before[name]).abs().max() > 1e-4, f"{name} was trained"
    return idle, own_idle


def train_whole_models(rank: int, sizes: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {style: train_both(*twins(style, **sizes), style) for style in STYLES}


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (1, {}),
        (3, {"num_kv_heads": 3}),
        (2, {"experts": 8, "experts_per_token": 2, "qk_norm": True}),
        (2, {"num_kv_heads": 2, "hidden_dim": 41, "head_dim": 10, **BIASES}),
    ],
)
def test_sliced_models_train_like_whole_ones(ranks: int, sizes: dict[str, Any]) -> None:
    for of_styles in run_group(ranks, train_whole_models, sizes):
        for style, (idle, own_idle) in of_styles.items():
            if "experts" in sizes:
                assert 0 < idle < own_idle if STYLES[style] else 0 < idle == own_idle, "experts without a token"


def no_whole_logits(rank: int) -> list[tuple[int, ...]]:
    _, sliced = twins("megatron")
    ids = torch.zeros(2, 11, dtype=torch.int64)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = sliced(ids)
        vocabulary_parallel_loss(logits, ids, VOCAB)
    return [shape for shape in kept if VOCAB in shape] + [tuple(logits.shape)]


def test_no_rank_holds_whole_logits() -> None:
    assert run_group(3, no_whole_logits) == [[(2, 11, 17)], [(2, 11, 17)], [(2, 11, 16)]]


def block(num_heads: int, num_kv_heads: int, hidden_dim: int) -> Block:
    attention = Attention(48, num_heads, num_kv_heads, 48 // num_heads)
    return Block(attention, MLP(48, hidden_dim), partial(RMSNorm, 48, 1e-6, torch.get_default_dtype()))


class Written(nn.Module):
    """A model by hand of the library's blocks, one of them inside another container, and a norm of torch's."""

    tokens: Any
    rest: Any

    def __init__(self, vocab_size: int = VOCAB, num_heads: int = 6, num_kv_heads: int = 0) -> None:
        super().__init__()
        self.tokens = nn.ModuleList([nn.Embedding(vocab_size, 48)])
        self.first = block(6, 3, 40)
        self.rest = nn.ModuleDict({"deep": nn.ModuleList([block(num_heads, num_kv_heads or num_heads, 41)])})
        self.norm = nn.LayerNorm(48)
        self.scores = Linear(48, vocab_size, bias=False)
        initialize(self, seed=1)

    def forward(self, ids: Tensor) -> Tensor:
        seq, x = ids.shape[1], self.tokens[0](ids)
        x = self.first(x, *rotary_tables(seq, 8, 1e4, x.device))
        last = self.rest["deep"][0]
        x = last(x, *rotary_tables(seq, last.self_attn.head_dim, 1e4, x.device))
        return self.scores(self.norm(x))


def train_written(rank: int, style: str) -> None:
    torch.set_default_dtype(torch.float64)
    whole, sliced = Written(), Written()
    for net in (whole, sliced):
        net.again = net.tokens[0]
    shard(sliced, "naive" if style == "naive" else "megatron", sequence_parallel=STYLES[style])
    train_both(whole, sliced, style)
    if style != "naive":
        assert sliced.tokens[0].weight.shape[0] < VOCAB
        assert sliced.again is sliced.tokens[0]
    assert sliced.rest["deep"][0].mlp.up_proj.weight.shape[0] < 41


@pytest.mark.parametrize("style", STYLES)
def test_any_module_of_the_librarys_blocks_can_be_split(style: str) -> None:
    run_group(3, train_written, style)


def refused(rank: int) -> None:
    """Nothing is cut before all is known to fit: what is refused still computes what it did."""
    ids = torch.ones(1, 4, dtype=torch.int64)
    two_heads, limited, scaled, sparse, tied = (Written() for _ in range(5))
    two_heads.other = Linear(48, 48, bias=False)
    initialize(two_heads, seed=1)  # otherwise the weight of `other` is uninitialized memory, perhaps nan
    limited.tokens[0].max_norm, scaled.tokens[0].scale_grad_by_freq, sparse.tokens[0].sparse = 1.0, True, True
    tied.rest["deep"][0].mlp.up_proj.weight = tied.rest["deep"][0].mlp.gate_proj.weight
    cases: list[tuple[nn.Module, Style, bool, str]] = [
        (Written(num_heads=4), "megatron", False, "--num-heads 4 among 3 tensor-parallel ranks"),
        (Written(num_kv_heads=2), "megatron", False, "--num-kv-heads 2 among 3 tensor-parallel ranks"),
        (Written(vocab_size=2), "megatron", False, "scores has 2 rows, which 3 tensor-parallel ranks cannot share"),
        (two_heads, "megatron", False, "scores and other: only one linear layer may be outside attention and MLP"),
        *((net, "megatron", False, "tokens.0: an embedding with max_norm") for net in (limited, scaled, sparse)),
        (tied, "naive", False, "rest.deep.0.mlp.gate_proj and rest.deep.0.mlp.up_proj share a weight"),
        (Written().first, "megatron", True, "sequence parallelism needs a whole model"),
        (nn.Sequential(nn.Linear(4, 4)), "megatron", False, "nothing in this module can be split"),
    ]
    for net, style, sequence_parallel, sentence in cases:
        before = {name: weight.clone() for name, weight in net.named_parameters()}
        with pytest.raises(InputError, match=f"^{sentence}"):
            shard(net, style, sequence_parallel=sequence_parallel)
        assert before.keys() == dict(net.named_parameters()).keys()
        assert all(torch.equal(weight, before[name]) for name, weight in net.named_parameters())
        if isinstance(net, Written):
            net(ids)
        assert not context_of().ledger.messages, "no hook talks"
    for net in (Written(num_heads=4), Written(vocab_size=2), two_heads):  # each layer is gathered whole
        expected = net(ids)
        shard(net, "naive")
        torch.testing.assert_close(net(ids), expected)
    split = Written(vocab_size=3)  # a row for each rank
    shard(split)
    with pytest.raises(InputError, match="is already split"):
        shard(split)


def train_without_first_block(rank: int) -> None:
    """Two steps in which the first layers are frozen, so that their outputs need no gradient; and a sum of its own."""
    whole, sliced = (LLama(CausalLLama, VOCAB, **SIZES) for _ in range(2))
    for net in (whole, sliced):
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("embed_tokens" not in name and "layers.0" not in name)
    shard(sliced)
    for step in range(2):
        ids = torch.randint(PADDING, (2, 9), generator=torch.Generator().manual_seed(step))
        causalLLMLoss(whole(ids), ids, VOCAB).backward()
        vocabulary_parallel_loss(sliced(ids), ids, VOCAB).backward()
    for (name, own), expected in zip(sliced.named_parameters(), whole.parameters(), strict=True):
        assert own.requires_grad == expected.requires_grad, name
        if own.requires_grad:
            assert expected.grad is not None
            assert_same(own.grad, split_like(own, expected.grad, rank, 2), name)
    x = torch.ones(2, 9, 48, requires_grad=True)
    total = TPGroup("a layer", LAYERS).all_reduce(x, "activations")
    assert total.unique().tolist() == [2]


def test_frozen_layers_before_others() -> None:
    run_group(2, train_without_first_block, transport="shared")


def sent_for_gradients(rank: int) -> dict[str, int]:
    """The bytes that a pass of slices of a sequence sends for gradients of weights that all ranks hold, by kind."""
    _, sliced = twins("sequence", experts=4, experts_per_token=2)
    sliced(torch.zeros(2, 11, dtype=torch.int64)).square().mean().backward()
    sent = context_of().ledger.sent_bytes
    return {kind: sent[kind] for kind in ("norm gradients", "expert gradients")}


def test_the_gradients_of_experts_and_norms_are_counted_apart() -> None:
    experts, layers, width, hidden = 4, SIZES["n_layers"], SIZES["dmodel"], SIZES["hidden_dim"]
    gains = (2 * layers + 1) * width
    of_experts = layers * (experts * 3 * hidden + experts) * width  # with the router
    for sent in run_group(2, sent_for_gradients):
        assert sent == {"norm gradients": 4 * gains, "expert gradients": 4 * of_experts}


def test_what_is_refused_stays_whole() -> None:
    run_group(3, refused)


def test_frozen_weights_stay_frozen_and_what_cannot_be_split_is_refused() -> None:
    net = LLama(CausalLLama, 10, dmodel=16, num_heads=2, n_layers=1, ctx_size=8)
    frozen = {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"}
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    shard(net, sequence_parallel=True)
    assert {name for name, parameter in net.named_parameters() if not parameter.requires_grad} == frozen

    stage = LLama(LLamaFirstStage, 10, dmodel=16, num_heads=2, n_layers=1, ctx_size=8)
    tied = LLama(CausalLLama, 10, dmodel=16, num_heads=2, n_layers=1, ctx_size=8)
    assert tied.lm_head is not None
    assert tied.model.embed_tokens is not None
    for arguments in ({"style": "naive", "sequence_parallel": True}, {"sequence_parallel": True}):
        with pytest.raises(InputError, match="sequence parallelism needs a whole model"):
            shard(stage, **arguments)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(InputError, match="untie them first"):
        shard(tied)
