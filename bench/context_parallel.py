"""Context parallelism beside one process that has all cores; the ways to share a sequence alternate within one run.

python bench/context_parallel.py
python bench/context_parallel.py --seq-len 1024 --rounds 20
"""

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from ranks import on_rank_0, run_ranks
from tables import milliseconds, print_head, print_row
from torch import Tensor
from training import Step, backward_step, build, loss_of, tokens
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn

from distlab.axes.grid import all_ranks
from distlab.parallel.context_parallel import ContextParallel
from distlab.parallel.flat import flatten_gradients
from distlab.parallel.options import CPKind, CPOrder
from simplellm import command_line

WAYS: dict[str, tuple[CPKind, CPOrder]] = {
    "ring, zigzag": ("ring", "zigzag"),
    "ring, contiguous": ("ring", "contiguous"),
    "gather": ("gather", "zigzag"),
    "heads": ("heads", "zigzag"),
}
WHOLE = "one process"


@dataclass
class Settings:
    """What to measure."""

    ranks: int = 2
    """ranks that share each sequence, each with one thread; one process has as many threads"""
    seq_len: int = 4096
    """tokens of the sequence"""
    rounds: int = 8
    """measured steps of each variant"""
    port: int = 29559
    """where rank 0 listens"""


def whole(seq_len: int) -> Step:
    """The step of one process."""
    net = build(seq_len)
    return backward_step(net, loss_of(net))


def shared(seq_len: int, kind: CPKind, order: CPOrder) -> Step:
    """A step of all ranks, with the average of the gradients."""
    net, context = build(seq_len), ContextParallel(all_ranks("cp"), kind, order)
    gradients = flatten_gradients(net)

    def step(ids: Tensor) -> Tensor:
        gradients.zero_()
        part = context.part(ids)
        loss = part.loss(net(part.ids, part=part.sequence))
        loss.backward()
        dist.all_reduce(gradients, dist.ReduceOp.AVG)
        return loss.detach()

    return step


def measure(settings: Settings) -> None:
    """One rank: the variants in turn; rank 0 prints the rows of the table."""
    steps = {WHOLE: on_rank_0(whole(settings.seq_len))}
    steps |= {name: shared(settings.seq_len, *way) for name, way in WAYS.items()}
    batch_of = partial(tokens, batch_size=1, seq_len=settings.seq_len)
    seconds = seconds_in_turn(steps, batch_of, settings.rounds, warm_up=1, meet=dist.barrier)
    for name, own in seconds.items() if dist.get_rank() == 0 else ():
        to_whole, to_gather = (quartiles_of_ratios(seconds[other], own) for other in (WHOLE, "gather"))
        print_row(settings.ranks, settings.seq_len, name, milliseconds(own), *to_whole.cells(2), *to_gather.cells(2))


def main(settings: Settings) -> None:
    require_quartiles("--rounds", settings.rounds)
    heads = ["ranks", "tokens", "variant", "ms a step (median)"]
    print_head(*heads, "speed to one process (median)", "quartiles", "speed to gather (median)", "quartiles")
    run_ranks(measure, settings.ranks, settings.port, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
