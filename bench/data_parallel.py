"""One data-parallel training step: the lab's two ways, torch's, the source document's listing, and no communication.

    python bench/data_parallel.py                 worlds 2 and 3, 24 rounds
    python bench/data_parallel.py --compile       with `torch.compile` of torch's DDP, and the lab's --compile

All variants run in the same processes, one step of each in turn, so they see the same machine at the same time. A step
is timed from a barrier before it to a barrier after it. Ratios are taken round by round.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import group_over_gloo, join
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from turns import quartiles_of_ratios, seconds_in_turn, through_lab

from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.machine.processes import leave
from distlab.parallel.data import Bucket, GradientBuckets, MyDP, flatten_gradients
from distlab.run.model import build_optimizer
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB_SIZE = 4096
BASELINE = "torch DDP"


@dataclass
class Settings:
    worlds: tuple[int, ...] = (2, 3)
    """numbers of ranks"""
    rounds: int = 24
    """measured steps of each variant"""
    batch_size: int = 1
    """sequences per rank"""
    seq_len: int = 256
    """tokens per sequence"""
    compile: bool = False
    """compare compiled steps"""
    port: int = 29555
    """where the ranks meet, on localhost"""


Step = Callable[[Tensor], None]


def fused_adam(net: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer("adam", net.parameters(), lr=8e-4)


def no_communication(net: nn.Module) -> Step:
    optimizer = fused_adam(net)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        causalLLMLoss(net(x), x, VOCAB_SIZE).backward()
        optimizer.step()

    return step


def torch_ddp(net: nn.Module, patient: bool = True) -> Step:
    return no_communication(DistributedDataParallel(net, process_group=group_over_gloo(patient)))


def gradient_aggregation(net: nn.Module) -> Step:
    """As in DP/gradient_aggr/intro_DP_GA.py."""
    optimizer, gradients = fused_adam(net), flatten_gradients(net)

    def step(x: Tensor) -> None:
        gradients.zero_()
        causalLLMLoss(net(x), x, VOCAB_SIZE).backward()
        with named("the gradients", "gradients"):
            dist.all_reduce(gradients, dist.ReduceOp.SUM)
        gradients.div_(dist.get_world_size())
        optimizer.step()

    return step


def gradients_in_buckets(net: nn.Module) -> Step:
    """As in DP/buckets/intro_DP_buckets.py."""
    optimizer = fused_adam(net)

    def average(bucket: Bucket) -> Pending:
        with named(str(bucket), "gradients"):
            return dist.all_reduce(bucket.flat, dist.ReduceOp.AVG, async_op=True)

    buckets = GradientBuckets(net.parameters(), on_full=average)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        causalLLMLoss(net(x), x, VOCAB_SIZE).backward()
        buckets.finish()
        optimizer.step()

    return step


def document_listing(net: nn.Module) -> Step:
    """The aggregation of the source document: a barrier, one concatenation, one sum, a division a parameter."""
    optimizer = torch.optim.Adam(net.parameters(), lr=8e-4)
    shapes = [p.shape for p in net.parameters()]
    lengths, group = [p.numel() for p in net.parameters()], group_over_gloo()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        causalLLMLoss(net(x), x, VOCAB_SIZE).backward()
        dist.barrier(group)
        gradients = []
        for p in net.parameters():
            assert p.grad is not None
            gradients.append(p.grad.view(-1))
            p.grad = None
        flat = torch.cat(gradients).to("cpu")
        dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group)
        for p, shape, part in zip(net.parameters(), shapes, torch.split(flat, lengths), strict=True):
            p.grad = part.view(shape) / dist.get_world_size()
        optimizer.step()

    return step


def torch_ddp_compiled(net: nn.Module) -> Step:
    optimizer, ddp = fused_adam(net), DistributedDataParallel(net, process_group=group_over_gloo())
    compiled = torch.compile(lambda x: causalLLMLoss(ddp(x), x, VOCAB_SIZE))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        compiled(x).backward()
        optimizer.step()

    return step


COMPILED: dict[str, Callable[[nn.Module], Step]] = {
    BASELINE: torch_ddp_compiled,
    "torch DDP, not compiled": torch_ddp,
    "one buffer (dp-ga)": lambda net: through_lab(gradient_aggregation(net)),
    "buckets (dp-buckets)": lambda net: through_lab(gradients_in_buckets(net)),
    "buckets, not compiled": gradients_in_buckets,
    "no communication": lambda net: through_lab(no_communication(net)),
}
VARIANTS: dict[str, Callable[[nn.Module], Step]] = {
    BASELINE: torch_ddp,
    "torch DDP without patient threads": partial(torch_ddp, patient=False),
    "torch DDP through the lab's backend": lambda net: no_communication(DistributedDataParallel(net)),
    "one buffer (dp-ga)": gradient_aggregation,
    "buckets (dp-buckets)": gradients_in_buckets,
    "MyDP": lambda net: no_communication(MyDP(net)),
    "the document's listing": document_listing,
    "no communication": no_communication,
}


def measure(rank: int, world_size: int, settings: Settings) -> None:
    """One rank: all variants in turn; rank 0 prints the table."""
    join(rank, world_size, settings.port)
    variants = COMPILED if settings.compile else VARIANTS
    steps = {name: build(LLama(CausalLLama, VOCAB_SIZE, ctx_size=settings.seq_len)) for name, build in variants.items()}

    def batch_of(_: int) -> Tensor:
        return torch.randint(VOCAB_SIZE, (settings.batch_size, settings.seq_len))

    seconds = seconds_in_turn(steps, batch_of, settings.rounds, meet=dist.barrier)
    if rank == 0:
        for name in variants:
            low, middle, high = quartiles_of_ratios(seconds[name], seconds[BASELINE])
            print(
                f"| {world_size} | {name} | {statistics.median(seconds[name]) * 1000:.0f} | {middle:.3f} | "
                f"{low:.3f} to {high:.3f} |",
                flush=True,
            )
    leave(0)  # without the process group's destructor, which can hang: see distlab.run.run.Run.close


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.rounds < 2:
        raise SystemExit(f"--rounds {settings.rounds}: quartiles need at least 2")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"| ranks | variant | ms a step (median) | time over {BASELINE} (median) | quartiles |")
    print("|---|---|---|---|---|", flush=True)
    for world_size in settings.worlds:
        mp.spawn(measure, args=(world_size, settings), nprocs=world_size)


if __name__ == "__main__":
    main()
