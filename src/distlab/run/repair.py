"""A rank's part of `--repair`: when another one dies, it agrees with the rest on where they go on.

What a survivor does when one of its waits has failed:

1. It closes its own connections, so that nobody waits for it: ranks that have none to the dead one leave their waits.
2. It asks the launcher who is left, and tells these how far it is. Step k counts only if all of them have taken
   its update, and one of them knows its loss: otherwise, whoever has taken it undoes it with the copy of the state
   before it. No two ranks are further apart, as each needs the others' gradients for its next update.
3. It makes the process groups again, of the ranks that are left, and they do again what had failed.

With `--spares`, a newcomer takes a dead rank's place: the others notice the launcher's news at the start of a step, or
in a longer wait over gloo, make the groups again with it, and a rank with the same weights sends it its state.

A death during the repair starts it again. (ReCycle: Gandhi et al., arXiv 2405.14009, sends the work of a dead worker to
those that hold the same weights; it has no code.)
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distlab.axes.layout import REPLICAS, ranks_along
from distlab.comm.context import context_of
from distlab.comm.gloo import drop
from distlab.comm.names import CONTROL, named
from distlab.comm.recorder import DEATH, REPAIR, Event
from distlab.comm.waits import TrafficError, is_lost_peer, list_ranks
from distlab.machine.processes import NEWCOMER, leave
from distlab.machine.torch_patches import number_groups_from_zero
from distlab.rendezvous.ranks import ranks_store
from distlab.rendezvous.survivors import (
    FINISHED,
    NOWHERE,
    TAKE,
    Answer,
    News,
    NewsError,
    Position,
    Survivor,
    common_position,
    describe_change,
    ended_since,
)
from distlab.run.handing_over import StateError, checksum_of, receive_state, send_state
from distlab.run.run_on import Arrived, RunningOn
from distlab.run.starting import Joined
from distlab.run.state_copy import StateCopy
from simplellm.errors import InputError


class Repair:
    """Repairs a run on this rank.

    Args:
        joined: the meeting of all ranks; gets the new groups, and its grid the ranks that are left.
        timeout_seconds: of any wait.
        first_step: of the run.
    """

    # Set by the run before its first step:
    copy: StateCopy  # of the state before the last update
    late: RunningOn
    describe: Callable[[Position], dict[str, Any]]  # returns the record that a newcomer gets beside the state
    received: dict[str, Any] | None = None  # by a newcomer: this record

    def __init__(self, joined: Joined, timeout_seconds: float, first_step: int) -> None:
        self._joined, self._timeout_seconds, self._rank = joined, timeout_seconds, joined.grid.rank
        self._newcomer = int(os.environ.get(NEWCOMER, "0"))
        self.survivor = Survivor(ranks_store(timeout_seconds, store=joined.store), self._rank, self._newcomer)
        joined.context.options.check = self.survivor.check  # groups of axes are made in the first step
        self._describe = copy(joined.grid).describe  # with the names of dead ranks too
        self._processes = dict.fromkeys(joined.grid.alive, 0)  # as `News.processes` returns them
        self.position = NOWHERE if self._newcomer else Position(first_step, TAKE)  # of this rank, as its steps note it
        self._abandoned: list[object] = []  # as `Context.abandon` returns them
        self.goes_back = False  # whether the steps have yet to go back to `position`, which a repair has set

    def after(self, error: Exception) -> tuple[str, list[Arrived]]:
        """Repair the run after a failed wait; raise `error` if no rank has died.

        Returns:
            a sentence about the repair; with `--run-on`, losses that some of the ranks know.
        """
        if not is_death(error):
            raise error
        recorder, started = self._joined.context.recorder, time.perf_counter()
        if self.late.unsettled == self.position.updates - 1:
            self.late.keep_arrived()
        while True:
            self._abandoned += self._joined.context.abandon()
            if dist.is_initialized():
                dist.destroy_process_group()
            number_groups_from_zero()
            news = self.survivor.await_news(error)
            try:
                answers = self.survivor.agree(news, self._answer(), self._timeout_seconds)
                known = {rank: answer for rank, answer in answers.items() if answer.position != NOWHERE}
                if not known and FINISHED in news.gone.values():
                    leave(0)
                position = common_position(known.values()) if known else NOWHERE
                self._make_groups(news)
                if self.position.updates > position.updates:
                    self.copy.restore()
                if self._rank in known:
                    self.position = position
                self._hand_over(news, known, position)
                break
            except NewsError:
                continue
            except Exception as lost:
                if not is_death(lost):
                    raise
        before, self._processes = self._processes, news.processes()
        self.position, self.goes_back = position, True
        sentence = self._sentence(news, before, position)
        for rank in ended_since(news, before) if recorder.enabled else ():
            what = f"{self._describe(rank)} {news.gone[str(rank)]}"
            recorder.events.append(Event(DEATH, what, news.timestamp, news.timestamp))
        recorder.add(REPAIR, sentence, started)
        return sentence, [Arrived(*answer.late) for answer in known.values() if answer.late is not None]

    def drop_abandoned_groups(self) -> None:
        """Give back what the groups before the repair hold; this rank's stack has no reference to them any more."""
        gc.collect()
        drop(self._abandoned)
        self._abandoned = []

    def compare(self) -> None:
        """Compare this rank's state with that of the ranks with the same weights; all ranks call it together.

        Raises:
            StateError: it differs from that of most of them, or nobody knows which is right.
        """
        grid = self._joined.grid
        sums = torch.zeros(grid.size, dtype=torch.int64)
        sums[grid.rank] = checksum_of(self.copy.optimizer)
        with named("the checksums of the replicas", CONTROL):
            dist.all_reduce(sums)
        of_same = {rank: int(sums[grid.alive.index(rank)]) for rank in self._same(self._rank) if rank in grid.alive}
        [(usual, count)] = Counter(of_same.values()).most_common(1)
        who = list_ranks(sorted(of_same))
        if 2 * count <= len(of_same):
            raise StateError(f"the weights of {who} differ, and nobody knows which are right; resume a checkpoint")
        if of_same[self._rank] != usual:
            raise StateError(f"its weights are not those that most of {who} have")

    def _answer(self) -> Answer:
        known, late = self.position.updates, self.late
        return Answer(self.position, known if late.unsettled is None else min(known, late.unsettled), late.last)

    def _same(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the layout with the same weights as one of them."""
        return next(ranks for ranks in ranks_along(self._joined.grid.layout, (REPLICAS,)) if rank in ranks)

    def _hand_over(self, news: News, known: Collection[int], position: Position) -> None:
        """Send the state of ranks that have it to newcomers, each from a rank with the same weights.

        Raises:
            StateError: no rank is left that has the weights of one of them.
        """
        for rank in news.alive:
            if rank in known:
                continue
            source = next((other for other in news.alive if other in self._same(rank) and other in known), None)
            if source is None:
                raise StateError(f"no rank is left that could give {self._describe(rank)} its weights")
            if self._rank == source:
                send_state(self.copy.optimizer, self.describe(position), news.alive.index(rank))
            elif self._rank == rank:
                self.received = receive_state(self.copy.optimizer, news.alive.index(source))

    def _make_groups(self, news: News) -> None:
        joined, timeout = self._joined, timedelta(seconds=self._timeout_seconds)
        joined.grid.keep(news.alive)
        options = replace(
            joined.context.options,
            places=[joined.places[rank] for rank in news.alive],
            describe=joined.grid.describe,
            previous=joined.context,
        )
        dist.init_process_group(
            "lab",
            store=dist.PrefixStore(f"repair/{news.epoch}", joined.store),
            rank=joined.grid.rank,
            world_size=joined.grid.size,
            timeout=timeout,
            pg_options=options,
        )
        joined.context = context_of()

    def _sentence(self, news: News, before: Mapping[int, int], position: Position) -> str:
        seconds, who = time.time() - news.timestamp, list_ranks(sorted(news.alive))
        what = describe_change(news, before, self._describe)
        go_on = f"{who} {'goes' if len(news.alive) == 1 else 'go'} on with step {position.step}"
        return f"{what}: {go_on}, {seconds:.2f} s after that was noticed"


def is_death(error: BaseException) -> bool:
    """Return whether an error says that the connection to another rank was lost, or that there are news."""
    if isinstance(error, NewsError):
        return True
    if isinstance(error, InputError) and error.__cause__ is not None:  # as a checkpoint that cannot be written
        return is_death(error.__cause__)
    if isinstance(error, TrafficError):
        return error.lost_a_peer
    return isinstance(error, Exception) and is_lost_peer(error)
