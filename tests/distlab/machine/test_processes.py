"""Processes whose threads sit in calls into torch: not waited for, and no reason to abort at the end."""

import subprocess
import sys
import threading
import time

import pytest

from distlab.machine.supervision import within

# Threads that are always about to come back from torch. With `sys.exit`, ten of twelve such processes aborted: so
# there are three of them, forked after the imports.
ASKS_WITHOUT_END = """
import os, threading
import torch.distributed as dist
from distlab.machine.processes import leave

for _ in range(3):
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    leave(0)

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def ask() -> None:
    while True:
        store.check(["a key"])

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
print("goodbye")
leave(3)
"""


def test_a_process_leaves_while_threads_are_inside_of_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", ASKS_WITHOUT_END], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "goodbye\n3\n" * 3, "")


def test_a_call_that_does_not_return_is_left_behind() -> None:
    began, released = time.monotonic(), threading.Event()
    try:
        assert within(0.2, lambda: released.wait(30)) is None
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
    assert within(5, lambda: "answer") == "answer"
    with pytest.raises(KeyError):
        within(5, lambda: dict[str, int]()["missing"])
