"""Tensors of ranks, and their results if they are combined in the order of the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp


def operand(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def combined(operands: Sequence[Tensor], op: ReduceOp.RedOpType) -> Tensor:
    """The result that the documentation promises, bit for bit; for an average, the sum."""
    result = operands[0]
    for other in operands[1:]:
        if op == ReduceOp.PRODUCT:
            result = result * other
        elif op in (ReduceOp.MAX, ReduceOp.MIN):
            result = (torch.maximum if op == ReduceOp.MAX else torch.minimum)(result, other)
        else:
            result = result + other
    return result
