"""What all tests share: a process with one thread that forks cheaply, and the removal of what a test leaves behind."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distlab.pipeline.schedules import SCHEDULES
from distlab.reports.style import SETTINGS
from simplellm import mixed_precision
from support.chapters import OneProcess, train_alone
from support.huge_pages import gather_in_huge_pages
from support.processes import before_forks, leave_group, make_group_of_one, wait_for

torch.set_num_threads(1)
SETTINGS["savefig.dpi"] = 50  # figures are looked at for what they show; their pixels take most of the time
if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    for other in (torch.cuda, torch.xpu, torch.mtia):  # each would keep every seed, with a trace of the stack
        vars(other)["_is_in_bad_fork"] = lambda: True


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """What a test leaves behind inside of torch ends before the next one forks, or pytest itself ends."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if wait_for(lambda thread=thread: thread.ident is not None, 5):  # type: ignore[misc]  # it may be about to start
            thread.join(0.5 if thread.daemon else 5)  # some daemons never end, such as TensorBoard's


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bfloat16 have factors in it, as the plan of memory assumes, whatever is faster on this CPU."""
    monkeypatch.setattr(mixed_precision, "CPU_IS_FASTER_IN_BFLOAT16", True)


@pytest.fixture(scope="module", autouse=True)
def _forks_are_cheap() -> None:
    """Again for each file of tests: a huge page that is written while a fork lives is split."""
    before_forks()
    gather_in_huge_pages()


@pytest.fixture
def in_the_foreground() -> Iterator[None]:
    """What the test starts ignores no signals, even if the tests run under nohup or in the background."""
    usual: dict[int, Any] = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {sent: signal.signal(sent, handler) for sent, handler in usual.items()}
    yield
    for sent, handler in before.items():
        signal.signal(sent, handler)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """The run that every topology has to equal, by the size of its batch."""
    return train_alone(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session", autouse=True)
def _group_of_one() -> Iterator[None]:
    """The tests' own process is a rank without others; ranks that it forks make groups of their own."""
    make_group_of_one()
    yield
    leave_group()


@pytest.fixture(autouse=True)
def _schedules_as_they_were() -> Iterator[None]:
    """A schedule that a test registers is not there for the next one."""
    before = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(before)
