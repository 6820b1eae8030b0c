"""Where ranks leave word of what they wait for, so that a run that stands still can be explained.

The place is the store where the ranks met: in torchrun's agent, or in rank 0's process. While all goes well, each rank
only looks there now and then whether one asks. When a wait fails, its rank asks, and every rank that still can answers
with a fresh notice. What a rank said earlier would not count: it may have been killed or stopped since.
"""

import contextlib
import json
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from distlab.comm.processes import within
from distlab.comm.traffic import Traffic
from distlab.comm.waits import TrafficError, Wait, list_ranks
from distlab.rendezvous.diagnosis import Diagnosis, Notice, diagnose, tell_causes

LONG_SECONDS = 1.0  # from when on a wait is worth a notice
SECONDS_BETWEEN_LOOKS = 0.5  # at the store, whether a rank asks
SECONDS_FOR_OTHERS = 2.0  # to answer, when a wait of this rank has failed: longer than the two above together
SECONDS_FOR_A_DEADLINE = (
    0.2  # that a lost peer asks later: a rank past its deadline closes its connections, and is first
)
SECONDS_FOR_THE_STORE = 2.0  # to answer: it may be in a process that is stopped
SECONDS_FOR_READERS = 3.0  # that rank 0, with whose process the store ends, stays for them


class NoticeBoard:
    """One rank's way to the notices of all."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._has_failed = False
        self._heard = ""  # why the run has failed, as other ranks say

    def open(self, store: dist.Store, rank: int, world_size: int, traffic: Traffic, is_rank_0s: bool) -> None:
        """Begin to watch this rank's waits.

        Args:
            store: where the ranks met.
            rank: of this process.
            world_size: number of ranks.
            traffic: whose waits are watched.
            is_rank_0s: the store ends with rank 0's process.
        """
        self._rank, self._world_size, self._traffic = rank, world_size, traffic
        self._is_rank_0s = is_rank_0s
        # What waits on the ranks' own connection cannot hold up this one.
        own = store.clone()  # type: ignore[attr-defined]  # torch's annotations lack it
        self._store = dist.PrefixStore("notices", own)
        self._store.set_timeout(timedelta(seconds=SECONDS_FOR_THE_STORE))
        threading.Thread(target=self._watch, daemon=True).start()

    def report_exit(self, cause: str) -> None:
        """Tell the others why this rank ends."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                within(SECONDS_FOR_THE_STORE / 2, lambda: self._put(f"ended/{self._rank}", cause))
                within(SECONDS_FOR_THE_STORE / 2, lambda: self._put("asked", ""))  # has them look for it

    def explain(self, error: TrafficError) -> Diagnosis | None:
        """Collect all ranks' notices; None if a wait failed that is not between ranks of this run.

        It takes a few seconds at most.
        """
        if self._store is None or error.wait is None:
            return None
        self._has_failed = True
        own = Notice(self._rank, error.wait, dict(self._traffic.begun), lost_a_peer=error.lost_a_peer)
        try:
            answer = within(SECONDS_FOR_OTHERS + SECONDS_FOR_THE_STORE, lambda: self._collect(own))
        except RuntimeError:  # the store's process is gone
            return self._without_store("has ended: see its last line", error.wait)
        if answer is None:
            return self._without_store("does not answer: it is stopped, or its machine or network is gone", error.wait)
        notices, ended = answer
        return diagnose(notices, ended, self._world_size, self._traffic.describe, self._traffic.timeout_seconds)

    def publish_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Tell ranks that find out later; with rank 0 the store may have gone by then."""
        if not diagnosis.is_partial:
            with contextlib.suppress(RuntimeError):
                within(SECONDS_FOR_THE_STORE / 2, lambda: self._put("concluded", diagnosis.sentence))

    def may_draw(self) -> bool:
        """True on the first rank that asks, where all share a terminal."""
        store = self._store
        assert store is not None
        with contextlib.suppress(RuntimeError):
            return within(SECONDS_FOR_THE_STORE, lambda: store.add("drawn", 1)) == 1
        return True

    def keep_store_open(self) -> None:
        """On rank 0, keep the store open until the others have read what they need."""
        if self._store is None or not self._is_rank_0s or self._rank > 0:
            return
        deadline = time.monotonic() + SECONDS_FOR_READERS
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and not all(
                any(self._has(f"{key}/{rank}") for key in ("read", "heard", "ended"))
                for rank in range(1, self._world_size)
            ):
                time.sleep(0.05)

    def _without_store(self, state: str, wait: Wait) -> Diagnosis | None:
        """What can be said if the notices cannot be read, because the process that has them is gone or stopped."""
        describe = self._traffic.describe
        if self._heard:
            return Diagnosis([], self._heard, is_partial=True)
        if self._is_rank_0s and self._rank > 0:
            return Diagnosis([], f"{describe(0)} {state}", is_partial=True)
        if not wait.peers:
            return None
        who = describe(wait.peers[0]) if len(wait.peers) == 1 else f"one of {list_ranks(wait.peers)}"
        return Diagnosis([], f"{who} does not answer, nor does the store where ranks leave word", is_partial=True)

    def _put(self, key: str, text: str) -> None:
        assert self._store is not None
        self._store.set(key, text)

    def _has(self, *keys: str) -> bool:
        assert self._store is not None
        return self._store.check(list(keys))

    def _read(self, key: str) -> str | None:
        """What was put there, if anything."""
        assert self._store is not None
        return self._store.get(key).decode() if self._has(key) else None

    def _words(self) -> dict[int, str]:
        """By rank, why it ended, from those that said so."""
        words = {rank: self._read(f"ended/{rank}") for rank in range(self._world_size)}
        return {rank: word for rank, word in words.items() if word is not None}

    def _collect(self, own: Notice) -> tuple[dict[int, Notice], dict[int, str]]:
        """Ask, and return all notices after some seconds, or as soon as every rank has said what it waits for."""
        store = self._store
        assert store is not None
        if own.lost_a_peer:
            time.sleep(SECONDS_FOR_A_DEADLINE)
        own.place = store.add("failed", 1)
        # Not the key of an answer, so a late one of the watch cannot take the place of it.
        self._put(f"failed/{self._rank}", json.dumps(own.as_json()))
        self._put("asked", "")
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while True:
            notices, ended = {self._rank: own}, self._words()
            for rank in {*range(self._world_size)} - {self._rank, *ended}:
                told = self._read(f"failed/{rank}") or self._read(f"answers/{rank}")
                if told is not None:
                    notices[rank] = Notice.from_json(json.loads(told))
            silent = self._world_size - len(ended) - sum(notice.wait is not None for notice in notices.values())
            if silent <= 0 or time.monotonic() > deadline:
                self._put(f"read/{self._rank}", "")
                return notices, ended
            time.sleep(0.05)

    def _watch(self) -> None:
        """Answer when one asks, again when the answer has changed, and listen to why other ranks end."""
        told = None
        long_seconds = min(LONG_SECONDS, self._traffic.timeout_seconds / 2)
        with contextlib.suppress(RuntimeError):  # the store has gone, and the run with it
            while not self._has("asked"):
                time.sleep(min(SECONDS_BETWEEN_LOOKS, long_seconds / 2))
            while not self._has_failed:  # then `explain` has the last word
                notice = Notice(self._rank, self._traffic.waits_for(long_seconds), dict(self._traffic.begun))
                if notice != told:
                    self._put(f"answers/{self._rank}", json.dumps(notice.as_json()))
                    told = notice
                words = self._words() if not self._heard else {}
                heard = tell_causes(words, words, self._traffic.describe) or self._read("concluded") or ""
                if heard and not self._heard:
                    self._heard = heard
                    self._put(f"heard/{self._rank}", "")
                time.sleep(0.1)


notices = NoticeBoard()
