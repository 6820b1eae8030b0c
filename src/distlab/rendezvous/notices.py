"""Each rank's current wait, published in the ranks' shared store so that a blocked run can be explained.

In a healthy run, each rank only polls the store to see whether another rank asks. When a wait fails, its rank asks, and
every rank that is still able to answers with a new notice. A notice published earlier would not show whether its rank
has been killed or stopped since.
"""

import contextlib
import math
import threading
import time

import torch
import torch.distributed as dist

from distlab.comm.context import Context
from distlab.comm.waits import TrafficError, Wait, list_ranks
from distlab.rendezvous.diagnosis import Diagnosis, Notice, diagnose, list_causes
from distlab.rendezvous.store import SharedStore, StoreError

LONG_SECONDS = 1.0  # only waits that have taken at least this long are published
SECONDS_BETWEEN_LOOKS = 0.5  # how often a rank polls the store for a question
SECONDS_FOR_OTHERS = 2.0  # time for other ranks to answer: more than the sum of the two above
# Delay before a rank that lost a peer asks. A rank whose deadline passes closes its connections, and must ask first.
SECONDS_FOR_A_DEADLINE = 0.2
SECONDS_FOR_THE_STORE = 2.0  # time for the store, whose process may be stopped, to answer
SECONDS_FOR_READERS = 3.0  # wait of rank 0, whose process holds the store, for the others to read it


class NoticeBoard:
    """One rank's access to the notices of all ranks."""

    def __init__(self, store: dist.Store, context: Context, is_rank_0s: bool) -> None:
        """Start to watch the waits of `context`, this rank's; `is_rank_0s` says whether rank 0 holds the store."""
        self._rank, self._ranks = context.rank, range(context.world_size)
        self._context, self._is_rank_0s = context, is_rank_0s
        self._has_failed = False
        self._is_closed = threading.Event()
        self._heard = ""  # reports of other ranks on why the run failed
        self._gone: int | None = None  # a rank that will read nothing
        # A separate connection, so that calls waiting on the ranks' connection do not block this one.
        own = dist.PrefixStore("notices", store.clone())  # type: ignore[attr-defined]  # torch's annotations lack it
        self._store = SharedStore("the store's process", SECONDS_FOR_THE_STORE, store=own)
        watched = SharedStore("the store's process", math.inf, store=own)  # it may be stopped for a while
        self._thread = threading.Thread(target=self._watch, args=(watched,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. A thread whose question the store does not answer is left behind."""
        self._is_closed.set()
        self._thread.join(SECONDS_FOR_THE_STORE)

    def report_exit(self, cause: str) -> None:
        """Report to the other ranks why this rank exits."""
        with contextlib.suppress(StoreError):
            self._store.set(f"ended/{self._rank}", cause)
            self._store.set(f"informed/{self._rank}")
            self._store.set("asked")  # makes them read it

    def explain(self, error: TrafficError) -> Diagnosis | None:
        """Collect all ranks' notices, in a few seconds; None if the failed wait was not for ranks of this run."""
        if error.wait is None:
            return None
        self._has_failed = True
        own = self._notice(error.wait)
        own.lost_a_peer = error.lost_a_peer
        try:
            notices, ended = self._collect(own)
        except StoreError as lost:
            silent = "does not answer: it is stopped, or its machine or network is down"
            return self._without_store("has exited: see its last line" if lost.lost_a_peer else silent, error.wait)
        waits = self._context.waits
        size, describe = len(self._ranks), self._context.describe
        found = diagnose(notices, ended, size, describe, waits.timeout_seconds, waits.timeout_name)
        self._gone = found.gone
        return found

    def publish_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Publish the diagnosis for ranks that fail later, when the store may have exited with rank 0."""
        if not diagnosis.is_partial:
            with contextlib.suppress(StoreError):
                self._store.set("diagnosis", diagnosis.sentence)

    def may_draw(self) -> bool:
        """Return whether this rank is the first that asks, among those that share a terminal."""
        with contextlib.suppress(StoreError):
            return self._store.add("drawn") == 1
        return True

    def keep_store_open(self) -> None:
        """On rank 0, keep the store open until the others have finished reading."""
        if self._is_rank_0s and self._rank == 0:
            readers = [rank for rank in self._ranks[1:] if rank != self._gone]
            self._store.keep_open([f"informed/{rank}" for rank in readers], SECONDS_FOR_READERS)

    def _notice(self, wait: Wait | None) -> Notice:
        return Notice(self._rank, wait, dict(self._context.begun), held_back=self._context.held_back())

    def _without_store(self, state: str, wait: Wait) -> Diagnosis | None:
        """Return a partial diagnosis if the notices cannot be read: the process that holds them exited or stopped."""
        describe = self._context.describe
        if self._heard:
            return Diagnosis([], self._heard, is_partial=True)
        if self._is_rank_0s and self._rank > 0:
            return Diagnosis([], f"{describe(0)} {state}", is_partial=True)
        if not wait.peers:  # as in making a group of one rank
            return None
        who = describe(wait.peers[0]) if len(wait.peers) == 1 else f"one of {list_ranks(wait.peers)}"
        return Diagnosis([], f"{who} does not answer, nor does the store that the ranks share", is_partial=True)

    def _causes(self, store: SharedStore) -> dict[int, str]:
        """Return, by rank, the reported cause of its exit."""
        ended = {f"ended/{rank}": rank for rank in self._ranks}
        return {ended[key]: cause for key, cause in store.read(*ended).items()}

    def _collect(self, own: Notice) -> tuple[dict[int, Notice], dict[int, str]]:
        """Ask, and return all notices as soon as every rank has published its wait, or after a few seconds."""
        store = self._store
        if own.lost_a_peer:
            time.sleep(SECONDS_FOR_A_DEADLINE)
        own.failure_number = store.add("failed")
        # Not under the key of an answer, so that a late answer of the watch thread cannot overwrite it.
        store.set(f"failed/{self._rank}", own.to_json())
        store.set("asked")
        # A rank's failure comes later in this list than its answer, and so replaces it.
        keys = {f"{kind}/{rank}": rank for kind in ("answers", "failed") for rank in self._ranks}
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while True:
            ended = self._causes(store)
            published = {keys[key]: Notice.from_json(text) for key, text in store.read(*keys).items()}
            notices = {rank: notice for rank, notice in published.items() if rank not in ended} | {self._rank: own}
            silent = len(self._ranks) - len(ended) - sum(notice.wait is not None for notice in notices.values())
            if silent <= 0 or time.monotonic() > deadline:
                store.set(f"informed/{self._rank}")
                return notices, ended
            time.sleep(0.05)

    def _watch(self, store: SharedStore) -> None:
        """Answer when a rank asks, answer again when the answer changes, and note why other ranks exit."""
        if self._context.device.type == "cuda":
            torch.cuda.set_device(self._context.device)  # see `Waits.watch`
        told = None
        long_seconds = min(LONG_SECONDS, self._context.waits.timeout_seconds / 2)
        with contextlib.suppress(RuntimeError):  # the store was closed because the run ended
            while not store.has("asked"):
                if self._is_closed.wait(min(SECONDS_BETWEEN_LOOKS, long_seconds / 2)):
                    return
            while not self._has_failed:  # from then on, `explain` publishes the notice
                notice = self._notice(self._context.waits.waits_for(long_seconds))
                if notice != told:
                    store.set(f"answers/{self._rank}", notice.to_json())
                    told = notice
                if not self._heard:
                    causes = list_causes(self._causes(store), self._context.describe)
                    self._heard = causes or store.read("diagnosis").get("diagnosis", "")
                    if self._heard:
                        store.set(f"informed/{self._rank}")
                if self._is_closed.wait(0.1):
                    return
