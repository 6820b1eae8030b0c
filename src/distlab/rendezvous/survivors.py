"""The deaths of ranks: the launcher notices them and says so in the store; the other ranks agree on how to go on.

With `--spares`, the launcher gives a newcomer the place of a dead rank. As soon as that is ready to train, the
launcher's next news count it among the ranks. It has no state yet, so its position is `NOWHERE`.

Only the launcher decides who is dead. Its news are numbered: each number is an epoch, in which the ranks that are left
make their process groups under a prefix of their own, so that nothing of an earlier epoch reaches them.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from distlab.comm.waits import TrafficError, list_ranks
from distlab.machine.processes import NEWCOMER, name_process
from distlab.rendezvous.store import SECONDS_BETWEEN_LOOKS, SharedStore

NEWS, READY, PLACE = "repair/news", "repair/ready", "repair/place"
TAKE, KEEP, MEET = range(3)  # phases of a step: taken; evaluated, recorded and saved; after the last one, the end
FINISHED = "has finished"  # why a rank has ended that did not fail
SECONDS_FOR_NEWS = 10.0  # from a lost connection until the launcher has noticed the death


@dataclass(frozen=True)
class News:
    """The ranks that are left, as the launcher sees them."""

    epoch: int  # number of such news in this run, from 1
    alive: tuple[int, ...]  # their numbers in the layout; those that have been here longer come first
    newcomers: dict[str, int]  # of the ranks whose place a newcomer has taken: its number
    gone: dict[str, str]  # why the others have ended, by their numbers: "was terminated by SIGKILL"
    timestamp: float  # when the launcher noticed it, in seconds since the epoch of `time.time`

    @classmethod
    def from_json(cls, text: str) -> "News":
        fields = json.loads(text)
        return cls(**{**fields, "alive": tuple(fields["alive"])})

    def processes(self) -> dict[int, int]:
        """Return the ranks that are left, each with the number of the newcomer that it is, or 0."""
        return {rank: self.newcomers.get(str(rank), 0) for rank in self.alive}


class Position(NamedTuple):
    """Where a rank is in a run: in one of the phases of a step, each of which may fail and be done again."""

    step: int
    phase: int

    @property
    def updates(self) -> int:
        return self.step + (self.phase > TAKE)


NOWHERE = Position(-1, TAKE)


class Answer(NamedTuple):
    """A rank's part of the agreement."""

    position: Position
    known: int  # it knows the losses of the steps before this one: of all that it has taken, unless with `--run-on`
    late: tuple[int, dict[str, float]] | None = None  # with `--run-on`: the last of them, as in `run_on.Arrived`


def common_position(answers: Collection[Answer]) -> Position:
    """Return where ranks go on that are no more than one update apart; whoever has taken a further one undoes it.

    A step whose loss nobody knows does not count: the dead may have computed a part of it. With `--run-on`, that is at
    most the last update of the rank that is least far, and then nobody has replaced the copy of the state before it.
    """
    known = max(answer.known for answer in answers)
    return min(Position(known, TAKE), *(answer.position for answer in answers))


class NewsError(Exception):
    """There are later news from the launcher."""


class Arbiter:
    """The launcher's part."""

    def __init__(self, store: SharedStore) -> None:
        self._store, self._epoch, self._gone = store, 0, dict[str, str]()
        self._alive, self._newcomers = list[int](), dict[str, int]()

    def are_ready(self, ranks: Collection[int]) -> bool:
        """Return whether all these ranks have begun to train, so that they can repair the run."""
        return self._store.has(*(f"{READY}/{rank}" for rank in ranks))

    def is_ready(self, newcomer: int) -> bool:
        """Return whether a newcomer is ready to train."""
        return self._store.has(f"{READY}/newcomer{newcomer}")

    def give_place(self, newcomer: int, environment: Mapping[str, str]) -> None:
        """Give a newcomer the place of a dead rank, as its environment variables."""
        self._store.set(f"{PLACE}/{newcomer}", json.dumps(environment))

    def tell(self, alive: Collection[int], gone: Mapping[int, str], newcomers: Mapping[int, int] | None = None) -> None:
        """Tell the ranks that are left, or new, who else ended, and why.

        `newcomers` have just been counted: their ranks, by their numbers.
        """
        self._epoch += 1
        self._gone |= {str(rank): why for rank, why in gone.items()}
        self._newcomers |= {str(rank): number for number, rank in (newcomers or {}).items()}
        old = [rank for rank in self._alive if rank in alive]
        self._alive = old + sorted(rank for rank in alive if rank not in old)
        news = News(self._epoch, tuple(self._alive), self._newcomers, self._gone, time.time())
        self._store.set(NEWS, json.dumps(asdict(news)))


def await_place(store: dist.Store) -> None:
    """As a spare, wait until a rank has died; then take its environment variables and its name."""
    number = os.environ[NEWCOMER]
    name_process(f"spare {number}")
    key = f"{PLACE}/{number}"
    store.wait([key], timedelta(days=1000))
    os.environ.update(json.loads(store.get(key)))
    name_process(f"rank {os.environ['RANK']}")


class Survivor:
    """A rank's part.

    Args:
        store: of all ranks; the launcher holds it.
        rank: this rank's number in the layout.
        newcomer: its number as a newcomer; 0 for the ranks of the start.
    """

    def __init__(self, store: SharedStore, rank: int, newcomer: int = 0) -> None:
        self._store, self._rank, self._newcomer = store, rank, newcomer
        self.epoch = 0  # of the last news that this rank has read

    def begin(self) -> None:
        """Tell the launcher that from now on this rank can go on without others."""
        self._store.set(f"{READY}/newcomer{self._newcomer}" if self._newcomer else f"{READY}/{self._rank}")

    def await_news(self, error: Exception) -> News:
        """Return the launcher's next news; raise `error`, the reason to ask, if there are none or this rank is out.

        A newcomer waits without a limit to be counted: the newcomers for the other slices may take longer to be ready.
        """
        deadline = time.monotonic() + SECONDS_FOR_NEWS
        while True:
            news = self._read()
            is_counted = self._newcomer == 0 or (news is not None and self._newcomer in news.newcomers.values())
            if news is not None and is_counted and news.epoch > self.epoch:
                break
            if is_counted and time.monotonic() > deadline:
                raise error
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self.epoch = news.epoch
        if self._rank not in news.alive:
            raise error
        return news

    def check(self) -> None:
        """Raise `NewsError` if another rank has died since the last news."""
        news = self._read()
        if news is not None and news.epoch > self.epoch:
            raise NewsError

    def agree(self, news: News, own: Answer, timeout_seconds: float) -> dict[int, Answer]:
        """Return the answers of all ranks.

        Raises:
            NewsError: another rank has died.
            TrafficError: a rank does not answer within the timeout.
        """
        keys = {f"repair/{news.epoch}/{rank}": rank for rank in news.alive}
        self._store.set(f"repair/{news.epoch}/{self._rank}", json.dumps(own))
        deadline = time.monotonic() + timeout_seconds
        while len(found := self._store.read(*keys)) < len(keys):
            self.check()
            if time.monotonic() > deadline:
                silent = list_ranks([rank for key, rank in keys.items() if key not in found])
                waited = f"rank {self._rank} waited {timeout_seconds:g} s for {silent} to take part in the repair"
                raise TrafficError(f"{waited}: no answer (--timeout sets how long to wait)", TimeoutError())
            time.sleep(SECONDS_BETWEEN_LOOKS)
        answers = {keys[key]: json.loads(text) for key, text in found.items()}
        return {rank: Answer(Position(*position), *more) for rank, (position, *more) in answers.items()}

    def _read(self) -> News | None:
        text = self._store.read(NEWS).get(NEWS)
        return None if text is None else News.from_json(text)


def describe_change(news: News, before: Mapping[int, int], describe: Callable[[int], str]) -> str:
    """Return in words which of the ranks that were there `before` have ended, and why, and which are back."""
    now = news.processes()
    ended = [f"{describe(rank)} {news.gone[str(rank)]}" for rank in ended_since(news, before)]
    back = [f"{describe(rank)} is back" for rank, process in sorted(now.items()) if before.get(rank) != process]
    return "; ".join([*ended, *back])


def ended_since(news: News, before: Mapping[int, int]) -> list[int]:
    """Return the ranks whose processes were there `before`, as `News.processes` returns them, and have ended."""
    now = news.processes()
    return [rank for rank, process in sorted(before.items()) if now.get(rank) != process]
