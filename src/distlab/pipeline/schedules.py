"""Pipeline schedules: what each worker computes, in order, as plain lists.

A schedule is a function of (worker, workers, micro-batches) that returns the worker's list of actions; in those below
each worker holds the stage of its own number. The same lists are printed and drawn (`distlab.show_schedule`), checked
and costed (`plan`), and executed (`executor`). To add one, write its function under `@schedule`.
"""

from collections.abc import Callable

from distlab.pipeline.actions import Action, Backward, Forward

Schedule = Callable[[int, int, int], list[Action]]
SCHEDULES: dict[str, Schedule] = {}
ALIASES = {"1f1b": "dapple"}  # other names in the literature


def schedule(order: Schedule) -> Schedule:
    """Register a schedule for `--schedule` under its function's name."""
    SCHEDULES[order.__name__] = order
    return order


def schedule_names() -> list[str]:
    """All that `all_stages` takes."""
    return [*SCHEDULES, *ALIASES]


def all_stages(name: str, workers: int, micro_batches: int) -> list[list[Action]]:
    """All workers' lists of the schedule `name`, one of `schedule_names()`."""
    order = SCHEDULES[ALIASES.get(name, name)]
    return [order(worker, workers, micro_batches) for worker in range(workers)]


@schedule
def naive(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """One micro-batch passes all stages forward and back before the next one enters."""
    return [action for k in range(micro_batches) for action in (Forward(stage, k), Backward(stage, k))]


@schedule
def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al., arXiv 1811.06965).

    The paper runs the backward passes from the last micro-batch to the first. From the first to the last, as here,
    takes as long, and adds up the gradients in the order in which one process does.
    """
    return [kind(stage, k) for kind in (Forward, Backward) for k in range(micro_batches)]


@schedule
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
