"""Queues of messages in shared memory: order, room, and what happens when memory is refused or a rank fails."""

import errno
import gc
import os
import re
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks
from support.refusals import refuse
from torch import Tensor

from distlab.comm.hosts import Hosts
from distlab.comm.queues import QueuedMessage, SharedQueue
from distlab.comm.traffic import Transport, traffic
from distlab.comm.waits import TrafficError
from distlab.rendezvous.ranks import open_store
from simplellm.errors import InputError

pytestmark = pytest.mark.alone
LARGEST = 70_001  # elements


def message(number: int) -> Tensor:
    """The content of a message: of any size up to the largest, some of two dimensions."""
    elements = [LARGEST, 1, 6, 1000][number % 4]
    values = torch.randn(elements, generator=torch.Generator().manual_seed(number))
    return values.view(2, -1) if elements % 2 == 0 else values


def both_queues(slots: int) -> tuple[SharedQueue, SharedQueue]:
    """Of two ranks, this one's to the other, and the other way round."""
    queues = [traffic.new_queue(sender, 1 - sender, slots, LARGEST, torch.empty(0)) for sender in (0, 1)]
    own, other = queues[dist.get_rank()], queues[1 - dist.get_rank()]
    assert own is not None
    assert other is not None
    return own, other


def exchange(rank: int, port: int, slots: int) -> dict[str, int]:
    """Each rank sends what the other one receives, with two receives begun ahead; the bytes that were counted."""
    with process_group(rank, 2, port):
        to_other, from_other = both_queues(slots)
        expected = [message(2 * number + 1 - rank) for number in range(40)]
        received = [torch.full_like(tensor, -1) for tensor in expected]
        begun = []
        for number in range(40):
            sent = message(2 * number + rank)
            begun.append(traffic.receive(received[number], "a message", source=1 - rank, queue=from_other))
            traffic.send(sent, "a message", to=1 - rank, kind="messages", queue=to_other).wait()
            sent.fill_(-2)  # the sender may change it at once
            if number:
                begun[number - 1].wait()
        begun[-1].wait()
        assert all(map(torch.equal, received, expected))
        return dict(traffic.ledger.sent_bytes)


@pytest.mark.parametrize("slots", [2, 3, 50])
def test_messages_arrive_in_order_and_unchanged(slots: int) -> None:
    for rank, sent_bytes in enumerate(run_ranks(2, exchange, free_port(), slots)):
        assert sent_bytes["messages"] == sum(message(2 * number + rank).nbytes for number in range(40))


def fill(rank: int, port: int) -> list[float]:
    """When rank 0 has sent each of four messages to rank 1, and when that, a second late, has received them."""
    with process_group(rank, 2, port):
        queue = traffic.new_queue(0, 1, 2, 5, torch.empty(0))
        assert queue is not None
        dist.barrier()
        ended = []
        for number in range(4):
            if rank == 0:
                traffic.send(torch.full((5,), float(number)), "a message", to=1, kind="messages", queue=queue).wait()
            else:
                time.sleep(number == 0)
                ended.append(time.monotonic())
                received = torch.empty(5)
                traffic.receive(received, "a message", source=0, queue=queue).wait()
                assert received.tolist() == [number] * 5
            ended.append(time.monotonic())
        return ended


def test_a_sender_waits_for_a_slot_and_no_longer() -> None:
    sent, (begins_to_take, *_) = run_ranks(2, fill, free_port())
    assert sent[1] < begins_to_take <= sent[2], "there are two slots"
    assert sent[3] < begins_to_take + 5


def fail(rank: int, port: int, waits: int, is_silent: bool) -> tuple[str, float]:
    """What a rank says, and after how long, when the other one neither sends nor receives, or has exited."""
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    queue = traffic.new_queue(0, 1, 1, 5, torch.empty(0))
    assert queue is not None
    if rank != waits:
        time.sleep(3 if is_silent else 0.5)
        return "", 0.0  # and the process ends
    traffic.timeout_seconds = 1 if is_silent else 30
    started, tensor = time.monotonic(), torch.zeros(5)
    try:
        if waits == 1:
            traffic.receive(tensor, "the activations", source=0, queue=queue).wait()
        else:
            for _ in range(2):  # there is room for one
                traffic.send(tensor, "the activations", to=1, kind="activations", queue=queue).wait()
    except TrafficError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the wait has ended without an error")


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("waits", [0, 1])
def test_a_wait_ends_with_the_usual_sentence(waits: int, is_silent: bool) -> None:
    sentence, seconds = run_ranks(2, fail, free_port(), waits, is_silent)[waits]
    what = "the activations from rank 0" if waits else "rank 1 to receive the activations"
    why = "no answer" if is_silent else "a rank has exited"
    assert sentence.startswith(f"rank {waits} waited ")
    assert f" s for {what}: {why}" in sentence
    assert seconds < 5


def meet_alone(rank: int, port: int, waits: int, is_silent: bool) -> tuple[str, int]:
    """What a rank says, and how many descriptors it leaves open, if the other one does not come to the meeting."""
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    if rank != waits:
        time.sleep(3 if is_silent else 0.5)
        return "", 0
    traffic.timeout_seconds = 1 if is_silent else 30
    opened = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TrafficError) as caught:
        traffic.new_queue(0, 1, 1, 5, torch.empty(0))
    sentence = str(caught.value)
    del caught  # its traceback holds the mapping
    gc.collect()
    left = []
    for fd in set(os.listdir("/proc/self/fd")) - opened:
        with suppress(FileNotFoundError):  # that of the list itself
            left.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sentence, sum("pipe" in name or "memfd" in name for name in left)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_that_does_not_come_is_named(waits: int, is_silent: bool) -> None:
    sentence, left = run_ranks(2, meet_alone, free_port(), waits, is_silent)[waits]
    offer = "the offer of shared memory"
    what = [f"(rank 1 to receive {offer}|the answer to {offer} from rank 1)", f"{offer} from rank 0"][waits]
    why = "no answer" if is_silent else "a rank has exited"
    assert re.match(rf"rank {waits} waited \d+\.\d s for {what}: {why}", sentence), sentence
    assert left == 0


def misuse(rank: int, port: int) -> list[str]:
    """What the receiver says to messages of another size, and to waits in another order; and the sender to too much."""
    said = []
    with process_group(rank, 2, port):
        queue = traffic.new_queue(0, 1, 4, 1000, torch.empty(0))
        assert queue is not None
        if rank == 0:
            for tensor in (torch.zeros(10), torch.zeros(10, dtype=torch.bfloat16), torch.zeros(2000)):
                try:
                    traffic.send(tensor, "a message", to=1, kind="messages", queue=queue)
                except AssertionError as error:
                    said.append(str(error))
        dist.barrier()
        if rank == 1:
            first, second = (traffic.receive(torch.zeros(10), "a message", source=0, queue=queue) for _ in range(2))
            for transfer in (second, first, second):
                try:
                    transfer.wait()
                except (AssertionError, RuntimeError) as error:
                    said.append(str(error))
        dist.barrier()
    return said


def test_messages_of_another_size_or_in_another_order_are_refused() -> None:
    sender, receiver = run_ranks(2, misuse, free_port())
    assert sender == ["8000 bytes in a slot of 4032"]
    assert receiver == [
        "messages of a queue are waited for in their order",
        "a message of 20 bytes has come, not of 40",
    ]


def send_and_exit(rank: int, port: int) -> list[float]:
    """What rank 1 receives, of which it takes nothing before rank 0 has exited; then what it says."""
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    queue = traffic.new_queue(0, 1, 3, 5, torch.empty(0))
    assert queue is not None
    received = torch.zeros(3, 5)
    for number in range(3):
        if rank == 0:
            traffic.send(torch.full((5,), float(number)), "a message", to=1, kind="messages", queue=queue).wait()
        else:
            time.sleep(0.5 * (number == 0))
            traffic.receive(received[number], "a message", source=0, queue=queue).wait()
    return received[:, 4].tolist()


def test_what_was_sent_arrives_though_its_sender_has_exited() -> None:
    assert run_ranks(2, send_and_exit, free_port())[1] == [0, 1, 2]


def pass_along(rank: int, port: int) -> list[list[int]]:
    """Messages from each of three ranks to the next and back; the elements of those that this rank sends by queue."""
    by_queue: list[int] = []
    put = SharedQueue.send

    def counted(queue: SharedQueue, tensor: Tensor) -> QueuedMessage:
        by_queue.append(tensor.numel())
        return put(queue, tensor)

    def there_and_back(elements: int) -> None:
        received = torch.zeros(elements)
        if rank:
            traffic.receive(received, "a message", source=rank - 1).wait()
        if rank < 2:
            traffic.send(torch.full_like(received, rank + 1.0), "a message", to=rank + 1, kind="messages").wait()
            traffic.receive(received, "an answer", source=rank + 1).wait()
        if rank:
            traffic.send(torch.full_like(received, rank - 1.0), "an answer", to=rank - 1, kind="messages").wait()
        assert received.unique().tolist() == [rank]

    used = []
    with process_group(rank, 3, port), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SharedQueue, "send", counted)
        for row, most, both_ways in (([0, 1, 2, 0, 1, 2], 1000, False), (range(3), 5, True), (range(3), 20_000, True)):
            traffic.open_queues(row, most, torch.empty(0), both_ways=both_ways)
            by_queue.clear()
            for elements in (1, 1000, 20_000, 30_000, 7):
                there_and_back(elements)
            used.append(sorted(by_queue))
        sent_bytes = traffic.ledger.sent_bytes["messages"]
        assert sent_bytes == 3 * [1, 2, 1][rank] * 4 * (1 + 1000 + 20_000 + 30_000 + 7)
    return used


def test_open_queues_carry_the_messages_that_they_have_room_for() -> None:
    one_way, all_but_one = [1, 7, 1000], [1, 7, 1000, 20_000]
    one_page = one_way  # 4096 bytes, what the smallest queue has room for
    first, middle, last = run_ranks(3, pass_along, free_port())
    # The first row has a link from rank 2 to rank 0, which is not used, and none back; the second makes these alone.
    assert first == [one_way, one_way, all_but_one]
    assert middle == [one_way, sorted([*one_way, *one_page]), sorted(2 * all_but_one)]
    assert last == [[], one_page, all_but_one]


def do_without(rank: int, port: int, who: int, call: str, error: int, transport: Transport) -> tuple[list[str], str]:
    """What was remarked, and an error, when a rank is refused memory and the other one is not."""
    with process_group(rank, 2, port), pytest.MonkeyPatch.context() as monkeypatch:
        remarks: list[str] = []
        traffic.transport, traffic.remark = transport, remarks.append
        opened = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, call, refuse(error) if rank == who else getattr(os, call))
        try:
            queues = [traffic.new_queue(0, 1, 2, 100_000, torch.empty(0)) for _ in range(2)]
        except InputError as refusal:
            return remarks, str(refusal)
        assert queues == [None, None]
        assert len(os.listdir("/proc/self/fd")) == opened, "nothing stays open"
        assert not traffic.shares_memory
        return remarks, ""


@pytest.mark.parametrize(
    ("who", "call", "error", "why"),
    [
        (0, "posix_fallocate", errno.ENOSPC, "no 0.8 MB of shared memory: No space left on device"),
        (0, "memfd_create", errno.EMFILE, "no 0.8 MB of shared memory: Too many open files"),
        (0, "pipe", errno.EMFILE, "no 0.8 MB of shared memory: Too many open files"),
        (1, "open", errno.EMFILE, "no 0.8 MB of shared memory: Too many open files"),
        (1, "readlink", errno.EACCES, "a rank cannot open the memory of another, of a different user or container"),
    ],
)
def test_without_memory_messages_go_over_gloo_and_the_sender_says_so(who: int, call: str, error: int, why: str) -> None:
    first, second = run_ranks(2, do_without, free_port(), who, call, error, "auto")
    assert first == ([f"{why}; what these ranks cannot share goes over gloo instead"], ""), "one remark, not two"
    assert second == ([], "")


@pytest.mark.parametrize("who", [0, 1])
def test_without_memory_a_run_that_asks_for_it_ends_on_both_ranks(who: int) -> None:
    call = ["posix_fallocate", "open"][who]
    for ended in run_ranks(2, do_without, free_port(), who, call, errno.ENOMEM, "shared"):
        assert ended[1] == (
            "--transport shared: no 0.8 MB of shared memory: Cannot allocate memory; use --transport gloo"
        )


def where_there_are_queues(rank: int, port: int) -> list[bool]:
    """Whether there is a queue to the next rank, of three on two hosts, and then with `--transport gloo`."""
    with process_group(rank, 3, port):
        traffic.hosts = Hosts(["a", "a", "b"], dist.HashStore())  # in which nobody has to meet for queues
        found = []
        transports: list[Transport] = ["auto", "gloo"]
        for transport in transports:
            traffic.transport = transport
            pairs = [pair for pair in ((0, 1), (1, 2), (2, 0)) if rank in pair]
            found += [traffic.new_queue(*pair, 2, 100, torch.empty(0)) is not None for pair in pairs]
        return found


def test_only_ranks_of_one_host_have_queues() -> None:
    found = run_ranks(3, where_there_are_queues, free_port())
    assert found == [[True, False, False, False], [True, False, False, False], [False] * 4]
