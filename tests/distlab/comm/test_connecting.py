"""Ranks that leave, while gloo connects them or later: what is left of it ends at once, and not at the timeout."""

import gc
import os
import threading
import time
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.held import threads
from support.processes import free_port, join, leave_group, meeting_of, run_ranks, wait_for

from distlab.comm import pending
from distlab.comm.context import Options
from distlab.comm.gloo import connect, drop
from distlab.comm.waits import TrafficError
from distlab.machine.sockets import shut_down

ROUNDS = 4  # which of two ranks waits for the other one's connection is chance
SECONDS_OF_A_WAIT = 2.0  # at most
SECONDS_UNTIL_NEWS, SECONDS_TO_END = 0.2, 5.0  # the latter for gloo's threads, on busy cores; the timeout is longer


def held() -> tuple[int, int]:
    """This process's descriptors and threads."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threads()


def leave_while_connecting(rank: int, port: int) -> None:
    """There are news while rank 0 waits for the others, and it leaves; only then do these come. Rank 3 is the store."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    leave_group()
    of_all = dist.TCPStore("localhost", port, is_master=rank == 3)
    if rank == 3:
        return of_all.wait([f"has ended/{other}" for other in range(3)])
    for number in range(ROUNDS):
        store, before = dist.PrefixStore(f"round {number}", of_all), held()

        def check(store: dist.Store = store) -> None:
            if store.check(["news"]):
                raise InterruptedError

        if rank == 2:
            time.sleep(SECONDS_UNTIL_NEWS)
            store.set("news", "")
        if rank > 0:
            store.wait(["left/0"])
        with pytest.raises(InterruptedError):
            connect(store, rank, 3, timedelta(seconds=60), check)
        store.set(f"left/{rank}", "")
        assert wait_for(lambda before=before: held() == before, SECONDS_TO_END)  # type: ignore[misc]
        store.wait([f"left/{other}" for other in range(3)])
    of_all.set(f"has ended/{rank}", "")
    return None


def leave_when_connected(rank: int, port: int) -> None:
    """Rank 1 hears the news when gloo has connected the two, and rank 0 a little later."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    leave_group()
    store = dist.TCPStore("localhost", port, is_master=rank == 0)

    def check() -> None:
        if store.check(["news"]):
            raise InterruptedError

    class Group(dist.ProcessGroupGloo):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            store.set(f"connected/{rank}", "")
            store.wait(["connected/0", "connected/1"])
            if rank == 1:
                raise InterruptedError

    dist.ProcessGroupGloo = Group  # type: ignore[assignment, misc]
    with pytest.raises(InterruptedError):
        connect(store, rank, 2, timedelta(seconds=60), check)
    if rank == 1:
        time.sleep(SECONDS_UNTIL_NEWS)
        store.set("news", "")


def test_no_rank_uses_a_group_that_another_one_has_left_while_it_was_made() -> None:
    run_ranks(2, leave_when_connected, free_port())


def leave_in_use(rank: int, port: int, meeting: Barrier) -> None:
    """Rank 1 abandons its groups, and stays; rank 0 waits for it."""
    context = join(rank, 2, port, 20, Options(transport="gloo", check=lambda: None))
    dist.barrier()
    if rank == 1:
        context.abandon()
    else:
        with pytest.raises(TrafficError) as caught:
            dist.recv(torch.empty(1), 1)
        assert caught.value.lost_a_peer
    meeting.wait(30)


def test_a_rank_that_abandons_its_groups_is_not_waited_for() -> None:
    run_ranks(2, leave_in_use, free_port(), meeting_of(2))


def seconds_of_last_sum(group: Any) -> float:
    """Add up numbers over the ranks, again and again, until that fails."""
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=SECONDS_OF_A_WAIT)
    while True:
        started = time.monotonic()
        try:
            group.allreduce([torch.zeros(3)], options).wait()
        except RuntimeError:
            return time.monotonic() - started


def shut_down_in_use(rank: int, port: int) -> None:
    """While two ranks add up numbers, one all-reduce after the other, rank 0 shuts down its connections."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    leave_group()
    of_both = dist.TCPStore("localhost", port, is_master=rank == 0)
    for number in range(12):
        store = dist.PrefixStore(f"round {number}", of_both)
        group, sockets = connect(store, rank, 2, timedelta(seconds=60), check=lambda: None)
        timer = threading.Timer(0.02 + 0.001 * number, shut_down, [sockets] if rank == 0 else [()])
        timer.start()
        seconds = seconds_of_last_sum(group)
        assert rank == 1 or seconds < SECONDS_OF_A_WAIT / 2  # rank 1 may notice nothing, as if rank 0 had been killed
        timer.join()
    of_both.set(f"has ended/{rank}", "")
    of_both.wait(["has ended/0", "has ended/1"])


def test_whoever_shuts_its_connections_down_does_not_wait_for_the_message_that_it_is_sending() -> None:
    run_ranks(2, shut_down_in_use, free_port())


def wait_until_there_are_news(rank: int, port: int, meeting: Barrier) -> None:
    """Rank 1 neither sends what rank 0 waits for nor leaves."""
    news = threading.Event()

    def check() -> None:
        if news.is_set():
            raise InterruptedError

    join(rank, 2, port, 60, Options(transport="gloo", check=check))
    if rank == 0:
        threading.Timer(SECONDS_UNTIL_NEWS, news.set).start()
        started = time.monotonic()
        with pytest.raises(InterruptedError):
            dist.recv(torch.empty(1), 1)
        assert time.monotonic() - started < SECONDS_TO_END
    meeting.wait(30)


def test_a_wait_over_gloo_ends_when_there_are_news() -> None:
    run_ranks(2, wait_until_there_are_news, free_port(), meeting_of(2))


def wait_for_what_has_arrived(rank: int, port: int) -> None:
    there_are_news = False

    def check() -> None:
        if there_are_news:
            raise InterruptedError

    pending.SECONDS_BETWEEN_CHECKS = 0.0
    join(rank, 2, port, 60, Options(transport="gloo", check=check))
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(20)]
    assert wait_for(lambda: all(work.is_completed() for work in works))
    there_are_news = True
    for work in works:
        work.wait()


def test_a_result_that_has_arrived_can_be_used_though_there_are_news() -> None:
    run_ranks(2, wait_for_what_has_arrived, free_port())


class Destroyed:
    """A group whose destructor waits for an event."""

    def __init__(self, may_end: threading.Event) -> None:
        self.may_end, self.has_ended = may_end, threading.Event()

    def held(self) -> list[object]:
        """Return a list with the only reference to an object with this destructor."""

        class Group:
            def __del__(self, destroyed: Destroyed = self) -> None:
                destroyed.may_end.wait()
                destroyed.has_ended.set()

        return [Group()]


@pytest.mark.quick
def test_a_group_whose_destructor_waits_keeps_nobody_waiting() -> None:
    may_end = threading.Event()
    lasting, others = Destroyed(may_end), [Destroyed(threading.Event()) for _ in range(2)]
    for other in others:
        other.may_end.set()
    drop([*others[0].held(), *lasting.held(), *others[1].held()], seconds=0.2)
    assert not lasting.has_ended.is_set()
    assert all(other.has_ended.is_set() for other in others)
    may_end.set()
    assert lasting.has_ended.wait(SECONDS_TO_END)


@pytest.mark.quick
def test_whoever_drops_a_group_waits_while_its_operations_end() -> None:
    """They may still write into tensors that are used again."""
    may_end = threading.Event()
    destroyed = Destroyed(may_end)
    threading.Timer(0.1, may_end.set).start()
    drop(destroyed.held(), seconds=SECONDS_TO_END)
    assert destroyed.has_ended.is_set()


def test_nothing_is_left_of_ranks_that_leave_while_others_connect() -> None:
    run_ranks(4, leave_while_connecting, free_port())
