"""Queues of messages from one rank to another of its host, in memory that both share.

A message is copied twice, into a slot by its sender and out of it by its receiver. Over gloo the kernel copies it as
often, and threads of gloo's have to wake up at both ends. That a message is there, and that its slot is free again, are
signals, so a wait ends as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import ctypes
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta

import torch
from torch import Tensor

from distlab.comm.mappings import Mapping, Offer, accept, no_offer, not_shared
from distlab.comm.shared import SharedWork
from distlab.comm.signals import Channel, close_all

THERE, FREE = 1, 2  # signals
SIZE = struct.Struct("q")  # of the message in a slot, at its beginning
HEADER_BYTES = 64  # from there to the message, which is aligned
Bring = Callable[[Tensor], object]  # sends a tensor to the other rank, or fills it with what that has sent


class SharedQueue:
    """One end of a queue, the sender's or the receiver's; messages are received in the order in which they were sent.

    One thread copies a message. torch would use all threads of the rank, which then look for more work for a while
    (`GOMP_SPINCOUNT`) on cores that the other rank needs.

    Args:
        slots: memory with a part for each message that can be there at a time.
        channel: to the other end.
    """

    def __init__(self, slots: Mapping, channel: Channel) -> None:
        self._slots, self._channel = slots, channel
        self._slot_count = slots.parts
        self._begun = 0  # messages that this end has begun to send, or to receive
        self._waited_for = 0  # of these
        weakref.finalize(self, channel.close)

    @property
    def message_bytes(self) -> int:
        """What a slot has room for."""
        return self._slots.part_bytes - HEADER_BYTES

    def send(self, tensor: Tensor) -> "QueuedMessage":
        """Begin to send a contiguous tensor of any shape, which its `wait` does."""
        self._begun += 1
        return QueuedMessage(self._put, self._begun, tensor)

    def receive(self, tensor: Tensor) -> "QueuedMessage":
        """Begin to receive the next message into a contiguous tensor of its size."""
        self._begun += 1
        return QueuedMessage(self._take, self._begun, tensor)

    def _put(self, number: int, tensor: Tensor, deadline: float) -> None:
        """Copy a message into the next slot, when the message before has left it."""
        self._wait_for(FREE, number - self._slot_count, number, deadline)
        slot = (number - 1) % self._slot_count
        SIZE.pack_into(self._slots, self._slots.place_of(slot), tensor.nbytes)
        ctypes.memmove(self._content(slot, tensor), tensor.data_ptr(), tensor.nbytes)
        self._channel.send(THERE)

    def _take(self, number: int, tensor: Tensor, deadline: float) -> None:
        """Copy a message out of its slot, when it is there."""
        self._wait_for(THERE, number, number, deadline)
        slot = (number - 1) % self._slot_count
        [size_bytes] = SIZE.unpack_from(self._slots, self._slots.place_of(slot))
        if size_bytes != tensor.nbytes:
            raise RuntimeError(f"a message of {size_bytes:,} bytes has come, not of {tensor.nbytes:,}")
        ctypes.memmove(tensor.data_ptr(), self._content(slot, tensor), tensor.nbytes)
        with suppress(RuntimeError):  # a sender that has exited needs no slot
            self._channel.send(FREE)

    def _content(self, slot: int, message: Tensor) -> int:
        """The address of a slot's memory for a message."""
        assert message.nbytes <= self.message_bytes, f"{message.nbytes} bytes in a slot of {self.message_bytes}"
        return self._slots.address + slot * self._slots.part_bytes + HEADER_BYTES

    def _wait_for(self, signal: int, times: int, number: int, deadline: float) -> None:
        """Wait for a signal that has to come so many times before a message can be sent or received."""
        assert number == self._waited_for + 1, "messages of a queue are waited for in their order"
        self._channel.wait(signal, times, deadline)
        self._waited_for = number


class QueuedMessage(SharedWork):
    """A message that an end of a queue has begun to send or to receive."""

    def __init__(self, move: Callable[[int, Tensor, float], None], number: int, tensor: Tensor) -> None:
        self._move, self._number, self._tensor = move, number, tensor

    def wait(self, timeout: timedelta) -> None:
        self._move(self._number, self._tensor, time.perf_counter() + timeout.total_seconds())


def offered_queue(message_bytes: int, slots: int, send: Bring, receive: Bring) -> SharedQueue:
    """The sender's end of a new queue; the receiver calls `accepted_queue`. Both raise `NotShared` if one has to."""
    offer, verdict = Offer(HEADER_BYTES + message_bytes, slots, pipes_to=1), torch.zeros(1, dtype=torch.int64)
    with ExitStack() as if_it_fails:
        if_it_fails.callback(close_all, offer.channels)
        try:
            problem, mapping, _ = accept(offer.numbers, reserved=range(slots), pipes=None)
            send(torch.tensor([0, problem, *offer.numbers[2:]] if problem else offer.numbers))
            receive(verdict)
        finally:
            offer.withdraw()
        if mapping is None or verdict:
            raise not_shared(problem or int(verdict), slots * message_bytes)
        if_it_fails.pop_all()
    return SharedQueue(mapping, offer.channels[0])


def accepted_queue(message_bytes: int, slots: int, send: Bring, receive: Bring) -> SharedQueue:
    """The receiver's end of the queue that the sender offers."""
    numbers = torch.tensor(no_offer(pipes_to=1))
    receive(numbers)
    problem, mapping, channels = accept(numbers.tolist(), reserved=range(0), pipes=0)
    with ExitStack() as if_it_fails:
        if_it_fails.callback(close_all, channels)
        send(torch.tensor([problem]))
        if mapping is None:
            raise not_shared(problem, slots * message_bytes)
        if_it_fails.pop_all()
    return SharedQueue(mapping, channels[0])
