"""Context parallelism beside one process that has all cores; the ways to share a sequence alternate within one run.

python bench/context_parallel.py
python bench/context_parallel.py --seq-len 1024 --rounds 20
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import join
from torch import Tensor
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.axes.grid import all_ranks
from distlab.comm.group import empty
from distlab.machine.processes import leave
from distlab.parallel.context_parallel import ContextParallel
from distlab.parallel.data import views_of
from distlab.parallel.division import Kind, Order
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB_SIZE = 4096
Step = Callable[[Tensor], object]  # token ids (1, seq)
WAYS: dict[str, tuple[Kind, Order]] = {
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


def whole(settings: Settings, rank: int) -> Step:
    """The step of one process, which rank 0 takes while the others wait."""
    net = build(settings)

    def step(ids: Tensor) -> None:
        if rank == 0:
            torch.set_num_threads(settings.ranks)
            net.zero_grad()
            causalLLMLoss(net(ids), ids, VOCAB_SIZE).backward()
            torch.set_num_threads(1)

    return step


def shared(settings: Settings, kind: Kind, order: Order) -> Step:
    """A step of all ranks, with the average of the gradients."""
    net, context = build(settings), ContextParallel(all_ranks("cp"), kind, order)
    parameters = list(net.parameters())
    flat = empty(sum(parameter.numel() for parameter in parameters), parameters[0].detach())
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        parameter.grad = view

    def step(ids: Tensor) -> None:
        flat.zero_()
        part = context.part(ids)
        part.loss(net(part.ids, part=part.sequence)).backward()
        dist.all_reduce(flat, dist.ReduceOp.AVG)

    return step


def build(settings: Settings) -> CausalLLama:
    return LLama(CausalLLama, VOCAB_SIZE, ctx_size=settings.seq_len)


def measure(rank: int, settings: Settings) -> None:
    """One rank: the variants in turn."""
    join(rank, settings.ranks, settings.port)
    steps = {WHOLE: whole(settings, rank)} | {name: shared(settings, *way) for name, way in WAYS.items()}
    seconds = seconds_in_turn(steps, partial(tokens, settings), settings.rounds, warm_up=1, meet=dist.barrier)
    if rank == 0:
        report(settings, seconds)
    leave(0)


def tokens(settings: Settings, turn: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (1, settings.seq_len), generator=torch.Generator().manual_seed(turn))


def report(settings: Settings, seconds: dict[str, list[float]]) -> None:
    for name, own in seconds.items():
        ratios: dict[Literal["whole", "gather"], tuple[float, float, float]] = {
            "whole": quartiles_of_ratios(seconds[WHOLE], own),
            "gather": quartiles_of_ratios(seconds["gather"], own),
        }
        cells = " | ".join(f"{middle:.2f} | {low:.2f} to {high:.2f}" for low, middle, high in ratios.values())
        print(f"| {settings.ranks} | {settings.seq_len} | {name} | {median(own) * 1e3:,.0f} | {cells} |")


def refusal_of_torch(rank: int, settings: Settings) -> None:
    """What torch's own context parallelism says on a CPU."""
    join(rank, settings.ranks, settings.port + 1, backend="gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v = (torch.randn(1, 4, 64, 16) for _ in range(3))
    try:
        with context_parallel(init_device_mesh("cpu", (settings.ranks,)), buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        said = "it runs"
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    if rank == 0:
        print(f"# torch's context_parallel on a CPU: {said}", flush=True)
    leave(0)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.rounds < 2:
        raise SystemExit(f"--rounds {settings.rounds}: quartiles need at least 2")
    mp.spawn(refusal_of_torch, args=(settings,), nprocs=settings.ranks)
    heading = "| ranks | tokens | variant | ms a step (median) | speed to one process (median) | quartiles "
    print(
        f"{heading}| speed to gather (median) | quartiles |", "|---|---|---|---|---|---|---|---|", sep="\n", flush=True
    )
    mp.spawn(measure, args=(settings,), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
