"""Slices of layers on several ranks compute what the whole layer does, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import free_port, process_group, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from distlab.grid import Grid
from distlab.optimizers import build_optimizer
from distlab.tensor_parallel import (
    LAYERS,
    Team,
    bytes_per_layer,
    copy_to,
    gather,
    gather_to,
    own_range,
    reduce_from,
    reduce_scatter,
    shard,
    shares,
    vocabulary_parallel_loss,
)
from distlab.traffic import traffic
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage, rotary_tables
from simplellm.losses import causalLLMLoss

STYLES = {"naive": False, "megatron": False, "sequence": True}
VOCAB, PADDING = 50, 20  # 50 divides by neither 3 nor 4; the padding is in the middle of a slice
SIZES = dict(dmodel=48, num_heads=6, n_layers=2, ctx_size=11, padding_idx=PADDING, hidden_dim=40, device="cpu")


def test_shares_are_those_of_tensor_split() -> None:
    for total in (0, 1, 5, 4096):
        for ranks in (1, 2, 3, 6, 7):
            assert shares(total, ranks) == [len(part) for part in torch.arange(total).tensor_split(ranks)]


def collect(rank: int, port: int) -> tuple[list[float], list[float], dict[str, int], dict[str, int]]:
    with process_group(rank, 3, port):
        parts, own = torch.empty(3, 2, 2), torch.full((2, 2), float(rank))
        traffic.all_gather(parts, own, "the activations", kind="gathered").wait()
        rows = torch.arange(3.0).add(10.0 * rank).unsqueeze(1).repeat(1, 4)
        before, total = rows.clone(), torch.empty(4)
        traffic.reduce_scatter(total, rows, "the sums", kind="scattered").wait()
        assert torch.equal(rows, before)
        return parts[:, 1, 1].tolist(), total.tolist(), dict(traffic.ledger.sent_bytes), dict(traffic.ledger.messages)


def test_all_gather_and_reduce_scatter_in_the_ledger() -> None:
    for rank, (gathered, total, sent_bytes, messages) in enumerate(run_ranks(3, collect, free_port())):
        assert gathered == [0, 1, 2]
        assert total == [30.0 + 3 * rank] * 4
        assert sent_bytes == {"gathered": 2 * 16, "scattered": 2 * 16}
        assert messages == {"gathered": 1, "scattered": 1}


def test_a_rank_alone_gathers_and_scatters_at_once() -> None:
    before = dict(traffic.ledger.messages)
    own, parts = torch.arange(4.0), torch.empty(1, 4)
    traffic.all_gather(parts, own, "the activations", kind="gathered").wait()
    assert parts.tolist() == [own.tolist()]
    traffic.reduce_scatter(own, parts.add_(1), "the sums", kind="scattered").wait()
    assert own.tolist() == [1, 2, 3, 4]
    assert dict(traffic.ledger.messages) == before


def exchange(rank: int, ranks: int, port: int) -> None:
    """Each function on slices of 7 rows, against what one process would compute from all ranks' inputs."""
    with process_group(rank, ranks, port):
        team, length = Team("a layer", LAYERS), 7
        generator = torch.Generator().manual_seed(0)
        wholes = torch.randn(ranks, 2, length, 4, generator=generator)  # what each rank has before the function
        factors = torch.randn(ranks, 2, length, 4, generator=generator)  # each rank's gradient of what comes after
        first, last = own_range(length, team)
        mine = slice(None), slice(first, last)
        total, total_factor = wholes.sum(0), factors.sum(0)
        whole, factor = wholes[rank], factors[rank]
        cases: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, Tensor]] = [
            # the function, its input and what it gives; the gradient of that and what it gives
            (lambda x: copy_to(x, team), whole, whole, factor, total_factor),
            (lambda x: reduce_from(x, team), whole, total, factor, factor),
            (lambda x: gather(x, team, length, dim=1), wholes[0][mine], wholes[0], factors[0], factors[0][mine]),
            (lambda x: gather_to(x, team, length), wholes[0][mine], wholes[0], factor, total_factor[mine]),
            (lambda x: reduce_scatter(x, team), whole, total[mine], factors[0][mine], factors[0]),
        ]
        for function, x, y, grad_y, grad_x in cases:
            own, grad = x.clone().requires_grad_(), grad_y.clone()
            result = function(own)
            result.backward(grad)
            torch.testing.assert_close(result, y)
            torch.testing.assert_close(own.grad, grad_x)
            assert torch.equal(own, x), "the input is unchanged"
            assert torch.equal(grad, grad_y), "the gradient is unchanged"


@pytest.mark.parametrize("ranks", [1, 3])
def test_functions_forward_and_backward(ranks: int) -> None:
    run_ranks(ranks, exchange, ranks, free_port())


def split_like(own: Tensor, whole: Tensor, place: int, ranks: int) -> Tensor:
    """The slice of `whole` that has the place and the shape of `own`."""
    for dim in range(whole.dim()):
        piece = whole.tensor_split(ranks, dim)[place]
        if own.shape != whole.shape and own.shape == piece.shape:
            return piece
    assert own.shape == whole.shape
    return whole


def twins(style: str, group: "dist.ProcessGroup | None" = None, **sizes: Any) -> tuple[CausalLLama, CausalLLama]:
    """The whole model, and this rank's slices of it."""
    whole, sliced = (LLama(CausalLLama, VOCAB, **{**SIZES, **sizes}) for _ in range(2))
    states = torch.get_rng_state()
    shard(sliced, "naive" if style == "naive" else "megatron", group, sequence_parallel=STYLES[style])
    assert torch.equal(torch.get_rng_state(), states), "nothing random happens"
    return whole, sliced


def assert_same(sliced: Tensor | None, whole: Tensor | None, what: str) -> None:
    assert sliced is not None
    assert whole is not None
    assert whole.abs().max() > 0, what
    torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")


def train_both(rank: int, ranks: int, style: str, sizes: dict[str, Any], port: int) -> None:
    """Three steps of SGD on the whole model and on the slices: losses, gradients and parameters, slice by slice."""
    with process_group(rank, ranks, port):
        whole, sliced = twins(style, **sizes)
        before = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
        loss_of = causalLLMLoss if style == "naive" else vocabulary_parallel_loss
        optimizers = [build_optimizer("sgd", net.parameters(), lr=0.5) for net in (whole, sliced)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            ids = torch.randint(VOCAB, (2, 11), generator=generator)
            ids[0, 3] = PADDING
            losses = causalLLMLoss(whole(ids), ids, VOCAB), loss_of(sliced(ids), ids, VOCAB)
            torch.testing.assert_close(losses[1], losses[0])
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
            wholes = dict(whole.named_parameters())
            assert wholes.keys() == dict(sliced.named_parameters()).keys()
            for name, own in sliced.named_parameters():
                assert own.grad is not None
                expected = wholes[name].grad
                assert expected is not None
                assert_same(own.grad, split_like(own, expected, rank, ranks), f"the gradient of {name}")
            for optimizer in optimizers:
                optimizer.step()
            for name, own in sliced.named_parameters():
                assert_same(own, split_like(own, wholes[name], rank, ranks), name)
        for name, weight in whole.named_parameters():
            assert (weight - before[name]).abs().max() > 1e-4, f"{name} was trained"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(1, {}), (3, {"num_kv_heads": 3}), (2, {"num_kv_heads": 2, "hidden_dim": 41})],
)
def test_sliced_models_train_like_whole_ones(ranks: int, sizes: dict[str, Any], style: str) -> None:
    run_ranks(ranks, train_both, ranks, style, sizes, free_port())


def input_gradients(rank: int, style: str, port: int) -> None:
    """The gradient of the input of single layers: nothing after them hides an error."""
    with process_group(rank, 3, port):
        whole, sliced = twins(style, num_kv_heads=3)
        sliced(torch.zeros(2, 11, dtype=torch.int64))  # so that sequence parallelism knows the length
        generator = torch.Generator().manual_seed(0)
        x, grad = torch.randn(2, 2, 11, 48, generator=generator)
        rows = slice(*own_range(11, Team("", LAYERS))) if STYLES[style] else slice(None)
        tables = rotary_tables(11, 8, 1e4, x.device)
        for part, others in (("self_attn", tables), ("mlp", ())):
            expected, own = x.clone().requires_grad_(), x[:, rows].clone().requires_grad_()
            y = whole.model.layers["1"].get_submodule(part)(expected, *others)
            own_y = sliced.model.layers["1"].get_submodule(part)(own, *others)
            y.backward(grad)
            own_y.backward(grad[:, rows])
            assert_same(own_y, y[:, rows], f"the output of {part}")
            assert expected.grad is not None
            assert_same(own.grad, expected.grad[:, rows], f"the gradient of the input of {part}")
            assert torch.equal(own, x[:, rows])


@pytest.mark.parametrize("style", STYLES)
def test_input_gradients_of_single_layers(style: str) -> None:
    run_ranks(3, input_gradients, style, free_port())


def slices_of_logits(rank: int, ranks: int, port: int) -> int:
    with process_group(rank, ranks, port):
        generator = torch.Generator().manual_seed(0)
        whole = (100 * torch.randn(2, 5, VOCAB, generator=generator)).requires_grad_()
        target = torch.randint(VOCAB, (2, 5), generator=generator)
        own = whole.detach().tensor_split(ranks, dim=-1)[rank].requires_grad_()
        expected, loss = causalLLMLoss(whole, target, VOCAB), vocabulary_parallel_loss(own, target, VOCAB)
        (3 * expected).backward()
        (3 * loss).backward()
        torch.testing.assert_close(loss, expected)
        assert whole.grad is not None
        assert_same(own.grad, whole.grad.tensor_split(ranks, dim=-1)[rank], "the gradient of the logits")
        return traffic.ledger.sent_bytes["vocabulary activations"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loss_of_slices_is_the_loss_of_the_whole(ranks: int) -> None:
    tokens_bytes = 2 * 5 * 4
    sent = 2 * (ranks - 1) * tokens_bytes // ranks + 2 * (ranks - 1) * 2 * tokens_bytes // ranks
    assert run_ranks(ranks, slices_of_logits, ranks, free_port()) == [sent] * ranks


def test_a_loss_needs_a_token_to_predict() -> None:
    with pytest.raises(InputError, match="--seq-len 1 leaves no token to predict"):
        vocabulary_parallel_loss(torch.zeros(2, 1, VOCAB), torch.zeros(2, 1, dtype=torch.int64), VOCAB)


def no_whole_logits(rank: int, port: int) -> list[tuple[int, ...]]:
    with process_group(rank, 3, port):
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
    assert run_ranks(3, no_whole_logits, free_port()) == [[(2, 11, 17)], [(2, 11, 17)], [(2, 11, 16)]]


def two_teams(rank: int, port: int) -> None:
    """Two replicas of two ranks, each with its own sequences: nothing passes from one to the other."""
    with process_group(rank, 4, port):
        team = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group("tp")
        whole, sliced = twins("megatron", team)
        ids = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(rank // 2))
        expected, loss = causalLLMLoss(whole(ids), ids, VOCAB), vocabulary_parallel_loss(sliced(ids), ids, VOCAB, team)
        expected.backward()
        loss.backward()
        torch.testing.assert_close(loss, expected)
        wholes = dict(whole.named_parameters())
        for name, own in sliced.named_parameters():
            expected_grad = wholes[name].grad
            assert expected_grad is not None
            assert_same(own.grad, split_like(own, expected_grad, rank % 2, 2), name)


def test_groups_keep_to_themselves() -> None:
    run_ranks(4, two_teams, free_port())


def refuse(rank: int, sizes: dict[str, int], port: int) -> str:
    with process_group(rank, 3, port):
        net = LLama(CausalLLama, VOCAB, **{**SIZES, **sizes})
        with pytest.raises(InputError) as caught:
            shard(net)
        assert not traffic.ledger.messages
        return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [({"num_heads": 4}, "--num-heads 4"), ({"num_heads": 6, "num_kv_heads": 2}, "num_kv_heads 2")],
)
def test_heads_that_do_not_divide_are_refused_before_anyone_waits(sizes: dict[str, int], flag: str) -> None:
    sentences = run_ranks(3, refuse, sizes, free_port())
    assert all(sentence.startswith(f"{flag} among 3 tensor-parallel ranks: ") for sentence in sentences)


def test_bytes_per_layer_as_worked_out_by_hand() -> None:
    # 256 tokens of 288 float32: 294,912 bytes. Four ranks send 3/4 of them twice in each all-reduce.
    assert bytes_per_layer("megatron", 4, 1, 256, 288, 4) == (2 * 442_368, 2 * 442_368)
    assert bytes_per_layer("megatron", 4, 1, 256, 288, 4, sequence_parallel=True) == (2 * 442_368, 2 * 442_368)
    # Thirteen times 288 columns are gathered; ten times 288 are the inputs of layers.
    assert bytes_per_layer("naive", 4, 1, 256, 288, 4) == (13 * 221_184, 10 * 442_368)
    assert bytes_per_layer("megatron", 1, 1, 256, 288, 4) == (0, 0)
    # Three ranks: 17 of 49 outputs and 66 of 196 in the longest slice, 9 of 25 tokens.
    assert bytes_per_layer("naive", 3, 1, 25, 49, 4)[0] == 2 * 25 * 4 * (5 * 17 + 2 * 66)
    assert bytes_per_layer("megatron", 3, 1, 25, 48, 4, sequence_parallel=True)[0] == 2 * 4 * 9 * 48 * 4


def test_ranks_that_share_a_stage_are_neighbours() -> None:
    places = [Grid.of(rank, {"dp": 2, "pp": 2, "tp": 2}) for rank in range(8)]
    assert [place.replica for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.stage for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.rank_of(1) for place in places] == [2, 3, 2, 3, 6, 7, 6, 7]
    assert places[0].describe(7) == "rank 7 (stage 1 of replica 1)"
    assert Grid.of(0, {"tp": 3}).describe(2) == "rank 2"


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
        with pytest.raises(InputError, match="sequence parallelism is for a whole model"):
            shard(stage, **arguments)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(InputError, match="untie them first"):
        shard(tied)
