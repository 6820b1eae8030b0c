"""A training step with sharded replicas: the three stages of ZeRO, by the lab and by torch, over gloo.

    python bench/sharded.py                 worlds 2 and 4, 12 rounds

`--shard optimizer` is compared with torch's ZeroRedundancyOptimizer in DistributedDataParallel, and with dp-ga, which
shards nothing; `gradients` and `weights` with fully_shard, without and with `reshard_after_forward`, on each block and
on the model. All variants run in the same processes, one step of each in turn, so the load of the machine is the same
for all. Ratios are taken round by round. The bytes are those of rank 0's weights, gradients and optimizer state after a
step, and of the tensors that are whole for a part of a step: for the lab their peak is counted, for fully_shard it is
computed from what it keeps.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import group_over_gloo, run_ranks
from tables import milliseconds, print_head, print_row
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import adam, averaged_buckets, build, loss_of, tokens, training_step
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn

from distlab.parallel.options import Sharded
from distlab.parallel.sharded import ShardedDP
from simplellm import command_line


@dataclass
class Settings:
    worlds: tuple[int, ...] = (2, 4)
    """numbers of ranks"""
    rounds: int = 12
    """measured steps of each variant"""
    batch_size: int = 1
    """sequences per rank"""
    seq_len: int = 256
    """tokens per sequence"""
    port: int = 29556
    """where the ranks meet, on localhost"""


class Variant(NamedTuple):
    step: Callable[[Tensor], object]
    held_bytes: Callable[[], int]  # weights, gradients, optimizer state


def own_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on this rank; of a DTensor of fully_shard, those of the local part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(own_bytes(value) for value in values if isinstance(value, Tensor))


def whole_bytes(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes with whole weights and gradients, and the state that the rank's optimizer has."""
    return 2 * sum(p.nbytes for p in net.parameters()) + state_bytes(optimizer)


def gradient_aggregation(net: nn.Module) -> Variant:
    """As in DP/buckets/intro_DP_buckets.py."""
    optimizer = adam(net.parameters())
    step = training_step(loss_of(net), optimizer, averaged_buckets(net).finish)
    return Variant(step, lambda: whole_bytes(net, optimizer))


def sharded(net: nn.Module, shard: Sharded) -> Variant:
    """As in DP/fsdp/intro_DP_FSDP.py."""
    model = ShardedDP(net, shard)
    optimizer = adam(model.own_parameters().values())
    update = training_step(loss_of(model), optimizer, model.finish_gradients)

    def step(ids: Tensor) -> None:
        update(ids)
        model.gather_weights()

    return Variant(step, lambda: sum(model.held_bytes()) + state_bytes(optimizer))


def zero_redundancy_optimizer(net: nn.Module) -> Variant:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    group = group_over_gloo()
    model = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, process_group=group, lr=8e-4, fused=True)
    return Variant(training_step(loss_of(model), optimizer), lambda: whole_bytes(net, optimizer.optim))


def fully_sharded(net: nn.Module, reshard_after_forward: bool, through_the_lab: bool = False) -> Variant:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.new_group() if through_the_lab else group_over_gloo(), "cpu")
    blocks = net.model.layers.values()  # type: ignore[union-attr, operator]
    weights = sum(p.nbytes for p in net.parameters())
    largest = max(sum(p.nbytes for p in block.parameters()) for block in blocks)
    others = weights - sum(p.nbytes for block in blocks for p in block.parameters())
    for part in (*blocks, net):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
    optimizer = adam(net.parameters())

    def held_bytes() -> int:
        # Parameters outside of the blocks stay whole from the forward to the backward pass, and their gradients until
        # its end. Without reshard_after_forward, all weights stay whole; with it, the weights of two blocks.
        gathered = others + (others + 2 * largest if reshard_after_forward else weights)
        parameters = list(net.parameters())
        kept = sum(own_bytes(p) + (own_bytes(p.grad) if p.grad is not None else 0) for p in parameters)
        return gathered + kept + state_bytes(optimizer)

    return Variant(training_step(loss_of(net), optimizer), held_bytes)


VARIANTS: dict[str, tuple[Callable[[nn.Module], Variant], list[str]]] = {  # the second: what each is compared with
    "dp-ga": (gradient_aggregation, []),
    "--shard optimizer": (partial(sharded, shard="optimizer"), ["ZeroRedundancyOptimizer", "dp-ga"]),
    "ZeroRedundancyOptimizer": (zero_redundancy_optimizer, []),
    "--shard gradients": (partial(sharded, shard="gradients"), ["fully_shard, kept"]),
    "fully_shard, kept": (partial(fully_sharded, reshard_after_forward=False), []),
    "--shard weights": (partial(sharded, shard="weights"), ["fully_shard"]),
    "fully_shard": (partial(fully_sharded, reshard_after_forward=True), []),
    "fully_shard through the lab's backend": (
        partial(fully_sharded, reshard_after_forward=True, through_the_lab=True),
        ["fully_shard"],
    ),
}


def measure(settings: Settings) -> None:
    """One rank: all variants in turn; rank 0 prints the rows of the table."""
    variants = {name: variant_of(build(settings.seq_len)) for name, (variant_of, _) in VARIANTS.items()}
    steps = {name: variant.step for name, variant in variants.items()}
    batch_of = partial(tokens, batch_size=settings.batch_size, seq_len=settings.seq_len)
    seconds = seconds_in_turn(steps, batch_of, settings.rounds, meet=dist.barrier)
    for name, (_, others) in VARIANTS.items() if dist.get_rank() == 0 else ():
        own, held_megabytes = seconds[name], f"{variants[name].held_bytes() / 1e6:.1f}"
        for other in others or [""]:
            ratio = quartiles_of_ratios(seconds[other], own) if other else ""
            print_row(dist.get_world_size(), name, other, milliseconds(own), ratio, held_megabytes)


def main(settings: Settings) -> None:
    require_quartiles("--rounds", settings.rounds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print_head(
        "ranks", "variant", "compared with", "ms a step (median)", "speed to that: median (quartiles)", "held, MB"
    )
    for world_size in settings.worlds:
        run_ranks(measure, world_size, settings.port, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
