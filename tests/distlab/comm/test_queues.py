"""Queues of messages in shared memory: order, room, and what happens when memory is refused or a rank fails."""

import errno
import gc
import os
import re
import time
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.held import mappings, pipes_and_memory
from support.processes import free_port, join, meeting_of, process_group, run_ranks
from support.refusals import refuse
from torch import Tensor

from distlab.comm.context import Options, TransportName
from distlab.comm.group import close_queues, open_queues
from distlab.comm.names import named
from distlab.comm.transports.queues import Queues
from distlab.comm.transports.transport import Carried
from distlab.comm.waits import TrafficError
from distlab.machine.devices import Place
from simplellm.errors import InputError

LARGEST = 70_001  # elements
PAGE = 1008  # elements that fill the smallest queue, a page less its header


def message(number: int) -> Tensor:
    """The content of a message: of any size up to the largest, some of two dimensions."""
    elements = [LARGEST, 1, 6, 1000][number % 4]
    values = torch.randn(elements, generator=torch.Generator().manual_seed(number))
    return values.view(2, -1) if elements % 2 == 0 else values


def exchange(rank: int, port: int, slots: int) -> dict[str, int]:
    """Each rank sends what the other one receives, with two receives begun ahead; the bytes that were counted."""
    with process_group(rank, 2, port) as context:
        for row in ((0, 1), (1, 0)):
            open_queues(row, 4 * LARGEST, torch.empty(0), slots=slots)
        assert mappings() == 2
        expected = [message(2 * number + 1 - rank) for number in range(40)]
        received = [torch.full_like(tensor, -1) for tensor in expected]
        begun: list[Any] = []
        for number in range(40):
            sent = message(2 * number + rank)
            begun.append(dist.irecv(received[number], 1 - rank))
            with named("a message", "messages"):
                dist.send(sent, 1 - rank)
            sent.fill_(-2)  # the sender may change it at once
            if number:
                begun[number - 1].wait()
        begun[-1].wait()
        assert all(map(torch.equal, received, expected))
        return dict(context.ledger.sent_bytes)


@pytest.mark.parametrize("slots", [2, 3, 50])
def test_messages_arrive_in_order_and_unchanged(slots: int) -> None:
    for rank, sent_bytes in enumerate(run_ranks(2, exchange, free_port(), slots)):
        assert sent_bytes["messages"] == sum(message(2 * number + rank).nbytes for number in range(40))


def notice_waits(rank: int, port: int, with_queue: bool) -> list[bool]:
    """Whether each of two sends counts as waited for: the first one never is, whatever carries it."""
    with process_group(rank, 2, port) as context:
        if with_queue:
            open_queues((0, 1), 20, torch.empty(0), slots=2)
        begun: list[Any] = []
        context.observers.append(begun.append)
        if rank == 0:
            works = [dist.isend(torch.ones(5), 1), dist.isend(torch.ones(5), 1)]
            works[1].wait()  # type: ignore[union-attr]
        else:
            for _ in range(2):
                dist.recv(torch.empty(5), 0)
        found = [pending.was_waited_for() for pending in begun]
        dist.barrier()
        return found


@pytest.mark.parametrize("with_queue", [True, False])
def test_a_send_that_was_never_waited_for_is_known(with_queue: bool) -> None:
    assert run_ranks(2, notice_waits, free_port(), with_queue) == [[False, True], [True, True]]


def fill(rank: int, port: int, two_sent: Barrier) -> list[float]:
    """When rank 0 has sent each of four messages to rank 1, and when that, a while after the second, receives them."""
    with process_group(rank, 2, port):
        open_queues((0, 1), 20, torch.empty(0), slots=2)
        dist.barrier()
        ended = []
        for number in range(4):
            if rank == 0:
                dist.isend(torch.full((5,), float(number)), 1)
            elif number == 0:
                two_sent.wait(20)
                time.sleep(0.5)  # a third message would have been sent by now, if there were a slot
            if rank == 1:
                ended.append(time.monotonic())
                received = torch.empty(5)
                dist.recv(received, 0)
                assert received.tolist() == [number] * 5
            ended.append(time.monotonic())
            if rank == 0 and number == 1:
                two_sent.wait(20)
        return ended


def test_a_sender_waits_for_a_slot_and_no_longer() -> None:
    sent, (begins_to_take, *_) = run_ranks(2, fill, free_port(), meeting_of(2))
    assert sent[1] < begins_to_take <= sent[2], "there are two slots"
    assert sent[3] < begins_to_take + 5


def be_silent_or_end(end: Barrier, is_silent: bool) -> None:
    """Until the other rank has found it out, or, after a moment in which that one begins to wait, at once."""
    if is_silent:
        end.wait(20)
    else:
        time.sleep(0.3)


def fail(rank: int, port: int, end: Barrier, waits: int, is_silent: bool) -> tuple[str, float]:
    """What a rank says, and after how long, when the other one neither sends nor receives, or has exited."""
    context = join(rank, 2, port)
    open_queues((0, 1), 20, torch.empty(0))
    if rank != waits:
        be_silent_or_end(end, is_silent)
        return "", 0.0  # and the process ends
    seconds = 0.5 if is_silent else 30
    context.waits.timeout_seconds = 30 if waits == 1 else seconds
    started, tensor = time.monotonic(), torch.zeros(5)
    try:
        with named("the activations", "activations"):
            if waits == 1:
                begun: Any = dist.irecv(tensor, 0)
                begun.wait(timedelta(seconds=seconds))  # in place of the group's deadline
            else:
                for _ in range(2):  # there is room for one
                    dist.send(tensor, 1)
    except TrafficError as error:
        said = str(error), time.monotonic() - started
    else:
        raise AssertionError("the wait has ended without an error")
    if is_silent:
        end.wait(20)
    return said


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("waits", [0, 1])
def test_a_wait_ends_with_the_usual_sentence(waits: int, is_silent: bool) -> None:
    sentence, seconds = run_ranks(2, fail, free_port(), meeting_of(2), waits, is_silent)[waits]
    what = "the activations from rank 0" if waits else "rank 1 to receive the activations"
    why = "no answer" if is_silent else "a rank has exited"
    assert sentence.startswith(f"rank {waits} waited ")
    assert f" s for {what}: {why}" in sentence
    assert seconds < 15, "before the timeout"


def meet_alone(rank: int, port: int, end: Barrier, waits: int, is_silent: bool) -> tuple[str, int]:
    """What a rank says, and how many descriptors it leaves open, if the other one does not come to the meeting."""
    context = join(rank, 2, port)
    dist.barrier()
    if rank != waits:
        be_silent_or_end(end, is_silent)
        return "", 0
    context.waits.timeout_seconds = 0.5 if is_silent else 30
    opened = pipes_and_memory()
    with pytest.raises(TrafficError) as caught:
        open_queues((0, 1), 20, torch.empty(0))
    sentence = str(caught.value)
    del caught  # its traceback holds the mapping
    gc.collect()
    left = pipes_and_memory() - opened
    if is_silent:
        end.wait(20)
    return sentence, left


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_that_does_not_come_is_named(waits: int, is_silent: bool) -> None:
    sentence, left = run_ranks(2, meet_alone, free_port(), meeting_of(2), waits, is_silent)[waits]
    offer = "the offer of shared memory"
    what = [f"(rank 1 to receive {offer}|the answer to {offer} from rank 1)", f"{offer} from rank 0"][waits]
    why = "no answer" if is_silent else "a rank has exited"
    assert re.match(rf"rank {waits} waited \d+\.\d s for {what}: {why}", sentence), sentence
    assert left == 0


def misuse(rank: int, port: int) -> str:
    """What the receiver says to a message of another size than it expects."""
    with process_group(rank, 2, port):
        open_queues((0, 1), 4000, torch.empty(0), slots=2)
        said, first = "", torch.zeros(10)
        if rank == 0:
            dist.send(torch.ones(10), 1)
            dist.send(torch.zeros(10, dtype=torch.bfloat16), 1)
        dist.barrier()
        if rank == 1:
            begun: list[Any] = [dist.irecv(tensor, 0) for tensor in (first, torch.zeros(10))]
            with pytest.raises(RuntimeError) as caught:
                begun[1].wait()  # in another order: what was begun before is received first
            said = str(caught.value)
            assert first.tolist() == [1] * 10
    return said


def test_a_message_of_another_size_is_refused() -> None:
    assert run_ranks(2, misuse, free_port()) == ["", "expected a message of 40 bytes, received 20"]


def send_and_exit(rank: int, port: int) -> list[float]:
    """What rank 1 receives, of which it takes nothing before rank 0 has exited."""
    join(rank, 2, port)
    open_queues((0, 1), 20, torch.empty(0), slots=3)
    received = torch.zeros(3, 5)
    for number in range(3):
        if rank == 0:
            dist.send(torch.full((5,), float(number)), 1)
        else:
            time.sleep(0.5 * (number == 0))
            dist.recv(received[number], 0)
    return received[:, 4].tolist()


def test_what_was_sent_arrives_though_its_sender_has_exited() -> None:
    assert run_ranks(2, send_and_exit, free_port())[1] == [0, 1, 2]


def overfill(rank: int, port: int) -> list[float]:
    """Each rank fills a queue that was made again, for larger messages or more of them, before the other takes any."""
    elements = (1 << 20) - 16  # with its header, a message fills whole pages; over gloo, a send would wait
    asked = (20, 4), (4 * elements, 1)
    with process_group(rank, 2, port, 10):
        for link, in_order in (((0, 1), asked), ((1, 0), asked[::-1])):
            for size_bytes, slots in in_order:
                open_queues(link, size_bytes, torch.empty(0), slots=slots)
        received = torch.zeros(4, elements)
        for number in range(4):
            dist.send(torch.full((elements,), float(number)), 1 - rank)
        for link in ((0, 1), (1, 0)):  # which keep their messages
            open_queues(link, 4 * elements, torch.empty(0), slots=4)
        for each in received:
            dist.recv(each, 1 - rank)
    return received[:, -1].tolist()


def test_a_queue_that_is_made_again_keeps_the_room_that_it_had() -> None:
    assert run_ranks(2, overfill, free_port()) == [[0, 1, 2, 3]] * 2


def pass_along(rank: int, port: int) -> list[list[int]]:
    """Messages from each of three ranks to the next and back; the elements of those that this rank sends by queue."""
    by_queue: list[int] = []
    send = Queues.send

    def counted(queues: Queues, tensor: Tensor, to: int, tag: int) -> Carried | None:
        if (carried := send(queues, tensor, to, tag)) is not None:
            by_queue.append(tensor.numel())
        return carried

    def there_and_back(elements: int) -> None:
        received = torch.zeros(elements)
        if rank:
            dist.recv(received, rank - 1)
        if rank < 2:
            dist.send(torch.full_like(received, rank + 1.0), rank + 1)
            dist.recv(received, rank + 1)
        if rank:
            dist.send(torch.full_like(received, rank - 1.0), rank - 1)
        assert received.unique().tolist() == [rank]

    used, sizes = [], (1, PAGE, PAGE + 1, 20_000, 30_000, 7)
    with process_group(rank, 3, port) as context, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Queues, "send", counted)
        there, back = (0, 1, 2), (2, 1, 0)
        for rows, most in (([(0, 1, 2, 0, 1, 2)], 1000), ([there, back], 5), ([there, back], 20_000)):
            for row in rows:
                open_queues(row, 4 * most, torch.empty(0))
            by_queue.clear()
            for elements in sizes:
                there_and_back(elements)
            used.append(sorted(by_queue))
        assert context.ledger.sent_bytes["send"] == 3 * [1, 2, 1][rank] * 4 * sum(sizes)
    return used


def test_open_queues_carry_the_messages_that_they_have_room_for() -> None:
    one_way, all_but_one = [1, 7, PAGE], [1, 7, PAGE, PAGE + 1, 20_000]
    one_page = one_way
    first, middle, last = run_ranks(3, pass_along, free_port())
    # The first row has a link from rank 2 to rank 0, which is not used, and none back; the second makes these alone.
    assert first == [one_way, one_way, all_but_one]
    assert middle == [one_way, sorted([*one_way, *one_page]), sorted(2 * all_but_one)]
    assert last == [[], one_page, all_but_one]


def do_without(
    rank: int, port: int, who: int, call: str, error: int, transport: TransportName
) -> tuple[list[str], str]:
    """What was remarked, and an error, when a rank is refused memory and the other one is not."""
    remarks: list[str] = []
    options = Options(transport=transport, remark=remarks.append)
    with process_group(rank, 2, port, options=options) as context, pytest.MonkeyPatch.context() as monkeypatch:
        opened = pipes_and_memory()
        monkeypatch.setattr(os, call, refuse(error) if rank == who else getattr(os, call))
        try:
            open_queues((0, 1), 400_000, torch.empty(0), slots=2)
        except InputError as refusal:
            return remarks, str(refusal)
        monkeypatch.undo()
        open_queues((0, 1), 400_000, torch.empty(0), slots=2)  # as ring attention does in each pass: not tried again
        assert mappings() == 0
        assert pipes_and_memory() == opened, "nothing stays open"
        assert not context.shares_memory
        tensor = torch.full((100_000,), float(rank))
        (dist.recv if rank else dist.send)(tensor, 1 - rank)
        assert tensor[-1] == 0
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


def where_there_are_queues(rank: int, port: int, transport: TransportName) -> list[int]:
    """By link, how many queues this rank has to or from the next rank, of three on two hosts."""
    options = Options(transport=transport, places=[Place("a"), Place("a"), Place("b")])
    with process_group(rank, 3, port, options=options):
        found, closed = [], mappings()
        for pair in ((0, 1), (1, 2), (2, 0)):
            before = mappings()
            open_queues(pair, 400, torch.empty(0), slots=2)
            found.append(mappings() - before)
        open_queues((0, 1, 2), 400, torch.empty(0), slots=2)
        assert mappings() - closed == sum(found), "of a row, each link that has one keeps it"
        close_queues((0, 1, 2))
        assert mappings() == closed, "their memory is freed"
        return found


def test_only_ranks_of_one_host_have_queues() -> None:
    assert run_ranks(3, where_there_are_queues, free_port(), "auto") == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert run_ranks(3, where_there_are_queues, free_port(), "gloo") == [[0, 0, 0]] * 3
