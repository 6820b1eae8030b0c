"""Calls that may not return: left behind, or ended by what is found meanwhile."""

import threading
import time

import pytest

from distlab.machine.time_limits import within


def test_a_call_that_does_not_return_is_left_behind() -> None:
    began, released = time.monotonic(), threading.Event()
    try:
        assert not within(0.2, lambda: released.wait(30)).done()
        assert time.monotonic() - began < 5
    finally:
        released.set()


def test_what_is_found_meanwhile_ends_the_wait() -> None:
    began, released = time.monotonic(), threading.Event()

    def look() -> None:
        raise ConnectionRefusedError

    try:
        with pytest.raises(ConnectionRefusedError):
            within(30, lambda: released.wait(30), meanwhile=look)
        assert time.monotonic() - began < 10
    finally:
        released.set()


def test_a_call_in_time_gives_its_answer_or_its_error() -> None:
    assert within(5, lambda: "answer").result() == "answer"
    with pytest.raises(KeyError):
        within(5, lambda: dict[str, int]()["missing"]).result()
