"""W_o backward on several ranks.   mpirun -n 4 python3 -m pytest -l -v --with-mpi tests/test_transformer_backward.py"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from data.data_parallel_preprocess import split_data
from model import func_impl
from model.func_impl import naive_collect_backward_output, naive_collect_backward_x, naive_collect_forward_input

pytestmark = pytest.mark.mpi


def weight_gradient(x: Any, output_grad: Any) -> Any:
    """(in_dim, out_dim) from inputs (batch, seq, in_dim) and the gradient of outputs (batch, seq, out_dim)."""
    return np.einsum("bsi,bso->io", x, output_grad)


def test_the_gradients_are_slices_of_those_of_one_process(
    layer: Any, group: Any, orders: list[Callable[[Any], Any]]
) -> None:
    x, output_grad = split_data(layer.x, layer.output_grad, group.mp_size, group.dp_size, group.rank)
    weight, idx, mp_comm, mp_size = group.part(layer.weight), group.mp_idx, group.mp_comm, group.mp_size
    whole_x = naive_collect_forward_input(group.part(x), mp_comm, mp_size)
    for in_order in orders:
        mine = naive_collect_backward_output(output_grad=in_order(output_grad), mp_group_idx=idx, mp_size=mp_size)
        np.testing.assert_array_equal(mine, group.part(output_grad), strict=True)

        of_my_rows = weight_gradient(whole_x, mine)
        all_rows = np.full(of_my_rows.shape, -77, of_my_rows.dtype)
        group.dp_comm.Allreduce(of_my_rows, all_rows)
        expected = group.part(weight_gradient(layer.x, layer.output_grad))
        np.testing.assert_array_equal(all_rows, expected, strict=True)
        assert np.any(all_rows), "zeros would equal zeros"

        term = in_order(mine @ weight.T)
        before = term.copy()
        grad_x = naive_collect_backward_x(grad_x=term, mp_comm=mp_comm, mp_size=mp_size)
        np.testing.assert_array_equal(grad_x, group.part(output_grad @ layer.weight.T), strict=True)
        np.testing.assert_array_equal(term, before, strict=True)
    assert np.any(layer.output_grad @ layer.weight.T)


def test_the_slice_is_the_callers_own(group: Any) -> None:
    output_grad = np.zeros((2, 3, 4))
    naive_collect_backward_output(output_grad, group.mp_idx, group.mp_size)[:] = 1
    assert not output_grad.any()


def test_the_function_has_two_names() -> None:
    assert func_impl.naive_collect_backward_input is naive_collect_backward_x


def test_what_cannot_be_sliced_is_refused_by_every_rank(group: Any) -> None:
    refused = [
        (lambda: naive_collect_backward_output(np.zeros((2, 4)), group.mp_size, group.mp_size), "mp_group_idx"),
        (lambda: naive_collect_backward_output(np.zeros((2, 4)), -1, group.mp_size), "mp_group_idx -1"),
        (lambda: naive_collect_backward_x(np.zeros((2, 4)), group.mp_comm, group.mp_size + 1), "the communicator has"),
    ]
    if group.mp_size > 1:
        odd = np.zeros((2, 3, group.mp_size + 1))
        refused += [
            (lambda: naive_collect_backward_output(odd, group.mp_idx, group.mp_size), "does not divide by mp_size"),
            (lambda: naive_collect_backward_x(odd, group.mp_comm, group.mp_size), "does not divide by mp_size"),
        ]
    for call, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            call()
        group.mp_comm.Barrier()
