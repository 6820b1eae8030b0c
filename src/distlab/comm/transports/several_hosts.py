"""The all-reduce of ranks on several hosts: in memory that the ranks of a host share, and over gloo between the hosts.

Only the first rank of each host takes part in the exchange between the hosts, so that each host sends a tensor once;
in a ring of all ranks, each of its ranks would send it (Jia et al., "Highly scalable deep learning training system
with mixed-precision", 2018). The messages between hosts have a separate column, such as "gradients between hosts".
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import SMALLEST_OF_HOSTS_BYTES
from distlab.comm.transports.mappings import NotShared
from distlab.comm.transports.memory import ELSEWHERE, SharedCollective, SharedMemory, call_of
from distlab.comm.transports.one_host import all_reduce_in_place, broadcast_in_place
from distlab.comm.transports.signals import SECONDS_MORE
from distlab.comm.transports.transport import Carried, Members, MemoryTransport, Op, ring_bytes
from distlab.comm.waits import group_key
from distlab.machine.network import patient_threads


class SeveralHosts(MemoryTransport):
    """Ranks on several hosts, at least one of which has several ranks; carries the tensors that `empty` has made.

    Args:
        store: of the group, in which the ranks meet.
    """

    smallest_bytes = SMALLEST_OF_HOSTS_BYTES

    def __init__(self, members: Members, takes_all: bool, store: dist.Store) -> None:
        super().__init__(members, takes_all)
        self._store = store
        self._is_first = members.context.rank in members.first_of_hosts
        self._memory: SharedMemory | None = None  # of this host; made for the first tensor
        self._between: dist.ProcessGroup | None = None  # the first ranks of the hosts
        self._thread = ThreadPoolExecutor(1)

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        if self._memory is None:
            here = self.members.here
            with patient_threads():
                memory = SharedMemory(self._meet(here), here, here.index(self.members.context.rank), False)
                if self._is_first:
                    self._between = self._meet(self.members.first_of_hosts)
            self._memory = memory
        return self._thread.submit(self._allocate, self._memory, elements, dtype).result()

    def _meet(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        # Not `dist.new_group`, which all ranks of the world would have to call. A backend has a group's methods.
        store, rank = dist.PrefixStore(f"hosts/{group_key(ranks)}", self._store), ranks.index(self.members.context.rank)
        return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, len(ranks), self.limit))

    def _allocate(self, memory: SharedMemory, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros (elements,) in this rank's part of a new mapping of its host; `NotShared` on all ranks."""
        deadline = time.perf_counter() + self.limit.total_seconds()
        problem: NotShared | None = None
        try:
            buffer = memory.allocate(elements, dtype)
        except NotShared as error:
            problem = error
        failed = torch.tensor([int(problem is not None)])
        self._reduce_between(failed, ReduceOp.MAX, deadline)
        options = dist.BroadcastOptions()
        options.timeout = _until(deadline)
        memory.group.broadcast([failed], options).wait()
        if failed:
            raise problem or NotShared("the ranks of another host cannot share memory")
        return buffer

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried | None:
        """Combine the tensors of a host in the order of its ranks, then over gloo the results of the hosts.

        Every rank gets a copy of the first rank's result, so all ranks have the same sums, in every run. A thread does
        this, in the order of the calls, so that the hosts exchange while ranks compute.
        """
        memory = self._memory
        if memory is None or memory.address_of(tensor) == ELSEWHERE:
            return None
        sent_bytes = {"": ring_bytes(tensor, memory.size)}
        if self._is_first:
            sent_bytes[" between hosts"] = ring_bytes(tensor, len(self.members.first_of_hosts))
        return Carried(self._thread.submit(self._combine, memory, tensor.view(-1), op), sent_bytes=sent_bytes)

    @torch.inference_mode()
    def _combine(self, memory: SharedMemory, own: Tensor, op: Op) -> None:
        # Of all three parts: the caller waits for them as one.
        deadline = time.perf_counter() + self.limit.total_seconds()
        plain, address = ReduceOp.SUM if op == ReduceOp.AVG else op, memory.address_of(own)

        def complete(name: str, turns: Iterator[None]) -> None:
            SharedCollective(memory, address, call_of(name, own), turns).advance(deadline)

        complete(f"all_reduce by {op.name}", all_reduce_in_place(memory, own, plain, all_get_it=False))
        self._reduce_between(own, plain, deadline)
        if self._is_first and op == ReduceOp.AVG:
            own.div_(self.members.size)
        complete(f"broadcast from rank {self.members.here[0]}", broadcast_in_place(memory, own, 0))

    def _reduce_between(self, tensor: Tensor, op: Op, deadline: float) -> None:
        """Combine the tensors of the hosts' first ranks; do nothing on other ranks."""
        if self._between is not None:
            options = dist.AllreduceOptions()
            options.reduceOp, options.timeout = ReduceOp(op), _until(deadline + 2 * SECONDS_MORE)
            self._between.allreduce([tensor], options).wait(options.timeout)

    def close(self) -> None:
        self._thread.shutdown()
        if self._memory is not None:
            self._memory.close()


def _until(deadline: float) -> timedelta:
    """Return the time that is left; never 0, which would mean no deadline to torch."""
    return timedelta(seconds=max(0.001, deadline - time.perf_counter()))
