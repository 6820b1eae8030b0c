"""The calls that rooms make which do not use `torch.distributed` yet; each is a call of the lab's process group."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import Context, context_of
from distlab.comm.group import CONTROL, Group, LabGroup, empty, open_queues, received_bytes, shares
from distlab.comm.names import named
from distlab.comm.pending import Pending as Transfer
from distlab.comm.recorder import Ledger
from distlab.comm.waits import TrafficError, Wait

__all__ = ["Group", "Traffic", "TrafficError", "Transfer", "traffic"]

Op = ReduceOp.RedOpType


def _group(group: Group) -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        dist.init_process_group("lab", store=dist.HashStore(), rank=0, world_size=1)
    found = group or dist.group.WORLD
    assert found is not None
    return found


class Traffic:
    """The lab's process group under its former names."""

    @property
    def context(self) -> Context:
        _group(None)
        return context_of()

    @property
    def ledger(self) -> Ledger:
        return self.context.ledger

    @property
    def begun(self) -> Counter[str]:
        return self.context.begun

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def timeout_seconds(self) -> float:
        return self.context.waits.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self.context.waits.timeout_seconds = seconds

    @property
    def group_timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_seconds)

    @property
    def shares_memory(self) -> bool:
        return self.context.shares_memory

    def describe(self, rank: int) -> str:
        return self.context.describe(rank)

    def held_back(self) -> dict[str, list[int]]:
        return self.context.held_back()

    def waits_for(self, at_least_seconds: float = 0.0) -> Wait | None:
        return self.context.waits.waits_for(at_least_seconds)

    def failure_of(self, error: Exception) -> TrafficError | None:
        return self.context.waits.failure_of(error)

    def waited_so_far(self) -> float:
        return self.context.waits.waited_so_far()

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        with self.context.waits.during(what), named(what, CONTROL):
            yield

    def connect(self, group: Group = None) -> None:
        found = _group(group)
        if isinstance(found, LabGroup):
            found.connect()

    def new_buffer(self, elements: int, like: Tensor, group: Group = None, *, goes_on_alone: bool = False) -> Tensor:
        return empty(elements, like, _group(group), overlaps=goes_on_alone)

    def is_shared(self, tensor: Tensor, group: Group = None) -> bool:
        return shares(tensor, _group(group))

    def new_queue(
        self, sender: int, receiver: int, slots: int, elements: int, like: Tensor, group: Group = None
    ) -> Any:
        found = _group(group)
        open_queues((sender, receiver), elements * like.itemsize, like, found, slots=slots)
        return found.queue(sender, receiver) if isinstance(found, LabGroup) else None

    def new_queues(
        self, ranks: Sequence[int], slots: int, elements: int, like: Tensor, group: Group = None
    ) -> dict[int, Any]:
        one, other = ranks
        return {a: self.new_queue(a, b, slots, elements, like, group) for a, b in ((one, other), (other, one))}

    def open_queues(self, row: Sequence[int], elements: int, like: Tensor, *, both_ways: bool = False) -> None:
        open_queues(row, elements * like.itemsize, like, _group(None))
        if both_ways:
            open_queues(row[::-1], elements * like.itemsize, like, _group(None))

    def all_reduce(
        self,
        tensor: Tensor,
        what: str,
        *,
        kind: str,
        op: Op = ReduceOp.AVG,
        group: Group = None,
        by_hand: Callable[[Tensor, Op], object] | None = None,
    ) -> Transfer:
        with named(what, kind):
            if by_hand is None or _group(group).size() == 1:
                return dist.all_reduce(tensor, op, _group(group), async_op=True)
            if group is not None:
                raise ValueError("the handwritten collectives work on all ranks, not on a group of them")
            by_hand(tensor, ReduceOp.SUM if op == ReduceOp.AVG else op)
            if op == ReduceOp.AVG:
                tensor.div_(dist.get_world_size())
            return Transfer(self.context, Wait(what, "collective"), None, [tensor])

    def all_reduced(self, tensor: Tensor, what: str, *, kind: str, op: Op, group: Group = None) -> Tensor:
        combined = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.all_reduce(combined, what, kind=kind, op=op, group=group).wait()
        return combined

    def all_gather(self, parts: Tensor, own: Tensor, what: str, *, kind: str, group: Group = None) -> Transfer:
        with named(what, kind):
            return dist.all_gather_single(parts, own, _group(group), async_op=True)

    def reduce_scatter(self, own: Tensor, parts: Tensor, what: str, *, kind: str, group: Group = None) -> Transfer:
        with named(what, kind):
            return dist.reduce_scatter_single(own, parts, ReduceOp.SUM, _group(group), async_op=True)

    def received_bytes(self, parts: Tensor, group: Group = None) -> int:
        return received_bytes(parts, _group(group))

    def broadcast(
        self, tensor: Tensor, what: str, *, kind: str, src: int | None = None, group: Group = None
    ) -> Transfer:
        with named(what, kind):
            found = _group(group)
            source = 0 if src is None else dist.get_group_rank(found, src)
            return dist.broadcast(tensor, group=found, group_src=source, async_op=True)

    def send(
        self, tensor: Tensor, what: str, *, to: int, kind: str, group: Group = None, queue: object = None
    ) -> Transfer:
        with named(what, kind):
            sent = dist.isend(tensor, to, _group(group))
            return cast(Transfer, sent)

    def receive(self, tensor: Tensor, what: str, *, source: int, group: Group = None, queue: object = None) -> Transfer:
        with named(what, CONTROL):
            received = dist.irecv(tensor, source, _group(group))
            return cast(Transfer, received)


traffic = Traffic()
