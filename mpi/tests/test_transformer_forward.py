"""W_o forward on several ranks.   mpirun -n 4 python3 -m pytest -l -v --with-mpi tests/test_transformer_forward.py"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from data.data_parallel_preprocess import split_data
from model.func_impl import naive_collect_forward_input, naive_collect_forward_output

pytestmark = pytest.mark.mpi


def test_every_rank_gets_the_whole_output_of_its_rows(
    layer: Any, group: Any, orders: list[Callable[[Any], Any]]
) -> None:
    x, _ = split_data(layer.x, layer.output_grad, group.mp_size, group.dp_size, group.rank)
    for in_order in orders:
        mine = in_order(group.part(x))
        before = mine.copy()
        whole = naive_collect_forward_input(x=mine, mp_comm=group.mp_comm, mp_size=group.mp_size)
        np.testing.assert_array_equal(whole, x, strict=True)
        np.testing.assert_array_equal(mine, before, strict=True)

        part = in_order(whole @ group.part(layer.weight))
        out = naive_collect_forward_output(out=part, mp_comm=group.mp_comm, mp_size=group.mp_size)
        np.testing.assert_array_equal(out, x @ layer.weight, strict=True)
        assert np.any(out), "zeros would equal zeros"


@pytest.mark.parametrize("collect", [naive_collect_forward_input, naive_collect_forward_output])
def test_another_mp_size_than_the_groups_is_refused_by_every_rank(collect: Callable[..., Any], group: Any) -> None:
    with pytest.raises(ValueError, match=f"mp_size {group.mp_size + 1}: the communicator has {group.mp_size} ranks"):
        collect(np.zeros((2, 3, 4)), group.mp_comm, group.mp_size + 1)
    group.mp_comm.Barrier()
