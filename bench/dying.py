"""The script of dp-repair, whose ranks die where DEATHS says, in JSON: [[rank, step, point, how], …].

Ranks pass numbered points within a step: before and after the loss of each of two micro-batches (0 to 3), the sum of
the gradients (4, 5), `run.log` (6, 7), and the completion of a checkpoint (8, 9). `how` is the name of a signal, or
"exception"; or "lost": the rank does not die, but takes its connections for lost when the others have gone on.
With LEAVE_OUT, nobody computes the rows of the dead. At the end, each rank writes what it held at each step.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distlab.checkpoints import saving
from distlab.comm.waits import TrafficError
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import RepairSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "DP/repair"))
lesson: Any = importlib.import_module("intro_DP_repair")
DEFAULTS = lesson.DEFAULTS
DEATHS = json.loads(os.environ.get("DEATHS", "[]"))


def held() -> tuple[int, int, int]:
    """Return the mappings that this process shares, its pipes and its threads."""
    maps = Path("/proc/self/maps").read_text().count("memfd:lab")
    pipes = sum(os.path.realpath(f"/proc/self/fd/{name}").count("pipe") for name in os.listdir("/proc/self/fd"))
    return maps, pipes, len(os.listdir("/proc/self/task"))


def train(run: TrainingRun[RepairSettings]) -> None:
    at = {"step": -1, "point": 0}
    holdings: list[tuple[int, int, int]] = []

    def reach() -> None:
        for death in DEATHS[:]:
            *where, how = death
            if where == [run.rank, at["step"], at["point"]]:
                DEATHS.remove(death)
                if how == "exception":
                    raise ValueError("a bad row")
                if how == "lost":
                    time.sleep(0.5)
                    raise TrafficError("lost", RuntimeError("Connection closed by peer"))
                os.kill(os.getpid(), getattr(signal, how))
        at["point"] += 1

    def with_points(function: Callable[..., Any]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            reach()
            result = function(*args, **options)
            reach()
            return result

        return call

    def steps(stories: Any, of_run: Callable[[Any], Iterator[Any]] = run.steps) -> Iterator[Any]:
        for step, batch in of_run(stories):
            holdings.append(held())
            at.update(step=step, point=0)
            yield step, batch

    for place, name in ((lesson, "causalLLMLoss"), (lesson, "add_up"), (run, "log"), (saving, "together")):
        setattr(place, name, with_points(getattr(place, name)))
    run.steps = steps  # type: ignore[method-assign]
    if "LEAVE_OUT" in os.environ:
        lesson.share_out = lambda _, parts, alive, whole: {rank: [(rank, k) for k in range(parts)] for rank in alive}
    lesson.train(run)
    (run.out / f"held{run.rank}.json").write_text(json.dumps(holdings))


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
