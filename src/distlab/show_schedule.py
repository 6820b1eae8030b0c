"""Show a pipeline schedule: a table of clock ticks, what it costs, and with --png a figure.

python -m distlab.show_schedule dapple --stages 3 --micro-batches 8
python -m distlab.show_schedule gpipe --stages 4 --micro-batches 8 --png gpipe.png
python -m distlab.show_schedule zb-h2 --stages 4 --micro-batches 8 --steps 10 --run-on
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from distlab.pipeline.actions import ActionCosts, Programs
from distlab.pipeline.plan import Plan, ideal_bubble, in_a_row, simulate
from distlab.pipeline.schedules import ALIASES, all_stages, schedule_names, with_recomputation
from simplellm import command_line
from simplellm.errors import require


@dataclass
class Request:
    """What to show."""

    schedule: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="|".join(schedule_names()))]
    """name of the schedule"""
    stages: int = 3
    """stages of the pipeline"""
    micro_batches: int = 3
    """parts that the batch is split into"""
    forward: int = 1
    """ticks of a forward pass"""
    backward: int = 2
    """ticks of a backward pass"""
    transfer: int = 0
    """ticks that a message travels"""
    steps: int = 1
    """with --run-on: steps in a row"""
    run_on: bool = False
    """no wait for all workers at the end of a step; micro-batches are numbered on"""
    recompute: bool = False
    """keep only the inputs of stages, and compute the rest again (R)"""
    png: Path | None = None
    """figure to draw"""


def show(request: Request) -> Iterator[str]:
    """The lines of the table and of the costs; draws the figure, too. Raises `InputError` for a wrong request."""
    schedules = schedule_names()
    require(request.schedule in schedules, f"{request.schedule}: no such schedule; there are {', '.join(schedules)}")
    least_values = {"stages": 1, "micro_batches": 1, "forward": 1, "backward": 1, "transfer": 0, "steps": 1}
    for name, least in least_values.items():
        value = getattr(request, name)
        require(value >= least, f"--{name.replace('_', '-')} {value}: must be at least {least}")
    p, m, steps = request.stages, request.micro_batches, request.steps
    require(steps == 1 or request.run_on, f"--steps {steps}: without --run-on, they are {steps} times the same")
    title = f"{request.schedule}, {p} stages, {m} micro-batches" + f", {steps} steps that run on" * (steps > 1)
    costs = ActionCosts(request.forward, request.backward, request.transfer)
    programs: Programs = all_stages(request.schedule, p, m)
    if request.recompute:
        title, programs = f"{title}, recomputed", with_recomputation(programs)
    plan = simulate(in_a_row(programs, steps), costs)
    yield f"# {title}; ticks: forward {request.forward}, backward {request.backward}, message {request.transfer}"
    yield from table(plan)
    for name, bubble, live in zip(plan.rows, plan.bubble, plan.peak_live, strict=True):
        yield f"# {name}: idle {bubble:.1%}, keeps the activations of {live} micro-batch{'es' * (live > 1)} at most"
    yield f"# {plan.makespan:.0f} ticks; {sum(map(len, plan.messages.values()))} messages"
    if steps > 1:
        yield f"# idle on average, {steps} steps: {sum(plan.bubble) / p:.1%}"
    has_formula = ALIASES.get(request.schedule, request.schedule) in ("gpipe", "dapple") and not request.recompute
    if has_formula and steps == 1 and not request.transfer:
        yield f"# idle by the formula (p - 1) / (m + p - 1): {ideal_bubble(p, m):.1%}"
    if request.png is not None:
        from distlab.reports.timeline import draw, planned_panel

        draw(request.png, [planned_panel(title, plan)])
        yield f"# drawn to {request.png}"


def table(plan: Plan) -> Iterator[str]:
    """A row for each worker, a column for each tick; a pass that takes several is continued by dashes."""
    ticks, rows = round(plan.makespan), plan.rows
    width = 1 + max(len(str(ticks - 1)), *map(len, plan.labels.values()))
    first = max(9, *(1 + len(row) for row in rows))
    yield f"{'tick':<{first}}" + "".join(f"{tick:>{width}}" for tick in range(ticks))
    for row, spans in zip(rows, plan.spans, strict=True):
        cells = ["."] * ticks
        for span in spans:
            start, end = round(span.start), round(span.end)
            cells[start:end] = [plan.labels[span.action]] + ["-"] * (end - start - 1)
        yield f"{row:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells)


def main(request: Request) -> None:
    for line in show(request):
        print(line)


if __name__ == "__main__":
    command_line.run(main, Request, __doc__)
