"""Simulates a pipeline schedule: is it correct, how long does it take, what does it keep?

The rules are those of the executor: a worker does its actions in order, an action starts when what it needs has
arrived, and a send never keeps its sender waiting. What an action needs, gives, costs and keeps, it says itself.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distlab.comm.wait_graph import find_cycle
from distlab.pipeline.actions import WEIGHT_GRADIENTS, Action, ActionCosts, Program, Result, labels, of_stage
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
    """A schedule that has been simulated.

    Attributes:
        owners: by stage, the worker that holds it.
        labels: by action, what it is called in tables, traces and figures.
        spans: per worker, its actions with their times.
        makespan: seconds from the first action's start to the last one's end.
        bubble: per worker, the fraction of the makespan in which it does not compute.
        peak_live: per worker, the most micro-batches of which its stages together keep activations at a time.
        peak_bytes: per worker, the most bytes of activations kept at a time.
        sent_bytes: per worker, what it sends to others.
        messages: what goes over each link, in order.
    """

    owners: dict[int, int]
    labels: dict[Action, str]
    spans: list[list[Span]]
    makespan: float
    bubble: list[float]
    peak_live: list[int]
    peak_bytes: list[float]
    sent_bytes: list[float]
    messages: dict[Link, list[Result]]


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
    owners = _find_owners(programs)
    producers = _check_complete(programs, owners)
    messages = _check_links(programs, owners)
    spans = _run(programs, producers, costs, owners)
    makespan = max(span.end for line in spans for span in line)
    kept = [list(_kept(program, costs)) for program in programs]
    sent = [sum(len(sent) for link, sent in messages.items() if link[0] == w) for w in range(len(programs))]
    return Plan(
        owners=owners,
        labels=labels(programs),
        spans=spans,
        makespan=makespan,
        bubble=[1 - sum(span.end - span.start for span in line) / makespan for line in spans],
        peak_live=[max(count for count, _ in line) for line in kept],
        peak_bytes=[max(size for _, size in line) for line in kept],
        sent_bytes=[count * costs.message_bytes for count in sent],
        messages=messages,
    )


def find_takers(programs: Sequence[Program]) -> dict[Result, Action]:
    """By each result that goes to another stage, the action that needs it.

    Raises:
        ScheduleError: two actions need it.
    """
    takers: dict[Result, Action] = {}
    stages = len({action.stage for program in programs for action in program})
    for action in (action for program in programs for action in program):
        for result in action.needs(stages):
            if result.stage != action.stage and takers.setdefault(result, action) != action:
                raise ScheduleError(
                    f"stage {action.stage} needs {result} for {takers[result]} and for {action}; it is sent once"
                )
    return takers


def busy_workers(plan: Plan) -> list[dict[Action, int]]:
    """Per worker and action, the most workers that compute at a time while it does, itself included."""
    everything = [span for line in plan.spans for span in line]
    return [
        {
            own.action: max(
                sum(other.start <= moment < other.end for other in everything)
                for moment in [own.start, *(o.start for o in everything if own.start < o.start < own.end)]
            )
            for own in line
        }
        for line in plan.spans
    ]


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """The idle fraction of GPipe and DAPPLE with equal stages and free messages: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def _find_owners(programs: Sequence[Program]) -> dict[int, int]:
    """Which worker each stage belongs to."""
    if not programs:
        raise ScheduleError("a schedule without workers trains nothing; give at least 1 stage")
    owners: dict[int, int] = {}
    for worker, program in enumerate(programs):
        if not program:
            raise ScheduleError(f"worker {worker} has no actions; give every worker a stage and micro-batches")
        for action in program:
            if action.stage < 0 or action.micro_batch < 0:
                raise ScheduleError(f"stage {action.stage} runs {action}; stages and micro-batches count from 0")
            if owners.setdefault(action.stage, worker) != worker:
                raise ScheduleError(
                    f"stage {action.stage} belongs to one worker, and {owners[action.stage]} and {worker} both run it"
                )
    return owners


def _check_complete(programs: Sequence[Program], owners: dict[int, int]) -> dict[Result, Action]:
    """The action that computes each result; all that is needed, and every weight gradient, must be computed once."""
    producers: dict[Result, Action] = {}
    order: dict[Action, int] = {}  # each action's place in its worker's program
    for program in programs:
        for place, action in enumerate(program):
            if order.setdefault(action, place) != place:
                raise ScheduleError(f"stage {action.stage} runs {action} twice; every action runs once")
            for result in action.results:
                if producers.setdefault(result, action) != action:
                    raise ScheduleError(
                        f"stage {action.stage} computes {result} in {producers[result]} and in {action}"
                    )
    for action in order:
        for result in action.needs(len(owners)):
            source = producers.get(result)
            if source is None:
                whose = f"{action} of stage {action.stage}"
                raise ScheduleError(f"stage {result.stage} never computes {result}, which {whose} needs")
            if source.stage == action.stage and order[source] > order[action]:
                raise ScheduleError(f"stage {action.stage} runs {action} before {source}")
    for stage in range(1 + max(owners)):
        for micro_batch in range(1 + max(action.micro_batch for action in order)):
            result = Result(WEIGHT_GRADIENTS, stage, micro_batch)
            if result not in producers:
                raise ScheduleError(f"stage {stage} never computes {result}")
    return producers


def _check_links(programs: Sequence[Program], owners: dict[int, int]) -> dict[Link, list[Result]]:
    """What goes over each link; messages carry no names on NCCL, so both ends must agree on the order."""
    takers = find_takers(programs)
    sent: dict[Link, list[Result]] = defaultdict(list)
    expected: dict[Link, list[Result]] = defaultdict(list)
    for worker, program in enumerate(programs):
        for action in program:
            for result in action.results:
                if result in takers and (to := owners[takers[result].stage]) != worker:
                    sent[worker, to, result.kind].append(result)
            for result in action.needs(len(owners)):
                if owners[result.stage] != worker:
                    expected[owners[result.stage], worker, result.kind].append(result)
    for link, order in sent.items():
        for given, wanted in zip(order, expected[link], strict=True):
            if given != wanted:
                other = f" of stage {wanted.stage}" if wanted.stage != given.stage else ""
                raise ScheduleError(
                    f"stage {given.stage} sends {given} where its neighbour on worker {link[1]} "
                    f"expects {wanted}{other}; both ends of a link must agree on the order"
                )
    return dict(sent)


def _run(
    programs: Sequence[Program], producers: dict[Result, Action], costs: ActionCosts, owners: dict[int, int]
) -> list[list[Span]]:
    """Let every worker go as far as it can, until all have finished or none can move."""
    sources = {a: [producers[r] for r in a.needs(len(owners))] for program in programs for a in program}
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            for action in program[len(spans[worker]) :]:
                if any(source not in ended for source in sources[action]):
                    break
                arrivals = [ended[s] + costs.transfer * (owners[s.stage] != worker) for s in sources[action]]
                start = max([*arrivals, spans[worker][-1].end if spans[worker] else 0.0])
                ended[action] = start + costs.seconds(action)
                spans[worker].append(Span(action, start, ended[action]))
                moved = True
    missing: dict[int, tuple[Action, Result]] = {}  # by worker: what it stands at, what that waits for
    for worker, program in enumerate(programs):
        for action in program[len(spans[worker]) :][:1]:
            missing[worker] = action, next(r for r in action.needs(len(owners)) if producers[r] not in ended)
    if missing:
        cycle = find_cycle({worker: [owners[result.stage]] for worker, (_, result) in missing.items()})
        raise ScheduleError(
            "deadlock: "
            + "; ".join(
                f"stage {action.stage}, before {action}, waits for {result} from stage {result.stage}"
                for action, result in (missing[worker] for worker in cycle)
            )
        )
    return spans


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
