"""gloo and NCCL: they carry every tensor, so they are asked last.

gloo carries CUDA tensors through pinned host memory. Its reduce-scatter sends as much as an all-reduce; here each rank
sends every part to the rank that adds it up.
"""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.gloo import Sockets, connect
from distlab.comm.transports.sums import add_in_order, combine_in_order, is_known
from distlab.comm.transports.transport import Carried, Members, Op, Transport
from distlab.machine.network import patient_threads
from distlab.machine.sockets import shut_down


class Library(Transport):
    """A group of gloo or NCCL.

    Args:
        members: the ranks, which meet now.
        store: in which they meet.
        timeout: of each of its collectives and messages.

    Attributes:
        group, kind, devices: torch's group, its type, and the devices whose tensors it carries.
    """

    def __init__(self, members: Members, store: dist.Store, timeout: timedelta) -> None:
        self._members, self._size = members, members.size
        self._is_nccl = members.context.is_over_nccl
        self._sockets: Sockets = set()  # of gloo, if the group can be abandoned
        self._several: _Several | None = None  # the messages that are being started together
        self.group: Any
        with patient_threads():
            if self._is_nccl:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self.group = dist.ProcessGroupNCCL(store, members.rank, members.size, options)
                self.kind, self.devices = dist.ProcessGroup.BackendType.NCCL, ["cuda"]
            else:
                check = members.context.options.check
                self.group, self._sockets = connect(store, members.rank, members.size, timeout, check)
                self.kind, self.devices = dist.ProcessGroup.BackendType.GLOO, ["cpu", "cuda"]

    def abandon(self) -> None:
        shut_down(self._sockets)

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried:
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp(op)
        carried = self._staged(tensor)
        return _brought(self.group.allreduce([carried], options), tensor, carried)

    def broadcast(self, tensor: Tensor, source: int) -> Carried:
        options = dist.BroadcastOptions()
        options.rootRank = source
        carried = self._staged(tensor)
        return _brought(self.group.broadcast([carried], options), tensor, carried)

    def all_gather(self, output: Tensor, own: Tensor) -> Carried:
        into, carried = self._host_buffer(output), self._staged(own)
        if self._is_nccl:
            return Carried(self.group._allgather_base(into, carried))
        rows = list(into.view(self._size, *own.shape).unbind())
        return _brought(self.group.allgather([rows], [carried]), output, into)

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried:
        into = [self._host_buffer(row) for row in rows]

        def bring() -> None:
            for row, filled in zip(rows, into, strict=True):
                row.copy_(filled, non_blocking=True)  # nothing, if they are one tensor

        return Carried(self.group.allgather([into], [self._staged(own)]), bring)

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried:
        if self._is_nccl or not is_known(op):
            options = dist.ReduceScatterOptions()
            options.reduceOp = ReduceOp(op)
            return Carried(self.group._reduce_scatter_base(own.view(-1), parts.view(-1), options))
        carried, into = self._staged(parts), self._host_buffer(own)
        received = torch.empty_like(carried)

        def combine() -> None:
            rows = received.flatten(1).unbind()
            if op == ReduceOp.SUM:
                add_in_order(rows, into.view(-1))
            else:
                combine_in_order(rows, op, into.view(-1))
            own.copy_(into)

        work = self.group.alltoall_base(received, carried, [], [])
        return Carried(work, combine, buffer_bytes=received.nbytes)

    def all_to_all(self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]) -> Carried:
        into, carried = self._host_buffer(output), self._staged(own)
        work = self.group.alltoall_base(into, carried, list(output_sizes), list(own_sizes))
        return _brought(work, output, into)._replace(sent_bytes=self._by_host(own, own_sizes))

    def _by_host(self, own: Tensor, sizes: Sequence[int]) -> dict[str, int] | None:
        """Return the bytes of parts for other ranks, and " between hosts" those of parts that leave this rank's host.

        None if all ranks are on one host.
        """
        here = self._members.here
        if len(here) == self._size:
            return None
        sent = {"": 0, " between hosts": 0}
        parts = own.split(list(sizes) or [len(own) // self._size] * self._size)
        for rank, part in zip(self._members.ranks, parts, strict=True):
            if rank != self._members.context.rank:
                sent["" if rank in here else " between hosts"] += part.nbytes
        return sent

    def reduce(self, tensor: Tensor, root: int, op: Op) -> Carried:
        """Combine all ranks' tensors on one of them."""
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = ReduceOp(op), root
        carried = self._staged(tensor)
        return _brought(self.group.reduce([carried], options), tensor, carried)

    def gather(self, output: Sequence[Sequence[Tensor]], own: Tensor, root: int) -> Carried:
        """Collect all ranks' `own` in the root's `output[0]`."""
        options = dist.GatherOptions()
        options.rootRank = root
        return Carried(self.group.gather(output, [own], options))

    def scatter(self, own: Tensor, input: Sequence[Sequence[Tensor]], root: int) -> Carried:
        """Give each rank its tensor of the root's `input[0]`."""
        options = dist.ScatterOptions()
        options.rootRank = root
        return Carried(self.group.scatter([own], input, options))

    def send(self, tensor: Tensor, to: int, tag: int) -> Carried:
        work = self.group.send([self._staged(tensor)], to, tag)
        return Carried(self._several or work)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Carried:
        into = self._host_buffer(tensor)
        work = self.group.recv([into], source, tag)
        return _brought(self._several or work, tensor, into)

    @contextlib.contextmanager
    def starting_together(self) -> Iterator[None]:
        """Start the messages inside together, over NCCL; all ranks of the group enter this context.

        A message that NCCL starts alone uses a communicator of its two ranks: it keeps later ones between them waiting,
        and the first one keeps the thread waiting until the other rank starts it too. Those that start together use
        the group's communicator.
        """
        if not self._is_nccl:
            yield
            return
        several = self._several = _Several()
        self.group._start_coalescing()
        try:
            yield
        finally:
            self._several = None
            several.work = self.group._end_coalescing()

    def recv_anysource(self, tensor: Tensor, tag: int) -> Carried:
        """Receive the next tensor of any rank of the group."""
        into = self._host_buffer(tensor)
        return _brought(self.group.recv_anysource([into], tag), tensor, into)

    def _host_buffer(self, tensor: Tensor) -> Tensor:
        """Return the tensor if it can be sent; for a CUDA tensor over gloo, pinned host memory of its size."""
        if tensor.is_cpu or self._is_nccl:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def _staged(self, tensor: Tensor) -> Tensor:
        """Return the tensor, copied to its `_host_buffer` if it cannot be sent directly."""
        carried = self._host_buffer(tensor)
        if carried is not tensor:
            carried.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        return carried


class _Several(dist.Work):
    """Messages that NCCL starts together; `work` is torch's handle, once they have started."""

    work: dist.Work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _brought(work: dist.Work, tensor: Tensor, carried: Tensor) -> Carried:
    """Return the operation that sends or fills `carried`; at its end `tensor` has the same content."""
    return Carried(work, None if carried is tensor else lambda: tensor.copy_(carried, non_blocking=True))
