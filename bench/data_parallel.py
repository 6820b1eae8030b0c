"""One data-parallel training step: the lab's two ways, torch's, the source document's listing, and no communication.

    python bench/data_parallel.py                 worlds 2 and 3, 24 rounds
    python bench/data_parallel.py --compile       with `torch.compile` of torch's DDP, and the lab's --compile

All variants run in the same processes, one step of each in turn, so they see the same machine at the same time. A step
is timed from a barrier before it to a barrier after it. Ratios are taken round by round.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from ranks import group_over_gloo, run_ranks
from tables import milliseconds, print_head, print_row
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import Step, adam, averaged_buckets, build, loss_of, tokens, training_step
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn, through_lab

from distlab.comm.names import named
from distlab.parallel.data import MyDP
from distlab.parallel.flat import flatten_gradients
from simplellm import command_line
from simplellm.errors import require

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
    baseline: str = BASELINE
    """the variant to which the others are compared"""
    compile: bool = False
    """compare compiled steps"""
    port: int = 29555
    """where the ranks meet, on localhost"""


def no_communication(net: nn.Module) -> Step:
    return training_step(loss_of(net), adam(net.parameters()))


def torch_ddp(net: nn.Module, patient: bool = True, compiled: bool = False) -> Step:
    loss = loss_of(DistributedDataParallel(net, process_group=group_over_gloo(patient)))
    return training_step(torch.compile(loss) if compiled else loss, adam(net.parameters()))


def gradient_aggregation(net: nn.Module) -> Step:
    """As in DP/gradient_aggr/intro_DP_GA.py."""
    loss, optimizer, gradients = loss_of(net), adam(net.parameters()), flatten_gradients(net)

    def step(ids: Tensor) -> Tensor:
        gradients.zero_()
        found = loss(ids)
        found.backward()
        with named("the gradients", "gradients"):
            dist.all_reduce(gradients, dist.ReduceOp.SUM)
        gradients.div_(dist.get_world_size())
        optimizer.step()
        return found.detach()

    return step


def gradients_in_buckets(net: nn.Module) -> Step:
    return training_step(loss_of(net), adam(net.parameters()), averaged_buckets(net).finish)


def document_listing(net: nn.Module) -> Step:
    """The aggregation of the source document: a barrier, one concatenation, one sum, a division a parameter."""
    shapes = [p.shape for p in net.parameters()]
    lengths, group = [p.numel() for p in net.parameters()], group_over_gloo()

    def aggregate() -> None:
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

    return training_step(loss_of(net), torch.optim.Adam(net.parameters(), lr=8e-4), aggregate)


COMPILED: dict[str, Callable[[nn.Module], Step]] = {
    BASELINE: partial(torch_ddp, compiled=True),
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


def measure(settings: Settings) -> None:
    """One rank: all variants in turn; rank 0 prints the rows of the table."""
    variants = COMPILED if settings.compile else VARIANTS
    steps = {name: step_of(build(settings.seq_len)) for name, step_of in variants.items()}
    batch_of = partial(tokens, batch_size=settings.batch_size, seq_len=settings.seq_len)
    seconds = seconds_in_turn(steps, batch_of, settings.rounds, meet=dist.barrier)
    for name, own in seconds.items() if dist.get_rank() == 0 else ():
        ratio = quartiles_of_ratios(own, seconds[settings.baseline])
        print_row(dist.get_world_size(), name, milliseconds(own), *ratio.cells(3))


def main(settings: Settings) -> None:
    require_quartiles("--rounds", settings.rounds)
    variants = COMPILED if settings.compile else VARIANTS
    require(settings.baseline in variants, f"--baseline {settings.baseline}: there are {', '.join(variants)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print_head("ranks", "variant", "ms a step (median)", f"time over {settings.baseline} (median)", "quartiles")
    for world_size in settings.worlds:
        run_ranks(measure, world_size, settings.port, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
