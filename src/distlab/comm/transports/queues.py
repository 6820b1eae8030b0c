"""Queues of messages from one rank to another on its host, in memory that both share.

A message is copied twice, into a slot by its sender and out of it by its receiver. Over gloo the kernel copies it as
often, and gloo's threads have to wake up at both ends. One signal reports a message, another that its slot is free
again. So a wait ends as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import ctypes
import struct
import weakref
from collections import deque
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.names import CONTROL, named
from distlab.comm.pending import SharedWork
from distlab.comm.transports.mappings import Mapping, NotShared, share
from distlab.comm.transports.signals import Channel
from distlab.comm.transports.transport import Carried, Members, Transport, share_less

SIZE = struct.Struct("q")  # of the message in a slot, at its beginning
HEADER_BYTES = 64  # before the message, which is aligned


class Queues(Transport):
    """The queues between ranks of a group. A message without a queue, or too large for it, goes over the library.

    Both ends of a queue make it by messages over the group itself.
    """

    def __init__(self, members: Members, group: dist.ProcessGroup) -> None:
        self._members, self._group = members, group
        self._queues: dict[tuple[int, int], SharedQueue] = {}  # by sender and receiver in the world
        self._without: set[tuple[int, int]] = set()  # those that cannot share memory, which are asked for many times

    def open(self, link: tuple[int, int], message_bytes: int, like: Tensor, slots: int) -> None:
        """Make the queue from one rank of the world to another; this rank is one of them, and both call it together.

        A queue that is too small is replaced by one that has room for all that either was made for.
        """
        context, (sender, receiver) = self._members.context, link
        if link in self._without:
            return
        if known := self._queues.get(link):
            if known.message_bytes >= message_bytes and known.slots >= slots:
                return
            message_bytes, slots = max(message_bytes, known.message_bytes), max(slots, known.slots)
            del self._queues[link]
        if not like.is_cpu or context.hosts[sender] != context.hosts[receiver]:
            return
        is_sender = context.rank == sender
        other = self._members.ranks.index(receiver if is_sender else sender)

        def bring(numbers: Tensor, what: str, is_sent: bool) -> None:
            with named(what, CONTROL):
                (self._group.send if is_sent else self._group.recv)([numbers], other, 0).wait()

        def worst(problem: int) -> int:
            verdict = torch.tensor([problem])  # of the receiver, which has found an error of the sender in the offer
            bring(verdict, "the answer to the offer of shared memory", not is_sender)
            return int(verdict)

        tell = partial(bring, what="the offer of shared memory", is_sent=is_sender)
        room_bytes, reserved = HEADER_BYTES + message_bytes, range(slots if is_sender else 0)
        try:
            memory, [channel] = share(int(not is_sender), room_bytes, slots, reserved, 1, tell, worst)
            self._queues[link] = SharedQueue(memory, channel, is_sender)
        except NotShared as error:
            share_less(context, error, is_first=is_sender)
            self._without.add(link)
        else:
            context.shares_memory = True

    def close_queue(self, link: tuple[int, int]) -> None:
        self._queues.pop(link, None)

    def send(self, tensor: Tensor, to: int, tag: int) -> Carried | None:
        queue = self._queues.get((self._members.context.rank, self._members.ranks[to]))
        if queue is None or tensor.nbytes > queue.message_bytes:
            return None
        return Carried(QueuedMessage(queue, tensor.cpu()), at_once=True)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Carried | None:
        queue = self._queues.get((self._members.ranks[source], self._members.context.rank))
        if queue is None or tensor.nbytes > queue.message_bytes:
            return None
        into = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
        return Carried(QueuedMessage(queue, into), None if into is tensor else lambda: tensor.copy_(into))

    def close(self) -> None:
        self._queues.clear()


class SharedQueue:
    """One end of a queue, the sender's or the receiver's; messages are received in the order in which they were sent.

    One thread copies a message. torch would use all threads of the rank, which then look for more work for a while
    (`GOMP_SPINCOUNT`) on cores that the other rank needs.

    Args:
        memory: a part, or slot, for each message that the queue can hold.
        channel: to the other end.
    """

    def __init__(self, memory: Mapping, channel: Channel, is_sender: bool) -> None:
        self._memory, self._channel, self.is_sender = memory, channel, is_sender
        self.slots = memory.parts
        self._moved = 0  # messages that this end has copied
        self.not_moved: deque[QueuedMessage] = deque()  # started messages that it has yet to copy
        weakref.finalize(self, channel.close)

    @property
    def message_bytes(self) -> int:
        """Room in a slot, in bytes."""
        return self._memory.part_bytes - HEADER_BYTES

    def move(self, deadline: float) -> None:
        """Copy the next message that this end has started."""
        message = self.not_moved[0]
        (self._put if self.is_sender else self._take)(message.tensor, deadline)
        self._moved += 1
        self.not_moved.popleft().is_moved = True

    def _put(self, tensor: Tensor, deadline: float) -> None:
        """Copy a message into the next slot, when the previous message has left it."""
        self._channel.wait(self._moved + 1 - self.slots, deadline)
        slot = self._moved % self.slots
        SIZE.pack_into(self._memory, self._memory.place_of(slot), tensor.nbytes)
        ctypes.memmove(self._content(slot, tensor), tensor.data_ptr(), tensor.nbytes)
        self._channel.send()

    def _take(self, tensor: Tensor, deadline: float) -> None:
        """Copy a message out of its slot, when it is there."""
        self._channel.wait(self._moved + 1, deadline)
        slot = self._moved % self.slots
        [size_bytes] = SIZE.unpack_from(self._memory, self._memory.place_of(slot))
        if size_bytes != tensor.nbytes:
            raise RuntimeError(f"expected a message of {tensor.nbytes:,} bytes, received {size_bytes:,}")
        ctypes.memmove(tensor.data_ptr(), self._content(slot, tensor), tensor.nbytes)
        with suppress(RuntimeError):  # a sender that has exited needs no slot
            self._channel.send()

    def _content(self, slot: int, message: Tensor) -> int:
        """Return the address of a slot's memory for a message."""
        assert message.nbytes <= self.message_bytes, f"{message.nbytes} bytes in a slot of {self.message_bytes}"
        return self._memory.address + slot * self._memory.part_bytes + HEADER_BYTES


class QueuedMessage(SharedWork):
    """A message that an end of a queue has started to send or to receive; earlier messages are moved first.

    Its tensor, of any shape, is contiguous; that of a receive has the size of the message.
    """

    def __init__(self, queue: SharedQueue, tensor: Tensor) -> None:
        self.queue, self.tensor, self.is_moved = queue, tensor, False
        queue.not_moved.append(self)

    def advance(self, deadline: float) -> None:
        while not self.is_moved:
            self.queue.move(deadline)
