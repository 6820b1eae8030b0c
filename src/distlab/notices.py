"""Where ranks leave word of what they wait for, so that a run that stands still can be explained.

The place is the store where the ranks met: in torchrun's agent, or in rank 0's process. A rank writes there when it has
waited for a second, when a wait has failed, and when it ends by an error of its own; short waits cost nothing.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from distlab.diagnosis import Diagnosis, Notice, Wait, diagnose
from distlab.traffic import Traffic, TrafficError

LONG_SECONDS = 1.0  # from when on a wait is worth a notice
SECONDS_FOR_OTHERS = 2.0  # to leave word, when a wait of this rank has failed: longer than `LONG_SECONDS`
SECONDS_FOR_THE_STORE = 2.0  # to answer: it may be in a process that is stopped
SECONDS_FOR_READERS = 3.0  # that rank 0, with whose process the store ends, stays for them

ResultT = TypeVar("ResultT")


class NoticeBoard:
    """One rank's way to the notices of all."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._has_failed = False

    def open(self, store: dist.Store, rank: int, world_size: int, traffic: Traffic, is_rank_0s: bool) -> None:
        """Begin to watch this rank's waits.

        Args:
            store: where the ranks met.
            rank: of this process.
            world_size: number of ranks.
            traffic: whose waits are watched.
            is_rank_0s: the store ends with rank 0's process.
        """
        self._store, self._rank, self._world_size, self._traffic = store, rank, world_size, traffic
        self._is_rank_0s = is_rank_0s
        threading.Thread(target=self._watch, daemon=True).start()

    def leave_word(self, cause: str) -> None:
        """Tell the others why this rank ends."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError, OSError):
                within(SECONDS_FOR_THE_STORE / 2, lambda: self._put(f"ended/{self._rank}", cause))

    def explain(self, error: TrafficError) -> Diagnosis | None:
        """Collect all ranks' notices; None if a wait failed that is not between ranks of this run.

        It takes a few seconds at most.
        """
        if self._store is None or error.wait is None:
            return None
        self._has_failed = True
        own = self._notice(error.wait)
        own.lost_a_peer = error.lost_a_peer
        try:
            answer = within(SECONDS_FOR_OTHERS + SECONDS_FOR_THE_STORE, lambda: self._collect(own))
        except (RuntimeError, OSError):  # the store's process is gone
            return self._without_store("has ended: see its last line")
        if answer is None:
            return self._without_store("does not answer: it is stopped, or its machine or network is gone")
        notices, ended = answer
        return diagnose(notices, ended, self._world_size, self._traffic.describe, self._traffic.timeout_seconds)

    def may_draw(self) -> bool:
        """True on the first rank that asks, where all share a terminal."""
        store = self._store
        assert store is not None
        with contextlib.suppress(RuntimeError):
            return within(SECONDS_FOR_THE_STORE, lambda: store.add("drawn", 1)) == 1
        return True

    def stay_for_readers(self) -> None:
        """On rank 0, keep the store open until the others have read it."""
        if self._is_rank_0s and self._rank == 0:
            deadline = time.monotonic() + SECONDS_FOR_READERS
            waiting = [f"read/{rank}" for rank in range(1, self._world_size)]
            with contextlib.suppress(RuntimeError):
                while time.monotonic() < deadline and not self._has(*waiting):
                    time.sleep(0.05)

    def _without_store(self, state: str) -> Diagnosis | None:
        """What can be said of rank 0 if the notices, which were in its process, cannot be read."""
        if not self._is_rank_0s or self._rank == 0:
            return None
        return Diagnosis([], f"{self._traffic.describe(0)} {state}")

    def _notice(self, wait: Wait | None) -> Notice:
        return Notice(self._rank, wait, dict(self._traffic.begun))

    def _put(self, key: str, text: str) -> None:
        assert self._store is not None
        self._reach_store()
        self._store.set(key, text)

    def _reach_store(self) -> None:
        """Raise `OSError` if it has gone."""
        if self._is_rank_0s and self._rank > 0:  # torch would report a store that has gone at length, from C++
            assert isinstance(self._store, dist.TCPStore)
            with socket.create_connection((self._store.host, self._store.port), SECONDS_FOR_THE_STORE):
                pass

    def _has(self, *keys: str) -> bool:
        assert self._store is not None
        return self._store.check(list(keys))

    def _collect(self, own: Notice) -> tuple[dict[int, Notice], dict[int, str]]:
        """Post the own notice, and return all after some seconds, or as soon as every rank has left word."""
        store = self._store
        assert store is not None
        self._reach_store()
        own.place = store.add("failed", 1)
        self._put(f"waits/{self._rank}", json.dumps(own.as_json()))
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while True:
            notices, ended = {self._rank: own}, {}
            for rank in range(self._world_size):
                if self._has(f"ended/{rank}"):
                    ended[rank] = store.get(f"ended/{rank}").decode()
                elif rank != self._rank and self._has(f"waits/{rank}"):
                    notices[rank] = Notice.from_json(json.loads(store.get(f"waits/{rank}")))
            silent = self._world_size - len(ended) - sum(notice.wait is not None for notice in notices.values())
            if not silent or time.monotonic() > deadline:
                store.set(f"read/{self._rank}", "")
                return notices, ended
            time.sleep(0.05)

    def _watch(self) -> None:
        """Post a wait that has become long, and take it back when it has ended after all."""
        posted = None
        long_seconds = min(LONG_SECONDS, self._traffic.timeout_seconds / 2)
        with contextlib.suppress(RuntimeError, OSError):  # the store has gone, and the run with it
            while True:
                time.sleep(long_seconds / 4)
                wait = self._traffic.waits_for(long_seconds)
                if self._has_failed:
                    return  # `explain` has the last word
                if wait != posted:
                    self._put(f"waits/{self._rank}", json.dumps(self._notice(wait).as_json()))
                    posted = wait


def within(seconds: float, call: Callable[[], ResultT]) -> ResultT | None:
    """What `call()` returns or raises; None if it has not ended after `seconds`: it is left behind then."""
    results: list[ResultT] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else None


notices = NoticeBoard()
