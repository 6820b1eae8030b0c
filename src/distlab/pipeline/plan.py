"""Plays a pipeline schedule without computing anything: is it correct, how long does it take, what does it keep?

The rules are those of the executor: a worker does its actions in order, an action starts when what it needs has
arrived, and a send never keeps its sender waiting.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distlab.pipeline.schedules import Action, Backward, Forward, Program, message, needs, receiver
from simplellm.errors import InputError


class ScheduleError(InputError):
    """A schedule that cannot run, or would not train what one process trains."""


@dataclass(frozen=True)
class Costs:
    """What actions and messages cost; a number serves all stages, a sequence gives one for each.

    Attributes:
        forward: seconds of a stage's forward pass over one micro-batch.
        backward: seconds of its backward pass.
        transfer: seconds from the end of an action until its message has arrived at the next stage.
        activation_bytes: what a stage keeps of one micro-batch from its forward pass to its backward pass.
        message_bytes: size of a message.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    transfer: float = 0.0
    activation_bytes: float | Sequence[float] = 0.0
    message_bytes: float = 0.0

    def seconds(self, action: Action) -> float:
        """How long an action computes."""
        return _of_stage(self.forward if isinstance(action, Forward) else self.backward, action.stage)


@dataclass(frozen=True)
class Span:
    """An action from `start` to `end`, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """A schedule that has been played.

    Attributes:
        spans: per worker, its actions with their times.
        makespan: seconds from the first action's start to the last one's end.
        bubble: per worker, the fraction of the makespan in which it does not compute.
        peak_live: per worker, the most micro-batches between their forward and their backward pass.
        peak_bytes: per worker, the most bytes of activations kept at a time.
        sent_bytes: per worker, what it sends to others.
        messages: per (sender, receiver), what goes over that link, in order.
    """

    spans: list[list[Span]]
    makespan: float
    bubble: list[float]
    peak_live: list[int]
    peak_bytes: list[float]
    sent_bytes: list[float]
    messages: dict[tuple[int, int], list[Action]]


def simulate(programs: Sequence[Program], costs: Costs | None = None) -> Plan:
    """Check a schedule and give its times.

    Args:
        programs: what each worker does, in order; a stage belongs to one worker.
        costs: by default a forward pass takes 1 second, a backward pass 2, and messages nothing.

    Raises:
        ScheduleError: with a sentence that names what is missing, repeated or out of order, or the stages that wait
            for each other.
    """
    costs = costs or Costs()
    owners = _check_complete(programs)
    messages = _check_links(programs, owners)
    spans = _run(programs, owners, costs)
    makespan = max(span.end for line in spans for span in line)
    live = [list(_live(program, costs)) for program in programs]
    sent = [sum(len(sent) for (sender, _), sent in messages.items() if sender == w) for w in range(len(programs))]
    return Plan(
        spans=spans,
        makespan=makespan,
        bubble=[1 - sum(span.end - span.start for span in line) / makespan for line in spans],
        peak_live=[max(count for count, _ in line) for line in live],
        peak_bytes=[max(size for _, size in line) for line in live],
        sent_bytes=[count * costs.message_bytes for count in sent],
        messages=messages,
    )


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


def _of_stage(value: float | Sequence[float], stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


def _check_complete(programs: Sequence[Program]) -> dict[int, int]:
    """Which worker each stage belongs to; every micro-batch must run forward and then backward once on every stage."""
    owners: dict[int, int] = {}
    done: set[Action] = set()
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
            if action in done:
                raise ScheduleError(f"stage {action.stage} runs {action} twice; every pass runs once")
            if isinstance(action, Backward) and Forward(action.stage, action.micro_batch) not in done:
                raise ScheduleError(f"stage {action.stage} runs {action} before F{action.micro_batch}")
            done.add(action)
    if not programs:
        raise ScheduleError("a schedule without workers trains nothing; give at least 1 stage")
    stages, micro_batches = 1 + max(owners), 1 + max(action.micro_batch for action in done)
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            for action in (Forward(stage, micro_batch), Backward(stage, micro_batch)):
                if action not in done:
                    raise ScheduleError(f"stage {stage} never runs {action}")
    return owners


def _check_links(programs: Sequence[Program], owners: dict[int, int]) -> dict[tuple[int, int], list[Action]]:
    """What goes over each link; messages carry no names on NCCL, so both ends must agree on the order."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for worker, program in enumerate(programs):
        for action in program:
            to = owners.get(receiver(action), worker)
            if to != worker:
                sent[worker, to].append(action)
            for source in needs(action, len(owners)):
                if owners[source.stage] != worker:
                    received[owners[source.stage], worker].append(source)
    for link, order in sent.items():
        for given, expected in zip(order, received[link], strict=True):
            if given != expected:
                raise ScheduleError(
                    f"stage {given.stage} sends {message(given)} where its neighbour on worker {link[1]} "
                    f"expects {message(expected)}; both ends of a link must agree on the order"
                )
    return dict(sent)


def _run(programs: Sequence[Program], owners: dict[int, int], costs: Costs) -> list[list[Span]]:
    """Let every worker go as far as it can, until all have finished or none can move."""
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            while len(spans[worker]) < len(program):
                action = program[len(spans[worker])]
                sources = needs(action, len(owners))
                if any(source not in ended for source in sources):
                    break
                arrivals = [ended[s] + (costs.transfer if owners[s.stage] != worker else 0) for s in sources]
                start = max([*arrivals, spans[worker][-1].end if spans[worker] else 0.0])
                ended[action] = start + costs.seconds(action)
                spans[worker].append(Span(action, start, ended[action]))
                moved = True
    waiting = {w: program[len(spans[w])] for w, program in enumerate(programs) if len(spans[w]) < len(program)}
    if waiting:
        raise ScheduleError(_describe_cycle(waiting, owners, ended))
    return spans


def _describe_cycle(waiting: dict[int, Action], owners: dict[int, int], ended: dict[Action, float]) -> str:
    """Who waits for whom, from one worker round to itself."""
    worker, path = next(iter(waiting)), []
    while worker not in path:
        path.append(worker)
        worker = owners[_missing(waiting[worker], owners, ended).stage]
    sentences = []
    for w in path[path.index(worker) :]:
        source = _missing(waiting[w], owners, ended)
        own = waiting[w]
        sentences.append(f"stage {own.stage}, before {own}, waits for {message(source)} from stage {source.stage}")
    return "deadlock: " + "; ".join(sentences)


def _missing(action: Action, owners: dict[int, int], ended: dict[Action, float]) -> Action:
    return next(source for source in needs(action, len(owners)) if source not in ended)


def _live(program: Program, costs: Costs) -> Iterator[tuple[int, float]]:
    """Micro-batches and bytes kept after each action."""
    count, size = 0, 0.0
    for action in program:
        sign = 1 if isinstance(action, Forward) else -1
        count += sign
        size += sign * _of_stage(costs.activation_bytes, action.stage)
        yield count, size
