"""Ranks that hang for real, and what they find out about it from each other's notices."""

import os
import threading
import time
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, join, meeting_of, run_ranks, wait_for

from distlab.comm.context import Options, TransportName, context_of
from distlab.comm.group import empty, shares
from distlab.comm.waits import TrafficError, Wait
from distlab.rendezvous import notices
from distlab.rendezvous.diagnosis import Notice
from distlab.rendezvous.groups import world_group
from distlab.rendezvous.store import SharedStore, StoreError


def wait_in_another_order(rank: int, port: int, transport: TransportName) -> tuple[bool, str]:
    """Rank 0 waits for an all-reduce before it sends; rank 1 receives before it waits for the all-reduce."""
    join(rank, 2, port, timeout_seconds=2, options=Options(transport=transport))
    world = world_group()
    assert world is not None
    assert world.notices is not None
    buffer, message = empty(1000, torch.empty(0)), torch.zeros(5)
    is_shared = shares(buffer)
    begun: Any = dist.all_reduce(buffer, async_op=True)
    try:
        if rank == 1:
            dist.recv(message, 0)
        begun.wait()
        if rank == 0:
            dist.send(message, 1)
    except TrafficError as error:
        found = world.notices.explain(error)
        world.notices.keep_store_open()
        return is_shared, found.sentence if found else ""
    dist.barrier()
    return is_shared, ""


def test_a_deadlock_is_named_that_only_shared_memory_has() -> None:
    """There an all-reduce goes on only while all ranks wait for it."""
    named = "deadlock: rank 0 waits for rank 1, which waits for rank 0"
    assert run_ranks(2, wait_in_another_order, free_port(), "shared") == [(True, named)] * 2
    assert run_ranks(2, wait_in_another_order, free_port(), "gloo") == [(False, "")] * 2


def wait_when_the_launcher_has_exited(rank: int, port: int, meeting: Barrier) -> str:
    """What rank 1 finds out about rank 0, which is silent; the third process is their launcher, with the store."""
    if rank == 2:
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        meeting.wait(20)
        del store
        for _ in range(2):
            meeting.wait(20)
        return ""
    os.environ |= {"TORCHELASTIC_RUN_ID": "here", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    context, found = join(rank, 2, port), None
    world = world_group()
    assert world is not None
    dist.barrier()
    for _ in range(2):
        meeting.wait(20)
    if rank == 1:
        context.waits.timeout_seconds = 0.5
        with pytest.raises(TrafficError) as caught:
            dist.recv(torch.empty(1), 0)
        found = world.notices.explain(caught.value)
    meeting.wait(20)
    return found.sentence if found else ""


def test_rank_0_is_not_taken_for_the_launcher_that_held_the_store() -> None:
    _, sentence, _ = run_ranks(3, wait_when_the_launcher_has_exited, free_port(), meeting_of(3))
    assert sentence == "rank 0 does not answer, nor does the store that the ranks share"


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def board_of_rank_1(
    store: dist.Store, is_rank_0s: bool = True, device: str = "cpu", rank: int = 1, ranks: int = 2, own: Any = ()
) -> notices.NoticeBoard:
    """A board whose rank waits for the last of `own`, if there is any."""
    waits = SimpleNamespace(
        waits_for=lambda _: [None, *own][-1], timeout_seconds=5, timeout_name="init_process_group's timeout"
    )
    context = SimpleNamespace(
        rank=rank, world_size=ranks, describe="rank {}".format, waits=waits, begun={}, held_back=dict
    )
    context.device = torch.device(device)
    return notices.NoticeBoard(store, context, is_rank_0s)  # type: ignore[arg-type]


def test_it_asks_for_waits_of_the_stream_on_the_ranks_own_gpu(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda own: given.append((own, threading.current_thread().name)))
    board_of_rank_1(store, device="cuda:1").close()
    [(device, thread)] = given
    assert device == torch.device("cuda", 1)
    assert thread != threading.current_thread().name


def lost_wait() -> TrafficError:
    return TrafficError("", RuntimeError("Connection closed by peer"), Wait("the tensor", "receive", (0,)))


def test_a_failure_counts_more_than_the_answer_of_the_same_rank(store: dist.Store) -> None:
    own, wait = dist.PrefixStore("notices", store), Wait("the loss", "send", (1,))
    own.set("answers/0", Notice(0, None).to_json())
    own.set("failed/0", Notice(0, wait, failure_number=1).to_json())
    board, started = board_of_rank_1(store), time.monotonic()
    found = board.explain(lost_wait())
    own.set("ended/0", "no room")
    last = board.explain(TrafficError("", TimeoutError(), Wait("the tensor", "receive", (0,))))
    assert found is not None
    board.publish_diagnosis(replace(found, is_partial=False))
    board.publish_diagnosis(replace(found, sentence="rank 0 does not answer", is_partial=True))
    assert board.may_draw()  # the store does not acknowledge what is set, but has read it before it answers this
    assert own.get("diagnosis").decode() == found.sentence, "others see by themselves what is partial"
    board.close()
    assert "  rank 0  waits to send the loss  -> rank 1" in found.picture
    assert time.monotonic() - started < notices.SECONDS_FOR_OTHERS
    assert last is not None
    assert last.sentence == "rank 0 failed: no room", "and its exit more than both"


def test_a_board_that_is_asked_answers_again_when_its_rank_waits_and_closes_at_once(store: dist.Store) -> None:
    own = dist.PrefixStore("notices", store)
    own.set("asked", "")
    waits: list[Wait] = []
    board = board_of_rank_1(store, own=waits)
    assert wait_for(lambda: own.check(["answers/1"]))
    waits.append(Wait("the loss", "send", (0,)))
    assert wait_for(lambda: Notice.from_json(own.get("answers/1").decode()).wait == waits[0])
    started = time.monotonic()
    board.close()
    assert time.monotonic() - started < notices.SECONDS_FOR_THE_STORE


def test_a_wait_that_is_for_no_other_rank_is_not_explained(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    board = board_of_rank_1(store)
    assert board.explain(TrafficError("", TimeoutError())) is None
    board.close()

    def lose(*_: object) -> int:
        raise StoreError("lost", TimeoutError())

    monkeypatch.setattr(SharedStore, "add", lose)
    board = board_of_rank_1(store, is_rank_0s=False)
    assert board.explain(TrafficError("", TimeoutError(), Wait("new_group", "other", ()))) is None
    board.close()


@pytest.mark.parametrize(
    ("error", "ranks", "reads"),
    [
        (RuntimeError("Connection closed by peer"), 2, False),
        (RuntimeError("Connection closed by peer"), 3, True),  # one of the two others may only be slow
        (TimeoutError(), 2, True),
    ],
)
def test_rank_0_keeps_the_store_open_for_a_slow_rank_and_not_for_a_dead_one(
    error: Exception, ranks: int, reads: bool, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "SECONDS_FOR_OTHERS", 0.1)
    monkeypatch.setattr(notices, "SECONDS_FOR_READERS", 0.5)
    board = board_of_rank_1(store, rank=0, ranks=ranks)
    found = board.explain(TrafficError("", error, Wait("the sum", "collective", tuple(range(1, ranks)))))
    assert found is not None
    assert found.sentence.endswith("computing for longer than init_process_group's timeout 5") == isinstance(
        error, TimeoutError
    )
    started = time.monotonic()
    board.keep_store_open()
    assert (time.monotonic() - started > notices.SECONDS_FOR_READERS) == reads
    board.close()


@pytest.mark.parametrize(
    ("told", "error", "sentence"),
    [
        ({}, dist.DistError("Connection reset by peer"), "rank 0 has exited: see its last line"),
        ({}, TimeoutError(), "rank 0 does not answer: it is stopped, or its machine or network is down"),
        ({"diagnosis": "rank 3 is slow", "asked": ""}, TimeoutError(), "rank 3 is slow"),  # as this one has heard
        ({"ended/0": "nan", "asked": ""}, TimeoutError(), "rank 0 failed: nan"),
    ],
)
def test_a_rank_0_that_took_the_store_with_it_is_told_from_one_that_is_silent(
    told: dict[str, str], error: Exception, sentence: str, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dist.PrefixStore("notices", store)
    for key, value in told.items():
        own.set(key, value)
    board = board_of_rank_1(store)
    assert wait_for(lambda: not told or own.check(["informed/1"]))

    def lose(*_: object) -> int:
        raise StoreError("lost", error)

    monkeypatch.setattr(SharedStore, "add", lose)
    found = board.explain(lost_wait())
    board.close()
    assert found is not None
    assert found.sentence == sentence


def test_a_run_ends_though_the_process_that_holds_the_store_is_stopped(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, goes_on = threading.Event(), threading.Event()

    def ask_a_stopped_process(*_: object) -> bool:
        is_asked.set()
        return goes_on.wait(20)

    monkeypatch.setattr(notices, "SECONDS_FOR_THE_STORE", 0.1)
    monkeypatch.setattr(SharedStore, "has", ask_a_stopped_process)
    board, started = notices.NoticeBoard(store, context_of(), is_rank_0s=True), time.monotonic()
    assert is_asked.wait(20)
    board.close()
    assert time.monotonic() - started < 10
    goes_on.set()
