"""Pipeline schedules: what each worker computes, in order, as plain lists.

A schedule is a function of (worker, workers, micro-batches) that returns the worker's list of actions. The same lists
are printed and drawn (`distlab.show_schedule`), checked and costed (`plan`), and executed (`executor`). To add one,
write its function under `@schedule`.

In the drawings each column is a tick, F a forward and B a whole backward pass, I its part for the input and W that for
the weights, for two workers and few micro-batches; ' marks the second stage of a worker.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from distlab.pipeline.actions import KINDS, Action, Backward, BackwardInput, BackwardWeight, Forward
from simplellm.errors import require

Order = Callable[[int, int, int], list[Action]]
DEFAULT_CHUNKS = 2  # of `interleaved`


@dataclass(frozen=True)
class Schedule:
    """A schedule, and what it asks of a run."""

    order: Callable[..., list[Action]]
    stages_per_worker: int  # 0: as many as the run asks for
    fits: Callable[[int, int], bool]  # (workers, micro-batches)
    needs: str  # what it needs to fit, in terms of {workers}


SCHEDULES: dict[str, Schedule] = {}
ALIASES = {"1f1b": "dapple"}  # other names in the literature


def schedule(
    *,
    stages_per_worker: int = 1,
    fits: Callable[[int, int], bool] = lambda workers, micro_batches: True,
    needs: str = "",
) -> Callable[[Callable[..., list[Action]]], Callable[..., list[Action]]]:
    """Register a schedule for `--schedule`, under its function's name with dashes."""

    def register(order: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
        SCHEDULES[order.__name__.replace("_", "-")] = Schedule(order, stages_per_worker, fits, needs)
        return order

    return register


def schedule_names() -> list[str]:
    """All that `all_stages` takes."""
    return [*SCHEDULES, *ALIASES]


def stages_per_worker(name: str, chunks: int = DEFAULT_CHUNKS) -> int:
    """How many stages each worker of a schedule holds; `chunks` where that can be chosen."""
    return SCHEDULES[ALIASES.get(name, name)].stages_per_worker or chunks


def all_stages(name: str, workers: int, micro_batches: int, chunks: int = DEFAULT_CHUNKS) -> list[list[Action]]:
    """All workers' lists of the schedule `name`, one of `schedule_names()`.

    Args:
        chunks: stages of each worker, where the schedule leaves the choice.

    Raises:
        InputError: the schedule cannot do so many micro-batches with so many workers.
    """
    found = SCHEDULES[ALIASES.get(name, name)]
    what = f"--schedule {name} on {workers} workers, with --micro-batches {micro_batches}"
    require(found.fits(workers, micro_batches), f"{what}: give {found.needs.format(**_sizes(workers))}")
    options = {} if found.stages_per_worker else {"chunks": chunks}
    return [found.order(worker, workers, micro_batches, **options) for worker in range(workers)]


def _sizes(workers: int) -> dict[str, int]:
    return {"workers": workers, "twice": 2 * workers, "twice_less_1": 2 * workers - 1}


@schedule()
def naive(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """One micro-batch passes all stages forward and back before the next one enters."""
    return [action for k in range(micro_batches) for action in (Forward(stage, k), Backward(stage, k))]


@schedule()
def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al., arXiv 1811.06965).

    The paper runs the backward passes from the last micro-batch to the first. From the first to the last, as here,
    takes as long, and adds up the gradients in the order in which one process does.
    """
    return [kind(stage, k) for kind in (Forward, Backward) for k in range(micro_batches)]


@schedule()
def dapple(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """A few forward passes, then one backward and one forward in turn; also called 1F1B (Fan et al., arXiv 2007.01045).

    A stage runs ahead just until the first gradient returns, so it never keeps the activations of more micro-batches
    than there are stages from it on.
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
    """Each worker has several stages, `workers` apart, and a bubble that is shorter by as much.

    Groups of `workers` micro-batches pass its first stage, then its second, and so on; back in reverse. Messages are
    `chunks` times as many (Narayanan et al., arXiv 2104.04473, §2.2).
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
    """DAPPLE whose workers do weight gradients when they would be idle (Qi et al., arXiv 2401.10241, §2.1).

    It keeps no more activations than DAPPLE's first stage.
    """
    p, r, m = stages, stage, micro_batches
    phases = ("F", p - 1 - r), ("F I", r), ("F I W", m - p + 1), ("I W", p - 1 - r), ("W", r)
    return _write_out(phases, [stage])


@schedule(
    fits=lambda workers, micro_batches: micro_batches >= 2 * workers - 1,
    needs="{twice_less_1} or more",
)
def zb_h2(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """More forward passes first, so that only the ends of a step idle: nothing, where steps run on (the same, §2.2).

    The first stage keeps the activations of 2 `stages` - 1 micro-batches.
    """
    p, r, m = stages, stage, micro_batches
    ahead = 2 * (p - r) - 1
    return _write_out((("F", ahead), ("I F", 2 * r), ("I W F", m - 2 * p + 1), ("I W", ahead), ("W", 2 * r)), [stage])


@schedule(stages_per_worker=2)
def zb_v(worker: int, workers: int, micro_batches: int) -> list[Action]:
    """Worker r has the stages r and 2p - 1 - r: down and up again, in a V, so that the loss is on worker 0.

    Activations are kept for as long on all workers, those of p micro-batches (the same, §6; arXiv 2405.15362).
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
    actions = _write_out([(letter, 1) for letter in letters], [r, 2 * p - 1 - r])
    return [action for action in actions if action.micro_batch < micro_batches]


@schedule(
    stages_per_worker=2,
    fits=lambda workers, micro_batches: micro_batches >= 2 * workers,
    needs="{twice} or more",
)
def dualpipe_v(worker: int, workers: int, micro_batches: int) -> list[Action]:
    """The same V, with whole backward passes where nobody waits for the gradient (DeepSeek-V3, arXiv 2412.19437)."""
    p, r, m = workers, worker, micro_batches
    back = ["B1", "B0"] * (r + 1)
    back = back[: r + 1] + [letter.replace("B", "I") for letter in back[r + 1 :]]
    phases = [("F0", 2 * (p - r - 1)), ("F0 F1", r + 1), ("I1 W F1", p - r - 1), ("F0 B1 F1 B0", m - 2 * p + r + 1)]
    phases += [("B1 F1 B0", p - r - 1), (" ".join(back), 1), ("W I0", p - r - 1), ("W", r + 1)]
    return _write_out(phases, [r, 2 * p - 1 - r])


def _write_out(phases: Iterable[tuple[str, int]], stages: Sequence[int]) -> list[Action]:
    """Actions from letters, as in ("F0 I1 W", 3): three times these, on the worker's first, second and oldest stage.

    Each kind of action takes a stage's micro-batches in order; a "W" without a stage is that of the oldest "I".
    """
    actions: list[Action] = []
    micro_batches: Counter[tuple[type[Action], int]] = Counter()
    pending: list[Action] = []  # of the backward passes in two parts, the first parts
    for letter in [letter for phase, times in phases for letter in phase.split() * times]:
        kind = KINDS[letter[0]]
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
