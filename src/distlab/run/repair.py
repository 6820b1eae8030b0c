"""`--repair`: a rank dies, and the others go on, in the same step of the same run.

What a survivor does when one of its waits has failed:

1. It closes its own connections, so that nobody waits for it: ranks that have none to the dead one leave their waits.
2. It asks the launcher who is left, and tells these how far it is. Step k counts only if all of them have taken
   its update: whoever has, while another has not, undoes it with the copy of the state before it. No two ranks are
   further apart, as each needs the others' gradients for its next update.
3. It makes the process groups again, of the ranks that are left, and they do again what had failed.

A death during the repair starts it again. (ReCycle: Gandhi et al., arXiv 2405.14009, sends the work of a dead worker to
those that hold the same weights; it has no code.)
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from distlab.comm.context import context_of
from distlab.comm.waits import TrafficError, is_lost_peer, list_ranks
from distlab.rendezvous.ranks import ranks_store
from distlab.rendezvous.survivors import News, NewsError, Position, Survivor, describe_gone
from distlab.run.starting import Joined
from simplellm.errors import InputError

if TYPE_CHECKING:
    from distlab.run.state_copy import StateCopy


@dataclass
class Repaired:
    """A finished repair; the run has yet to go back to where it goes on."""

    position: Position
    sentence: str


class Repair:
    """Repairs a run on this rank.

    Args:
        joined: the meeting of all ranks; gets the new groups.
        timeout_seconds: of any wait.
        first_step: of the run.
    """

    copy: "StateCopy | None" = None  # of the state before the last update; set by the run when there is an optimizer

    def __init__(self, joined: Joined, timeout_seconds: float, first_step: int) -> None:
        self._joined, self._timeout_seconds, self._rank = joined, timeout_seconds, joined.grid.rank
        self.survivor = Survivor(ranks_store(timeout_seconds, store=joined.store), self._rank)
        self.alive = tuple(range(joined.grid.size))  # original numbers of the ranks that are left
        self.position = Position(first_step, 0)  # of this rank
        self.done: Repaired | None = None

    def reach(self, step: int, phase: int) -> None:
        """Note how far this rank is."""
        self.position = Position(step, phase)

    def after(self, error: Exception) -> None:
        """Repair the run after a failed wait; raise `error` if no rank has died."""
        if not is_death(error):
            raise error
        while True:
            self._joined.context.abandon()
            if dist.is_initialized():
                dist.destroy_process_group()
            news = self.survivor.await_news(error)
            try:
                position = self.survivor.agree(news, self.position, self._timeout_seconds)
                self._make_groups(news)
                break
            except NewsError:
                continue
            except Exception as lost:
                if not is_death(lost):
                    raise
        if self.position.updates > position.updates:
            assert self.copy is not None, "an update was made without a copy of the state before it"
            self.copy.restore()
        before, self.alive, self.position = self.alive, news.alive, position
        self.done = Repaired(position, self._sentence(news, before, position))

    def _make_groups(self, news: News) -> None:
        joined, timeout = self._joined, timedelta(seconds=self._timeout_seconds)
        options = replace(
            joined.context.options,
            places=[joined.places[rank] for rank in news.alive],
            describe=lambda number: joined.grid.describe(news.alive[number]),
            check=self.survivor.check,
            previous=joined.context,
        )
        dist.init_process_group(
            "lab",
            store=dist.PrefixStore(f"repair/{news.epoch}", joined.store),
            rank=news.alive.index(self._rank),
            world_size=len(news.alive),
            timeout=timeout,
            pg_options=options,
        )
        joined.context = context_of()

    def _sentence(self, news: News, before: Collection[int], position: Position) -> str:
        seconds, who = time.time() - news.timestamp, list_ranks(news.alive)
        ended = describe_gone(news, before, self._joined.grid.describe)
        go_on = f"{who} {'goes' if len(news.alive) == 1 else 'go'} on with step {position.step}"
        return f"{ended}: {go_on}, {seconds:.2f} s after that was noticed"


def is_death(error: BaseException) -> bool:
    """Return whether an error says that the connection to another rank was lost."""
    if isinstance(error, InputError) and error.__cause__ is not None:  # as a checkpoint that cannot be written
        return is_death(error.__cause__)
    return (
        error.lost_a_peer if isinstance(error, TrafficError) else isinstance(error, Exception) and is_lost_peer(error)
    )
