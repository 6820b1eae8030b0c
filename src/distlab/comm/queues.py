"""Queues of messages from one rank to another of its host, in memory that both share.

A message is copied twice, into a slot by its sender and out of it by its receiver. Over gloo the kernel copies it as
often, and threads of gloo's have to wake up at both ends. That a message is there, and that its slot is free again, are
signals, so a wait ends as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor

from distlab.comm.mappings import Mapping, Offer, accept, no_offer, not_shared
from distlab.comm.shared import SharedWork
from distlab.comm.signals import Channel, close_all

Exchange = Callable[[Tensor], object]  # brings a tensor to the other rank, or fills it with the other rank's
THERE, FREE = 1, 2  # signals


class SharedQueue:
    """One end of a queue; messages are received in the order in which they were sent.

    Args:
        slots: a part for each message that can be there at a time.
        channel: to the other end.
    """

    def __init__(self, slots: Mapping, channel: Channel) -> None:
        self._mapping, self._channel = slots, channel
        self._slots = len(slots) // slots.part_bytes
        self._begun = 0  # messages that this end has sent or begun to receive
        self._received = 0

    def send(self, tensor: Tensor, timeout: timedelta) -> None:
        """Copy a message, a tensor of any shape, into the next slot as soon as the message before has left it.

        Raises:
            RuntimeError: as of `Channel.wait` and `Channel.send`.
        """
        self._channel.wait(FREE, 1 + self._begun - self._slots, time.perf_counter() + timeout.total_seconds())
        self._slot(self._begun, tensor).copy_(tensor.view(-1))
        self._begun += 1
        self._channel.send(THERE)

    def receive(self, tensor: Tensor) -> "QueuedMessage":
        """Begin to receive the next message into a contiguous tensor of its size."""
        self._begun += 1
        return QueuedMessage(self, self._begun, tensor)

    def take(self, number: int, tensor: Tensor, deadline: float) -> None:
        """Wait for a message, counted from 1, and copy it; `RuntimeError` as of `Channel.wait`."""
        assert number == self._received + 1, "messages of a queue are waited for in their order"
        self._channel.wait(THERE, number, deadline)
        tensor.view(-1).copy_(self._slot(number - 1, tensor))
        self._received = number
        self._channel.send(FREE)

    def _slot(self, message: int, like: Tensor) -> Tensor:
        return self._mapping.part(message % self._slots, like)


class QueuedMessage(SharedWork):
    """A message that is to be received."""

    def __init__(self, queue: SharedQueue, number: int, tensor: Tensor) -> None:
        self._queue, self._number, self._tensor = queue, number, tensor

    def wait(self, timeout: timedelta) -> None:
        self._queue.take(self._number, self._tensor, time.perf_counter() + timeout.total_seconds())


def offered_queue(slot_bytes: int, slots: int, send: Exchange, receive: Exchange) -> SharedQueue:
    """The sender's end of a new queue; the receiver calls `accepted_queue`. Both raise `NotShared` if one has to."""
    offer, verdict = Offer(slot_bytes, slots, pipes_to=1), torch.zeros(1, dtype=torch.int64)
    problem, mapping, _ = accept(offer.numbers, reserved=range(slots), pipes=None)
    try:
        send(torch.tensor([0, problem, *offer.numbers[2:]] if problem else offer.numbers))
        receive(verdict)
    finally:
        offer.withdraw()
    if mapping is None or verdict:
        close_all(offer.channels)
        raise not_shared(problem or int(verdict), slots * slot_bytes)
    return SharedQueue(mapping, offer.channels[0])


def accepted_queue(send: Exchange, receive: Exchange) -> SharedQueue:
    """The receiver's end of the queue that the sender offers."""
    numbers = torch.tensor(no_offer(pipes_to=1))
    receive(numbers)
    problem, mapping, channels = accept(numbers.tolist(), reserved=range(0), pipes=0)
    send(torch.tensor([problem]))
    if mapping is None:
        part_bytes, parts = numbers[3:5].tolist()
        raise not_shared(problem, part_bytes * parts)
    return SharedQueue(mapping, channels[0])
