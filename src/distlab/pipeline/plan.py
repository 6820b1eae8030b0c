"""A schedule as it would run: whether it is correct, how long it takes, and how many activations it keeps.

The class of an action defines its inputs, results, costs and kept activations; the engine computes the times.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distlab.comm.wait_graph import find_cycle
from distlab.pipeline.actions import WEIGHT_GRADIENTS, Action, ActionCosts, Programs, Result, describe_stages, labels
from distlab.pipeline.engine import NEVER, Engine, Graph, LinkKey, ScheduleError

ROUNDING = 1e-9  # of sums of shares
ADD_UP = "what its actions keep and free must add up to 0"
# Of a layer's forward pass. With fewer, additional threads make a pipeline slower: bench/README.md, "Threads that have
# computed".
MULTIPLY_ADDS_OF_A_THREAD = 4e7


@dataclass(frozen=True)
class Span:
    """An action from `start` to `end`, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """The result of simulating a schedule; lists have one entry per worker."""

    owners: dict[int, int]  # by stage, the worker that holds it
    rows: list[str]  # the worker's stages: "stage 1", "stages 1 and 4"
    labels: dict[Action, str]  # see the function `labels`
    spans: list[list[Span]]  # the worker's actions with their times
    makespan: float  # seconds from the start of the first action to the end of the last one
    bubble: list[float]  # the fraction of the makespan in which the worker is idle
    peak_live: list[int]  # the maximum number of micro-batches whose activations the worker's stages keep at once
    peak_bytes: list[float]  # the maximum bytes of activations that the worker keeps at once
    messages: dict[LinkKey, list[Result]]  # the messages over each link, in order
    takers: dict[Result, Action]  # by result that another stage needs, the action that needs it


def simulate(programs: Programs, costs: ActionCosts | None = None, holders: int = 1) -> Plan:
    """Check a schedule and compute its times. `holders` is the most workers that may hold a stage, as in `Graph`.

    Raises:
        ScheduleError: names what is missing, repeated or out of order, or the stages that wait for each other.
    """
    costs = costs or ActionCosts()
    for worker, program in enumerate(programs):
        if not program:
            raise ScheduleError(f"worker {worker} has no actions; give every worker a stage and micro-batches")
    if not programs:
        raise ScheduleError("the schedule has no workers; give at least 1 stage")
    graph = Graph(programs, holders)
    _check_results(graph)
    messages = graph.messages()
    _check_links(messages, graph)
    played = Engine(graph, costs.seconds, lambda *_: (costs.transfer, 0.0))
    _check_finished(played)
    spans = [[Span(graph.actions[i], played.starts[i], played.ends[i]) for i in line] for line in graph.lines]
    return Plan(
        owners=graph.owners,
        rows=[describe_stages(program) for program in programs],
        labels=labels(programs),
        spans=spans,
        makespan=played.makespan,
        bubble=[1 - sum(span.end - span.start for span in line) / played.makespan for line in spans],
        peak_live=[max(len(kept) for _, kept in _kept(program)) for program in programs],
        peak_bytes=[max(itertools.accumulate(map(costs.kept_bytes, program))) for program in programs],
        messages=messages,
        takers=graph.takers,
    )


def in_a_row(programs: Programs, steps: int) -> Programs:
    """Return the lists of several steps in which no worker waits at the end of a step; micro-batch numbers continue.

    Weight updates are not in the lists: every worker makes its own at the end of its list for a step.
    """
    micro_batches = 1 + max((action.micro_batch for program in programs for action in program), default=0)
    firsts = range(0, steps * micro_batches, micro_batches)
    return [
        [replace(a, micro_batch=a.micro_batch + first) for first in firsts for a in program] for program in programs
    ]


def busy_workers(plan: Plan) -> dict[Action, int]:
    """Return, by action, the maximum number of workers that compute at the same time, including its own."""
    spans = [span for line in plan.spans for span in line if span.end > span.start]
    changes = Counter(span.start for span in spans)
    changes.subtract(span.end for span in spans)
    times = sorted(changes)
    busy = list(itertools.accumulate(changes[time] for time in times))  # from each of the times to the next one
    place = {time: index for index, time in enumerate(times)}
    most = {own.action: max(busy[place[own.start] : place[own.end]]) for own in spans}
    return {span.action: most.get(span.action, 1) for line in plan.spans for span in line}


def threads_by_plan(
    programs: Programs, cores: int, costs: ActionCosts | None = None, holders: int = 1
) -> dict[Action, int]:
    """Return, by action, the number of its threads: its share of the cores, including the cores of idle workers.

    An action whose threads compete with other workers takes several times as long, so a worker gives up its core only
    if the plan shows it idle for all of the action's time. Workers that outnumber the cores take turns on them, at
    times that do not follow from `costs`; only the beginning and the end of a step are then certain, as in the plan for
    equal stages. A worker that is not the only one takes no more threads than have enough to do: when an action ends,
    its threads wait in a loop for a while, on a core that the next worker needs. The number of threads depends only on
    the plan, not on the course of a run: every run computes the same.
    """
    busy = busy_workers(simulate(programs, costs if len(programs) <= cores else None, holders))
    most = most_threads(len(programs), cores, costs)
    return {action: share_of_cores(cores, workers, most) for action, workers in busy.items()}


def most_threads(workers: int, cores: int, costs: ActionCosts | None) -> int:
    """Return the maximum number of threads worth giving to an action, in a pipeline of `workers` workers.

    The work of a layer decides, also for a stage whose main work is the head.
    """
    if costs is None or workers == 1:
        return cores
    return max(1, int(min(cores, costs.layer_multiply_adds / MULTIPLY_ADDS_OF_A_THREAD)))


def share_of_cores(cores: int, busy: int, most: int) -> int:
    """Return the number of threads of an action while `busy` workers compute."""
    return min(most, max(1, cores // busy))


def acknowledged(programs: Programs, plan: Plan, worker: int) -> dict[Result, list[Result]]:
    """Return, by message that a worker receives, its own messages that the sender had used before it sent that one."""
    received = {result for link, results in plan.messages.items() if link[1] == worker for result in results}
    sent = {result for link, results in plan.messages.items() if link[0] == worker for result in results}
    acknowledged: dict[Result, list[Result]] = {}
    for program in programs:
        used: list[Result] = []
        for action in program:
            used += [result for result in action.needs(len(plan.owners)) if result in sent]
            for result in received.intersection(action.results):
                acknowledged[result], used = used, []
    return acknowledged


def most_on_the_way(programs: Programs, plan: Plan) -> dict[LinkKey, int]:
    """Return, by link, the maximum number of messages of a step that were sent but not yet acknowledged.

    A later message from the receiver is the acknowledgement. With room for this number, no sender ever has to wait:
    what a step leaves without acknowledgement, gradients, is acknowledged by the activations of the next step, before
    its gradients.
    """
    links = {result: link for link, results in plan.messages.items() for result in results}
    most = dict.fromkeys(plan.messages, 0)
    for worker, program in enumerate(programs):
        by_message, on_the_way = acknowledged(programs, plan, worker), Counter[LinkKey]()
        for action in program:
            taken = [result for need in action.needs(len(plan.owners)) for result in by_message.get(need, ())]
            on_the_way.subtract(links[result] for result in taken)
            on_the_way.update(links[result] for result in action.results if result in links)
            most.update((link, max(most[link], count)) for link, count in on_the_way.items())
    return most


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """Return the idle fraction of GPipe and DAPPLE with equal stages and free messages: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def _check_results(graph: Graph) -> None:
    """Check that every weight gradient is computed, and that a stage frees all activations that it keeps, not more."""
    micro_batches = range(1 + max(action.micro_batch for action in graph.actions))
    for stage, micro_batch in itertools.product(range(1 + max(graph.owners)), micro_batches):
        if (result := Result(WEIGHT_GRADIENTS, stage, micro_batch)) not in graph.producers:
            raise ScheduleError(f"stage {stage} never computes {result}")
    kept: Mapping[tuple[int, int], float] = {}
    for action, kept in _kept(graph.actions):
        share = kept.get((action.stage, action.micro_batch), 0.0)
        what = f"{-share:g} more of the activations of micro-batch {action.micro_batch} than it keeps"
        if share < 0:
            raise ScheduleError(f"stage {action.stage} frees in {action} {what}; {ADD_UP}")
    for (stage, micro_batch), share in kept.items():
        what = f"stage {stage} still keeps {share:g} of the activations of micro-batch {micro_batch} after a step"
        raise ScheduleError(f"{what}; {ADD_UP}")


def _check_links(messages: Mapping[LinkKey, Sequence[Result]], graph: Graph) -> None:
    """Raise `ScheduleError` if the ends of a link differ in the order of its messages, which have no names."""
    needed = {result: place for place, result in enumerate(graph.takers)}  # in the order in which workers need them
    for link, sent in messages.items():
        for given, wanted in zip(sent, sorted(sent, key=needed.__getitem__), strict=True):
            if given != wanted:
                where = f"stage {given.stage} sends {given} where worker {link[1]}"
                what = f"{wanted} of stage {wanted.stage}" if wanted.stage != given.stage else str(wanted)
                raise ScheduleError(f"{where} expects {what}; both ends of a link must agree on the order")


def _check_finished(played: Engine) -> None:
    """Raise `ScheduleError` with the stages that wait for each other, if some have actions that never start."""
    graph, waits = played.graph, dict[int, tuple[Action, Result]]()  # by worker, a blocked action and its missing input
    for worker, line in enumerate(graph.lines):
        index = next((index for index in line if played.starts[index] == NEVER), None)
        if index is not None:
            action = graph.actions[index]
            missing = (r for r in action.needs(len(graph.owners)) if played.starts[graph.producers[r]] == NEVER)
            waits[worker] = action, next(missing)
    sentences = []
    for worker in find_cycle({worker: [graph.workers[graph.producers[r]]] for worker, (_, r) in waits.items()}):
        action, result = waits[worker]
        sentences.append(f"stage {action.stage}, before {action}, waits for {result} from stage {result.stage}")
    if sentences:
        raise ScheduleError(f"deadlock: {'; '.join(sentences)}")


def _kept(program: Iterable[Action]) -> Iterator[tuple[Action, Mapping[tuple[int, int], float]]]:
    """Yield, after each action, the shares that are kept of the activations of (stage, micro-batch)."""
    kept, neutral = defaultdict[tuple[int, int], float](float), ActionCosts()
    for action in program:
        key = action.stage, action.micro_batch
        kept[key] += action.kept_share(neutral)
        if abs(kept[key]) < ROUNDING:
            del kept[key]
        yield action, kept
