"""Every rank knows its place.   mpirun -n 8 python3 -m pytest -l -v --with-mpi tests/test_get_info.py"""

from typing import Any

import numpy as np
import pytest
from model.func_impl import get_info

pytestmark = pytest.mark.mpi


def members(comm: Any, rank: int) -> list[int]:
    """The ranks in the world of a group's members, in the group's order."""
    gathered = np.full(comm.Get_size(), -1)
    comm.Allgather(np.array([rank]), gathered)
    return list(gathered)


def test_the_groups_are_blocks_of_models_and_strides_of_copies(world: Any, grid: tuple[int, int]) -> None:
    (mp_size, dp_size), rank = grid, world.Get_rank()
    mp_idx, dp_idx, mp_comm, dp_comm, _, _ = get_info(
        comm=world, rank=rank, mp_size=mp_size, dp_size=dp_size, fc_layer="fc_q", in_dim=16, out_dim=mp_size
    )
    assert (mp_idx, dp_idx) == (rank % mp_size, rank // mp_size)
    assert (mp_comm.Get_rank(), dp_comm.Get_rank()) == (mp_idx, dp_idx)
    assert members(mp_comm, rank) == [dp_idx * mp_size + index for index in range(mp_size)]
    assert members(dp_comm, rank) == [mp_idx + mp_size * index for index in range(dp_size)]


def test_the_output_is_split_and_for_fc_o_the_input(world: Any, grid: tuple[int, int]) -> None:
    mp_size, dp_size = grid
    in_dim, out_dim = 3 * mp_size, 5 * mp_size
    for fc_layer in ("fc_q", "fc_k", "fc_v", "fc_o"):
        *_, part_in_dim, part_out_dim = get_info(world, world.Get_rank(), mp_size, dp_size, fc_layer, in_dim, out_dim)
        assert (part_in_dim, part_out_dim) == ((3, out_dim) if fc_layer == "fc_o" else (in_dim, 5)), fc_layer


def test_what_cannot_work_is_refused_by_every_rank(world: Any, grid: tuple[int, int]) -> None:
    (mp_size, dp_size), rank = grid, world.Get_rank()
    dim = 4 * mp_size
    refused = [
        ((rank, mp_size, dp_size, "fc_p", dim, dim), "fc_p: "),
        ((rank, mp_size, dp_size + 1, "fc_q", dim, dim), f"dp_size {dp_size + 1}"),
        ((world.Get_size(), mp_size, dp_size, "fc_q", dim, dim), f"rank {world.Get_size()}"),
        ((-1, mp_size, dp_size, "fc_q", dim, dim), "rank -1"),
    ]
    if mp_size > 1:
        refused += [
            ((rank, mp_size, dp_size, "fc_v", dim, dim + 1), f"{dim + 1} does not divide"),
            ((rank, mp_size, dp_size, "fc_o", dim + 1, dim), f"{dim + 1} does not divide"),
        ]
    for arguments, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            get_info(world, *arguments)
        world.Barrier()  # a rank that waited in a split would never come here
