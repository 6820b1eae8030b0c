"""Simulates a pipeline schedule: is it correct, how long does it take, what does it keep?

The rules are those of the executor: a worker does its actions in order, an action starts when what it needs has
arrived, and a send never keeps its sender waiting. What an action needs, gives, costs and keeps, it says itself.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distlab.comm.wait_graph import find_cycle
from distlab.pipeline.actions import (
    WEIGHT_GRADIENTS,
    Action,
    ActionCosts,
    Program,
    Result,
    describe_stages,
    labels,
    of_stage,
)
from simplellm.errors import InputError

Link = tuple[int, int, str]  # sender, receiver (workers), kind of message


class ScheduleError(InputError):
    """A schedule that cannot run, or would not train what one process trains."""


@dataclass(frozen=True)
class Span:
    """An action from `start` to `end`, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """A schedule that has been simulated; lists are per worker."""

    owners: dict[int, int]  # by stage, the worker that holds it
    rows: list[str]  # what it holds: "stage 1", "stages 1 and 4"
    labels: dict[Action, str]  # what actions are called beside the worker's others
    spans: list[list[Span]]  # its actions with their times
    makespan: float  # seconds from the first action's start to the last one's end
    bubble: list[float]  # the fraction of the makespan in which it does not compute
    peak_live: list[int]  # the most micro-batches of which its stages together keep activations at a time
    peak_bytes: list[float]  # the most bytes of activations that it keeps at a time
    sent_bytes: list[float]  # to other workers
    messages: dict[Link, list[Result]]  # what goes over each link, in order
    takers: dict[Result, Action]  # by result that goes to another stage, the action that needs it


def simulate(programs: Sequence[Program], costs: ActionCosts | None = None) -> Plan:
    """Check a schedule and give its times.

    Args:
        programs: what each worker does, in order; a stage belongs to one worker, which may hold several.
        costs: by default a forward pass takes 1 second, a backward pass 2, and messages nothing.

    Raises:
        ScheduleError: with a sentence that names what is missing, repeated or out of order, or the stages that wait
            for each other.
    """
    costs = costs or ActionCosts()
    owners, producers = _check_complete(programs)
    takers = find_takers(programs)
    messages = _check_links(programs, owners, takers)
    spans = _run(programs, owners, producers, costs)
    makespan = max(span.end for line in spans for span in line)
    kept = [list(_kept(program, costs)) for program in programs]
    sent = [sum(len(sent) for (sender, *_), sent in messages.items() if sender == w) for w in range(len(programs))]
    return Plan(
        owners=owners,
        rows=[describe_stages(program) for program in programs],
        labels=labels(programs),
        spans=spans,
        makespan=makespan,
        bubble=[1 - sum(span.end - span.start for span in line) / makespan for line in spans],
        peak_live=[max(count for count, _ in line) for line in kept],
        peak_bytes=[max(size for _, size in line) for line in kept],
        sent_bytes=[count * costs.message_bytes for count in sent],
        messages=messages,
        takers=takers,
    )


def find_takers(programs: Sequence[Program]) -> dict[Result, Action]:
    """By result that goes to another stage, the action that needs it, in the order in which workers need them.

    Raises:
        ScheduleError: two actions need it.
    """
    takers: dict[Result, Action] = {}
    actions = [action for program in programs for action in program]
    stages = len({action.stage for action in actions})
    for action in actions:
        for result in action.needs(stages):
            if result.stage != action.stage and takers.setdefault(result, action) != action:
                raise ScheduleError(
                    f"stage {action.stage} needs {result} for {takers[result]} and for {action}; it is sent once"
                )
    return takers


def busy_workers(plan: Plan) -> dict[Action, int]:
    """By action, the most workers that compute at a time while it does, its own included."""
    spans = [span for line in plan.spans for span in line]

    def busy(moment: float) -> int:
        return sum(span.start <= moment < span.end for span in spans)

    return {
        own.action: max((busy(other.start) for other in spans if own.start <= other.start < own.end), default=1)
        for own in spans
    }


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """The idle fraction of GPipe and DAPPLE with equal stages and free messages: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def _check_complete(programs: Sequence[Program]) -> tuple[dict[int, int], dict[Result, Action]]:
    """The worker of each stage, and the action that computes each result.

    All that is needed and every weight gradient must be computed, once, and on its own stage before it is needed.
    """
    owners: dict[int, int] = {}
    producers: dict[Result, Action] = {}
    order: dict[Action, int] = {}  # each action's place in its worker's program
    if not programs:
        raise ScheduleError("a schedule without workers trains nothing; give at least 1 stage")
    for worker, program in enumerate(programs):
        if not program:
            raise ScheduleError(f"worker {worker} has no actions; give every worker a stage and micro-batches")
        for place, action in enumerate(program):
            stage = action.stage
            if stage < 0 or action.micro_batch < 0:
                raise ScheduleError(f"stage {stage} runs {action}; stages and micro-batches count from 0")
            if owners.setdefault(stage, worker) != worker:
                raise ScheduleError(
                    f"stage {stage} belongs to one worker, and {owners[stage]} and {worker} both run it"
                )
            if order.setdefault(action, place) != place:
                raise ScheduleError(f"stage {stage} runs {action} twice; every action runs once")
            for result in action.results:
                if producers.setdefault(result, action) != action:
                    raise ScheduleError(
                        f"stage {stage} computes {result} twice, in {producers[result]} and in {action}"
                    )
    for action in order:
        for result in action.needs(len(owners)):
            source = producers.get(result)
            if source is None:
                what = f"{result}, which {action} of stage {action.stage} needs"
                raise ScheduleError(f"stage {result.stage} never computes {what}")
            if source.stage == action.stage and order[source] > order[action]:
                raise ScheduleError(f"stage {action.stage} runs {action} before {source}")
    for stage in range(1 + max(owners)):
        for micro_batch in range(1 + max(action.micro_batch for action in order)):
            result = Result(WEIGHT_GRADIENTS, stage, micro_batch)
            if result not in producers:
                raise ScheduleError(f"stage {stage} never computes {result}")
    return owners, producers


def _check_links(
    programs: Sequence[Program], owners: dict[int, int], takers: dict[Result, Action]
) -> dict[Link, list[Result]]:
    """What goes over each link; messages carry no names on NCCL, so both ends must agree on the order."""

    def by_link(results: Iterable[Result]) -> dict[Link, list[Result]]:
        links: dict[Link, list[Result]] = defaultdict(list)
        for result in results:
            sender, receiver = owners[result.stage], owners[takers[result].stage]
            if sender != receiver:
                links[sender, receiver, result.kind].append(result)
        return links

    actions = (action for program in programs for action in program)
    sent = by_link(result for action in actions for result in action.results if result in takers)
    for link, expected in by_link(takers).items():
        for given, wanted in zip(sent[link], expected, strict=True):
            if given != wanted:
                of_stage = f" of stage {wanted.stage}" if wanted.stage != given.stage else ""
                raise ScheduleError(
                    f"stage {given.stage} sends {given} where its neighbour on worker {link[1]} "
                    f"expects {wanted}{of_stage}; both ends of a link must agree on the order"
                )
    return dict(sent)


def _run(
    programs: Sequence[Program], owners: dict[int, int], producers: dict[Result, Action], costs: ActionCosts
) -> list[list[Span]]:
    """Let every worker go as far as it can, until all have finished or none can move."""
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in programs]
    while True:
        waits: dict[int, tuple[Action, Result]] = {}  # by worker, the action that cannot start, and for want of what
        moved = False
        for worker, program in enumerate(programs):
            for action in program[len(spans[worker]) :]:
                needed = action.needs(len(owners))
                missing = [result for result in needed if producers[result] not in ended]
                if missing:
                    waits[worker] = action, missing[0]
                    break
                arrivals = [ended[producers[r]] + costs.transfer * (owners[r.stage] != worker) for r in needed]
                start = max([*arrivals, spans[worker][-1].end if spans[worker] else 0.0])
                ended[action] = start + costs.seconds(action)
                spans[worker].append(Span(action, start, ended[action]))
                moved = True
        if not waits:
            return spans
        if not moved:
            cycle = find_cycle({worker: [owners[result.stage]] for worker, (_, result) in waits.items()})
            sentences = (
                f"stage {action.stage}, before {action}, waits for {result} from stage {result.stage}"
                for action, result in (waits[worker] for worker in cycle)
            )
            raise ScheduleError(f"deadlock: {'; '.join(sentences)}")


def _kept(program: Program, costs: ActionCosts) -> Iterator[tuple[int, float]]:
    """Micro-batches and bytes of which activations are kept after each action."""
    shares: dict[tuple[int, int], float] = defaultdict(float)
    live, size = 0, 0.0
    for action in program:
        key = action.stage, action.micro_batch
        before = shares[key]
        shares[key] += action.keeps
        live += (shares[key] > 1e-9) - (before > 1e-9)  # shares that add up to nothing may miss it by rounding
        size += action.keeps * of_stage(costs.activation_bytes, action.stage)
        yield live, size
