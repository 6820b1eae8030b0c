"""Pipeline schedules: what each worker computes, in order, as plain lists.

A schedule is a function of (worker, workers, micro-batches) that returns the worker's list of actions; where each
worker holds one stage, as in those below, it is that stage. The same lists are printed and drawn
(`distlab.show_schedule`), checked and costed (`plan`), and executed (`executor`). To add one, write its function under
`@schedule`; to add a kind of action, see `actions`.
"""

from collections.abc import Callable

from distlab.pipeline.actions import Action, Backward, Forward

Schedule = Callable[[int, int, int], list[Action]]
SCHEDULES: dict[str, Schedule] = {}
ALIASES = {"1f1b": "dapple"}  # what the literature also calls them


def schedule(order: Schedule) -> Schedule:
    """Make a schedule known to `--schedule` by its function's name."""
    SCHEDULES[order.__name__] = order
    return order


def schedule_names() -> list[str]:
    """All that `all_stages` takes."""
    return [*SCHEDULES, *ALIASES]


def all_stages(name: str, workers: int, micro_batches: int) -> list[list[Action]]:
    """The lists of all workers of the schedule called `name`, one of `schedule_names()`."""
    order = SCHEDULES[ALIASES.get(name, name)]
    return [order(worker, workers, micro_batches) for worker in range(workers)]


@schedule
def naive(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """One micro-batch goes all the way forward and all the way back before the next one enters."""
    return [action for k in range(micro_batches) for action in (Forward(stage, k), Backward(stage, k))]


@schedule
def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al., arXiv 1811.06965).

    The paper goes back from the last micro-batch to the first; from the first to the last, as here, takes as long, and
    adds up the gradients in the order in which one process does.
    """
    forwards, backwards = _passes(stage, micro_batches)
    return forwards + backwards


@schedule
def dapple(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """After a few forward passes, one backward and one forward in turn (Fan et al., arXiv 2007.01045).

    The literature also calls it 1F1B. A stage runs ahead just so far that the first gradient returns when it would have
    nothing else to do; so it never keeps the activations of more micro-batches than there are stages from it on.
    """
    forwards, backwards = _passes(stage, micro_batches)
    ahead = min(stages - stage, micro_batches)
    in_turn = [action for pair in zip(backwards, forwards[ahead:], strict=False) for action in pair]
    return forwards[:ahead] + in_turn + backwards[micro_batches - ahead :]


def _passes(stage: int, micro_batches: int) -> tuple[list[Action], list[Action]]:
    """A stage's forward passes and its backward passes, each in the order of the micro-batches."""
    return [Forward(stage, k) for k in range(micro_batches)], [Backward(stage, k) for k in range(micro_batches)]
