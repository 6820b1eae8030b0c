"""Pipeline schedules: the actions of each worker, in order, as plain lists.

A schedule is a function of (worker, workers, micro-batches) that returns the worker's list of actions. The same lists
are printed and drawn (`distlab.show_schedule`), checked and simulated (`plan`), and executed (`executor`). To add a
schedule, write its function and decorate it with `@schedule`. Only the lists of `auto` are not written here: a search
finds them (`auto.py`), unless a written schedule is faster. `with_recomputation` turns any schedule into one that keeps
less.

In the drawings, a forward pass and each part of a backward pass take one tick. A prime marks a worker's second stage, a
dot an idle tick.
"""

import itertools
import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.pipeline.actions import (
    ACTION_KINDS,
    GRAPH,
    Action,
    ActionCosts,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardAgain,
    ForwardKeepingInput,
    Program,
    Programs,
    RecomputingBackward,
    RecomputingBackwardInput,
    Result,
)
from distlab.pipeline.auto import Limit, find_programs, keeps_at_most, stages_in_v
from distlab.pipeline.plan import simulate
from simplellm.errors import InputError, require

DEFAULT_CHUNKS = 2  # of `interleaved` and `auto`
AUTO = "auto"


@dataclass(frozen=True)
class Schedule:
    """A schedule and its requirements."""

    programs: Callable[..., list[list[Action]]]  # (workers, micro-batches, …) -> all workers' lists
    stages_per_worker: int  # 0: the run chooses
    fits: Callable[[int, int], bool]  # (workers, micro-batches) -> whether the schedule supports them
    needs: str  # the numbers of micro-batches that it supports, in terms of {workers}


SCHEDULES: dict[str, Schedule] = {}
ALIASES = {"1f1b": "dapple"}  # other names in the literature


def schedule(
    *,
    stages_per_worker: int = 1,
    fits: Callable[[int, int], bool] = lambda workers, micro_batches: True,
    needs: str = "",
) -> Callable[[Callable[..., list[Action]]], Callable[..., list[Action]]]:
    """Register a schedule for `--schedule`, under its function's name with dashes for underscores."""

    def register(order: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
        def programs(workers: int, micro_batches: int, **options: Any) -> list[list[Action]]:
            return [order(worker, workers, micro_batches, **options) for worker in range(workers)]

        name = order.__name__.replace("_", "-")
        SCHEDULES.pop(name, None)  # the one registered last is the last, also if it replaces another
        SCHEDULES[name] = Schedule(programs, stages_per_worker, fits, needs)
        return order

    return register


def is_file(name: str) -> bool:
    """Return whether a schedule's name is that of a Python file, which defines it, and has to be run."""
    return name.endswith(".py")


def read_schedule(name: str) -> None:
    """Register the schedule that a file such as `my/order.py` defines, under the file's path; ignore other names.

    The file is run as a module; its last function with `@schedule` is used.

    Raises:
        InputError: there is no such file, it cannot be run, or it defines no schedule.
    """
    if not is_file(name) or name in SCHEDULES:
        return
    require(os.path.isfile(name), f"--schedule {name}: there is no such file")
    before = dict(SCHEDULES)
    try:
        runpy.run_path(name)
    except Exception as error:
        raise InputError(f"--schedule {name}: the file cannot be run: {type(error).__name__}: {error}") from error
    own = [found for known, found in SCHEDULES.items() if before.get(known) is not found]
    require(bool(own), f"--schedule {name}: it defines no schedule: a function with @schedule() before it")
    SCHEDULES[name] = own[-1]


def schedule_names() -> list[str]:
    """Return all names that `all_stages` accepts."""
    return [*SCHEDULES, *ALIASES]


def schedule_of(name: str) -> Schedule:
    """Return the schedule of a name; `InputError` if it is not one of `schedule_names()`."""
    known = ALIASES.get(name, name)
    require(known in SCHEDULES, f"--schedule {name}: give one of {', '.join(schedule_names())}")
    return SCHEDULES[known]


def stages_per_worker(name: str, chunks: int = DEFAULT_CHUNKS) -> int:
    """Return the number of stages of each worker of a schedule; `chunks` if the schedule lets the run choose."""
    return schedule_of(name).stages_per_worker or chunks


def check_schedule(
    name: str, workers: int, micro_batches: int, chunks: int = DEFAULT_CHUNKS, limit: Limit | None = None
) -> Schedule:
    """Return the schedule `name` if it exists and supports these settings; `InputError` otherwise."""
    found = schedule_of(name)
    what = f"--schedule {name} on {workers} worker{'s' * (workers != 1)}, with --micro-batches {micro_batches}"
    require(found.fits(workers, micro_batches), f"{what}: give {found.needs.format(**_sizes(workers))}")
    has_limit = name == AUTO or limit is None
    require(has_limit, f"--keep-at-most {limit} with --schedule {name}: it needs --schedule auto")
    what, fixed = f"--chunks-per-stage {chunks} with --schedule {name}", found.stages_per_worker
    is_right = not fixed or chunks in (fixed, DEFAULT_CHUNKS)
    require(is_right, f"{what}: its workers hold {fixed}; --schedule interleaved takes any number")
    require(name != AUTO or chunks <= 2, f"{what}: give 1 or 2")
    return found


def all_stages(
    name: str,
    workers: int,
    micro_batches: int,
    chunks: int = DEFAULT_CHUNKS,
    costs: ActionCosts | None = None,
    limit: Limit | None = None,
    recompute: bool = False,
) -> list[list[Action]]:
    """Return all workers' lists of the schedule `name`, one of `schedule_names()`.

    Args:
        chunks: stages of each worker, if the schedule lets the run choose.
        costs: the costs for which `auto` searches; without costs, its search is short.
        limit: limit on the activations that `auto` keeps.
        recompute: see `with_recomputation`.

    Raises:
        InputError: there is no such schedule; or it does not support this number of micro-batches with this number of
            workers, or a limit.
    """
    found = check_schedule(name, workers, micro_batches, chunks, limit)
    options: dict[str, Any] = {} if found.stages_per_worker else {"chunks": chunks}
    if name == AUTO:
        options |= {"costs": costs, "limit": limit, "recompute": recompute}
    programs = found.programs(workers, micro_batches, **options)
    return with_recomputation(programs) if recompute else programs


def with_recomputation(programs: Programs) -> list[list[Action]]:
    """Return a schedule whose stages keep only their inputs, and compute the rest again before the backward pass.

    A stage can do so while it waits for the gradient. A backward pass that follows its forward pass at once has nothing
    to wait for; within such a pass, the blocks compute their insides again one by one. Forward passes of other kinds do
    not change.
    """
    stages = len({action.stage for program in programs for action in program})
    return [list(_recomputing(program, stages)) for program in programs]


def _recomputing(program: Program, stages: int) -> Iterator[Action]:
    recomputed = set[Result]()  # graphs that are not kept
    again: dict[type, type[Action]] = {Backward: RecomputingBackward, BackwardInput: RecomputingBackwardInput}
    for action, following in itertools.zip_longest(program, program[1:]):
        place, graph = (action.stage, action.micro_batch), action.result(GRAPH)
        is_followed = type(following) in again and following.micro_batch == action.micro_batch
        if type(action) is Forward and not is_followed:
            recomputed.add(graph)
            yield ForwardKeepingInput(*place)
        elif graph in recomputed and graph in action.needs(stages):
            yield from (ForwardAgain(*place), action)
        else:
            yield again.get(type(action), type(action))(*place)


def _sizes(workers: int) -> dict[str, int]:
    return {"workers": workers, "twice": 2 * workers, "twice_less_1": 2 * workers - 1}


@schedule()
def naive(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Each micro-batch passes forward and backward through all stages before the next one starts.

    worker 0   F0  .  .  . B0  - F1  .  .  . B1  -
    worker 1    . F0 B0  -  .  .  . F1 B1  -  .  .
    """
    return [action for k in range(micro_batches) for action in (Forward(stage, k), Backward(stage, k))]


@schedule()
def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al., arXiv 1811.06965).

    The paper runs the backward passes from the last micro-batch to the first. This function runs them from the first
    to the last, which takes as long, and adds up the gradients in the same order as one process.

        worker 0   F0 F1 F2  .  .  .  .  .  . B0  - B1  - B2  -
        worker 1    . F0 F1 F2  .  .  . B0  - B1  - B2  -  .  .
        worker 2    .  . F0 F1 F2 B0  - B1  - B2  -  .  .  .  .
    """
    return [kind(stage, k) for kind in (Forward, Backward) for k in range(micro_batches)]


@schedule()
def dapple(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """A few forward passes, then one backward and one forward alternately, or 1F1B (Fan et al., arXiv 2007.01045).

    A stage runs ahead only until its first gradient arrives, so stage s of p keeps the activations of at most p - s
    micro-batches.

        worker 0   F0 F1 F2  .  .  .  . B0  -  . B1  -  . B2  -
        worker 1    . F0 F1  .  . B0  - F2 B1  -  . B2  -  .  .
        worker 2    .  . F0 B0  - F1 B1  - F2 B2  -  .  .  .  .
    """
    passes = gpipe(stage, stages, micro_batches)
    forwards, backwards = passes[:micro_batches], passes[micro_batches:]
    ahead = min(stages - stage, micro_batches)
    in_turn = [action for pair in zip(backwards, forwards[ahead:], strict=False) for action in pair]
    return forwards[:ahead] + in_turn + backwards[micro_batches - ahead :]


@schedule(
    stages_per_worker=0,
    fits=lambda workers, micro_batches: micro_batches % workers == 0,
    needs="a multiple of {workers}",
)
def interleaved(worker: int, workers: int, micro_batches: int, chunks: int) -> list[Action]:
    """Each worker holds `chunks` stages, `workers` apart; the bubble is `chunks` times shorter than DAPPLE's.

    Groups of `workers` micro-batches pass the worker's first stage, then its second, and so on; backward in reverse
    order. There are about `chunks` times as many messages (Narayanan et al., arXiv 2104.04473, §2.2).

        worker 0    F0  F1 F0' F1'   .   . B0'   -   . B1'   -  B0   -  B1   -
        worker 1     .  F0  F1 F0' B0'   - F1' B1'   -  B0   -  B1   -   .   .
    """
    passes = range(micro_batches * chunks)

    def action(kind: type[Action], k: int) -> Action:
        chunk = k // workers % chunks
        stage = (chunk if kind is Forward else chunks - 1 - chunk) * workers + worker
        return kind(stage, k // (workers * chunks) * workers + k % workers)

    forwards, backwards = ([action(kind, k) for k in passes] for kind in (Forward, Backward))
    ahead = min(2 * (workers - 1 - worker) + (chunks - 1) * workers, len(passes))
    in_turn = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return forwards[:ahead] + in_turn + backwards[len(passes) - ahead :]


@schedule(fits=lambda workers, micro_batches: micro_batches >= workers, needs="{workers} or more")
def zb_h1(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """DAPPLE, but workers compute weight gradients when they would be idle (Qi et al., arXiv 2401.10241, §2.1).

    No stage keeps more activations than DAPPLE's first stage.

        worker 0   F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
        worker 1    . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        worker 2    .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    p, r, m = stages, stage, micro_batches
    phases = ("F", p - 1 - r), ("F I", r), ("F I W", m - p + 1), ("I W", p - 1 - r), ("W", r)
    return _write_out(phases, [stage])


@schedule(
    fits=lambda workers, micro_batches: micro_batches >= 2 * workers - 1,
    needs="{twice_less_1} or more",
)
def zb_h2(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """More forward passes at first, so that workers idle only at the start and the end of a step.

    If the next step started without waiting, there would be no idle time at all (the same paper, §2.2). The first stage
    keeps the activations of 2 `stages` - 1 micro-batches.

        worker 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4  .  .
        worker 1    . F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4  .
        worker 2    .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    p, r, m = stages, stage, micro_batches
    ahead = 2 * (p - r) - 1
    return _write_out((("F", ahead), ("I F", 2 * r), ("I W F", m - 2 * p + 1), ("I W", ahead), ("W", 2 * r)), [stage])


@schedule(stages_per_worker=2)
def zb_v(worker: int, workers: int, micro_batches: int) -> list[Action]:
    """Worker r holds the stages r and 2p - 1 - r. Micro-batches pass the workers in a V, and the loss is on worker 0.

    Every worker keeps the activations of p micro-batches (the same paper, §6; arXiv 2405.15362).

        worker 0    F0  F1  F2 F0' I0' W0' F1' I1' W1'  F3  I0  W0 F2' I2' W2'  I1  W1 F3' I3' W3'  I2  W2  I3  W3   .
        worker 1     .  F0 F0'  F1 F1' I0' W0'  F2  I0  W0 F2' I1' W1'  F3  I1  W1 F3' I2' W2'  I2 I3'  I3  W2 W3'  W3
    """
    p, r, m = workers, worker, max(2 * workers - 1, micro_batches)
    letters = ["F0"] * (2 * (p - r) - 1) + ["F1", "F0"] * r + ["F1", "I1", "W1"] * (p - r)
    done = Counter(letters)
    while done["F1"] < done["F0"] or done["F0"] < m:
        turn = [*(["F0"] if done["F0"] < m else []), "I0", "W0", "F1", "I1", "W1"]
        letters += turn
        done.update(turn)
    letters += ["I0", "I1"] * r + ["I0", "W0"] * (p - r)
    letters += [letter for letter in ("W1", "W0") for _ in range(m - letters.count(letter))]
    actions = _write_out([(letter, 1) for letter in letters], stages_in_v(worker, workers))
    return [action for action in actions if action.micro_batch < micro_batches]


@schedule(
    stages_per_worker=2,
    fits=lambda workers, micro_batches: micro_batches >= 2 * workers,
    needs="{twice} or more",
)
def dualpipe_v(worker: int, workers: int, micro_batches: int) -> list[Action]:
    """The same V, with whole backward passes where no stage waits for the gradient (DeepSeek-V3, arXiv 2412.19437).

    worker 0    F0  F1  F2 F0' I0' W0' F1'  F3 B1'   - F2'  B0   - B2'   - F3'   .  B1   - B3'   -  I2  W2  I3  W3
    worker 1     .  F0 F0'  F1 F1'  F2 B0'   - F2'  B0   -  F3 B1'   - F3'  B1   - B2'   -  B2   - I3'  I3 W3'  W3
    """
    p, r, m = workers, worker, micro_batches
    back = ["B1", "B0"] * (r + 1)
    back = back[: r + 1] + [letter.replace("B", "I") for letter in back[r + 1 :]]
    phases = [("F0", 2 * (p - r - 1)), ("F0 F1", r + 1), ("I1 W F1", p - r - 1), ("F0 B1 F1 B0", m - 2 * p + r + 1)]
    phases += [("B1 F1 B0", p - r - 1), (" ".join(back), 1), ("W I0", p - r - 1), ("W", r + 1)]
    return _write_out(phases, stages_in_v(worker, workers))


def auto(
    workers: int,
    micro_batches: int,
    chunks: int,
    costs: ActionCosts | None = None,
    limit: Limit | None = None,
    tries: int | None = None,
    recompute: bool = False,
) -> list[list[Action]]:
    """Return the fastest of the result of `find_programs` and the written schedules with the same stages per worker.

    Greedy choices can be slower than a written schedule, most of all in a V with slow messages. Without costs, there is
    nothing to compare: the result is the first try.
    """
    if costs is None:
        return find_programs(workers, micro_batches, chunks, ActionCosts(), limit, 1, recompute)
    limit = limit or Limit(workers)
    found = [find_programs(workers, micro_batches, chunks, costs, limit, tries, recompute)]
    for written in SCHEDULES.values():
        if written.stages_per_worker == chunks and written.fits(workers, micro_batches):
            programs = written.programs(workers, micro_batches)
            counted = with_recomputation(programs) if recompute and limit.is_bytes else programs
            if keeps_at_most(limit, counted, costs):
                found.append(programs)
    run = with_recomputation if recompute else list
    return min(found, key=lambda programs: simulate(run(programs), costs).makespan)


SCHEDULES[AUTO] = Schedule(auto, 0, lambda workers, micro_batches: True, "")


def _write_out(phases: Iterable[tuple[str, int]], stages: Sequence[int]) -> list[Action]:
    """Return actions from phases: ("F0 I1 W", 3) is three times F on the worker's first stage, I on its second, and W.

    Each kind of action takes a stage's micro-batches in order. A "W" without a stage belongs to the oldest pending "I".
    """
    actions: list[Action] = []
    micro_batches: Counter[tuple[type[Action], int]] = Counter()
    pending: list[Action] = []  # each "I" whose "W" has not followed yet
    for letter in [letter for phase, times in phases for letter in phase.split() * times]:
        kind = ACTION_KINDS[letter[0]]
        if kind is BackwardWeight and len(stages) > 1 and len(letter) == 1:
            stage, micro_batch = pending[0].stage, pending[0].micro_batch
        else:
            stage = stages[int(letter[1:] or 0)]
            passes = Backward if kind is BackwardInput else kind
            micro_batch = micro_batches[passes, stage]
            micro_batches[passes, stage] += 1
        if kind is BackwardInput:
            pending.append(kind(stage, micro_batch))
        elif kind is BackwardWeight:
            pending.remove(BackwardInput(stage, micro_batch))
        actions.append(kind(stage, micro_batch))
    return actions
