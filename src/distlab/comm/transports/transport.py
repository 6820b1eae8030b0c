"""The interface of a transport of tensors between the ranks of a group, as `distlab.comm.lab_group` uses it.

`MemoryTransport` is the common part of the transports that make memory which ranks share.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import Context, require_one_dtype
from distlab.comm.pending import Carrier
from distlab.comm.transports.mappings import NotShared
from distlab.comm.waits import Wait
from simplellm.errors import InputError

MadeT = TypeVar("MadeT")
Op = ReduceOp.RedOpType
is_overlapping: ContextVar[bool] = ContextVar("is_overlapping", default=False)


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Make the collectives that start inside progress while their ranks compute.

    They do not use the memory of one host, nor do tensors that are made here: in it, nothing happens before all ranks
    wait.
    """
    token = is_overlapping.set(True)
    try:
        yield
    finally:
        is_overlapping.reset(token)


@dataclass(frozen=True)
class Members:
    """The ranks of a group, as seen by one of them."""

    context: Context
    ranks: tuple[int, ...]  # numbers in the world

    @cached_property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.ranks.index(self.context.rank)

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank != self.context.rank)

    @cached_property
    def here(self) -> list[int]:
        """The ranks on this rank's host."""
        return self.context.here(self.ranks)

    @cached_property
    def first_of_hosts(self) -> list[int]:
        """The first rank on each host, in the order of these ranks."""
        first: dict[str, int] = {}
        for rank in self.ranks:
            first.setdefault(self.context.hosts[rank], rank)
        return list(first.values())


class Carried(NamedTuple):
    """A collective or message that a transport has started."""

    by: Carrier | None = None  # None: it is complete
    finish: Callable[[], object] | None = None  # called when the wait for `by` has ended
    sent_bytes: Mapping[str, int] | None = None  # by a suffix of the ledger's column; None: the usual bytes
    at_once: bool = False  # whether it ends before its call returns
    buffer_bytes: int = 0  # see `Operation`


class Transport:
    """A transport of tensors; by default, it accepts none.

    Each method starts a collective or a message of the group, or returns None if the transport does not accept its
    tensors. Tensors are contiguous. The answer is the same on all ranks that take part.
    """

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried | None:
        """Combine all ranks' tensors, in place."""
        return None

    def broadcast(self, tensor: Tensor, source: int) -> Carried | None:
        """Copy the tensor of a rank of the group into all others'."""
        return None

    def all_gather(self, output: Tensor, own: Tensor) -> Carried | None:
        """Collect all ranks' `own` in `output`, one after another."""
        return None

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried | None:
        """Collect the `own` of rank r in `rows[r]`; any sizes."""
        return None

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried | None:
        """Combine all ranks' `parts` (ranks, elements); rank r gets row r in `own`. An average is a sum here.

        Sums are added up in the order of ranks (`sums.add_in_order`), except over NCCL.
        """
        return None

    def all_to_all(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]
    ) -> Carried | None:
        """Send part r of `own` to rank r, and collect the parts for this rank in `output`; no sizes: equal parts."""
        return None

    def send(self, tensor: Tensor, to: int, tag: int) -> Carried | None:
        """Send a tensor to a rank of the group."""
        return None

    def recv(self, tensor: Tensor, source: int, tag: int) -> Carried | None:
        """Receive the next tensor of a rank of the group."""
        return None

    def close(self) -> None:
        """Close this rank's connections to others. The caller must have waited for every operation."""

    def abandon(self) -> None:
        """Close them whatever is under way, if that is possible."""
        self.close()


class MemoryTransport(Transport, ABC):
    """A transport that makes memory on the first request, if the ranks can share it.

    Args:
        members: the ranks; some of them are on one host.
        takes_all: whether tensors also travel here that are too small to be worth it.
    """

    smallest_bytes: int  # of tensors that are worth it

    def __init__(self, members: Members, takes_all: bool) -> None:
        self.members, self._takes_all = members, takes_all
        self._can_make = True

    def together(self, make: Callable[[], MadeT]) -> MadeT | None:
        """Call `make`, which makes memory; None if these ranks cannot share it. All ranks call it together.

        Raises:
            InputError: the transport is "shared", and these ranks cannot share memory.
            TrafficError: a rank does not take part.
        """
        context = self.members.context
        if not self._can_make:
            return None
        try:
            with context.waits.during(Wait("shared memory", "other", self.members.others)):
                made = make()
        except NotShared as error:
            share_less(context, error, is_first=context.rank in self.members.first_of_hosts)
            self._can_make = False  # memory that was made before stays shared
            return None
        context.shares_memory = True
        return made

    @property
    def limit(self) -> timedelta:
        """The longest time that a wait may take."""
        return timedelta(seconds=self.members.context.waits.timeout_seconds)

    def is_worth_it(self, size_bytes: int, like: Tensor) -> bool:
        return like.is_cpu and (self._takes_all or size_bytes >= self.smallest_bytes)

    def empty(self, elements: int, like: Tensor) -> Tensor | None:
        """Return zeros (elements,) in memory that the ranks share, or None; see `distlab.comm.group.empty`."""
        if not self.is_worth_it(elements * like.itemsize, like):
            return None
        return self.together(lambda: self.allocate(elements, like.dtype))

    @abstractmethod
    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros (elements,) in this rank's part of new memory."""

    def shares(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory of one host that all ranks of the group share."""
        return False

    def held_back(self) -> list[Wait]:
        """Return the collectives of which this rank has yet to compute its part. Other threads may call this."""
        return []


def share_less(context: Context, error: NotShared, is_first: bool) -> None:
    """Raise `InputError` if the transport is "shared"; else continue over gloo: the first rank remarks on it."""
    if context.options.transport == "shared":
        raise InputError(f"--transport shared: {error}; use --transport gloo") from None
    if is_first and not context.has_remarked:
        context.has_remarked = True
        context.options.remark(f"{error}; what these ranks cannot share goes over gloo instead")


def ring_bytes(tensor: Tensor, ranks: int) -> int:
    """Return the bytes that each of `ranks` ranks sends in an all-reduce around a ring."""
    return 2 * (ranks - 1) * tensor.nbytes // ranks


def require_plain(*tensors: Tensor) -> None:
    """Raise `ValueError` for tensors of several dtypes, sparse ones, or ones whose memory is not their content.

    That memory would be sent as it is: with its gaps, or without the sign of a view such as `z.conj().imag`.
    """
    require_one_dtype(tensors)
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ValueError(f"a tensor of layout {tensor.layout}: only an all-reduce takes sparse tensors (COO)")
        if not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"a tensor {shape} with strides {strides} is not contiguous; call .contiguous() first")
        if tensor.is_neg():
            raise ValueError("a view that torch has yet to negate; call .resolve_neg() first")


def kind_of(operation: Any, tensor: Tensor) -> ReduceOp.RedOpType:
    """Return the kind of an operation: a `ReduceOp` of torch's options equals its kind but is not a dictionary key.

    Raises:
        ValueError: the lab does not reduce such a tensor by it.
    """
    if operation == ReduceOp.PREMUL_SUM:
        raise ValueError("the lab does not reduce by PREMUL_SUM; multiply first, and reduce by SUM")
    if operation == ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"no average of {tensor.dtype}: it need not be a whole number; reduce by SUM, and divide")
    return getattr(operation, "op", operation)
