"""The process group of the lab's backend: `dist.init_process_group("lab")`.

It is torch's interface over gloo, NCCL and the memory that ranks of one host share. On the way it counts messages and
bytes, gives each wait a name and a deadline, and records what `--trace` draws. The bytes counted are those that a
bandwidth-optimal algorithm sends from this rank (a ring for all-reduce, all-gather and reduce-scatter: Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009), also in shared memory, which moves
as many. What the first ranks of several hosts send each other is a column of its own, "gradients between hosts".

A collective takes one of these ways:

    shared memory, in place     tensors that `empty` has made
    shared memory, in pieces    other tensors in host memory, from `SMALLEST_SHARED_BYTES` on
    hosts                       tensors that `empty` has made for ranks on several hosts
    gloo or NCCL                everything else; gloo carries CUDA tensors through pinned host memory

Functional collectives, which DTensor uses, call the same methods through torch's C++ interface, and for all-gather and
reduce-scatter the coalesced ones. What this class does not override would go to gloo or NCCL uncounted.
"""

# torch's annotations have overloads that its Python layer does not call.
# mypy: disable-error-code="override,assignment"

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import SMALLEST_OF_HOSTS_BYTES, SMALLEST_SHARED_BYTES, Context, ContextGroup, Transport
from distlab.comm.devices import patient_threads
from distlab.comm.hosts import MemoryOfHosts
from distlab.comm.mappings import NotShared
from distlab.comm.names import counted_as, name_of, named
from distlab.comm.pending import Carrier, Pending
from distlab.comm.queues import SharedQueue, accepted_queue, offered_queue
from distlab.comm.shared import (
    COMBINE,
    SharedAllGather,
    SharedAllReduce,
    SharedBroadcast,
    SharedCollective,
    SharedMemory,
    SharedReduceScatter,
    add_in_order,
    all_gather_through_slots,
    all_reduce_through_slots,
    all_to_all_through_slots,
    broadcast_through_slots,
    combine_in_order,
    reduce_scatter_through_slots,
)
from distlab.comm.torch_patches import group_of_one
from distlab.comm.waits import Wait, group_key

Group = dist.ProcessGroup | None  # None: all ranks
Start = Callable[[], Carrier | None]
CONTROL = "control"  # the ledger's column for what is not part of training
_is_overlapping: ContextVar[bool] = ContextVar("is_overlapping", default=False)


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Inside, collectives start that have to go on while their ranks compute.

    The memory of one host is not used for them: there, nothing happens before all ranks wait.
    """
    token = _is_overlapping.set(True)
    try:
        yield
    finally:
        _is_overlapping.reset(token)


class LabGroup(ContextGroup):
    """Ranks that communicate, by torch's interface; see the module.

    Args:
        context: what this rank's groups share.
        store: where the ranks of the group meet.
        ranks: the group's ranks in the world.
        timeout: of torch's own group.
        transport: for tensors in host memory.
    """

    def __init__(
        self,
        context: Context,
        store: dist.Store,
        ranks: Sequence[int],
        timeout: timedelta,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(ranks.index(context.rank), len(ranks))  # type: ignore[call-arg]
        self.context, self.ranks, self.key = context, tuple(ranks), group_key(ranks)
        self._store, self._timeout, self._epoch = store, timeout, 0
        transport = context.options.transport if transport is None else transport
        self._may_share = transport != "gloo" and not context.is_over_nccl
        self._shares_all = transport == "shared"
        context.groups.add(self)
        self._open()

    def _open(self) -> None:
        """Make what carries tensors: torch's group now, memory and queues when they are asked for."""
        own, size, library = self.ranks.index(self.context.rank), len(self.ranks), self.context.library
        store = dist.PrefixStore(f"epoch{self._epoch}", self._store)
        kinds = dist.ProcessGroup.BackendType
        kind = kinds.CUSTOM
        with patient_threads():
            if size == 1:
                self._library: Any = group_of_one()
            elif library == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._library, kind = dist.ProcessGroupNCCL(store, own, size, options), kinds.NCCL
            else:
                self._library, kind = dist.ProcessGroupGloo(store, own, size, self._timeout), kinds.GLOO
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), kind, self._library)
        self.memory: SharedMemory | MemoryOfHosts | None = None
        self._may_have_memory = True
        self._queues: dict[tuple[int, int], SharedQueue] = {}  # by sender and receiver
        self._without_queue: set[tuple[int, int]] = set()  # senders and receivers that cannot share memory

    def _close(self) -> None:
        if self.memory is not None:
            self.memory.close()
        self.memory = None
        self._queues.clear()

    def shutdown(self) -> None:
        """End the group; `dist.destroy_process_group` calls it. Everything started must have been waited for."""
        self._close()

    def reopen(self, epoch: int) -> None:
        """Close everything that carries tensors, and meet again under another epoch of the store.

        All ranks of the group call it together. Who holds the group keeps it; memory that it made before is no longer
        shared.
        """
        self._close()
        self._epoch = epoch
        self._open()

    # Memory and queues

    def empty(self, elements: int, like: Tensor, *, overlaps: bool = False) -> Tensor:
        """Zeros (elements,), of `like`'s dtype and device, to be communicated in again and again.

        Where it pays, they are in memory that the ranks of the group share, and collectives of them need no copy.
        All ranks of the group must call this in the same order. With `overlaps`, it is for collectives that are started
        in `overlapping`.

        Raises:
            InputError: the transport is "shared", and these ranks cannot share memory.
            TrafficError: a rank does not take part.
        """
        plain = partial(like.new_zeros, elements)
        if not elements or not self._may_have_memory or not self._is_worth_sharing(elements * like.itemsize, like):
            return plain()
        if overlaps and len(self.context.hosts.split(self.ranks)) == 1:
            return plain()
        shared = self._shared(lambda memory: memory.allocate(elements, like.dtype, self._limit))
        return plain() if shared is None else shared

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory of this group on one host, as what `empty` returns may."""
        return isinstance(self.memory, SharedMemory) and self.memory.parts_like(tensor) is not None

    def open_queues(self, row: Sequence[int], message_bytes: int, like: Tensor, *, slots: int = 1) -> None:
        """Send messages from each rank of a row to the next through memory that both share, where they can.

        Larger messages, and those for which there is no queue, go over gloo or NCCL. A `send` returns when its message
        is in one of the `slots`, and so waits for a free one. All ranks of the row call this together.

        Args:
            row: ranks of the world.
            message_bytes: of the largest message.
            like: of the messages' device.

        Raises:
            InputError: the transport is "shared", and these ranks cannot share memory.
            TrafficError: a rank does not take part.
        """
        for link in pairwise(row):
            if self.context.rank in link and link[0] != link[1] and link not in self._without_queue:
                known = self._queues.get(link)
                if known is None or known.message_bytes < message_bytes or known.slots < slots:
                    self._open_queue(*link, message_bytes, like, slots)

    def _open_queue(self, sender: int, receiver: int, message_bytes: int, like: Tensor, slots: int) -> None:
        self._queues.pop((sender, receiver), None)
        split = self.context.hosts.split((sender, receiver))
        if not (self._may_share and like.is_cpu and len(split) == 1):
            return
        is_sender = self.context.rank == sender
        other = self.ranks.index(receiver if is_sender else sender)
        offer = "the offer of shared memory"
        told, asked = (offer, f"the answer to {offer}") if is_sender else (f"the answer to {offer}", offer)

        def tell(tensor: Tensor) -> None:
            with named(told, CONTROL):
                self.send([tensor], other, 0).wait()

        def ask(tensor: Tensor) -> None:
            with named(asked, CONTROL):
                self.recv([tensor], other, 0).wait()

        try:
            made = (offered_queue if is_sender else accepted_queue)(message_bytes, slots, tell, ask)
        except NotShared as error:
            self.context.share_less(error, is_first=is_sender)
            self._without_queue.add((sender, receiver))
            return
        self._queues[sender, receiver] = made
        self.context.shares_memory = True

    def close_queues(self, row: Sequence[int]) -> None:
        """Close the queues along a row, all of whose messages have been received or are in a slot."""
        for link in pairwise(row):
            self._queues.pop(link, None)

    def queue(self, sender: int, receiver: int) -> SharedQueue | None:
        """This rank's end of the open queue from one rank of the world to another, if there is one."""
        return self._queues.get((sender, receiver))

    def connect(self) -> None:
        """Over NCCL, connect the ranks now rather than in the first step.

        NCCL connects ranks in their first collective, which may have to wait until the GPU is idle. Within a step, the
        GPU may be busy with a receive that the sender serves only after this collective: a deadlock.
        """
        if self.context.is_over_nccl:
            with named("a first message", CONTROL):
                self.allreduce([torch.zeros(1, device=self.context.device)]).wait()

    def received_bytes(self, parts: Tensor) -> int:
        """Bytes of memory that a reduce-scatter of `parts` needs until it has ended: what others send over gloo."""
        is_sent = self.size() > 1 and not self.context.is_over_nccl and not self.shares(parts)
        return parts.nbytes if is_sent and self._slots(parts) is None else 0

    def held_back(self) -> list[Wait]:
        begun = list(self.memory.not_done) if isinstance(self.memory, SharedMemory) else []
        return [one.named for one in begun if one.is_held_back and one.named is not None]

    # Collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        [tensor] = tensors
        op = _kind_of((opts or dist.AllreduceOptions()).reduceOp)
        wait = self._collective("all_reduce")
        if self.size() == 1:
            return self._complete(wait, [tensor])
        memory, parts = self._parts_of(tensor)
        is_known = _is_known(op)
        if isinstance(memory, MemoryOfHosts) and parts is not None:
            self._count_all_reduce(wait, tensor, memory.ranks_here)
            if memory.is_first:
                self._count_all_reduce(wait, tensor, memory.hosts, " between hosts")
            return self._start(wait, partial(memory.all_reduce, parts, op, self._limit), [tensor])
        self._count_all_reduce(wait, tensor, self.size())
        if isinstance(memory, SharedMemory) and parts is not None and is_known:
            return self._start(wait, partial(SharedAllReduce, memory, parts, op), [tensor])
        if is_known and (slots := self._slots(tensor, wait)):
            return self._start(wait, partial(all_reduce_through_slots, slots, tensor.view(-1), op), [tensor])
        carried = self._staged(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = ReduceOp(op), self._timeout
        return self._over_library(wait, partial(self._library.allreduce, [carried], options), tensor, carried)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        return self._together([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        [tensor], source = tensors, (opts or dist.BroadcastOptions()).rootRank
        root = self.ranks[source]
        wait = self._collective("broadcast", f" of {self.context.describe(root)}")
        if self.size() == 1:
            return self._complete(wait, [tensor])
        self._count(wait, tensor.nbytes if self.rank() == source else 0)
        memory, parts = self._parts_of(tensor)
        if isinstance(memory, SharedMemory) and parts is not None:
            return self._start(wait, partial(SharedBroadcast, memory, parts, source), [tensor])
        if slots := self._slots(tensor, wait):
            return self._start(wait, partial(broadcast_through_slots, slots, tensor.view(-1), source), [tensor])
        carried = self._staged(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = source, self._timeout
        return self._over_library(wait, partial(self._library.broadcast, [carried], options), tensor, carried)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Collect every rank's `input` in `output`, whose elements are those of all ranks in their order."""
        _refuse_gaps(output, input)
        wait = self._collective("all_gather")
        if self.size() == 1:
            output.view(-1).copy_(input.reshape(-1))
            return self._complete(wait, [output])
        self._count(wait, (self.size() - 1) * input.nbytes)
        parts = output.view(self.size(), -1)
        memory, sources = self._parts_of(input)
        if isinstance(memory, SharedMemory) and sources is not None:
            wholes = memory.parts_like(output)
            if wholes is not None and input.data_ptr() == parts[memory.rank].data_ptr():  # each rank's is its row
                sources = [whole.view(memory.size, -1)[rank] for rank, whole in enumerate(wholes)]
            return self._start(wait, partial(SharedAllGather, memory, sources, parts), [output])
        if slots := self._slots(input, wait):
            rows = list(parts.unbind())
            return self._start(wait, partial(all_gather_through_slots, slots, rows, input.view(-1)), [output])
        into, carried = self._host_buffer(output), self._staged(input)
        if self.context.is_over_nccl:
            return self._over_library(wait, partial(self._library._allgather_base, into, carried), output, into)
        rows = list(into.view(self.size(), *input.shape).unbind())
        return self._over_library(wait, partial(self._library.allgather, [rows], [carried]), output, into)

    def all_gather_single_coalesced(
        self, output: Sequence[Tensor], input: Sequence[Tensor], opts: Any = None
    ) -> Pending:
        """`all_gather_single` of several tensors; functional collectives call it, also for one."""
        return self._together([self.all_gather_single(*pair) for pair in zip(output, input, strict=True)])

    def allgather(self, output: Sequence[Sequence[Tensor]], input: Sequence[Tensor], opts: Any = None) -> Pending:
        """Collect every rank's `input[0]` in `output[0]`, a tensor for each rank."""
        [rows], [own] = output, input
        _refuse_gaps(*rows, own)
        wait = self._collective("all_gather")
        if self.size() == 1:
            rows[0].copy_(own)
            return self._complete(wait, list(rows))
        self._count(wait, (self.size() - 1) * own.nbytes)
        is_even = all(row.shape == own.shape for row in rows)
        if is_even and (slots := self._slots(own, wait)):
            flat = [row.view(-1) for row in rows]
            return self._start(wait, partial(all_gather_through_slots, slots, flat, own.view(-1)), list(rows))
        into = [self._host_buffer(row) for row in rows]
        carried = self._staged(own)

        def bring() -> None:
            for row, filled in zip(rows, into, strict=True):
                if row is not filled:
                    row.copy_(filled, non_blocking=True)

        start = partial(self._library.allgather, [into], [carried])
        return self._start(wait, start, list(rows)).then(bring)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Add up all ranks' `input`, (ranks * elements), of which rank r gets the r-th part in `output`.

        Shared memory and gloo add in the order of ranks (`add_in_order`), and so get the same sums to the last bit;
        NCCL has its own order. gloo's own reduce-scatter sends as much as an all-reduce; here each rank sends every
        part to its rank.
        """
        _refuse_gaps(output, input)
        op = _kind_of((opts or dist.ReduceScatterOptions()).reduceOp)
        wait = self._collective("reduce_scatter")
        if self.size() == 1:
            output.view(-1).copy_(input.view(-1))
            return self._complete(wait, [output])
        self._count(wait, (self.size() - 1) * output.nbytes)
        if self.context.is_over_nccl or not _is_known(op):
            options = dist.ReduceScatterOptions()
            options.reduceOp, options.timeout = ReduceOp(op), self._timeout
            start = partial(self._library._reduce_scatter_base, output.view(-1), input.view(-1), options)
            return self._over_library(wait, start, output, output)
        pending = self._combine_parts(wait, output, input.view(self.size(), -1), op)
        return pending.then(lambda: output.div_(self.size())) if op == ReduceOp.AVG else pending

    def reduce_scatter_single_coalesced(
        self, output: Sequence[Tensor], input: Sequence[Tensor], opts: Any = None
    ) -> Pending:
        """`reduce_scatter_single` of several tensors; functional collectives call it, also for one."""
        return self._together([self.reduce_scatter_single(*pair, opts) for pair in zip(output, input, strict=True)])

    def _combine_parts(self, wait: Wait, output: Tensor, parts: Tensor, op: ReduceOp.RedOpType) -> Pending:
        memory, sources = self._parts_of(parts)
        is_sum = op in (ReduceOp.SUM, ReduceOp.AVG)
        if is_sum and isinstance(memory, SharedMemory) and sources is not None:
            return self._start(wait, partial(SharedReduceScatter, memory, sources, output), [output])
        if is_sum and (slots := self._slots(parts, wait)):
            return self._start(wait, partial(reduce_scatter_through_slots, slots, output.view(-1), parts), [output])
        carried, into = self._staged(parts), self._host_buffer(output)
        received = torch.empty_like(carried)

        def add_up() -> None:
            rows = received.flatten(1).unbind()
            if is_sum:
                add_in_order(rows, into.view(-1))
            else:
                combine_in_order(rows, op, into.view(-1))
            if into is not output:
                output.copy_(into)

        start = partial(self._library.alltoall_base, received, carried, [], [])
        return self._start(wait, start, [output]).then(add_up)

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
        """Send part r of `input` to rank r, and collect what all ranks send to this one in `output`."""
        _refuse_gaps(output, input)
        wait = self._collective("all_to_all")
        if self.size() == 1:
            output.copy_(input)
            return self._complete(wait, [output])
        own = input.nbytes // self.size()
        if input_split_sizes:
            own = input[: input_split_sizes[self.rank()]].nbytes
        self._count(wait, input.nbytes - own)
        is_even = not output_split_sizes and not input_split_sizes
        if is_even and (slots := self._slots(input, wait)):
            size = self.size()
            start = partial(all_to_all_through_slots, slots, output.view(size, -1), input.view(size, -1))
            return self._start(wait, start, [output])
        into, carried = self._host_buffer(output), self._staged(input)
        sizes = list(output_split_sizes), list(input_split_sizes)
        return self._over_library(wait, partial(self._library.alltoall_base, into, carried, *sizes), output, into)

    def alltoall(self, output: Sequence[Tensor], input: Sequence[Tensor], opts: Any = None) -> Pending:
        """Send `input[r]` to rank r, and receive what rank r sends in `output[r]`; any sizes."""
        received = torch.cat([tensor.new_empty(tensor.numel()) for tensor in output])
        sent = torch.cat([tensor.reshape(-1) for tensor in input])
        sizes = [tensor.numel() for tensor in output], [tensor.numel() for tensor in input]

        def bring() -> None:
            for tensor, part in zip(output, received.split(sizes[0]), strict=True):
                tensor.copy_(part.view_as(tensor))

        return self.all_to_all_single(received, sent, *sizes).then(bring)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        """Combine all ranks' tensor on one of them."""
        [tensor], asked = tensors, opts or dist.ReduceOptions()
        wait = self._collective("reduce")
        if self.size() == 1:
            return self._complete(wait, [tensor])
        self._count(wait, tensor.nbytes * (self.rank() != asked.rootRank))
        carried = self._staged(tensor)
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.timeout = asked.reduceOp, asked.rootRank, self._timeout
        return self._over_library(wait, partial(self._library.reduce, [carried], options), tensor, carried)

    def gather(self, output: Sequence[Sequence[Tensor]], input: Sequence[Tensor], opts: Any = None) -> Pending:
        [own], root = input, (opts or dist.GatherOptions()).rootRank
        _refuse_gaps(own, *(tensor for tensors in output for tensor in tensors))
        wait = self._collective("gather")
        if self.size() == 1:
            output[0][0].copy_(own)
            return self._complete(wait, [own])
        self._count(wait, own.nbytes * (self.rank() != root))
        options = dist.GatherOptions()
        options.rootRank, options.timeout = root, self._timeout
        return self._start(wait, partial(self._library.gather, output, list(input), options), [own])

    def scatter(self, output: Sequence[Tensor], input: Sequence[Sequence[Tensor]], opts: Any = None) -> Pending:
        [own], root = output, (opts or dist.ScatterOptions()).rootRank
        _refuse_gaps(own, *(tensor for tensors in input for tensor in tensors))
        wait = self._collective("scatter")
        if self.size() == 1:
            own.copy_(input[0][0])
            return self._complete(wait, [own])
        self._count(wait, (self.size() - 1) * own.nbytes * (self.rank() == root))
        options = dist.ScatterOptions()
        options.rootRank, options.timeout = root, self._timeout
        return self._start(wait, partial(self._library.scatter, list(output), input, options), [own])

    def barrier(self, opts: Any = None) -> Pending:
        tensor = torch.zeros(1, device=self.context.device)
        with counted_as(CONTROL):
            wait = self._collective("barrier")
            if self.size() == 1:
                return self._complete(wait, [tensor])
            carried = self._staged(tensor)
            return self._over_library(wait, lambda: self._library.allreduce([carried]), tensor, carried)

    # The same by the names of torch 2.11.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Messages

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Pending:
        """Start to send a tensor to a rank of the group. Messages between two ranks arrive in order."""
        [tensor], to = tensors, self.ranks[dst]
        what, kind, line = name_of("send")
        wait = Wait(what, "send", (to,), line=line, kind=kind)
        self._count(wait, tensor.nbytes)
        carried = self._staged(tensor)
        queue = self._queues.get((self.context.rank, to))
        if queue is not None and carried.nbytes <= queue.message_bytes:
            pending = self._start(wait, partial(queue.send, carried), [carried])
            pending.wait()
            return pending
        return self._start(wait, partial(self._library.send, [carried], dst, tag), [carried])

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Pending:
        """Start to receive the next message of a rank of the group. Through a queue, wait in order."""
        [tensor], source = tensors, self.ranks[src]
        what, kind, line = name_of("recv")
        wait = Wait(what, "receive", (source,), line=line, kind=kind)
        carried = self._host_buffer(tensor)
        queue = self._queues.get((source, self.context.rank))
        if queue is not None and carried.nbytes <= queue.message_bytes:
            start: Start = partial(queue.receive, carried)
        else:
            start = partial(self._library.recv, [carried], src, tag)
        return self._over_library(wait, start, tensor, carried)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        return self._library.recv_anysource(list(tensors), tag)

    # What all of them use

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.context.waits.timeout_seconds)

    def _collective(self, operation: str, of: str = "") -> Wait:
        """Count a collective of this group's ranks, and name the wait for it."""
        what, kind, line = name_of(operation)
        begun = self.context.begun
        begun[self.key] += 1
        peers = tuple(rank for rank in self.ranks if rank != self.context.rank)
        return Wait(f"{what}{of}", "collective", peers, begun[self.key] - 1, line, kind)

    def _count(self, wait: Wait, sent_bytes: int, more: str = "") -> None:
        self.context.ledger.count(f"{wait.kind}{more}", sent_bytes)

    def _count_all_reduce(self, wait: Wait, tensor: Tensor, parties: int, more: str = "") -> None:
        """Count what each of `parties` sends in a ring."""
        self._count(wait, 2 * (parties - 1) * tensor.nbytes // parties, more)

    def _start(self, wait: Wait, start: Start, tensors: list[Tensor]) -> Pending:
        with self.context.waits.during(wait):
            carrier = start()
        if isinstance(carrier, SharedCollective):
            carrier.named = wait
        return Pending(self.context, wait, carrier, tensors)

    def _over_library(self, wait: Wait, start: Start, tensor: Tensor, carried: Tensor) -> Pending:
        """Start what sends or fills `carried`, whose content `tensor` has at the end."""
        pending = self._start(wait, start, [tensor])
        return pending if carried is tensor else pending.then(lambda: tensor.copy_(carried, non_blocking=True))

    def _complete(self, wait: Wait, tensors: list[Tensor]) -> Pending:
        """What involves no other rank."""
        return Pending(self.context, wait, None, tensors)

    def _together(self, pending: Sequence[Pending]) -> Pending:
        """Several as one."""
        *others, last = pending
        for one in others:
            last.then(one.wait)
        return last

    def _parts_of(self, tensor: Tensor) -> tuple[SharedMemory | MemoryOfHosts | None, list[Tensor] | None]:
        """The memory of the group and, if a tensor lies in it, that place in each rank's part."""
        _refuse_gaps(tensor)
        return self.memory, None if self.memory is None else self.memory.parts_like(tensor)

    def _slots(self, tensor: Tensor, wait: Wait | None = None) -> SharedMemory | None:
        """The group's memory, with slots that a tensor can pass through in pieces; None if it is not to.

        Args:
            tensor: of this rank.
            wait: the collective; its ranks make the slots together if they have none.
        """
        if not self._may_have_memory or _is_overlapping.get() or len(self.context.hosts.split(self.ranks)) > 1:
            return None
        if not self._is_worth_sharing(tensor.nbytes, tensor):
            return None
        memory = self.memory
        if not isinstance(memory, SharedMemory) or not memory.has_slots():
            self._shared(lambda made: made.make_slots(self._limit) if isinstance(made, SharedMemory) else None, wait)
            memory = self.memory
        return memory if isinstance(memory, SharedMemory) and memory.has_slots() else None

    def _is_worth_sharing(self, size_bytes: int, like: Tensor) -> bool:
        """Whether the ranks are to share memory for collectives of so many bytes; the same on all of them."""
        hosts = len(self.context.hosts.split(self.ranks))
        if not self._may_share or not like.is_cpu or self.size() == hosts:  # each on a host of its own, or alone
            return False
        least = SMALLEST_SHARED_BYTES if hosts == 1 else SMALLEST_OF_HOSTS_BYTES
        return self._shares_all or size_bytes >= least

    def _shared(
        self, use: Callable[[SharedMemory | MemoryOfHosts], Tensor | None], wait: Wait | None = None
    ) -> Tensor | None:
        """What `use` makes in the group's memory, which is made first; None if these ranks cannot share memory.

        All ranks of the group do it together, in the collective `wait` if there is one.
        """
        peers = tuple(rank for rank in self.ranks if rank != self.context.rank)
        try:
            with self.context.waits.during(wait or Wait("shared memory", "other", peers)):
                if self.memory is None:
                    self.memory = self._make_memory()
                made = use(self.memory)
                self.context.shares_memory = True
                return made
        except NotShared as error:
            is_first = any(here[0] == self.context.rank for here in self.context.hosts.split(self.ranks))
            self.context.share_less(error, is_first)
            self._may_have_memory = False  # what has been made stays shared
            return None

    def _make_memory(self) -> SharedMemory | MemoryOfHosts:
        context = self.context
        if len(context.hosts.split(self.ranks)) == 1:
            return SharedMemory(self._library, self.rank(), self.size(), context.has_own_core)
        name = f"{self.group_name}/{self._epoch}"
        return MemoryOfHosts(context.hosts, self.ranks, context.rank, name, self._limit)

    def _host_buffer(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it can be sent; for a CUDA tensor over gloo, pinned host memory of its size."""
        _refuse_gaps(tensor)
        if tensor.is_cpu or self.context.is_over_nccl:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def _staged(self, tensor: Tensor) -> Tensor:
        """The tensor, copied to its `_host_buffer` if it cannot be sent directly."""
        carried = self._host_buffer(tensor)
        if carried is not tensor:
            carried.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        return carried


# torch 2.11 has these under other names only, which 2.13 warns are deprecated.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def empty(elements: int, like: Tensor, group: Group = None, *, overlaps: bool = False) -> Tensor:
    """Zeros (elements,) to be communicated in again and again: `LabGroup.empty`, or plain memory in another backend."""
    found = _lab_group(group)
    return like.new_zeros(elements) if found is None else found.empty(elements, like, overlaps=overlaps)


def connect(group: Group) -> None:
    """See `LabGroup.connect`; other backends need nothing."""
    found = _lab_group(group)
    if found is not None:
        found.connect()


def shares(tensor: Tensor, group: Group = None) -> bool:
    """Whether a tensor lies in memory that the ranks of a group share."""
    found = _lab_group(group)
    return found is not None and found.shares(tensor)


def received_bytes(parts: Tensor, group: Group = None) -> int:
    """Bytes of memory that a reduce-scatter of `parts` needs until it has ended."""
    found = _lab_group(group)
    return 0 if found is None else found.received_bytes(parts)


def open_queues(row: Sequence[int], message_bytes: int, like: Tensor, group: Group = None, *, slots: int = 1) -> None:
    """See `LabGroup.open_queues`; in another backend, messages keep their way."""
    found = _lab_group(group)
    if found is not None:
        found.open_queues(row, message_bytes, like, slots=slots)


def device_of(group: Group = None) -> torch.device:
    """Where a tensor must be to be sent without a copy: this rank's GPU over NCCL, else host memory."""
    found = _lab_group(group)
    if found is None:
        return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    return found.context.device if found.context.is_over_nccl else torch.device("cpu")


def close_queues(row: Sequence[int], group: Group = None) -> None:
    """See `LabGroup.close_queues`."""
    found = _lab_group(group)
    if found is not None:
        found.close_queues(row)


def has_queue(sender: int, receiver: int, group: Group = None) -> bool:
    """Whether this rank has an end of an open queue from one rank of the world to another."""
    found = _lab_group(group)
    return found is not None and found.queue(sender, receiver) is not None


def _lab_group(group: Group) -> LabGroup | None:
    found = dist.group.WORLD if group is None else group
    return found if isinstance(found, LabGroup) else None


def _refuse_gaps(*tensors: Tensor) -> None:
    """Raise `ValueError` for a tensor with gaps between its elements, for which gloo sends what lies in the gaps."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"a tensor {shape} with strides {strides} is not contiguous; call .contiguous() first")


def _is_known(op: ReduceOp.RedOpType) -> bool:
    """Whether the lab combines by it itself; gloo and NCCL know more operations."""
    return op in COMBINE or op == ReduceOp.AVG


def _kind_of(operation: Any) -> ReduceOp.RedOpType:
    """torch's options hold a `ReduceOp`, which is equal to its kind but no key of a dictionary."""
    return getattr(operation, "op", operation)
