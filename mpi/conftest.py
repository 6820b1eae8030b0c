"""The ranks of `mpirun`, arranged in every possible grid, and a layer W_o that one process computes as a whole.

All numbers are small integers, even if the dtype is a real one. So no sum or product is rounded, and what the ranks
compute together must equal the result of one process, bit for bit.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent))  # pytest may have been started in another folder
from model.func_impl import get_info
from mpi_wrapper import Communicator

SIZE = MPI.COMM_WORLD.Get_size()
if SIZE > 1:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would not run while a rank waits in MPI
GRIDS = [(mp_size, SIZE // mp_size) for mp_size in range(1, SIZE + 1) if SIZE % mp_size == 0]
SHAPES = [(4, 1, 4, 4), (4, 3, 4, 12), (8, 2, 12, 8)]  # batch, seq, in_dim, out_dim


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--with-mpi", action="store_true", help="run the tests for several ranks; under mpirun")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("mpi") and not item.config.getoption("--with-mpi"):
        pytest.skip("needs mpirun and --with-mpi")


def pytest_exception_interact(report: Any) -> None:
    """If a test fails on one rank, end all ranks, since the others may be waiting for it."""
    if SIZE > 1:
        print(
            f"\nrank {MPI.COMM_WORLD.Get_rank()}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True
        )
        MPI.COMM_WORLD.Abort(1)


@pytest.fixture(params=[MPI.COMM_WORLD, Communicator(MPI.COMM_WORLD)], ids=["mpi4py", "lab"])
def world(request: pytest.FixtureRequest) -> Any:
    """All ranks, in mpi4py's communicator and in the lab's."""
    return request.param


@pytest.fixture(params=GRIDS, ids=lambda grid: "mp{}-dp{}".format(*grid))
def grid(request: pytest.FixtureRequest) -> Any:
    """(mp_size, dp_size)"""
    return request.param


@dataclass
class Group:
    """A rank's position in the grid."""

    rank: int
    mp_size: int
    dp_size: int
    mp_idx: int
    mp_comm: Any
    dp_comm: Any

    def part(self, whole: Any) -> Any:
        """This rank's slice (..., features / mp_size) of `whole` (..., features): a view with gaps."""
        width = whole.shape[-1] // self.mp_size
        return whole[..., self.mp_idx * width : (self.mp_idx + 1) * width]


@pytest.fixture
def group(world: Any, grid: tuple[int, int]) -> Group:
    mp_idx, _, mp_comm, dp_comm, _, _ = get_info(world, world.Get_rank(), *grid, "fc_o", 4 * SIZE, 4 * SIZE)
    return Group(world.Get_rank(), *grid, mp_idx, mp_comm, dp_comm)


@dataclass
class Layer:
    """W_o in one process: its input, its weight, and the gradient of its output."""

    x: Any
    """(batch, seq, in_dim)"""
    weight: Any
    """(in_dim, out_dim)"""
    output_grad: Any
    """(batch, seq, out_dim)"""


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["int32", "float16", "float32", "float64"])
def layer(request: pytest.FixtureRequest, shape: tuple[int, int, int, int]) -> Layer:
    """The same on every rank."""
    batch, seq, in_dim, out_dim = shape
    random = np.random.default_rng(in_dim + out_dim)
    sizes = (batch, seq, in_dim), (in_dim, out_dim), (batch, seq, out_dim)
    return Layer(*(random.integers(-3, 4, size).astype(request.param) for size in sizes))


@pytest.fixture
def orders() -> list[Callable[[Any], Any]]:
    """Functions that convert an array to each memory order that a caller may use."""
    return [np.asarray, np.ascontiguousarray, np.asfortranarray]
