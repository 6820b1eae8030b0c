"""Waits of a GPU's stream: timed by its events, named, and bounded; with a stand-in for CUDA's events."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from support.processes import wait_for

from distlab.comm.context import Context, Options
from distlab.comm.late import LateNumber
from distlab.comm.pending import Pending
from distlab.comm.recorder import COMPUTE, STEP, WAIT, Ledger, Recorder
from distlab.comm.waits import StreamWait, StreamWaits, TrafficError, Wait, Waits
from distlab.machine.streams import side_stream

GRADIENTS = Wait("the gradients", "collective", (1,))


def waits_of_rank_0() -> Waits:
    return Waits(0, 2, Ledger(), "rank {}".format)


def context_over(library: str) -> Context:
    """That of rank 0 of two, with a recorder that records."""
    recorder = Recorder()
    recorder.enabled = True
    device = torch.device("cuda", 0)
    return Context(0, 2, Options(), library, ["here"] * 2, dist.HashStore(), device, recorder=recorder)


class Gpu:
    """A GPU whose stream has come as far as `seconds`; what is queued takes one second each."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.queued = 0
        self.synchronized = 0

    def event(self, enable_timing: bool = False) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record(self) -> None:
        self.at = self._gpu.queued
        self._gpu.queued += 1

    def query(self) -> bool:
        return self.at <= self._gpu.seconds

    def synchronize(self) -> None:
        self._gpu.synchronized += 1
        self._gpu.seconds = max(self._gpu.seconds, self.at)

    def elapsed_time(self, later: "Event") -> float:
        assert max(self.at, later.at) <= self._gpu.seconds
        return 1000.0 * (later.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return gpu


def stream_wait(gpu: Gpu, reached: int, done: int) -> StreamWait:
    """A wait that the stream reaches after so many seconds, and that ends after so many."""
    events = gpu.event(enable_timing=True), gpu.event(enable_timing=True)
    events[0].at, events[1].at = reached, done
    return StreamWait(GRADIENTS, *events)  # type: ignore[arg-type]


def test_a_wait_is_under_way_from_when_the_stream_reaches_it(gpu: Gpu) -> None:
    waits = StreamWaits()
    waits.add(stream_wait(gpu, reached=2, done=5))
    waits.add(stream_wait(gpu, reached=6, done=7))
    under_way, collected = [], []
    for gpu.seconds in range(8):
        now = waits.under_way()
        under_way.append(now is not None and now[0] is GRADIENTS)
        waits.collect(ledger := Ledger())
        collected.append((ledger.waited_seconds, ledger.collective_seconds))
    assert under_way == [False, False, True, True, True, False, True, False]
    assert collected == [(0, 0)] * 5 + [(3, 3), (0, 0), (1, 1)]


def test_the_events_of_a_wait_may_be_of_two_streams(gpu: Gpu) -> None:
    """The wait is counted when both have passed; where the second one comes first, the stream has not waited."""
    waits, ledger = StreamWaits(), Ledger()
    for reached, done in ((4, 3), (1, 3)):
        waits.add(stream_wait(gpu, reached, done))
    waited = []
    for gpu.seconds in (3, 4):
        waits.collect(ledger)
        waited.append(ledger.waited_seconds)
    assert waited == [0, 2]


def test_the_watch_ends_a_wait_at_its_deadline_and_names_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, failures, given = waits_of_rank_0(), list[TrafficError](), list[tuple[object, threading.Thread]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: given.append((device, threading.current_thread())))
    waits.timeout_seconds = 0.2
    waits.of_stream.add(stream_wait(gpu, reached=1, done=3))
    waits.watch(failures.append, torch.device("cuda", 1))
    time.sleep(0.5)
    assert failures == []  # what is queued before it takes long
    gpu.seconds, started = 1, time.perf_counter()
    assert wait_for(lambda: bool(failures))
    assert time.perf_counter() - started >= 0.2
    sentence = r"rank 0 waited \d+\.\d s for the gradients from rank 1: no answer \(--timeout sets how long to wait\)"
    assert re.fullmatch(sentence, str(failures[0]))
    assert failures[0].wait == GRADIENTS
    [(device, thread)] = given
    assert device == torch.device("cuda", 1), "questions of another thread about events would go to the first GPU"
    assert thread is not threading.current_thread()


@pytest.fixture
def copies_on_the_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks at the end that a number's copy waited for the main stream, and ran on a side stream.

    It is the one stream of its kind, of another priority than NCCL's.
    """
    given: list[object] = []

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        given.append(stream)
        yield

    main, side, made = object(), SimpleNamespace(wait_stream=given.append), list[int]()

    def new_stream(_: object, priority: int) -> object:
        made.append(priority)
        return side

    side_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr("distlab.machine.streams.copied_to_host", torch.Tensor.clone)
    yield
    assert given == [main, side] * max(1, len(given) // 2)
    assert made == [-1]
    side_stream.cache_clear()


@pytest.mark.usefixtures("gpu", "copies_on_the_side")
def test_a_rank_alone_reads_a_number_that_it_has_left_without_a_wait_for_later_work() -> None:
    number = torch.tensor(6.0)
    late = LateNumber(number.as_subclass(OnGPU), dist.all_reduce(number, async_op=True))
    late.leave()
    number += 1  # the next step has another
    following = LateNumber(number.as_subclass(OnGPU), None)
    following.leave()
    assert late.read() == 6
    assert following.read() == 7


class WorkOfAnotherBackend(dist.Work):
    """An all-reduce that brings 6 when it is waited for."""

    def __init__(self, number: torch.Tensor) -> None:
        super().__init__()
        self._number = number

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: object = None) -> bool:
        self._number.fill_(6)
        return True


@pytest.mark.usefixtures("gpu", "copies_on_the_side")
def test_a_number_of_another_backend_is_copied_when_it_is_there() -> None:
    number = torch.tensor(2.0).as_subclass(OnGPU)
    late = LateNumber(number, WorkOfAnotherBackend(number))
    late.leave()
    assert late.read() == 6


@pytest.mark.usefixtures("copies_on_the_side")
def test_a_number_that_is_left_is_read_without_a_wait_for_later_work(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch names a wait for the number that does not end."""
    context = context_over("nccl")
    number, pending = torch.tensor(6.0).as_subclass(OnGPU), begin(context)[0]
    context.waits.timeout_seconds, failures = 0.2, list[TrafficError]()
    context.waits.watch(failures.append, torch.device("cpu"))
    late = LateNumber(number, pending)
    late.leave()
    assert pending.was_waited_for()
    assert not late.has_arrived()
    gpu.queued += 100  # the next step
    assert failures == []

    def hang(event: Event) -> None:
        assert wait_for(lambda: bool(failures))
        gpu.seconds = event.at

    monkeypatch.setattr(Event, "synchronize", hang)
    assert late.read() == 6
    assert "s for the gradients from rank 1: no answer" in str(failures[0])
    assert late.has_arrived()
    assert gpu.seconds < 10
    assert context.waits.waited_so_far() == 0


def test_the_watch_ends_a_wait_of_the_thread_inside_of_nccl() -> None:
    waits, failures = waits_of_rank_0(), list[TrafficError]()
    waits.timeout_seconds = 0.2
    waits.watch(failures.append, torch.device("cpu"))
    with waits.during(Wait("its own disk", "other")):  # no other rank takes part in it
        time.sleep(0.5)
    assert failures == []
    closed, of_closed, wait = waits_of_rank_0(), list[TrafficError](), Wait("the checkpoint of step 3", "other", (1,))
    closed.timeout_seconds = 0.1
    closed.watch(of_closed.append, torch.device("cpu"))
    closed.close()
    with waits.during(wait), closed.during(wait):
        assert wait_for(lambda: bool(failures))
    assert of_closed == []
    assert "s for the checkpoint of step 3: no answer" in str(failures[0])


def test_nccl_gets_time_for_the_diagnosis_before_it_ends_the_process() -> None:
    over_gloo, over_nccl = context_over("gloo"), context_over("nccl")
    over_gloo.waits.timeout_seconds = over_nccl.waits.timeout_seconds = 3
    assert over_gloo.group_timeout.total_seconds() == 3
    assert over_nccl.group_timeout.total_seconds() > 30


def test_what_a_gpu_computes_is_recorded_when_it_computes_it(gpu: Gpu) -> None:
    recorder = context_over("nccl").recorder
    with recorder.span(STEP, "step 0"):  # the clock starts at event 0
        with recorder.span(COMPUTE, "F0"):  # between events 1 and 2
            pass
        with recorder.span(COMPUTE, "F1"):
            pass
    assert gpu.synchronized == 1  # for the clock alone: to record costs the run nothing
    first, second = (event for event in recorder.as_json()["events"] if event.kind == COMPUTE)
    assert (first.name, second.name) == ("F0", "F1")
    assert [first.seconds, second.seconds, second.start - first.end] == pytest.approx([1, 1, 1])


class Work(dist.Work):
    """What NCCL returns: a wait that takes no deadline and returns at once, or a future that is done when queued."""

    def wait(self, *timeout: object) -> bool:
        assert not timeout
        return True

    def get_future(self) -> "torch.futures.Future[object]":
        future: torch.futures.Future[object] = torch.futures.Future()
        future.set_result(None)
        return future


T = TypeVar("T")


class FutureOnHost(torch.futures.Future[T]):
    """A future that may be asked for devices that are not there."""

    def __init__(self, *, devices: object = None) -> None:
        super().__init__()


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def begin(context: Context) -> tuple[Pending, OnGPU]:
    tensor = torch.empty(3, device="meta").as_subclass(OnGPU)
    return Pending(context, GRADIENTS, Work(), [tensor]), tensor


@pytest.mark.parametrize("by_library", [False, True])
def test_a_wait_for_nccl_is_the_streams(by_library: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_over("nccl")
    monkeypatch.setattr("torch.futures.Future", FutureOnHost)
    pending, tensor = begin(context)
    gpu.queued += 4  # computed meanwhile
    if by_library:
        assert pending.get_future().wait()[0] is tensor
    else:
        pending.wait()
    assert context.waits.waited_so_far() == 0
    assert context.waits.waits_for() is (GRADIENTS if by_library else None)  # the stream has come to second 0
    gpu.seconds = gpu.queued
    assert context.waits.waited_so_far() == (5 if by_library else 1)
    assert context.waits.waits_for() is None


def test_waits_that_have_ended_are_counted_at_a_later_one(gpu: Gpu) -> None:
    """A program that trains by itself never asks for them; their events would be kept."""
    context = context_over("nccl")
    for _ in range(9):
        begin(context)[0].wait()
        gpu.seconds = gpu.queued
    assert context.ledger.waited_seconds == 8


def test_a_wait_of_the_stream_is_recorded(gpu: Gpu) -> None:
    context = context_over("nccl")
    with context.recorder.span(STEP, "step 0"):
        begin(context)[0].wait()
    events = {event.kind: event for event in context.recorder.as_json()["events"]}
    assert events[WAIT].name == "the gradients from rank 1"
    assert events[WAIT].seconds == pytest.approx(1)
    assert events["message"].seconds == pytest.approx(2)
