"""The single interface for all training traffic.

All communication between ranks during training goes through `traffic`. It counts messages and bytes by kind (gradients,
weights, loss, …), gives every wait a name and a deadline, and copies CUDA tensors through pinned host memory if the
backend is gloo. The bytes counted are those that a bandwidth-optimal algorithm sends from this rank (a ring for
all-reduce, all-gather and reduce-scatter: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009). The all-reduce in shared memory moves the same number of bytes: a rank reads its share of the
others' tensors, and writes the result to them. (A sum of activations is counted in the same way, although each rank
reads all of the others' tensors.) Where it is part of one over several hosts, what the hosts' first ranks
send each other is counted as a kind of its own, "gradients between hosts".
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.endpoint import CountingEndpoint, Endpoint, Group, is_over_nccl, members, process_group, rank
from distlab.comm.group_memory import GroupMemory, Transport
from distlab.comm.hosts import MemoryOfHosts
from distlab.comm.mappings import NotShared
from distlab.comm.queues import SharedQueue, accepted_queue, offered_queue
from distlab.comm.shared import (
    SharedAllGather,
    SharedAllReduce,
    SharedBroadcast,
    SharedCollective,
    SharedCombination,
    SharedMemory,
    SharedReduceScatter,
    add_in_order,
)
from distlab.comm.transfer import Transfer, Work, host_buffer, staged
from distlab.comm.waits import TrafficError, Wait, group_key

__all__ = ["Group", "Traffic", "TrafficError", "Transfer", "Transport", "traffic"]

Op = ReduceOp.RedOpType
AllReduce = Callable[[Tensor, Op, Endpoint], None]  # a handwritten one
Begin = Callable[[Tensor, Tensor], Work | None]  # starts a collective that fills a tensor from another


class Traffic(GroupMemory):
    """Messages and collectives with a ledger, names and deadlines, over `torch.distributed`'s process group.

    `what` names the content in the error message of a failed wait, e.g. "the gradients of bucket 2"; `kind` is the
    ledger's column. All tensors must be contiguous, and must not be changed before `Transfer.wait` has returned.

    Without a process group, or with a world size of 1, every collective completes at once and nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun: Counter[str] = Counter()  # collectives that this rank has started, by their ranks ("0,1,2")
        self.device = torch.device("cpu")  # of this rank
        self._thread: ThreadPoolExecutor | None = None
        self._open_queues: dict[tuple[int, int], SharedQueue | None] = {}  # by sender and receiver
        self._without_queue: set[tuple[int, int]] = set()  # senders and receivers that could not share memory

    def connect(self, group: Group = None) -> None:
        """Over NCCL, connect the ranks of a group now rather than in the first step.

        NCCL connects ranks in their first collective, which may have to wait until the GPU is idle. Within a step, the
        GPU may be busy with a receive that the sender serves only after this collective: a deadlock.
        """
        if is_over_nccl():
            self.all_reduce(torch.zeros(1, device=self.device), "a first message", kind="control", group=group).wait()

    def new_queue(
        self, sender: int, receiver: int, slots: int, elements: int, like: Tensor, group: Group = None
    ) -> SharedQueue | None:
        """This rank's end of a queue, in memory that two ranks share, for messages from one to the other.

        None where they are to be sent over the process group: on several hosts, as `transport` says, or, after a
        remark, where the ranks cannot share memory. Both ranks call this, and neither is to wait for the other
        elsewhere meanwhile.

        Args:
            slots: how many messages can be there at a time: the sender waits before it sends another one.
            elements: of the largest message, which has `like`'s dtype and device.
            group: where they meet.

        Raises:
            InputError: the transport is "shared", and these ranks cannot share memory.
            TrafficError: the other rank does not take part.
        """
        ranks = [sender, receiver]
        if not self._may_share(like, ranks) or not self._are_on_one_host(ranks):
            return None
        is_sender = rank() == sender
        other, offer = receiver if is_sender else sender, "the offer of shared memory"
        answer = f"the answer to {offer}"

        def tell(tensor: Tensor) -> None:
            what = offer if is_sender else answer
            self.send(tensor, what, to=other, kind="control", group=group).wait()

        def ask(tensor: Tensor) -> None:
            what = answer if is_sender else offer
            self.receive(tensor, what, source=other, group=group).wait()

        try:
            queue = (offered_queue if is_sender else accepted_queue)(elements * like.itemsize, slots, tell, ask)
        except NotShared as error:
            self._share_less(error, is_first=is_sender)
            self._without_queue.add((sender, receiver))
            return None
        self.shares_memory = True
        return queue

    def new_queues(
        self, ranks: Sequence[int], slots: int, elements: int, like: Tensor, group: Group = None
    ) -> dict[int, SharedQueue | None]:
        """The queues between two ranks, by sender; both ranks call this, as `new_queue`."""
        one, other = ranks
        return {
            sender: self.new_queue(sender, receiver, slots, elements, like, group)
            for sender, receiver in ((one, other), (other, one))
        }

    def open_queues(self, row: Sequence[int], elements: int, like: Tensor, *, both_ways: bool = False) -> None:
        """From now on, send messages from each rank of a row to the next through a queue, where they can share memory.

        All of these ranks call this together. A queue has room for one message: a second `send` waits until the first
        message has been received, and receives are waited for in their order. Larger messages, those of a group, and
        those between two ranks for which `new_queue` has failed go over the process group.

        Args:
            elements: of the largest message, which has `like`'s dtype and device.
            both_ways: also from each rank to the one before.

        Raises:
            InputError, TrafficError: as `new_queue`.
        """
        links = {(sender, receiver) for sender, receiver in pairwise(row) if sender != receiver}
        for link in sorted(links | ({link[::-1] for link in links} if both_ways else set())):  # as on all ranks
            known = self._open_queues.get(link)
            has_room = known is not None and known.message_bytes >= elements * like.itemsize
            if rank() in link and not has_room and link not in self._without_queue:
                self._open_queues[link] = self.new_queue(*link, 1, elements, like)

    def _open_queue(self, sender: int, receiver: int, message: Tensor, group: Group) -> SharedQueue | None:
        """The open queue that a message between two ranks goes through, if any; the same at both ends."""
        queue = self._open_queues.get((sender, receiver)) if group is None else None
        return queue if queue is not None and message.nbytes <= queue.message_bytes else None

    def all_reduce(
        self,
        tensor: Tensor,
        what: str,
        *,
        kind: str,
        op: Op = ReduceOp.AVG,
        group: Group = None,
        by_hand: AllReduce | None = None,
    ) -> Transfer:
        """Start to combine `tensor` (any shape, changed in place) over all ranks; by default, average it.

        Over gloo and NCCL, and over several hosts, it goes on while this rank computes. In the shared memory of one
        host, a rank does its share when it waits, as a thread beside it would need a core: no rank has the result
        before all of them wait, and none of it is hidden behind computation.

        With `by_hand`, one of `distlab.collectives.ALL_REDUCES`, the ledger counts the bytes that it actually sends.
        """
        ranks = members(group)
        if len(ranks) == 1:
            return self._complete(tensor, what)
        carried = staged(tensor)
        if by_hand is None:
            memory, parts = self._parts_here(carried, group)
            begin: Callable[[], Work | None]
            if parts is not None and isinstance(memory, MemoryOfHosts):
                self._count_all_reduce(kind, tensor, memory.ranks_here)
                if memory.is_first:
                    self._count_all_reduce(f"{kind} between hosts", tensor, memory.hosts)
                begin = partial(memory.all_reduce, parts, op, timedelta(seconds=self.timeout_seconds))
            else:
                self._count_all_reduce(kind, tensor, len(ranks))
                begin = partial(dist.all_reduce, carried, op=op, group=group, async_op=True)
                if parts is not None and isinstance(memory, SharedMemory):
                    begin = partial(SharedAllReduce, memory, parts, op)
            return self._start(self._collective(what, ranks), begin, tensor, carried)
        if group is not None:
            raise ValueError("the handwritten collectives work on all ranks, not on a group of them")

        def combine(endpoint: Endpoint) -> None:
            by_hand(carried, ReduceOp.SUM if op == ReduceOp.AVG else op, endpoint)
            if op == ReduceOp.AVG:
                carried.div_(len(ranks))

        return self._start(self._collective(what, ranks), partial(self._in_thread, combine, kind), tensor, carried)

    def _count_all_reduce(self, kind: str, tensor: Tensor, parties: int) -> None:
        """Count what each of `parties` sends in a ring."""
        self.ledger.count(kind, 2 * (parties - 1) * tensor.nbytes // parties)

    def all_reduced(self, tensor: Tensor, what: str, *, kind: str, op: Op, group: Group = None) -> Tensor:
        """Wait for the combination of `tensor` (any shape) over all ranks, and return it; `tensor` is not changed.

        For what changes its place from call to call, as activations do. In shared memory, each of up to three ranks
        combines all of it, in a tensor of its own; `tensor` is copied first, unless it is in the place that `next_term`
        gives. All ranks of the group call this with tensors of one size. Gradients do not pass through it.
        """
        tensor = tensor.detach()
        term = self._next_term(tensor.shape, tensor, group)
        if term is None:
            whole = self._kept_buffer("whole", tensor.shape, tensor, group)  # of many ranks, or on several hosts
            combined = torch.empty_like(tensor, memory_format=torch.contiguous_format) if whole is None else whole
            self.all_reduce(combined.copy_(tensor), what, kind=kind, op=op, group=group).wait()
            return combined if whole is None else combined.clone()
        self._sums[group, tensor.dtype] += 1
        if not tensor.is_set_to(term.own):
            term.own.copy_(tensor)
        combined, ranks = torch.empty_like(term.own), members(group)
        self._count_all_reduce(kind, tensor, len(ranks))
        begin = partial(SharedCombination, term.memory, term.parts, op, combined)
        self._start(self._collective(what, ranks), begin, combined, combined).wait()
        return combined

    def all_gather(self, parts: Tensor, own: Tensor, what: str, *, kind: str, group: Group = None) -> Transfer:
        """Start to collect every rank's `own` (any shape) in `parts` (ranks, *own.shape); `own` may be a row of it."""
        shared = self._shared_parts(own, group)
        if shared is not None:
            memory, sources = shared
            in_place = self._shared_parts(parts, group)
            if in_place is not None and own.data_ptr() == parts[memory.rank].data_ptr():  # each rank's own is its row
                sources = [whole.view(memory.size, -1)[rank] for rank, whole in enumerate(in_place[1])]
            begin = partial(SharedAllGather, memory, sources, parts)
            return self._around_ring(parts, own, lambda *_: begin(), what, kind, group)

        def gather(into: Tensor, carried: Tensor) -> dist.Work | None:
            return dist.all_gather(list(into.unbind()), carried, group=group, async_op=True)

        return self._around_ring(parts, own, gather, what, kind, group)

    def reduce_scatter(self, own: Tensor, parts: Tensor, what: str, *, kind: str, group: Group = None) -> Transfer:
        """Start to add up all ranks' `parts` (ranks, *own.shape); the r-th rank of the group gets row r in `own`.

        `own` may be that row of `parts`. gloo's own reduce-scatter sends as much as an all-reduce; over gloo, each rank
        sends every row to its rank, which adds them up in the order of ranks. Shared memory has the same order
        (`add_in_order`), and so the same sums to the last bit; NCCL has its own.
        """
        shared = self._shared_parts(parts, group)
        if shared is not None:
            begin = partial(SharedReduceScatter, *shared, own)
            return self._around_ring(own, parts, lambda *_: begin(), what, kind, group)
        if is_over_nccl():

            def scatter(into: Tensor, carried: Tensor) -> dist.Work | None:
                return dist.reduce_scatter(into, list(carried.unbind()), group=group, async_op=True)

            return self._around_ring(own, parts, scatter, what, kind, group)
        received: list[Tensor] = []  # (ranks, *own.shape)

        def exchange(_: Tensor, carried: Tensor) -> dist.Work | None:
            received.append(torch.empty_like(carried))
            return dist.all_to_all_single(received[0], carried, group=group, async_op=True)

        def add_up(into: Tensor) -> None:
            add_in_order(received.pop().flatten(1).unbind(), into.view(-1))

        return self._around_ring(own, parts, exchange, what, kind, group, add_up)

    def received_bytes(self, parts: Tensor, group: Group = None) -> int:
        """Bytes of memory that a `reduce_scatter` of `parts` needs until it has ended: what the others send by gloo."""
        is_sent = len(members(group)) > 1 and not is_over_nccl() and not self.is_shared(parts, group)
        return parts.nbytes if is_sent else 0

    def broadcast(
        self, tensor: Tensor, what: str, *, kind: str, src: int | None = None, group: Group = None
    ) -> Transfer:
        """Start to copy rank `src`'s `tensor` (any shape) into every rank's; by default, the group's first rank's.

        In shared memory, no rank has it before all of them wait, as with `all_reduce`.
        """
        ranks = members(group)
        if len(ranks) == 1:
            return self._complete(tensor, what)
        src = ranks[0] if src is None else src
        self.ledger.count(kind, tensor.nbytes if rank() == src else 0)
        carried = staged(tensor)
        wait = self._collective(f"{what} of {self.describe(src)}", ranks)
        begin: Callable[[], Work | None] = partial(dist.broadcast, carried, src=src, group=group, async_op=True)
        shared = self._shared_parts(carried, group)
        if shared is not None:
            begin = partial(SharedBroadcast, *shared, ranks.index(src))
        return self._start(wait, begin, tensor, carried)

    def send(
        self, tensor: Tensor, what: str, *, to: int, kind: str, group: Group = None, queue: SharedQueue | None = None
    ) -> Transfer:
        """Start to send `tensor` (any shape) to another rank. Messages between two ranks arrive in order.

        Keep the transfer until its `wait` has returned: gloo drops the message of a transfer that is garbage-collected.
        `group` is the channel; NCCL runs the messages of a channel one after another, both directions together. With
        `queue`, of `new_queue`, or where one is open (`open_queues`), the message goes through that: it is there, and
        the tensor may be changed, when this method returns, which waits for a free slot.

        Raises:
            TrafficError: as `Transfer.wait`, through a queue.
        """
        self.ledger.count(kind, tensor.nbytes)
        carried = staged(tensor)
        wait = Wait(what, "send", (to,))
        queue = queue or self._open_queue(rank(), to, carried, group)
        if queue is not None:
            transfer = Transfer(self, wait, queue.send(carried), carried, carried)
            transfer.wait()
            return transfer
        return self._start(wait, partial(dist.isend, carried, dst=to, group=group), carried, carried)

    def receive(
        self, tensor: Tensor, what: str, *, source: int, group: Group = None, queue: SharedQueue | None = None
    ) -> Transfer:
        """Start to receive the next message of rank `source` in `group` into `tensor` (any shape).

        Through a queue, as with `send`, it is the next message of that, and messages are waited for in their order.
        """
        carried = host_buffer(tensor)
        wait = Wait(what, "receive", (source,))
        queue = queue or self._open_queue(source, rank(), carried, group)
        if queue is not None:
            return Transfer(self, wait, queue.receive(carried), tensor, carried)
        return self._start(wait, partial(dist.irecv, carried, src=source, group=group), tensor, carried)

    def _around_ring(
        self,
        result: Tensor,
        tensor: Tensor,
        begin: Begin,
        what: str,
        kind: str,
        group: Group,
        finish: Callable[[Tensor], None] = lambda _: None,
    ) -> Transfer:
        """Start a collective that takes `tensor` and fills `result`; one has a part, the other a part for each rank.

        `finish` is called at its end with the tensor that the result has to be in.
        """
        ranks = members(group)
        if len(ranks) == 1:
            return self._complete(result.copy_(tensor.view_as(result)), what)
        self.ledger.count(kind, (len(ranks) - 1) * min(tensor.nbytes, result.nbytes))
        into = host_buffer(result)
        wait = self._collective(what, ranks)
        return self._start(wait, partial(begin, into, staged(tensor)), result, into, partial(finish, into))

    def _collective(self, what: str, ranks: Sequence[int]) -> Wait:
        """Count a collective of `ranks`, and name the wait for it."""
        key = group_key(ranks)
        self.begun[key] += 1
        return Wait(what, "collective", tuple(r for r in ranks if r != rank()), self.begun[key] - 1)

    def _start(
        self,
        wait: Wait,
        begin: Callable[[], Work | None],
        tensor: Tensor,
        carried: Tensor,
        finish: Callable[[], object] = lambda: None,
    ) -> Transfer:
        with self.named(wait):
            work = begin()
            if isinstance(work, SharedCollective):
                work.named = wait
            return Transfer(self, wait, work, tensor, carried, finish)

    def held_back(self) -> dict[str, list[int]]:
        """The collectives in shared memory of which this rank has yet to do its share: their numbers, by their ranks.

        Another thread may ask.
        """
        numbers: dict[str, list[int]] = {}
        for memory in list(self._shared.values()):
            for collective in list(memory.not_combined) if isinstance(memory, SharedMemory) else []:
                if collective.is_held_back and collective.named is not None:
                    key = group_key([rank(), *collective.named.peers])
                    numbers.setdefault(key, []).append(collective.named.number)
        return numbers

    def _complete(self, tensor: Tensor, what: str) -> Transfer:
        """The transfer of a collective that involves no other rank."""
        return Transfer(self, Wait(what, "collective"), None, tensor, tensor)

    def _in_thread(self, collective: Callable[[Endpoint], None], kind: str) -> Future[None]:
        """Run a collective made of sends and receives in a thread, after those started before it."""
        endpoint = CountingEndpoint(process_group())

        def run() -> None:
            collective(endpoint)
            self.ledger.count(kind, endpoint.sent_bytes)

        self._thread = self._thread or ThreadPoolExecutor(1)
        return self._thread.submit(run)


traffic = Traffic()
