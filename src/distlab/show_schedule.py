"""Show a pipeline schedule: a table of clock ticks, its costs, and with --png a figure.

    ./launch.sh show-schedule dapple --stages 3 --micro-batches 8
    ./launch.sh show-schedule gpipe --stages 4 --micro-batches 8 --png gpipe.png
    ./launch.sh show-schedule zb-h2 --stages 4 --micro-batches 8 --steps 10 --run-on
    ./launch.sh show-schedule dapple --pipelines 2 --dead 4
    ./launch.sh show-schedule auto --chunks-per-stage 1 --cost-per-stage 1,1,2 --keep-at-most 4

In place of a name, give the file of a schedule of your own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from distlab.pipeline.actions import ActionCosts, Programs
from distlab.pipeline.auto import read_limit
from distlab.pipeline.plan import Plan, ideal_bubble, in_a_row, simulate
from distlab.pipeline.rerouting import reroute
from distlab.pipeline.schedules import (
    ALIASES,
    DEFAULT_CHUNKS,
    all_stages,
    read_schedule,
    schedule_names,
    stages_per_worker,
)
from distlab.settings.common import shown_as
from simplellm import command_line
from simplellm.errors import require


@dataclass
class Request:
    """The schedule to show."""

    schedule: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="|".join(schedule_names()))]
    """name of the schedule, or a file that defines one"""
    stages: int = 3
    """workers of the pipeline: with most schedules, each has one stage"""
    micro_batches: int = 3
    """parts that the batch is split into"""
    forward: int = 1
    """ticks of a forward pass"""
    backward: int = 2
    """ticks of a backward pass"""
    weight_share: float = 0.5
    """fraction of a backward pass in two parts that is for the weights (W)"""
    cost_per_stage: Annotated[str | None, shown_as("N,N,...", "default: all stages cost the same")] = None
    """factors for the ticks of each stage's passes, e.g. 1,1,1,2"""
    chunks_per_stage: int = DEFAULT_CHUNKS
    """of interleaved and auto: stages of each worker; auto: 1 or 2"""
    keep_at_most: Annotated[str | None, shown_as("N", "default: as many as workers")] = None
    """of auto: micro-batches whose activations a worker keeps at most"""
    transfer: int = 0
    """ticks that a message travels"""
    steps: int = 1
    """with --run-on: steps in a row"""
    run_on: bool = False
    """no wait for all workers at the end of a step; micro-batches are numbered on"""
    recompute: bool = False
    """keep only the inputs of stages, and compute the rest again (R)"""
    pipelines: int = 1
    """pipelines that follow the schedule; worker j of pipeline i has the number i * stages + j"""
    dead: Annotated[str | None, shown_as("N,N,...", "default: none")] = None
    """with --pipelines: workers that are dead, and whose work others do, as with --repair; marked by a star"""
    png: Path | None = None
    """figure to draw"""


def plan_of(request: Request) -> tuple[str, Plan, ActionCosts]:
    """Return a title, the schedule as simulated, and its costs. Raises `InputError` for a wrong request."""
    read_schedule(request.schedule)
    schedules = schedule_names()
    require(request.schedule in schedules, f"{request.schedule}: no such schedule; there are {', '.join(schedules)}")
    ones = dict.fromkeys(
        ("stages", "micro_batches", "forward", "backward", "chunks_per_stage", "steps", "pipelines"), 1
    )
    for name, least in {**ones, "transfer": 0}.items():
        value = getattr(request, name)
        require(value >= least, f"--{name.replace('_', '-')} {value}: must be at least {least}")
    require(0 < request.weight_share < 1, f"--weight-share {request.weight_share}: must be between 0 and 1")
    p, m, steps = request.stages, request.micro_batches, request.steps
    require(steps == 1 or request.run_on, f"--steps {steps}: give --run-on too; without it, all steps are the same")
    held = stages_per_worker(request.schedule, request.chunks_per_stage)
    workers = f"{p} stages" if held == 1 else f"{p} workers with {held} stages each"
    title = f"{request.schedule}, {workers}, {m} micro-batch{'es' * (m > 1)}"
    title += f", {steps} steps that run on" * (steps > 1) + ", recomputed" * request.recompute
    programs, costs = _programs_and_costs(request)
    if request.pipelines == 1:
        given = f"--dead {request.dead}"
        require(request.dead is None, f"{given}: give --pipelines 2 or more, whose workers can replace it")
        return title, simulate(in_a_row(programs, steps), costs), costs
    require(steps == 1 and not request.recompute, "--pipelines with --steps or --recompute: leave one of them out")
    return f"{title}, {request.pipelines} pipelines", _plan_of_pipelines(request, programs, costs), costs


def show(request: Request) -> Iterator[str]:
    """Yield the lines of the table and the costs; also draw the figure. Raises `InputError` for a wrong request."""
    title, plan, _ = plan_of(request)
    p, m, steps = request.stages, request.micro_batches, request.steps
    times = [time for spans in plan.spans for span in spans for time in (span.start, span.end)]
    parts = f"--backward {request.backward} with --weight-share {request.weight_share}"
    is_whole = all(math.isclose(time, round(time), abs_tol=1e-6) for time in times)
    require(is_whole, f"{parts}: both parts of a backward pass must take whole ticks")
    yield f"# {title}; ticks: forward {request.forward}, backward {request.backward}, message {request.transfer}"
    yield from table(plan)
    for name, bubble, kept in zip(plan.rows, plan.bubble, plan.peak_bytes, strict=True):
        yield f"# {name}: idle {bubble:.1%}, keeps the activations of at most {kept:g} micro-batch{'es' * (kept > 1)}"
    yield f"# {plan.makespan:.0f} ticks; {sum(map(len, plan.messages.values()))} messages"
    if steps > 1:
        yield f"# idle on average, {steps} steps: {sum(plan.bubble) / p:.1%}"
    has_formula = ALIASES.get(request.schedule, request.schedule) in ("gpipe", "dapple")
    is_usual = not (request.recompute or request.transfer or request.cost_per_stage)
    if has_formula and is_usual and steps == request.pipelines == 1:
        yield f"# idle by the formula (p - 1) / (m + p - 1): {ideal_bubble(p, m):.1%}"
    if request.png is not None:
        from distlab.reports.timeline import draw, planned_panel

        draw(request.png, [planned_panel(title, plan)])
        yield f"# drawn to {request.png}"


def _programs_and_costs(request: Request) -> tuple[Programs, ActionCosts]:
    """Return the schedule and its costs; activations are counted in micro-batches of all the stages of a worker."""
    name, workers = request.schedule, request.stages
    held = stages_per_worker(name, request.chunks_per_stage)
    factors = _read_factors(request.cost_per_stage, workers * held)
    costs = ActionCosts(
        [request.forward * factor for factor in factors],
        [request.backward * factor for factor in factors],
        request.transfer,
        activation_bytes=1 / held,
        weight_share=request.weight_share,
    )
    limit = None if request.keep_at_most is None else read_limit(request.keep_at_most)
    in_bytes = limit is not None and limit.is_bytes
    require(not in_bytes, f"--keep-at-most {request.keep_at_most}: give micro-batches; only a run knows their bytes")
    sizes = workers, request.micro_batches, request.chunks_per_stage
    return all_stages(name, *sizes, costs, limit, request.recompute), costs


def _plan_of_pipelines(request: Request, programs: Programs, costs: ActionCosts) -> Plan:
    """Return the plan of the workers that are alive, each with its pipeline, and stars at the actions of guests."""
    workers, p = range(request.pipelines * request.stages), request.stages
    parts = [] if request.dead is None else request.dead.split(",")
    dead = [int(part) if part.isdecimal() else -1 for part in parts]
    alive = [worker for worker in workers if worker not in dead]
    stages = {worker % p for worker in alive}
    sentence = f"--dead {request.dead}: give numbers from 0 to {len(workers) - 1}, not all that have the same stage"
    require(all(worker in workers for worker in dead) and len(stages) == p, sentence)
    plan = simulate(reroute(programs, request.pipelines, alive, costs), costs, holders=request.pipelines)
    guests = {
        span.action
        for worker, spans in zip(alive, plan.spans, strict=True)
        for span in spans
        if span.action.micro_batch // request.micro_batches != worker // p
    }
    marked = {action: label + "*" * (action in guests) for action, label in plan.labels.items()}
    rows = [f"{row} of {worker // p}" for worker, row in zip(alive, plan.rows, strict=True)]
    return replace(plan, labels=marked, rows=rows)


def _read_factors(text: str | None, stages: int) -> list[int]:
    """Return the factors of `--cost-per-stage`."""
    if text is None:
        return [1] * stages
    factors = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    is_right = len(factors) == stages and min(factors) >= 1
    require(is_right, f"--cost-per-stage {text}: give a whole number, 1 or more, for each of {stages} stages")
    return factors


def table(plan: Plan) -> Iterator[str]:
    """Yield a row for each worker, with a column for each tick; dashes continue a pass that takes several ticks."""
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


command = command_line.as_command(main, Request, __doc__)

if __name__ == "__main__":
    command_line.run(main, Request, __doc__)
