"""Signals in pipes: counted, with a deadline, and with the end of a rank noticed."""

import errno
import gc
import os
import select
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.held import pipes_and_memory
from support.processes import free_port, process_group, run_ranks
from torch.distributed import ReduceOp

from distlab.comm.context import Options
from distlab.comm.group import empty, shares
from distlab.comm.transports.memory import Turns
from distlab.comm.transports.signals import SECONDS_MORE, Channel, make_pipes, open_channel, wait_for_all
from distlab.comm.waits import is_lost_peer, is_timeout

pytestmark = pytest.mark.quick


def soon() -> float:
    return time.perf_counter() + 0.1


def both_ends() -> tuple[Channel, Channel]:
    [first], far_ends = make_pipes(1)
    other = open_channel(os.getpid(), *far_ends)
    for end in far_ends:
        os.close(end)
    return first, other


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel in one process."""
    gc.collect()  # what other tests have left would close its descriptors at any time
    before = open_descriptors()
    first, other = both_ends()
    yield first, other
    first.close()
    other.close()
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_signals_are_counted(ends: tuple[Channel, Channel]) -> None:
    first, other = ends
    for _ in range(3):
        first.send()
    other.wait(1, soon())
    other.wait(3, soon())
    with pytest.raises(RuntimeError) as caught:
        other.wait(4, soon())
    assert is_timeout(caught.value)
    other.send()
    first.wait(1, soon())


class Polls:
    """`select.poll`: when it was asked, after how much computing, with which timeout in milliseconds."""

    def __init__(self) -> None:
        self._poll, self.asked = select.poll(), list[tuple[float, float, float]]()
        self.register, self.unregister = self._poll.register, self._poll.unregister

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.asked.append((time.perf_counter(), time.thread_time(), timeout))
        return self._poll.poll(timeout)


@pytest.mark.parametrize("spin_seconds", [0.0, 0.1, 5.0])
def test_a_wait_keeps_its_core_for_so_long_then_sleeps_and_ends_at_its_deadline(
    ends: tuple[Channel, Channel], spin_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = Polls()
    monkeypatch.setattr("distlab.comm.transports.signals.select.poll", lambda: polls)
    started, computed = time.perf_counter(), time.thread_time()
    with pytest.raises(RuntimeError) as caught:
        wait_for_all(ends[:1], 1, started + 0.3, spin_seconds)
    assert is_timeout(caught.value)
    assert time.perf_counter() - started >= 0.3
    *spinning, (slept_at, _, timeout) = polls.asked
    assert slept_at - started >= min(spin_seconds, 0.3)
    assert timeout >= 1
    assert [timeout for *_, timeout in spinning] == [0] * len(spinning)
    assert bool(spinning) == bool(spin_seconds)
    assert all(computed_by - computed < spin_seconds + 0.1 for _, computed_by, _ in spinning)


def wait_beside_others(rank: int, port: int, cores: int, threads: int) -> float:
    """Seconds of computing time that a rank spends on a wait of half a second, with so many cores and usual threads."""
    options = Options(threads=threads)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("distlab.comm.context.cores", lambda: cores)
        monkeypatch.setattr("distlab.comm.transports.memory.SPIN_SECONDS", 0.4)
        with process_group(rank, 2, port, options=options):
            buffer = empty(1000, torch.empty(0))
            begun = dist.all_reduce(buffer, async_op=True)
            if rank == 1:
                time.sleep(0.5)
            before = time.thread_time()
            begun.wait()
            return time.thread_time() - before


@pytest.mark.parametrize(("cores", "threads", "spins"), [(2, 1, True), (1, 1, False), (4, 2, True), (3, 2, False)])
def test_ranks_that_share_cores_do_not_spin(cores: int, threads: int, spins: bool) -> None:
    seconds, _ = run_ranks(2, wait_beside_others, free_port(), cores, threads)
    assert (seconds > 0.02) == spins, seconds  # one that does not takes 0.001


def test_a_signal_arrives_though_its_rank_has_ended_since_and_then_its_end_is_noticed() -> None:
    first, other = both_ends()
    other.send()
    other.close()
    first.wait(1, soon())
    for call in (lambda: first.wait(2, time.perf_counter() + 60), first.send):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert is_lost_peer(caught.value)
    first.close()


@pytest.mark.parametrize("answers", [True, False])
def test_the_first_rank_waits_longer_than_those_that_wait_for_it(ends: tuple[Channel, Channel], answers: bool) -> None:
    """They reach the deadline before it exits, and so do not report its exit."""
    turns, started = Turns(ends[:1], answers, spin_seconds=0.0), time.perf_counter()
    turns.begin()
    with pytest.raises(RuntimeError) as caught:
        turns.wait(started + 0.1)
    assert is_timeout(caught.value)
    assert (time.perf_counter() - started >= 0.1 + SECONDS_MORE) == answers


@pytest.mark.parametrize("made", range(6))
def test_no_pipe_is_left_if_one_cannot_be_made(made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, pipe, calls = open_descriptors(), os.pipe, iter(range(6))

    def refuse() -> tuple[int, int]:
        if next(calls) == made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pipe()

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            make_pipes(3)
    assert open_descriptors() == before


def refuse_a_pipe(rank: int, port: int, on_rank_0: bool) -> tuple[float, int]:
    """An average without shared memory, and how many descriptors it left open."""
    options = Options(remark=lambda _: None)
    with process_group(rank, 3, port, options=options), pytest.MonkeyPatch.context() as monkeypatch:
        open_file = os.open

        def refuse(*args: object) -> int:
            if (args and not str(args[0]).startswith("/proc")) or (len(args) > 1 and int(str(args[1])) & os.O_RDWR):
                return open_file(*args)  # type: ignore[arg-type]
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        if on_rank_0 and rank == 0:
            monkeypatch.setattr(os, "pipe", refuse)
        elif not on_rank_0 and rank == 2:
            monkeypatch.setattr(os, "open", refuse)
        before = pipes_and_memory()
        buffer = empty(1000, torch.empty(0))
        left = pipes_and_memory() - before
        assert not shares(buffer)
        buffer[:] = rank
        dist.all_reduce(buffer, ReduceOp.AVG)
        return buffer[-1].item(), left


@pytest.mark.parametrize("on_rank_0", [True, False])
def test_without_pipes_ranks_use_gloo_and_leave_nothing_open(on_rank_0: bool) -> None:
    assert run_ranks(3, refuse_a_pipe, free_port(), on_rank_0) == [(1.0, 0)] * 3
