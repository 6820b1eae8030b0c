"""The links between this worker of a pipeline and others: they carry messages, and live from step to step.

Messages of one kind arrive in the order in which they were sent. Between ranks that share memory, a send is complete
when the sender has copied the message into a queue; otherwise sends and receives go on while both ends compute.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.context import Group, context_of
from distlab.comm.group import close_queues, open_queues
from distlab.comm.names import CONTROL, named
from distlab.pipeline.actions import Programs, Result
from distlab.pipeline.engine import LinkKey
from distlab.pipeline.plan import Plan, acknowledged, most_on_the_way


@dataclass(eq=False)
class WorkerLink:
    """A link of this worker: the messages of one kind to or from another worker."""

    sender: int  # rank
    receiver: int  # rank
    group: Group  # in which messages between these two ranks stay in order
    slots: int  # maximum number of messages in transit

    def send(self, result: Result, tensor: Tensor) -> dist.Work | None:
        """Start to send a result; None if the send is complete. Otherwise, keep work and tensor until it is."""
        with named(str(result), result.kind):
            work = dist.isend(tensor, self.receiver, self.group)
        if work is None or not work.is_completed():
            return work
        work.wait()  # returns at once
        return None

    def receive(self, result: Result, into: Tensor) -> dist.Work:
        """Start to receive the next message, which is this result."""
        with named(str(result), CONTROL):
            work = dist.irecv(into, self.sender, self.group)
        assert work is not None  # this rank is in the group
        return work


class Links:
    """The links of a worker.

    Args:
        ranks: ranks of the pipeline's workers.
        worker: the number of this worker.
    """

    def __init__(self, ranks: Sequence[int], worker: int) -> None:
        self._ranks, self._worker = ranks, worker
        self._links: dict[LinkKey, WorkerLink] = {}
        self._groups: list[dist.ProcessGroup] = []  # made for these links
        self._late: list[dist.Work] = []  # sends that a step leaves to the next one
        self._message_bytes = 0  # size of the messages for which the queues have room
        self.link_of: dict[Result, WorkerLink] = {}  # by message that this worker sends or receives
        self.incoming: list[tuple[WorkerLink, Sequence[Result]]] = []  # with its messages of a step, in order
        self.confirmed: dict[Result, list[Result]] = {}  # by message received, those sent that have thus arrived

    def open(self, programs: Programs, plan: Plan) -> None:
        """Make the groups and queues for the messages of these programs; all ranks call this together."""
        context, slots = context_of(), most_on_the_way(programs, plan)
        numbers, groups = group_numbers(plan.messages, context.is_over_nccl), list[Group]([None])
        if more := max(numbers.values(), default=0):
            with context.waits.during("all ranks to create the pipeline's channels"):
                timeout = timedelta(seconds=context.waits.timeout_seconds)
                self._groups = [dist.new_group(timeout=timeout) for _ in range(more)]
            groups += self._groups
        for key, number in numbers.items():
            if self._worker in key[:2]:
                sender, receiver = (self._ranks[worker] for worker in key[:2])
                self._links[key] = WorkerLink(sender, receiver, groups[number], slots[key])
        self.link_of = {result: link for key, link in self._links.items() for result in plan.messages[key]}
        self.incoming = [(link, plan.messages[key]) for key, link in self._links.items() if key[1] == self._worker]
        self.confirmed = acknowledged(programs, plan, self._worker)
        if context.is_over_nccl:
            self._connect(context.rank, torch.zeros(1, device=context.device))

    def close(self) -> None:
        """Wait for sends in progress, and release queues and groups; all ranks call this together."""
        self.finish([], run_on=False)
        for link in self._links.values():
            close_queues((link.sender, link.receiver), link.group)
        for group in self._groups:
            dist.destroy_process_group(group)
        self._links, self._groups, self._message_bytes = {}, [], 0

    def make_room(self, elements: int, like: Tensor) -> None:
        """Make queues that have room for messages larger than all earlier ones."""
        message_bytes = elements * like.itemsize
        if message_bytes > self._message_bytes:
            self._message_bytes = message_bytes
            for link in self._links.values():  # in the same order on all workers
                ends = link.sender, link.receiver
                open_queues(ends, message_bytes, like, link.group, slots=link.slots)

    def finish(self, sends: Iterable[dist.Work], run_on: bool) -> None:
        """Wait for the sends of a step, or, if it runs on, for the sends that the step before has left."""
        own = list(sends)
        due, self._late = (self._late, own) if run_on else ([*self._late, *own], [])
        for work in due:
            work.wait()

    def _connect(self, rank: int, tensor: Tensor) -> None:
        """Exchange a message over each link in turn: NCCL connects a link at its first use, which blocks both ends."""
        for (_, _, kind), link in self._links.items():
            with named(f"the first message for {kind}", CONTROL):
                if rank == link.sender:
                    dist.send(tensor, link.receiver, link.group)
                else:
                    dist.recv(tensor, link.sender, link.group)


def group_numbers(links: Iterable[LinkKey], over_nccl: bool) -> dict[LinkKey, int]:
    """Return, by link, the number of the process group that its messages take; 0 is the group of all ranks.

    Within a group, messages between two ranks are ordered: over gloo, in each direction; over NCCL, in both together.
    With a single group, gloo would deliver a message of one kind as one of another kind, and with NCCL a receive posted
    ahead would block a send that the peer needs first. So where links connect the same two ranks, each kind of message
    gets a group; over NCCL, each direction too.
    """
    kinds = {link: (link[2], over_nccl and link[0] > link[1]) for link in links}
    ends = Counter(tuple(sorted(link[:2])) if over_nccl else link[:2] for link in kinds)
    if max(ends.values(), default=1) == 1:
        return dict.fromkeys(kinds, 0)
    numbers = {kind: number for number, kind in enumerate(sorted(set(kinds.values())))}
    return {link: numbers[kind] for link, kind in kinds.items()}
