"""ShardedDP around other models: tied, frozen and idle parameters, several dtypes, shards that are not equally long."""

from typing import Any

import pytest
import torch
from processes import free_port, process_group, run_ranks
from torch import Tensor, nn

from distlab.comm.traffic import traffic
from distlab.parallel.sharded import Sharded, ShardedDP

SHARDED: list[Sharded] = ["optimizer", "gradients", "weights"]


class Mixed(nn.Module):
    """An embedding that is also the head, blocks, frozen layers in and outside of a block, one that is often idle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.named = nn.ModuleDict({"frozen_half": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))})
        self.named["frozen_half"][0].requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4) + 1)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids)) * self.scale + self.shift
        if (ids == 0).any():
            x = x + self.sometimes(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(torch.tanh(self.named["frozen_half"](x)))
        return nn.functional.cross_entropy(logits, target)


ALL_USED = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 1, 0, 2, 2, 2], [3, 3, 0, 1, 5, 6]])
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}
STEPS, MICRO_BATCHES = 3, 2
Run = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]  # weights before and after, buffers


def batch(rank: int, micro_batch: int, shard: Sharded) -> Tensor:
    """With whole weights, a layer may take no part in some batches of some ranks; a gather needs all ranks."""
    ids = ALL_USED[(rank + micro_batch) % len(ALL_USED)]
    return ids if shard == "weights" or rank != 1 else ids.clamp(min=1)


def train_sharded(rank: int, world_size: int, port: int) -> dict[tuple[Sharded, str], Run]:
    ended: dict[tuple[Sharded, str], Run] = {}
    traffic.transport = "shared" if world_size == 3 else "auto"  # which is gloo for so little
    with process_group(rank, world_size, port):
        for shard in SHARDED:
            for name, optimizer_of in OPTIMIZERS.items():
                torch.manual_seed(rank)  # other weights on every rank, until they have the first one's
                net = ShardedDP(Mixed(), shard, backward_passes=MICRO_BATCHES, bucket_bytes=80)
                before = net.whole_parameters()
                optimizer = optimizer_of(net.own_parameters().values())
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    for micro_batch in range(MICRO_BATCHES):
                        ids = batch(rank, micro_batch, shard)
                        (net(ids, ids.roll(1)) / MICRO_BATCHES).backward()
                    net.finish_gradients()
                    optimizer.step()
                    net.gather_weights()
                ended[shard, name] = before, net.whole_parameters(), dict(net.model.named_buffers())
    return ended


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_trains_as_one_process(world_size: int) -> None:
    by_rank = run_ranks(world_size, train_sharded, world_size, free_port())
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
