"""Pipeline schedules: what each stage computes, in order, as plain lists.

A schedule is a function of (stage, stages, micro-batches) that returns the stage's list of actions. The same lists are
printed and drawn (`distlab.show_schedule`), checked and costed (`plan`), and executed (`executor`). To
add one, write its function under `@schedule`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One stage's work on one micro-batch."""

    stage: int
    micro_batch: int


class Forward(Action):
    """Activations of the stage before -> this stage's activations."""

    def __str__(self) -> str:
        return f"F{self.micro_batch}"


class Backward(Action):
    """Gradients from the stage after -> gradients of this stage's weights, and of what the stage before sent."""

    def __str__(self) -> str:
        return f"B{self.micro_batch}"


Program = Sequence[Action]  # what one worker does, in order
Schedule = Callable[[int, int, int], list[Action]]
SCHEDULES: dict[str, Schedule] = {}


def schedule(order: Schedule) -> Schedule:
    """Make a schedule known to `--schedule` by its function's name."""
    SCHEDULES[order.__name__] = order
    return order


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


def all_stages(name: str, stages: int, micro_batches: int) -> list[list[Action]]:
    """The lists of all stages of the schedule called `name`, one of `SCHEDULES`."""
    return [SCHEDULES[name](stage, stages, micro_batches) for stage in range(stages)]


def needs(action: Action, stages: int) -> list[Action]:
    """What must have been computed before: the action whose message it receives, and a backward pass's forward."""
    if isinstance(action, Forward):
        return [Forward(action.stage - 1, action.micro_batch)] if action.stage > 0 else []
    own = Forward(action.stage, action.micro_batch)
    return [own, Backward(action.stage + 1, action.micro_batch)] if action.stage < stages - 1 else [own]


def receiver(action: Action) -> int:
    """The stage that an action's result goes to; outside the pipeline for the last forward and the first backward."""
    return action.stage + (1 if isinstance(action, Forward) else -1)


def message(action: Action) -> str:
    """What the result of an action is called when it travels to the next stage."""
    content = "activations" if isinstance(action, Forward) else "gradients"
    return f"the {content} of micro-batch {action.micro_batch}"
