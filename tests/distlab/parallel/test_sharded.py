"""ShardedDP around other models: tied, frozen and idle parameters, several dtypes, shards that are not equally long."""

import copy
import weakref
from typing import Any

import pytest
import torch
from support.mixed_model import HalfFrozen, Mixed
from support.processes import run_group
from torch import Tensor, nn

from distlab.axes.placement import placement_of
from distlab.comm.context import TransportName
from distlab.comm.group import shares
from distlab.parallel.flat_parameters import is_whole
from distlab.parallel.sharded import Sharded, ShardedDP
from distlab.pipeline.activations import Stage
from distlab.run.model import build_optimizer
from simplellm.llama import CausalLLama, LLama

SHARDED: list[Sharded] = ["optimizer", "gradients", "weights"]


ALL_USED = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 1, 0, 2, 2, 2], [3, 3, 0, 1, 5, 6]])
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: build_optimizer("sgd", parameters, lr=0.5, weight_decay=0.1),  # of matrices only
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}
STEPS, MICRO_BATCHES = 3, 2
TRANSPORTS: list[TransportName] = ["gloo", "shared"]
Run = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]  # weights before and after, buffers


def batch(rank: int, micro_batch: int, shard: Sharded) -> Tensor:
    """The ids of a micro-batch; without 0, they leave parameters idle: on rank 1, or in the first one of all ranks."""
    ids = ALL_USED[(rank + micro_batch) % len(ALL_USED)]
    is_idle = micro_batch == 0 if shard == "weights" else rank == 1
    return ids.clamp(min=1) if is_idle else ids


def train_sharded(rank: int) -> dict[tuple[Sharded, str], Run]:
    ended: dict[tuple[Sharded, str], Run] = {}
    for shard in SHARDED:
        for name, optimizer_of in OPTIMIZERS.items():
            torch.manual_seed(rank)  # other weights on every rank, until they have the first one's
            net = ShardedDP(Mixed(), shard, backward_passes=MICRO_BATCHES, bucket_bytes=80)
            before = net.whole_parameters()
            assert len(net.flat_weights()) > 2, "of several buckets or blocks"
            optimizer = optimizer_of(net.own_parameters().values())
            for step in range(STEPS):
                optimizer.zero_grad()
                in_turn = [batch(rank, micro_batch, shard) for micro_batch in range(MICRO_BATCHES)]
                for together in [in_turn] if step == 1 else [[ids] for ids in in_turn]:
                    losses = [net(ids, ids.roll(1)) / MICRO_BATCHES for ids in together]
                    for loss in losses:  # all forward passes before the first backward pass, or one and one
                        loss.backward()
                net.finish_gradients()
                optimizer.step()
                net.gather_weights()
            ended[shard, name] = before, net.whole_parameters(), dict(net.model.named_buffers())
    return ended


@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_one_process(world_size: int) -> None:
    by_rank = run_group(world_size, train_sharded, transport="shared" if world_size == 3 else "gloo")
    for (shard, name), (before, _, buffers) in by_rank[0].items():
        model = Mixed()
        model.load_state_dict({**before, **buffers, "head.weight": before["embed.weight"]})
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            for rank in range(world_size):
                for micro_batch in range(MICRO_BATCHES):
                    ids = batch(rank, micro_batch, shard)
                    (model(ids, ids.roll(1)) / (world_size * MICRO_BATCHES)).backward()
            optimizer.step()
        for weight, expected in model.named_parameters():
            trained = not torch.equal(expected, before[weight])
            assert trained == expected.requires_grad, f"{weight}, with {shard}"
            for own_before, own, _ in (ended[shard, name] for ended in by_rank):
                assert torch.equal(own_before[weight], before[weight]), f"{weight} starts as on rank 0"
                tolerance = 1e-6 if name == "sgd" else 1e-5
                torch.testing.assert_close(own[weight], expected, rtol=0, atol=tolerance, msg=f"{weight}, {shard}")


def test_no_rank_holds_the_initial_weights_whole() -> None:
    """While a rank gets its shards: one value, and the parameters of one unit. The shards are not rounded."""
    sizes: dict[str, Any] = {"dmodel": 16, "num_heads": 2, "n_layers": 4}
    model = LLama(CausalLLama, 64, **sizes, dtype=torch.bfloat16, without_weights=True)
    assert model.initial is not None
    initial, values, held_bytes = model.initial, list["weakref.ref[Tensor]"](), list[int]()

    def value_of(name: str) -> Tensor:
        assert not any(value() is not None for value in values)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        held_bytes.append(sum(storages.values()) - 4 * len(storages))
        values.append(weakref.ref(value := initial(name)))
        return value

    model.model.layers["2"].requires_grad_(False)
    net = ShardedDP(model, "weights", initial=value_of, rounded=model.rounded_parameters())
    block_bytes = sum(p.nbytes for p in model.model.layers["0"].parameters())
    assert 0 < max(held_bytes) <= block_bytes
    expected = LLama(CausalLLama, 64, **sizes).state_dict()
    assert all(weight.equal(expected[name]) for name, weight in net.whole_parameters().items())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_rehearsal_leaves_no_weights_whole_and_no_gradients(is_frozen: bool) -> None:
    model = LLama(CausalLLama, 64, dmodel=16, num_heads=2, n_layers=2).requires_grad_(not is_frozen)
    net = ShardedDP(model, "weights")
    ids = torch.zeros(1, 4, dtype=torch.int64)
    Stage(net, lambda y, _: y.mean(), None).rehearse_sharded(ids, ids, None)
    assert net.held_bytes()[2] > 0, "weights were gathered"
    assert [flat.untyped_storage().nbytes() for flat in net.flat_weights()] == [0] * len(net.flat_weights())
    assert all(p.grad is None for p in net.own_parameters().values())


def test_weights_gathered_for_a_backward_pass_that_does_not_follow_are_not_used_after_a_change() -> None:
    net = ShardedDP(LLama(CausalLLama, 64, dmodel=16, num_heads=2, n_layers=2), "weights")
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert net(ids).any()
    with torch.no_grad():
        net.own_parameters()["lm_head.weight"].zero_()
    net.gather_weights()
    assert not net(ids).any()


def test_no_weights_are_whole_between_passes_also_of_what_took_no_part() -> None:
    net = ShardedDP(Mixed(), "weights")
    for ids in (ALL_USED[0], ALL_USED[0].clamp(min=1)):
        with torch.no_grad():
            net(ids, ids)
        assert not any(is_whole(flat) for flat in net.flat_weights()), "after a forward pass"
        net(ids, ids).backward()
        net.finish_gradients()
        assert not any(is_whole(flat) for flat in net.flat_weights()), "after a backward pass"


class UsedTwice(nn.Module):
    """A block with a frozen layer, which the forward pass uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), HalfFrozen()])

    def forward(self, x: Tensor) -> Tensor:
        first, block = self.blocks
        return block(block(first(x), True)["y"], True)["y"].square().sum()


def test_a_block_with_frozen_parameters_is_whole_until_each_of_its_uses_has_its_gradients() -> None:
    plain, x = UsedTwice(), torch.randn(3, 4)
    net = ShardedDP(copy.deepcopy(plain), "weights", backward_passes=2)
    for model in (plain, net, plain, net):
        model(x).backward()
        assert not any(is_whole(flat) for flat in net.flat_weights()), "and no longer"
    net.finish_gradients()
    for own, expected in zip(net.own_parameters().values(), plain.parameters(), strict=True):
        assert (own.grad is None) == (expected.grad is None)
        if own.grad is not None and expected.grad is not None:
            torch.testing.assert_close(own.grad.flatten(), expected.grad.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shard", SHARDED)
def test_a_rank_alone_holds_all_weights_and_master_weights_of_those_that_are_trained(
    shard: Sharded, dtype: torch.dtype
) -> None:
    model = Mixed().to(dtype)
    trained = {p for p in model.parameters() if p.requires_grad} - ({model.scale} if shard == "weights" else set())
    expected = sum(p.nbytes for p in model.parameters())
    expected += sum(4 * p.numel() for p in trained if dtype != torch.float32)
    assert ShardedDP(model, shard, keep=[model.scale]).held_bytes()[0] == expected


LR = 2.0**-7  # of steps so short that a weight of 16 bits would seldom change


def start_of(shard: nn.Parameter) -> int:
    flat = placement_of(shard).flat
    assert flat is not None
    return flat.start


def train_in_bfloat16(rank: int, transport: TransportName) -> list[tuple[Run, dict[str, Tensor], dict[str, int]]]:
    """For each way to share out: the run, this rank's shards, and where they begin.

    Half-way, another model goes on from the shards, as from a checkpoint.
    """
    ended = []
    for shard in SHARDED:
        saved: dict[str, Tensor] = {}
        for steps in (range(2), range(2, 4)):
            torch.manual_seed(rank)
            net = ShardedDP(Mixed().bfloat16(), shard, bucket_bytes=80)
            assert shares(net.flat_weights()[0]) == (transport == "shared" and shard != "weights")
            before, own = net.whole_parameters(), net.own_parameters()
            with torch.no_grad():
                for name, value in saved.items():
                    own[name].copy_(value)
            net.gather_weights()
            optimizer = torch.optim.SGD(own.values(), lr=LR)
            for step in steps:
                optimizer.zero_grad()
                ids = batch(rank, step + 1, shard)
                net(ids, ids.roll(1)).backward()
                net.finish_gradients()
                optimizer.step()
                net.gather_weights()
            saved = {name: p.detach().clone() for name, p in own.items()}
        run = before, net.whole_parameters(), dict(net.model.named_buffers())
        ended.append((run, saved, {name: start_of(p) for name, p in own.items() if p.requires_grad}))
    return ended


def test_a_model_in_bfloat16_has_master_weights_in_float32() -> None:
    """The same bits by both transports, and as one process that adds up gradients in float32 in the order of ranks."""
    over_gloo, shared = (run_group(3, train_in_bfloat16, transport, transport=transport) for transport in TRANSPORTS)
    by_rank = [gloo_runs + shared_runs for gloo_runs, shared_runs in zip(over_gloo, shared, strict=True)]
    for number, ((before, _, buffers), *_) in enumerate(by_rank[0]):
        shard, model = SHARDED[number % len(SHARDED)], Mixed().bfloat16()
        model.load_state_dict({**before, **buffers, "head.weight": before["embed.weight"]})
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        master = {name: p.detach().float() for name, p in trained.items()}
        for step in range(4):
            sums = {name: torch.zeros_like(weight) for name, weight in master.items()}
            for rank in range(3):
                model.zero_grad()
                ids = batch(rank, step + 1, shard)
                model(ids, ids.roll(1)).backward()
                for name, p in trained.items():
                    sums[name] += 0 if p.grad is None else p.grad
            for name, p in trained.items():
                master[name].add_(sums[name].bfloat16().div_(3).float(), alpha=-LR)
                p.data.copy_(master[name])
        is_rounded_off = [(p == before[name]) & (master[name] != before[name]) for name, p in trained.items()]
        assert any(off.any() for off in is_rounded_off), "without master weights, these steps would be lost"
        for own_run, saved, starts in (ended[number] for ended in by_rank):
            for name, p in trained.items():
                assert torch.equal(own_run[1][name], p), f"{name}, with {shard}"
                own = saved[name].flatten()
                assert own.dtype == torch.float32
                assert torch.equal(own, master[name].flatten()[starts[name] : starts[name] + len(own)])


class OfTwoDtypes(nn.Module):
    """A layer in float32, and a wider one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4), nn.Linear(4, 64).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x).bfloat16()).float().square().mean()


def gradients_in_two_dtypes(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = ShardedDP(OfTwoDtypes(), "gradients")
    net(torch.full((1, 4), rank + 1.0)).backward()
    net.finish_gradients()
    return {name: p.grad.clone() for name, p in net.own_parameters().items() if p.grad is not None}


def test_a_gradient_in_float32_is_not_rounded_beside_those_in_bfloat16() -> None:
    over_gloo, shared = (run_group(2, gradients_in_two_dtypes, transport=transport) for transport in TRANSPORTS)
    for expected, own in zip(over_gloo, shared, strict=True):
        assert expected.keys() == own.keys()
        narrow = own["narrow.weight"]
        assert not narrow.equal(narrow.bfloat16().float()), "it was not rounded"
        assert all(own[name].equal(gradient) for name, gradient in expected.items())
