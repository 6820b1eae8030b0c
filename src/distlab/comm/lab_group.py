"""The process group of the lab's backend: `dist.init_process_group("lab")`.

It is torch's interface over gloo, NCCL and the memory that ranks of one host share. It also counts messages and bytes,
gives each wait a name and a deadline, and records the events that `--trace` draws. It counts the bytes that a
bandwidth-optimal algorithm sends from this rank (a ring for all-reduce, all-gather and reduce-scatter: Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009), also in shared memory, which moves
the same number.

The first of these transports that accepts a collective or message carries it:

    queues         messages, where `open_queues` has made a queue
    one host       tensors that `empty` has made, in place; others from `SMALLEST_SHARED_BYTES` on, in pieces
    several hosts  all-reduces of tensors that `empty` has made
    library        everything else: gloo or NCCL

Functional collectives, which DTensor uses, call the same methods through torch's C++ interface, and for all-gather and
reduce-scatter the coalesced ones. A method that this class does not override would go to gloo or NCCL uncounted.
"""

# torch's annotations have overloads that its Python layer does not call.
# mypy: disable-error-code="override,assignment"

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: its functions keep for ever the default group that there is when it is imported
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import Context, ContextGroup, TransportName
from distlab.comm.names import name_of
from distlab.comm.pending import Pending, SharedWork
from distlab.comm.recorder import SEND, Destination
from distlab.comm.transports.library import Library
from distlab.comm.transports.one_host import OneHost
from distlab.comm.transports.queues import Queues
from distlab.comm.transports.several_hosts import SeveralHosts
from distlab.comm.transports.transport import (
    Carried,
    Members,
    MemoryTransport,
    Transport,
    kind_of,
    require_plain,
    ring_bytes,
)
from distlab.comm.waits import Wait, group_key
from distlab.machine.torch_patches import keep_work_of_joins, uncompiled

keep_work_of_joins()


@uncompiled
class LabGroup(ContextGroup):
    """Ranks, given by their numbers in the world, that communicate through torch's interface; see the module.

    `timeout` is of torch's own group; `transport`, if given, replaces the context's.
    """

    def __init__(
        self,
        context: Context,
        store: dist.Store,
        ranks: Sequence[int],
        timeout: timedelta,
        transport: TransportName | None = None,
    ) -> None:
        super().__init__(ranks.index(context.rank), len(ranks))  # type: ignore[call-arg]
        self.context, self.ranks, self.key = context, tuple(ranks), group_key(ranks)
        members = self._members = Members(context, self.ranks)
        self._messages: Counter[tuple[int, int]] = Counter()  # sent and received by this rank: (sender, receiver)
        transport = context.options.transport if transport is None else transport
        takes_all, hosts = transport == "shared", len(members.first_of_hosts)
        self._library = Library(members, store, timeout)
        # torch asks for the group's devices to know where the tensors of its object collectives must be.
        for device in self._library.devices:
            self._register_backend(torch.device(device), self._library.kind, self._library.group)
        # Memory and queues are made on request.
        self.memory: MemoryTransport | None = None
        self.queues: Queues | None = None
        self.transports: list[Transport] = [self._library]  # in the order in which they are asked
        if transport != "gloo" and not context.is_over_nccl and hosts < members.size:
            self.queues = Queues(members, self)
            if hosts == 1:
                self.memory = OneHost(members, takes_all, self._library.group)
            else:
                self.memory = SeveralHosts(members, takes_all, store)
            self.transports = [self.queues, self.memory, self._library]
        # A new set: another thread may be going through the one before.
        context.groups = weakref.WeakSet([*context.groups, self])

    def shutdown(self) -> None:
        """End the group; `dist.destroy_process_group` calls it. The caller must have waited for every operation."""
        for transport in self.transports:
            transport.close()

    def abandon(self) -> object:
        for transport in reversed(self.transports):
            transport.abandon()
        return self._library.group

    def held_back(self) -> list[Wait]:
        return self.memory.held_back() if self.memory else []

    # Collectives

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> Pending:
        [tensor] = [tensors] if isinstance(tensors, Tensor) else tensors  # `DistributedDataParallel.join` gives one
        op = kind_of((opts or dist.AllreduceOptions()).reduceOp, tensor)
        if tensor.is_sparse:  # gloo gathers indices and values
            own_bytes = tensor._indices().nbytes + tensor._values().nbytes
            wait, sent_bytes = self._collective("all_reduce"), (self.size() - 1) * own_bytes
            return self._begin(wait, lambda _: self._library.all_reduce(tensor, op), [tensor], sent_bytes)
        require_plain(tensor)
        wait, sent_bytes = self._collective("all_reduce"), ring_bytes(tensor, self.size())
        return self._begin(wait, lambda by: by.all_reduce(tensor, op), [tensor], sent_bytes)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        return self._together([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        [tensor], source = tensors, (opts or dist.BroadcastOptions()).rootRank
        require_plain(tensor)
        wait = self._collective("broadcast", f" of {self.context.describe(self._in_world(source))}")
        sent_bytes = tensor.nbytes * (self.rank() == source)
        return self._begin(wait, lambda by: by.broadcast(tensor, source), [tensor], sent_bytes)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Collect every rank's `input` in `output`, in the order of the ranks."""
        require_plain(output, input)
        wait, sent_bytes = self._collective("all_gather"), (self.size() - 1) * input.nbytes
        return self._begin(wait, lambda by: by.all_gather(output, input), [output], sent_bytes)

    def all_gather_single_coalesced(
        self, output: Sequence[Tensor], input: Sequence[Tensor], opts: Any = None
    ) -> Pending:
        """Call `all_gather_single` for several tensors; functional collectives use this, also for one tensor."""
        return self._together([self.all_gather_single(*pair) for pair in zip(output, input, strict=True)])

    def allgather(self, output: Sequence[Sequence[Tensor]], input: Sequence[Tensor], opts: Any = None) -> Pending:
        """Collect every rank's `input[0]` in `output[0]`, a tensor for each rank."""
        [rows], [own] = map(list, output), input
        require_plain(*rows, own)
        wait, sent_bytes = self._collective("all_gather"), (self.size() - 1) * own.nbytes
        return self._begin(wait, lambda by: by.all_gather_list(rows, own), rows, sent_bytes)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Add up all ranks' `input`, (ranks * elements); rank r gets the r-th part of the sum in `output`."""
        require_plain(output, input)
        op = kind_of((opts or dist.ReduceScatterOptions()).reduceOp, input)
        is_average = op == ReduceOp.AVG and not self.context.is_over_nccl
        asked, parts = ReduceOp.SUM if is_average else op, input.view(self.size(), -1)
        wait, sent_bytes = self._collective("reduce_scatter"), (self.size() - 1) * output.nbytes
        pending = self._begin(wait, lambda by: by.reduce_scatter(output, parts, asked), [output], sent_bytes)
        return pending.then(torch.inference_mode()(lambda: output.div_(self.size()))) if is_average else pending

    def reduce_scatter_single_coalesced(
        self, output: Sequence[Tensor], input: Sequence[Tensor], opts: Any = None
    ) -> Pending:
        """Call `reduce_scatter_single` for several tensors; functional collectives use this, also for one tensor."""
        return self._together([self.reduce_scatter_single(*pair, opts) for pair in zip(output, input, strict=True)])

    def reduce_scatter(self, output: Sequence[Tensor], input: Sequence[Sequence[Tensor]], opts: Any = None) -> Pending:
        return self.reduce_scatter_single(output[0], torch.stack(list(input[0])), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Pending:
        """Send part r of `input` to rank r, and collect in `output` the parts that all ranks send to this one."""
        require_plain(output, input)
        sizes = output_split_sizes, input_split_sizes
        own_bytes = input.nbytes // self.size()
        if input_split_sizes:
            own_bytes = input[: input_split_sizes[self.rank()]].nbytes
        wait, sent_bytes = self._collective("all_to_all"), input.nbytes - own_bytes
        return self._begin(wait, lambda by: by.all_to_all(output, input, *sizes), [output], sent_bytes)

    def alltoall(self, output: Sequence[Tensor], input: Sequence[Tensor], opts: Any = None) -> Pending:
        """Send `input[r]` to rank r, and receive rank r's tensor in `output[r]`; any sizes."""
        received = torch.cat([tensor.new_empty(tensor.numel()) for tensor in output])
        sent = torch.cat([tensor.reshape(-1) for tensor in input])
        sizes = [tensor.numel() for tensor in output], [tensor.numel() for tensor in input]

        @torch.inference_mode()
        def bring() -> None:
            for tensor, part in zip(output, received.split(sizes[0]), strict=True):
                tensor.copy_(part.view_as(tensor))

        return self.all_to_all_single(received, sent, *sizes).then(bring)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        """Combine all ranks' tensors on one of them."""
        [tensor], asked = tensors, opts or dist.ReduceOptions()
        root, op = asked.rootRank, kind_of(asked.reduceOp, tensor)
        require_plain(tensor)
        wait, sent_bytes = self._collective("reduce"), tensor.nbytes * (self.rank() != root)
        return self._begin(wait, lambda _: self._library.reduce(tensor, root, op), [tensor], sent_bytes)

    def gather(self, output: Sequence[Sequence[Tensor]], input: Sequence[Tensor], opts: Any = None) -> Pending:
        [own], root = input, (opts or dist.GatherOptions()).rootRank
        require_plain(own, *(tensor for tensors in output for tensor in tensors))
        wait, sent_bytes = self._collective("gather"), own.nbytes * (self.rank() != root)
        return self._begin(wait, lambda _: self._library.gather(output, own, root), [own], sent_bytes)

    def scatter(self, output: Sequence[Tensor], input: Sequence[Sequence[Tensor]], opts: Any = None) -> Pending:
        [own], root = output, (opts or dist.ScatterOptions()).rootRank
        require_plain(own, *(tensor for tensors in input for tensor in tensors))
        wait, sent_bytes = self._collective("scatter"), (self.size() - 1) * own.nbytes * (self.rank() == root)
        return self._begin(wait, lambda _: self._library.scatter(own, input, root), [own], sent_bytes)

    def barrier(self, opts: Any = None) -> Pending:
        tensor = torch.zeros(1, device=self.context.device)
        wait = self._collective("barrier")
        pending = self._begin(wait, lambda by: by.all_reduce(tensor, ReduceOp.SUM), [tensor], None)
        # By the read, this thread waits over NCCL too, and not only its stream.
        return pending.then(tensor.item) if self.context.is_over_nccl else pending

    # The names of torch 2.11 for the same methods.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Messages

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Pending:
        """Start to send a tensor to a rank of the group. Messages between two ranks arrive in order."""
        [tensor] = tensors
        require_plain(tensor)
        what, kind, line = name_of("send")
        receiver = self._in_world(dst)
        flow = self._next_message(self.context.rank, receiver)
        wait, started = Wait(what, "send", (receiver,), line=line, kind=kind), time.perf_counter()
        pending = self._begin(wait, lambda by: by.send(tensor, dst, tag), [tensor], tensor.nbytes)
        if self.context.recorder.enabled:
            self.context.recorder.add(SEND, f"{what} to {self.context.describe(receiver)}", started, flow)
        return pending

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Pending:
        """Start to receive the next message of a rank of the group. Messages of a queue must be waited for in order."""
        [tensor] = tensors
        require_plain(tensor)
        what, _, line = name_of("recv")
        sender = self._in_world(src)
        flow = self._next_message(sender, self.context.rank)
        wait = Wait(what, "receive", (sender,), line=line, flow=flow)
        return self._begin(wait, lambda by: by.recv(tensor, src, tag), [tensor], None)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Pending:
        """Start to receive the next message of any rank of the group, over gloo."""
        [tensor] = tensors
        require_plain(tensor)
        what, _, line = name_of("recv")
        wait = Wait(f"{what} from any rank", "other", self._members.others, line=line)
        carried = self._library.recv_anysource(tensor, tag)
        assert isinstance(carried.by, dist.Work)
        pending, source = self._begin(wait, lambda _: carried, [tensor], None), carried.by._source_rank
        pending._source_rank = source  # `dist.recv` asks for it
        return pending.then(lambda: self._next_message(self.ranks[source()], self.context.rank))

    def starting_together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for messages that all ranks of the group start together; see `Library`."""
        return self._library.starting_together()

    def _in_world(self, rank: int) -> int:
        """Return the number in the world of a rank of this group; `ValueError` if it has no such rank."""
        if not 0 <= rank < self.size():
            raise ValueError(f"there is no rank {rank} in a group of {self.size()} ranks")
        return self.ranks[rank]

    def _next_message(self, sender: int, receiver: int) -> str:
        """Count a message, and return its name in a trace, which is the same on both ranks; "" if there is no trace."""
        self._messages[sender, receiver] += 1
        if not self.context.recorder.enabled:
            return ""
        return f"{sender}>{receiver} #{self._messages[sender, receiver]} of {self.group_name}"

    # Common to all

    def _collective(self, operation: str, of: str = "") -> Wait:
        """Count a collective of this group's ranks, and name the wait for it."""
        what, kind, line = name_of(operation)
        begun = self.context.begun
        begun[self.key] += 1
        return Wait(f"{what}{of}", "collective", self._members.others, begun[self.key] - 1, line, kind)

    def _begin(
        self, wait: Wait, ask: Callable[[Transport], Carried | None], tensors: list[Tensor], sent_bytes: int | None
    ) -> Pending:
        """Start the operation in the first transport that accepts it.

        Args:
            ask: starts the operation in a transport; None if the transport does not accept it.
            tensors: the tensors that it sends or fills.
            sent_bytes: the bytes that this rank sends, for the ledger; None if they are not counted.
        """
        with self.context.waits.during(wait):
            carried = next(answer for by in self.transports if (answer := ask(by)) is not None)
        if sent_bytes is not None:
            kind = self.context.counted_as or wait.kind
            columns: Mapping[str, int] = carried.sent_bytes or {"": sent_bytes}
            for column, count in columns.items():
                self.context.ledger.count(Destination(f"{kind}{column}", wait.way, wait.peers), count)
        if isinstance(carried.by, SharedWork):
            carried.by.named = wait
        pending = Pending(self.context, wait, carried.by, tensors)
        pending.buffer_bytes = carried.buffer_bytes
        if carried.finish is not None:
            pending.then(torch.inference_mode()(carried.finish))  # `SharedCollective._take_turn` says why
        if carried.at_once:
            pending.complete()
        return pending

    def _together(self, pending: Sequence[Pending]) -> Pending:
        """Return several operations as one."""
        *others, last = pending
        for one in others:
            last.then(one.wait)
        return last
