"""The script of dp-repair, or the one in LESSON, whose ranks die where DEATHS says: [[rank, step, point, how], …].

Ranks pass numbered points within a step. In dp-repair: before and after the loss of each of two micro-batches (0 to 3),
the sum of the gradients (4, 5), `run.log` (6, 7), the comparison of the replicas where it is due (8, 9), and the
completion of a checkpoint (the next two). In hybrid-repair, there is a point before each action of the rank's program;
then the same ones. Point -1 is the beginning of any step. In step -1, a rank dies at its start (point 0), or a spare
that waits (rank -1), whose number is the point. `how` is the name of a signal, or "exception"; or "lost": the rank does
not die, but takes its connections for lost when another has died; or "ready": it dies when all ranks are ready to
train; or "corrupt": one of its weights changes; or "replaced": it dies when a spare without weights has joined, which
is not ready before; or "late": it dies when the others have what it has sent; or "agree", "groups": it dies within the
next repair, before it has told the others how far it is, or after that. With LEAVE_OUT, nobody computes the
micro-batches of the dead. With ALL_BACK, the step after a death waits for spares. With CORES, detours are planned for
as many cores. Each rank writes what it held at each step and at its end, and whether the folder of the run is locked.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distlab.checkpoints import saving
from distlab.comm.waits import TrafficError
from distlab.pipeline.rerouting import side_by_side
from distlab.rendezvous.ranks import ranks_store
from distlab.rendezvous.survivors import Arbiter, NewsError, Survivor
from distlab.run.main import main
from distlab.run.repairable import RepairableRun
from distlab.run.training import TrainingRun
from distlab.settings import hybrid
from distlab.settings.folders import is_claimed
from distlab.settings.replicas import RepairSettings

LESSON = Path(__file__).resolve().parents[1] / os.environ.get("LESSON", "DP/repair/intro_DP_repair.py")
sys.path.insert(0, str(LESSON.parent))
lesson: Any = importlib.import_module(LESSON.stem)
DEFAULTS = lesson.DEFAULTS
DEATHS = json.loads(os.environ.get("DEATHS", "[]"))
SECONDS_TO_BE_READY, SECONDS_TO_SEND = 20.0, 0.3
SECONDS_TO_CLOSE = 30.0  # usually less than 1; a group with a message that gloo has lost lasts until --timeout
IS_AWAITED = "a spare is awaited"  # name of a file in the folder of the run
IS_LOST = "rank {} has lost its connections"  # the same
WITHIN: dict[str, tuple[Any, str]] = {"agree": (Survivor, "agree"), "groups": (dist, "init_process_group")}
starting = os.environ.get("RANK") if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" else None
for rank, step, number, how in DEATHS:
    if step < 0 and starting == str(rank) and os.environ.get("LAB_NEWCOMER", "0") == str(number):
        if how == "exception":
            raise ValueError("a bad import")
        os.kill(os.getpid(), signal.SIGKILL)


def held() -> dict[str, int]:
    """Return how many shared mappings, descriptors of pipes and sockets, and threads this process has."""
    maps = Path("/proc/self/maps").read_text().count("memfd:lab")
    looks = [(descriptors(), threads()) for _ in range(5)]
    connections, running = map(min, zip(*looks, strict=True))
    return {"mappings": maps, "descriptors": connections, "threads": running}


def descriptors() -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{name}").count(":[") for name in os.listdir("/proc/self/fd"))


def threads() -> int:
    time.sleep(0.01)  # a call to the store is a thread for a moment
    return len(os.listdir("/proc/self/task"))


def held_at_the_end() -> dict[str, int]:
    """Return what is held when one connection, to the store, and one thread are left; or `SECONDS_TO_CLOSE` later."""
    deadline = time.monotonic() + SECONDS_TO_CLOSE
    while max((now := held())["descriptors"], now["threads"]) > 1 and time.monotonic() < deadline:
        gc.collect()  # again: what threads hold that end late
    return now


def await_news(run: TrainingRun[RepairSettings]) -> None:
    assert isinstance(run, RepairableRun)
    with contextlib.suppress(NewsError):
        while True:
            run.repair.survivor.check()
            time.sleep(0.01)


def await_lost(out: Path, before: int) -> None:
    """Wait until all ranks that take their connections for lost in a step `before` this one have done so."""
    for rank, step, _, how in DEATHS:
        while how == "lost" and step < before and not (out / IS_LOST.format(rank)).exists():
            time.sleep(0.01)


def with_wait(function: Callable[[], None], for_file: Path) -> Callable[[], None]:
    def call() -> None:
        while not for_file.exists():
            time.sleep(0.01)
        function()

    return call


def train(run: TrainingRun[RepairSettings]) -> None:
    at, of_deaths = {"step": -1, "point": 0}, [step for _, step, *_ in DEATHS]
    holdings: dict[int, dict[str, int]] = {}  # by step, when it begins for the first time
    optimizers: list[Any] = []

    def reach() -> None:
        for death in DEATHS[:]:
            *where, how = death
            if where == [run.rank, at["step"], at["point"]]:
                DEATHS.remove(death)
                if how == "lost":
                    (run.out / IS_LOST.format(run.rank)).touch()
                    await_news(run)
                    raise TrafficError("lost", RuntimeError("Connection closed by peer"))
                await_lost(run.out, at["step"])
                if how == "exception":
                    raise ValueError("a bad row")
                if how == "corrupt":
                    optimizers[0].param_groups[0]["params"][0].data.view(-1)[0] += 1
                    continue
                if how == "replaced":
                    (run.out / IS_AWAITED).touch()
                    await_news(run)
                    how = "SIGKILL"
                if how == "ready":
                    arbiter = Arbiter(ranks_store(SECONDS_TO_BE_READY, run.joined.store))
                    while not arbiter.are_ready(range(run.world_size)):
                        time.sleep(0.01)
                    how = "SIGKILL"
                if how == "late":
                    time.sleep(SECONDS_TO_SEND)
                    how = "SIGKILL"
                if how in WITHIN:
                    setattr(*WITHIN[how], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
                    continue
                os.kill(os.getpid(), getattr(signal, how))
        at["point"] += 1

    def with_points(function: Callable[..., Any], after: bool = True) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            reach()
            result = function(*args, **options)
            if after:
                reach()
            return result

        return call

    def steps(stories: Any, of_run: Callable[[Any], Iterator[Any]] = run.steps) -> Iterator[Any]:
        for step, batch in of_run(stories):
            if "LAB_NEWCOMER" in os.environ and at["step"] < 0:  # the ranks before it have died those deaths
                DEATHS[:] = [death for death in DEATHS if death[1] > step]
            is_one_missing = len(run.grid.alive) < run.world_size
            if "ALL_BACK" in os.environ and is_one_missing and step not in of_deaths:
                with run.surviving():  # a step that has begun would go on without the spare
                    await_news(run)
                    raise NewsError
                continue
            if os.environ.get("WATCH") != "False":  # it takes time
                holdings.setdefault(step, held())
            at.update(step=step, point=-1)
            reach()
            yield step, batch

    def optimizer(model: Any, make: Callable[[Any], Any] = run.optimizer) -> Any:
        optimizers.append(make(model))
        return optimizers[-1]

    if run.joins_late and any(how == "replaced" for *_, how in DEATHS):
        assert isinstance(run, RepairableRun)
        survivor = run.repair.survivor
        survivor.begin = with_wait(survivor.begin, run.out / IS_AWAITED)  # type: ignore[method-assign]
    run.optimizer = optimizer  # type: ignore[method-assign]
    if "CORES" in os.environ:
        hybrid.cores_here = lambda: int(os.environ["CORES"])
    if hasattr(lesson, "Pipeline"):
        run_step = lesson.Pipeline.step
        lesson.Pipeline.step = lambda self, rows, before: run_step(self, rows, with_points(before, after=False))
    else:
        lesson.causalLLMLoss = with_points(lesson.causalLLMLoss)
    places: list[tuple[Any, str]] = [(lesson, "add_up"), (run, "log"), (saving, "together")]
    if isinstance(run, RepairableRun):
        places.append((run.repair, "compare"))
    for place, name in places:
        setattr(place, name, with_points(getattr(place, name)))
    run.steps = steps  # type: ignore[method-assign]
    if "LEAVE_OUT" in os.environ:
        lesson.assign = lambda _, parts, alive, *__: {rank: range(rank * parts, (rank + 1) * parts) for rank in alive}
        lesson.reroute = lambda programs, count, alive, *_, **__: [side_by_side(programs, count)[w] for w in alive]

    def close(close: Callable[[], None] = run.close) -> None:
        found: dict[str, Any] = {"writes": run.is_first, "has claimed": run.is_first and is_claimed(run.out)}
        close()
        found |= {"steps": holdings, "at the end": held_at_the_end()}
        (run.out / f"held{run.rank}.json").write_text(json.dumps(found))

    run.close = close  # type: ignore[method-assign]
    lesson.train(run)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
