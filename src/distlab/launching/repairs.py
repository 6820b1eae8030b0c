"""The launcher's part of `--repair`: it tells ranks to go on when others have died, and gives spares their places."""

from collections.abc import Mapping, Sequence
from itertools import chain

from distlab.axes.layout import SLICES, ranks_along
from distlab.launching.processes import Ranks
from distlab.rendezvous.store import SharedStore
from distlab.rendezvous.survivors import FINISHED, Arbiter
from distlab.settings.replicas import RepairFlag
from simplellm.errors import InputError, tell


class Repairs:
    """The repairs of a run.

    Ranks that hold slices of the same layers cannot go on without each other: they die and come back together. `spares`
    processes may take the places of ranks that have died: one for each slice is started in advance, when all ranks have
    begun to train, and waits for a death.
    """

    def __init__(self, settings: RepairFlag, spares: int) -> None:
        self._settings, self._unused = settings, spares
        self._units = ranks_along(settings.layout, (SLICES,))

    def begin(self, ranks: Ranks, store: SharedStore, environments: Sequence[Mapping[str, str]]) -> None:
        """Watch these ranks, which have just been started."""
        self._ranks, self._arbiter, self._environments = ranks, Arbiter(store), environments
        self._started = 0  # spares, since then
        self._is_ready = self.is_too_early = False
        self._idle: list[int] = []  # numbers of spares that wait for a death
        self._taking: dict[int, int] = {}  # spares that are not counted yet, and the ranks whose places they take
        self._vacant: list[int] = []  # ranks that have died, and whose places no spare takes yet

    def look(self) -> None:
        """Do what there is to do."""
        self._ranks.kill_stopped()
        self._go_on()
        if self._ranks.failures:  # which cannot be repaired
            return
        self._collect()
        self._fill()
        self._count()

    def _go_on(self) -> None:
        """Tell the running ranks which others have ended. A failure that they can repair is no failure of the run."""
        ranks, causes = self._ranks, {rank: failure.cause for rank, failure in self._ranks.failures.items()}
        if not ranks.ended or any(failure.cannot_be_repaired for failure in ranks.failures.values()):
            return
        units = [unit for unit in self._units if not causes.keys().isdisjoint(unit)]
        left = ranks.processes.keys() - chain.from_iterable(units)
        if causes:
            self.is_too_early = not self._arbiter.are_ready(left)
            early = "some ranks have yet to begin to train" if self.is_too_early else ""
            if why := self._settings.why_lost(left) or early:
                told = ", ".join(f"rank {rank} {cause}" for rank, cause in causes.items())
                tell(f"{told}; this cannot be repaired: {why}")
                return
        for unit in units:
            first = next(rank for rank in unit if rank in causes)
            for rank in unit:
                if rank in ranks.processes:
                    ranks.kill(rank)
                    causes[rank] = f"has slices of the same layers as rank {first} and was ended"
            self._vacant += unit
        self._arbiter.tell(left, {rank: causes.get(rank, FINISHED) for rank in {*ranks.ended, *causes}})
        ranks.ended.clear()
        ranks.failures.clear()

    def _collect(self) -> None:
        """Find the spares that have exited before they were counted."""
        for number, failure in self._ranks.exited_spares().items():
            if number in self._idle:
                self._idle.remove(number)
                tell(f"a spare {failure.cause}; the run goes on without it")
            else:
                rank = self._taking.pop(number)
                self._vacant.append(rank)
                tell(f"a spare for rank {rank} {failure.cause}; the run goes on without it")

    def _fill(self) -> None:
        """Start spares, and give them the places of the dead."""
        for unit in self._units:
            places = [rank for rank in unit if rank in self._vacant]
            while len(self._idle) < len(places) <= len(self._idle) + self._unused:
                self._start_spare()
            if len(places) > len(self._idle):
                self._end_spares_of(unit)
                continue
            for rank in places:
                number = self._idle.pop(0)
                self._vacant.remove(rank)
                self._taking[number] = rank
                self._arbiter.give_place(number, self._environments[rank])
        self._is_ready = self._is_ready or self._arbiter.are_ready(self._ranks.processes)
        while self._is_ready and self._unused and len(self._idle) < len(self._units[0]):
            self._start_spare()

    def _end_spares_of(self, unit: Sequence[int]) -> None:
        """End the spares that take places in a unit: without a spare for another of its ranks, they would never do."""
        for number, rank in list(self._taking.items()):
            if rank in unit:
                self._ranks.kill_spare(number)
                del self._taking[number]
                self._vacant.append(rank)

    def _start_spare(self) -> None:
        """Start one more spare; if that is impossible, the run goes on without."""
        try:
            self._ranks.start_spare(self._started + 1, self._environments[0])
        except InputError as error:
            self._unused = 0
            tell(f"{error}; the run goes on, and no more spares are started")
            return
        self._unused -= 1
        self._started += 1
        self._idle.append(self._started)

    def _count(self) -> None:
        """Count spares among the ranks as soon as they, and those for the other slices, are ready to train."""
        ready = {rank: number for number, rank in self._taking.items() if self._arbiter.is_ready(number)}
        for unit in self._units:
            if not ready.keys() >= {*unit}:
                continue
            new = {ready[rank]: rank for rank in unit}
            for number, rank in new.items():
                self._ranks.count_spare(number, rank)
                del self._taking[number]
            self._arbiter.tell(self._ranks.processes, {}, new)
