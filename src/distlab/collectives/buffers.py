"""Helpers for the handwritten collectives: contiguous memory, and element-wise operations."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.transports.sums import COMBINE

Op = ReduceOp.RedOpType
KEPT_BYTES = 64_000_000


@contextlib.contextmanager
def in_place(tensor: Tensor, is_changed: bool = True) -> Iterator[Tensor]:
    """Yield a detached contiguous view or copy of a tensor; a copy is written back at the end if it `is_changed`."""
    own = tensor.detach()
    data = own.contiguous().resolve_conj().resolve_neg()  # messages are plain memory, without torch's conjugate flags
    yield data
    if is_changed and data is not own:
        own.copy_(data)


def scratch_buffer(like: Tensor, number: int = 0, count: int | None = None) -> Tensor:
    """Return memory to receive into, of the shape of a tensor or of `count` tensors; each `number` is another buffer.

    The last few buffers are reused by later calls, unless they are very large: the operating system clears fresh memory
    at the first write, which takes as long as a message.
    """
    shape = like.shape if count is None else torch.Size((count, *like.shape))
    if shape.numel() * like.element_size() > KEPT_BYTES:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return _kept_buffer(shape, like.dtype, like.device, number, threading.get_ident())


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)  # the next call may be outside inference mode
def _kept_buffer(shape: torch.Size, dtype: torch.dtype, device: torch.device, number: int, thread: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@functools.cache
def reduce_function(op: Op, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the element-wise function of an operation.

    Raises:
        ValueError: the operation is not in `COMBINE`, or torch does not support it for this type; raised on every rank,
            so that none waits.
    """
    for known, function in COMBINE.items():
        if op == known:
            with contextlib.suppress(RuntimeError):  # for example, the maximum of complex numbers is not defined
                function(torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
                return function
    raise ValueError(
        f"{op} of {dtype}: the collectives combine with SUM, PRODUCT, MAX or MIN, if torch supports them for the type"
    )


def one_for_each_rank(parts: Tensor | None, part: Tensor, world_size: int) -> Tensor:
    """Return `parts`, if it holds a tensor of the shape of `part` for each rank.

    Raises:
        ValueError: it does not; raised before anything is sent.
    """
    shape = (world_size, *part.shape)
    if parts is None or parts.shape != shape:
        given = "none" if parts is None else f"one {tuple(parts.shape)}"
        raise ValueError(f"a part {tuple(part.shape)} for each rank needs a tensor {shape} on this rank, not {given}")
    return parts
