"""The all-reduce of ranks on several hosts: in memory that the ranks of a host share, and over gloo between the hosts.

Only the first rank of each host takes part in the exchange between the hosts, so that each host sends a tensor once;
in a ring of all ranks, each of its ranks would send it (Jia et al., "Highly scalable deep learning training system
with mixed-precision", 2018). The messages between hosts have a separate column, such as "gradients between hosts".
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import SMALLEST_OF_HOSTS_BYTES, Hosts
from distlab.comm.transports.collectives import Collectives, InPlace, combine_share
from distlab.comm.transports.mappings import NotShared
from distlab.comm.transports.memory import Address, MemoryTransport, SharedMemory, from_rank_0
from distlab.comm.transports.signals import SECONDS_MORE
from distlab.comm.transports.sums import copy_from
from distlab.comm.transports.transport import Carried, Members, Op, ring_bytes
from distlab.machine.network import patient_threads


class SeveralHosts(MemoryTransport):
    """Ranks on several hosts, at least one of which has several ranks; carries the tensors that `empty` has made.

    Args:
        name: return the group's name, different for each group; called when the memory is made.
    """

    smallest_bytes = SMALLEST_OF_HOSTS_BYTES

    def __init__(self, members: Members, takes_all: bool, name: Callable[[], str]) -> None:
        super().__init__(members, takes_all)
        self._name = name
        self._memory: MemoryOfHosts | None = None

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        if self._memory is None:
            context = self.members.context
            self._memory = MemoryOfHosts(context.hosts, self.members.ranks, context.rank, self._name(), self.limit)
        return self._memory.allocate(elements, dtype, self.limit)

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried | None:
        memory = self._memory
        if memory is None or not (address := memory.memory.address_of(tensor)):
            return None
        sent_bytes = {"": ring_bytes(tensor, memory.ranks_here)}
        if memory.is_first:
            sent_bytes[" between hosts"] = ring_bytes(tensor, memory.hosts)
        return Carried(memory.all_reduce(address, tensor.view(-1), op, self.limit), sent_bytes=sent_bytes)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


class MemoryOfHosts:
    """The memory that the ranks of a group share on each of several hosts, and the groups that they communicate in.

    All ranks of the group must construct it together, and then call its methods in the same order.

    Args:
        hosts: the hosts of the ranks.
        ranks: of the group.
        rank: this rank.
        name: of the group, different for each group.
        timeout: of the meeting.

    Raises:
        RuntimeError: raised by gloo; a rank did not take part.
    """

    def __init__(self, hosts: Hosts, ranks: Sequence[int], rank: int, name: str, timeout: timedelta) -> None:
        by_host = hosts.split(ranks)
        own = next(here for here in by_host if rank in here)
        self._first = own[0]
        self.ranks, self.hosts, self.ranks_here, self.rank = tuple(ranks), len(by_host), len(own), own.index(rank)

        def meet(those: Sequence[int]) -> dist.ProcessGroup:
            # Not `dist.new_group`, which all ranks of the world would have to call. A backend has a group's methods.
            store = dist.PrefixStore(f"hosts/{name}/{','.join(map(str, those))}", hosts.store)
            return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, those.index(rank), len(those), timeout))

        with patient_threads():
            here = meet(own)
            self.memory = SharedMemory(here, own.index(rank), len(own), has_own_core=lambda: False)
            self._collectives = Collectives(self.memory, own)
            self._between = meet([here[0] for here in by_host]) if self.is_first else None
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        """Close this rank's connections to others; every operation must have ended."""
        self._thread.shutdown()
        self.memory.close()

    @property
    def is_first(self) -> bool:
        """True if this rank is the first of its host."""
        return self.rank == 0

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Return zeros (elements,) in this rank's part of a new mapping of its host, after all earlier operations.

        Raises:
            NotShared: on all ranks, if the ranks of one host cannot make or map it.
            RuntimeError: raised by gloo; a rank did not take part.
        """
        return self._thread.submit(self._allocate, elements, dtype, timeout).result()

    def _allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        deadline = time.perf_counter() + timeout.total_seconds()
        problem: NotShared | None = None
        try:
            buffer = self.memory.allocate(elements, dtype, timeout)
        except NotShared as error:
            problem = error
        failed = torch.tensor([int(problem is not None)])
        self._reduce_between(failed, ReduceOp.MAX, deadline)
        self.memory.group.broadcast([failed], from_rank_0(_until(deadline))).wait()
        if failed:
            raise problem or NotShared("the ranks of another host cannot share memory")
        return buffer

    def all_reduce(self, address: Address, own: Tensor, op: ReduceOp.RedOpType, timeout: timedelta) -> Future[None]:
        """Combine the tensors in all ranks' parts, on all hosts, after all earlier operations.

        `own`, (elements,), is this rank's, at `address`. Those of a host are first combined in the order of the ranks,
        ((x0 + x1) + x2) + …, then gloo combines the hosts' sums; every rank gets a copy of the first rank's result. So
        all ranks have the same sums, in every run. A thread does this, so that the hosts exchange while ranks compute.
        """
        return self._thread.submit(self._combine, address, own, op, timeout)

    @torch.inference_mode()
    def _combine(self, address: Address, own: Tensor, op: ReduceOp.RedOpType, timeout: timedelta) -> None:
        deadline = time.perf_counter() + timeout.total_seconds()  # of all three parts: the caller waits for them as one
        plain = ReduceOp.SUM if op == ReduceOp.AVG else op
        add = partial(combine_share, rank=self.rank, op=plain, all_get_it=False)
        InPlace(self._collectives, address, own, add, f"all_reduce by {op.name}").advance(deadline)
        self._reduce_between(own, plain, deadline)
        if self.is_first and op == ReduceOp.AVG:
            own.div_(len(self.ranks))
        bring = partial(copy_from, source=0, rank=self.rank)
        InPlace(self._collectives, address, own, bring, f"broadcast from rank {self._first}").advance(deadline)

    def _reduce_between(self, tensor: Tensor, op: ReduceOp.RedOpType, deadline: float) -> None:
        """Combine the tensors of the hosts' first ranks; do nothing on other ranks."""
        if self._between is not None:
            options = dist.AllreduceOptions()
            options.reduceOp, options.timeout = ReduceOp(op), _until(deadline + 2 * SECONDS_MORE)
            self._between.allreduce([tensor], options).wait(options.timeout)


def _until(deadline: float) -> timedelta:
    """Return the time that is left; never 0, which would mean no deadline to torch."""
    return timedelta(seconds=max(0.001, deadline - time.perf_counter()))
