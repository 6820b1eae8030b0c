"""Schedules to play with: what the library says about them, in words and in numbers for a drawing."""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence

from distlab.pipeline.actions import ACTION_KINDS, Action, ActionCosts, stages_of
from distlab.pipeline.plan import Plan, Span
from distlab.pipeline.schedules import AUTO, SCHEDULES
from distlab_page.contents import NO_BUBBLE, simulated
from distlab_playground import drawing
from simplellm.errors import require

ACTION = re.compile(r"([A-Za-z])(\d{1,4})('*)")
A_LINE = "give a worker's actions on a line, such as F0 F1 B0 B1, or I0 W0 for a backward pass in two parts"


def bubbles(workers: int, micro_batches: int, steps: int = 1) -> dict[str, float]:
    """Return the mean idle share of each schedule that these sizes can have; equal passes, free messages."""
    names = [name for name in SCHEDULES if name != AUTO and not name.endswith(".py")]
    plans = {name: simulated(name, workers, micro_batches, steps) for name in names}
    return {name: statistics.fmean(plan.bubble) for name, plan in plans.items() if plan}


def verdict(guess: str, bubbles: Mapping[str, float]) -> str:
    """Return whether the guessed schedule leaves almost no bubble, and which do, if any."""
    best = min(bubbles, key=lambda name: bubbles[name])
    none = sorted((name for name in bubbles if bubbles[name] < NO_BUBBLE), key=lambda name: bubbles[name])
    own = f"**{guess}** has {bubbles[guess]:.1%}."
    if not none:
        return f"None of them: the least is that of **{best}**, {bubbles[best]:.1%}. {own}"
    only = "only at the beginning of the first step and at the end of the last"
    found = f"{'Right' if guess in none else 'No'}: almost none is left by **{' and '.join(none)}**, {only}. {own}"
    return (
        f"{found} A backward pass in two parts does it: I, for which another worker waits, comes first, and W fills "
        "the gaps."
    )


def typed(text: str) -> list[list[Action]]:
    """Return the schedule that a text describes: a line for each worker, such as `F0 F1 B0 B1`.

    A worker that holds other stages than the one with its own number names them first: `0 3: F0 F0' B0' B0`.

    Raises:
        InputError: a line cannot be read. Whether the schedule can run, `simulate` says.
    """
    return [_typed_line(worker, line) for worker, line in enumerate(_lines(text))]


def numbered(text: str) -> str:
    """Return the lines of a text, each with the number of its worker."""
    return "\n".join(f"worker {worker} | {line}" for worker, line in enumerate(_lines(text)))


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _typed_line(worker: int, line: str) -> list[Action]:
    before, colon, after = line.rpartition(":")
    held = before.split() if colon else [str(worker)]
    require(all(number.isdecimal() for number in held), f"worker {worker}, {before}: give the numbers of its stages")
    stages = [int(number) for number in held]
    actions = []
    for word in after.split():
        found = ACTION.fullmatch(word)
        require(found is not None, f"worker {worker}, {word}: {A_LINE}")
        assert found is not None
        letter, number, primes = found.groups()
        known = ", ".join(f"{kind} ({ACTION_KINDS[kind].in_words()})" for kind in ACTION_KINDS if kind.isalpha())
        require(letter in ACTION_KINDS, f"worker {worker}, {word}: no such action; there are {known}")
        one = f"worker {worker}, {word}: it holds {len(stages)} stages"
        require(len(primes) < len(stages), f"{one}; name them before a colon, as in 0 3: F0 F0' B0' B0")
        actions.append(ACTION_KINDS[letter](stages[len(primes)], int(number)))
    return actions


def as_typed(plan: Plan) -> str:
    """Return the schedule of a plan as `typed` reads it."""
    lines = []
    for worker, line in enumerate(plan.spans):
        stages = stages_of([span.action for span in line])
        named = "" if stages == [worker] else f"{' '.join(map(str, stages))}: "
        lines.append(named + " ".join(plan.labels[span.action] for span in line))
    return "\n".join(lines)


def says(plan: Plan, names: Sequence[str], played: int) -> str:
    """Return what happens when the action with this number, from 1, starts: what it needed, and who waited."""
    worker, span = drawing.in_order(plan)[played - 1]
    line = plan.spans[worker]
    place = line.index(span)
    idle = span.start - (line[place - 1].end if place else 0.0)
    needs = [str(need) for need in span.action.needs(len(plan.owners)) if need.stage != span.action.stage]
    kind = span.action.in_words()
    begins = f"At {span.start:g}, {names[worker]} begins {plan.labels[span.action]}, {kind} of micro-batch"
    sentence = f"{begins} {span.action.micro_batch}" + f"; it needs {' and '.join(needs)}" * bool(needs)
    return sentence + (f". It was idle for {idle:g} tick{'s' * (idle != 1)} before." if idle > 1e-9 else ".")


def kept(line: Sequence[Span], costs: ActionCosts) -> list[tuple[float, float]]:
    """Return the activations that a worker keeps, as (time, kept from then on), in micro-batches."""
    return [
        (span.end, total)
        for span, total in zip(line, itertools.accumulate(costs.kept_bytes(s.action) for s in line), strict=True)
    ]


def table(plan: Plan, names: Sequence[str], costs: ActionCosts | None = None) -> str:
    """Return a table of all passes; with `costs`, also of the activations that a worker keeps after each."""
    head, lines = ["worker", "pass", "from, ticks", "to, ticks"], list[list[str]]()
    for name, line in zip(names, plan.spans, strict=True):
        cells = [[name, plan.labels[span.action], f"{span.start:g}", f"{span.end:g}"] for span in line]
        if costs is not None:
            for own, (_, size) in zip(cells, kept(line, costs), strict=True):
                own.append(f"{max(0.0, round(size, 9)):g}")
        lines += cells
    return drawing.table([*head, *["micro-batches kept"] * (costs is not None)], lines, "All passes")
