"""What a collective costs: fitted on this computer, predicted in a simulated world, measured.

The model is that of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005: a message costs a latency and a time for each byte, combining two tensors a time for each byte. One thing is
added: ranks of one computer share what it can move.

python -m distlab.collective_costs 64 --latency-us 20 --gigabytes-per-second 1.25     # 64 computers with 10 Gbit/s each
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from distlab import collectives as by_hand
from distlab.simulation import Link, SimulatedWorld

LIBRARY = "library"
FITTED_BYTES = 4_000_000


@dataclass(frozen=True)
class Costs:
    """What the model knows of a computer.

    Attributes:
        link: a message that travels alone.
        shared_bytes_per_second: all messages together, when every rank sends at once.
        combined_bytes_per_second: adding one tensor to another, on every rank at once.
    """

    link: Link
    shared_bytes_per_second: float
    combined_bytes_per_second: float
    one_card: bool = False
    """whether a rank's messages at the same time share its link, as those of a computer on a network do"""

    def __str__(self) -> str:
        rates = self.link.bytes_per_second, self.shared_bytes_per_second, self.combined_bytes_per_second
        alone, together, combined = (f"{rate / 1e9:.1f} GB/s" for rate in rates)
        return (
            f"a message takes {self.link.latency_seconds * 1e6:.0f} µs and goes at {alone}, "
            f"or {together} for all together; adding goes at {combined}"
        )


def operations(size_bytes: int, device: str = "cpu") -> dict[str, dict[str, Callable[[], object]]]:
    """What this rank can run: by operation and topology, with root 0.

    Args:
        size_bytes: of the tensor that is broadcast or combined; of all the parts together that are gathered, or that a
            reduce-scatter hands out.
        device: where the tensors are; on "meta" they have a size and no content.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(size, max(1, size_bytes // 4 // size), device=device)
    part, at_root = whole[0].clone(), whole if rank == 0 else None
    return {
        "broadcast": {
            "naive": partial(by_hand.broadcast_naive, whole, 0),
            "tree": partial(by_hand.broadcast_tree, whole, 0),
            "ring": partial(by_hand.broadcast_ring, whole, 0),
            LIBRARY: lambda: dist.broadcast(whole, 0),
        },
        "reduce": {
            "naive": partial(by_hand.reduce_naive, whole, 0),
            "tree": partial(by_hand.reduce_tree, whole, 0),
            LIBRARY: lambda: dist.reduce(whole, 0),
        },
        "all-reduce": {
            **{topology: partial(all_reduce, whole) for topology, all_reduce in by_hand.ALL_REDUCES.items()},
            LIBRARY: lambda: dist.all_reduce(whole),
        },
        "gather": {
            "naive": partial(by_hand.gather_naive, part, at_root, 0),
            "tree": partial(by_hand.gather_tree, part, at_root, 0),
            LIBRARY: lambda: dist.gather(part, None if at_root is None else list(at_root), 0),
        },
        "all-gather": {
            "naive": partial(by_hand.allgather_naive, part, whole),
            "tree": partial(by_hand.allgather_tree, part, whole),
            "ring": partial(by_hand.allgather_ring, part, whole),
            LIBRARY: lambda: dist.all_gather(list(whole), part),
        },
        "reduce-scatter": {
            "naive": partial(by_hand.reducescatter_naive, whole, part),
            "ring": partial(by_hand.reducescatter_ring, whole, part),
            LIBRARY: lambda: dist.reduce_scatter(part, list(whole)),
        },
    }


def fit_costs(rounds: int = 20) -> Costs:
    """Measure the model's numbers, on all ranks together; in a world of one there is nothing to send."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tiny, large, other = torch.ones(1), torch.ones(FITTED_BYTES // 4), torch.ones(FITTED_BYTES // 4)

    def ping_pong(tensor: Tensor) -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    def shift() -> None:
        messages = [dist.irecv(other, (rank - 1) % size), dist.isend(large, (rank + 1) % size)]
        for message in messages:
            assert message is not None
            message.wait()

    combining = measure(lambda: torch.add(large, other, out=large), rounds)
    if size == 1:
        return Costs(Link(), math.inf, FITTED_BYTES / combining)
    alone = measure(lambda: ping_pong(large), rounds, min) / 2
    latency = min(measure(lambda: ping_pong(tiny), rounds, min), alone) / 2  # on a busy computer, either may be unlucky
    together = measure(shift, rounds)
    link = Link(latency, FITTED_BYTES / (alone - latency))
    moved = size * (FITTED_BYTES + latency * link.bytes_per_second)
    return Costs(link, moved / together, FITTED_BYTES / combining)


def predict(operation: str, topology: str, size_bytes: int, world_size: int, costs: Costs) -> SimulatedWorld:
    """A simulated world in which the operation has run; its `makespan` is the predicted time."""
    world = SimulatedWorld(
        world_size, costs.link, shared_bytes_per_second=costs.shared_bytes_per_second, one_card=costs.one_card
    )

    def charged(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def combine_in_time(own: Tensor, received: Tensor, out: Tensor) -> Tensor:
            world.compute(out.nbytes / costs.combined_bytes_per_second)
            return combine(own, received, out=out)

        return combine_in_time

    with mock.patch.dict(by_hand.COMBINE, {op: charged(combine) for op, combine in by_hand.COMBINE.items()}):
        world.run(lambda _: operations(size_bytes, device="meta")[operation][topology]())
    return world


def measure(
    work: Callable[[], object], rounds: int, typical: Callable[[list[float]], float] = statistics.median
) -> float:
    """Seconds until the slowest rank has finished: by default the median of `rounds`, after one that does not count."""
    seconds = []
    for _ in range(1 + rounds):
        dist.barrier()
        started = time.perf_counter()
        work()
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return typical(seconds[1:])


def table(
    world_size: tyro.conf.Positional[int],
    latency_us: float = 20,
    gigabytes_per_second: float = 1.25,
    kilobytes: tuple[int, ...] = (1, 32, 1000, 32_000),
) -> None:
    """Print the predicted milliseconds of every operation between computers with a network card each.

    Each message is simulated: that takes seconds for dozens of computers, and some minutes for rings of a thousand.

    Args:
        world_size: computers, a rank each.
        latency_us: of a message, in microseconds.
        gigabytes_per_second: that go through a computer's link in either direction.
        kilobytes: sizes of the tensors, or of all the parts.
    """
    if not (1 <= world_size <= 1024 and latency_us >= 0 and gigabytes_per_second > 0 and min(kilobytes) >= 0):
        raise SystemExit("# give 1 to 1024 computers, a latency and sizes of 0 or more, and a bandwidth above 0")
    costs = Costs(Link(latency_us * 1e-6, gigabytes_per_second * 1e9), math.inf, math.inf, one_card=True)
    print(f"{'ms':<26}" + "".join(f"{size:>10,} kB" for size in kilobytes))
    [known] = SimulatedWorld(1).run(lambda _: operations(0, device="meta"))
    for operation, topologies in known.items():
        for topology in list(topologies)[:-1]:
            times = [predict(operation, topology, 1000 * size, world_size, costs).makespan for size in kilobytes]
            print(
                f"{operation:<16}{topology:<10}" + "".join(f"{1e3 * seconds:>13.2f}" for seconds in times), flush=True
            )


if __name__ == "__main__":
    tyro.cli(table)
