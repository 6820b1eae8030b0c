"""Naive tensor parallelism: which rank holds which part of a layer, and what the ranks exchange around W_o.

W_o multiplies the output of the attention heads, (batch, seq, in_dim), by a matrix (in_dim, out_dim). Each of the
`mp_size` ranks of a model-parallel group has the output of its own heads, and holds the columns of W_o for its part of
the output. Every rank needs all inputs for its columns, and all ranks need the whole output:

    forward     x part --all-gather--> x --times W_o's columns--> out part --all-gather--> out
    backward    grad of out --own slice--> times the columns, transposed --reduce-scatter--> grad of x part

It is called naive because there is a way without gathering: if each rank holds rows of W_o, it multiplies them only by
its own part of x, and one all-reduce adds up the outputs. (For "fc_o", `get_info` returns the sizes of that split.)

Arrays may have any number of leading axes and any memory order; they keep their dtype. The communicators may be
mpi4py's or the lab's `Communicator`.
"""

from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[Any]


class Comm(Protocol):
    """The methods of a communicator that these functions use."""

    def Get_size(self) -> int: ...
    def Split(self, *, key: int, color: int) -> Any: ...
    def Allgather(self, src: Any, dst: Any, /) -> None: ...
    def Reduce_scatter(self, src: Any, dst: Any, /, *, op: MPI.Op) -> None: ...


def get_info(
    comm: Comm, rank: int, mp_size: int, dp_size: int, fc_layer: str, in_dim: int, out_dim: int
) -> tuple[int, int, Any, Any, int, int]:
    """The position of a rank in the grid of ranks, and the size of its part of a layer.

    Args:
        comm: all `mp_size * dp_size` ranks; all of them call this together.
        rank: number of this process.
        mp_size: number of ranks that share a model; they have consecutive numbers.
        dp_size: number of replicas of the model.
        fc_layer: "fc_q", "fc_k" or "fc_v", split on their output, or "fc_o", split on its input.
        in_dim: inputs of the whole layer.
        out_dim: outputs of the whole layer.

    Returns:
        `(mp_idx, dp_idx, mp_comm, dp_comm, part_in_dim, part_out_dim)`: the index of the rank in its replica, and that
        of the replica; the communicator of the ranks that share this replica, and that of the ranks that hold the same
        part of other replicas; the dimensions of the part.

    Raises:
        ValueError: there is no such layer, a dimension is not divisible, or the sizes do not match `comm`.
    """
    if fc_layer not in ("fc_q", "fc_k", "fc_v", "fc_o"):
        raise ValueError(f"{fc_layer}: the layers are fc_q, fc_k, fc_v and fc_o")
    if mp_size * dp_size != comm.Get_size() or not 0 <= rank < comm.Get_size():
        raise ValueError(f"mp_size {mp_size}, dp_size {dp_size} and rank {rank} do not fit {comm.Get_size()} ranks")
    if fc_layer == "fc_o":
        in_dim = _divided(in_dim, mp_size)
    else:
        out_dim = _divided(out_dim, mp_size)
    mp_idx, dp_idx = rank % mp_size, rank // mp_size
    mp_comm = comm.Split(key=rank, color=dp_idx)
    dp_comm = comm.Split(key=rank, color=mp_idx)
    return mp_idx, dp_idx, mp_comm, dp_comm, in_dim, out_dim


def naive_collect_forward_input(x: Array, mp_comm: Comm, mp_size: int) -> Array:
    """Gather all ranks' inputs, (batch, seq, in_dim / mp_size) each, into (batch, seq, in_dim) on every rank.

    Raises:
        ValueError: `mp_comm` does not have `mp_size` ranks.
    """
    return _gathered(x, mp_comm, mp_size)


def naive_collect_forward_output(out: Array, mp_comm: Comm, mp_size: int) -> Array:
    """Gather all ranks' outputs, (batch, seq, out_dim / mp_size) each, into (batch, seq, out_dim) on every rank.

    Raises:
        ValueError: `mp_comm` does not have `mp_size` ranks.
    """
    return _gathered(out, mp_comm, mp_size)


def naive_collect_backward_output(output_grad: Array, mp_group_idx: int, mp_size: int) -> Array:
    """The gradient of this rank's outputs: its slice (batch, seq, out_dim / mp_size) of (batch, seq, out_dim).

    Every rank already has the whole gradient, so nothing is sent.

    Raises:
        ValueError: out_dim is not divisible by `mp_size`, or there is no such index.
    """
    if not 0 <= mp_group_idx < mp_size:
        raise ValueError(f"mp_group_idx {mp_group_idx}: mp_size {mp_size} has the indices below it")
    return _slices(output_grad, mp_size)[mp_group_idx].copy()


def naive_collect_backward_x(grad_x: Array, mp_comm: Comm, mp_size: int) -> Array:
    """The gradient of this rank's inputs: its slice (batch, seq, in_dim / mp_size) of the sum over the ranks.

    Each rank's columns of W_o use all inputs, so each rank computes a term (batch, seq, in_dim) of the whole gradient.

    Raises:
        ValueError: in_dim is not divisible by `mp_size`, or `mp_comm` does not have `mp_size` ranks.
    """
    _check_size(mp_comm, mp_size)
    terms = np.ascontiguousarray(np.stack(_slices(grad_x, mp_size)))
    mine = np.empty(terms.shape[1:], terms.dtype)
    mp_comm.Reduce_scatter(terms, mine, op=MPI.SUM)
    return mine


naive_collect_backward_input = naive_collect_backward_x


def _gathered(part: Array, mp_comm: Comm, mp_size: int) -> Array:
    """The parts (..., features / mp_size) of all ranks, concatenated on the last axis."""
    _check_size(mp_comm, mp_size)
    parts = np.empty((mp_size, *part.shape), part.dtype)
    mp_comm.Allgather(np.ascontiguousarray(part), parts)
    return np.concatenate(parts, axis=-1)


def _slices(whole: Array, mp_size: int) -> list[Array]:
    """`whole` (..., features) cut into `mp_size` views (..., features / mp_size)."""
    _divided(whole.shape[-1], mp_size)
    return np.split(whole, mp_size, axis=-1)


def _divided(dim: int, mp_size: int) -> int:
    if dim % mp_size:
        raise ValueError(f"a dimension of {dim} does not divide by mp_size {mp_size}")
    return dim // mp_size


def _check_size(mp_comm: Comm, mp_size: int) -> None:
    if mp_comm.Get_size() != mp_size:
        raise ValueError(f"mp_size {mp_size}: the communicator has {mp_comm.Get_size()} ranks")
