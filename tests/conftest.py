"""One thread for the tests' own process: forked ranks (see processes.py) must not inherit a thread pool."""

import os
import threading
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from chapters import OneProcess, train_alone

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """What a test leaves behind inside of torch ends before the next one forks, or pytest itself ends."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(15)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """The run that every topology has to equal, by the size of its batch."""
    return train_alone(tmp_path_factory.mktemp("one"))
