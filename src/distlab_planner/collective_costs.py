"""Predict the cost of the handwritten collectives between computers with one network card each.

./launch.sh collective-costs 64 --latency-us 20 --gigabytes-per-second 1.25     # 64 computers with 10 Gbit/s each
"""

import math
from dataclasses import dataclass

import tyro

from distlab.collectives.simulation import SimulatedWorld
from distlab.comm.link import Link
from distlab_planner.collective_model import CostModel, operations, predict_collective
from simplellm import command_line
from simplellm.errors import require


@dataclass
class CollectivesRequest:
    """The prediction that is asked for."""

    world_size: tyro.conf.Positional[int]
    """number of computers, with one rank each"""
    latency_us: float = 20
    """latency of a message in microseconds"""
    gigabytes_per_second: float = 1.25
    """bandwidth of each computer's link, in each direction"""
    kilobytes: tuple[int, ...] = (1, 32, 1000, 32_000)
    """sizes of the tensors, or of all their parts together"""

    def check(self) -> None:
        """Raise `InputError` for values that cannot be simulated."""
        gigabytes, sizes = self.gigabytes_per_second, " ".join(map(str, self.kilobytes))
        require(1 <= self.world_size <= 1024, f"{self.world_size} computers: give 1 to 1024")
        require(0 <= self.latency_us < math.inf, f"--latency-us {self.latency_us:g}: give 0 or more")
        require(0 < gigabytes < math.inf, f"--gigabytes-per-second {gigabytes:g}: must be greater than 0")
        require(min(self.kilobytes, default=0) >= 1, f"--kilobytes {sizes}: give one or more sizes, from 1 up")


def table(request: CollectivesRequest) -> None:
    """Print the predicted milliseconds of every operation between computers with one network card each.

    Every message is simulated, which takes seconds for dozens of computers, and minutes for rings of a thousand.
    """
    request.check()
    link = Link(request.latency_us * 1e-6, request.gigabytes_per_second * 1e9)
    costs = CostModel(link, math.inf, math.inf)
    print(f"{'ms':<26}" + "".join(f"{size:>10,} kB" for size in request.kilobytes))
    [known] = SimulatedWorld(1).run(lambda endpoint: operations(0, endpoint, device="meta"))
    for operation, topologies in known.items():
        for topology in list(topologies)[:-1]:
            predicted = (
                predict_collective(operation, topology, 1000 * kb, request.world_size, costs)
                for kb in request.kilobytes
            )
            milliseconds = "".join(f"{1e3 * world.makespan:>13.2f}" for world in predicted)
            print(f"{operation:<16}{topology:<10}{milliseconds}", flush=True)


command = command_line.as_command(table, CollectivesRequest, __doc__)

if __name__ == "__main__":
    command_line.run(table, CollectivesRequest, __doc__)
