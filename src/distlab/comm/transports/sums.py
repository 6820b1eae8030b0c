"""Tensors of all ranks combined in the order of the ranks, so that all get the same sum to the last bit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

CHUNK_BYTES = 256 * 1024  # added up at once, so that a chunk is written back to all parts while it is in the caches
COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


def is_known(op: ReduceOp.RedOpType) -> bool:
    """Return whether the lab combines by this operation itself; gloo and NCCL know more operations."""
    return op in COMBINE or op == ReduceOp.AVG


def combine_in_order(parts: Sequence[Tensor], op: ReduceOp.RedOpType, result: Tensor) -> None:
    """Combine two or more tensors of one shape and dtype, ((x0 + x1) + x2) + …; an average is not yet divided.

    `result` may be the first of `parts`.
    """
    combine = COMBINE[ReduceOp.SUM if op == ReduceOp.AVG else op]
    first, *others = parts
    for other in others:
        combine(first, other, out=result)
        first = result


def add_in_order(rows: Sequence[Tensor], total: Tensor) -> None:
    """Add up two or more rows, (elements,) each, in order: ((x0 + x1) + x2) + …

    Numbers of 16 bits are added in float32, and the sum is rounded once. `total`, (elements,), may be one of the rows.
    """
    dtype, in_a_chunk = total.dtype, CHUNK_BYTES // total.element_size()
    if dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    for into, first, *others in zip(*(row.split(in_a_chunk) for row in (total, *rows)), strict=True):
        in_progress = first.to(dtype) + others[0]
        for other in others[1:]:
            in_progress += other
        into.copy_(in_progress)
