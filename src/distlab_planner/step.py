"""The time of a step: a simulation of its schedule, with each worker's work before and after, and final collectives.

All replicas, and all ranks that share a stage, do the same at the same time, so that one rank of each worker stands for
them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distlab.parallel.options import BUCKET_BYTES
from distlab.pipeline.actions import Action, Programs, stages_of
from distlab.pipeline.engine import Engine
from distlab.pipeline.plan import most_threads, share_of_cores, threads_by_plan
from distlab_planner.communication_seconds import CollectiveSeconds, one_after_another
from distlab_planner.costs import Costs
from distlab_planner.graph import AfterPasses, BeforePasses, graph_of
from distlab_planner.hosts import SharedHosts
from distlab_planner.layouts import SAME_WEIGHTS
from distlab_planner.machine import KIND_OF
from distlab_planner.model import NUMBER_BYTES
from distlab_planner.sent import LOSS_BYTES, sent_bytes

WARM_UP = 3  # steps at the beginning of a run that do not count where it is compared with a prediction


@dataclass(frozen=True)
class Step:
    """A predicted step: its seconds, and a worker's seconds by activity."""

    seconds: float
    computing: float  # of its passes, if no other rank computed
    exchanging: float  # with ranks that share layers, sequences or weights, likewise
    averaging: float  # gradients and the loss, after the last pass; gathering weights that replicas have updated
    updating: float  # the weights, and the other work of a step
    sharing: float  # additional, because ranks share cores and memory
    idle: float
    bubble: float  # mean share of the workers' time between their first and last pass in which they are idle
    sent_bytes: float  # by the rank that sends most, per step

    @property
    def bound(self) -> str:
        """The activity that takes most of the step."""
        parts = {
            "computing": self.computing,
            "exchanges within passes": self.exchanging,
            "averaging gradients": self.averaging,
            "updating weights": self.updating,
            "sharing cores": self.sharing,
            "waiting for other stages": self.idle,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class _AroundPasses:
    """Seconds of a worker's work in a step before and after its passes."""

    updating: float  # the weights, and the other work of a step
    gathering: float  # the weights that replicas have updated
    averaging: CollectiveSeconds  # the gradients

    @property
    def before(self) -> float:
        return self.updating + self.gathering

    @property
    def after(self) -> float:
        return 0.0 if self.averaging.overlaps else self.averaging.alone


def predict(costs: Costs, worker: int | None = None) -> Step:
    """Predict the step of a layout in steady state, with the activities of a worker; by default, the busiest."""
    layout, step = costs.layout, graph_of(costs.layout)
    programs = layout.programs()
    around = [_around_passes(costs, program) for program in programs]
    engine = _simulated(costs, programs, around)
    lines = step.graph.lines  # by worker, the numbers of its actions
    passes = [line[1:-1] for line in lines]  # without the work before and after them

    def busy(actions: Sequence[int]) -> float:
        return sum(engine.ends[number] - engine.starts[number] for number in actions)

    averaged = [  # by worker, when its gradients are
        _end_of_average(costs, program, own.averaging.seconds, engine.starts[line[-2]], engine.ends[line[-2]])
        if own.averaging.overlaps
        else engine.ends[line[-1]]
        for program, own, line in zip(programs, around, lines, strict=True)
    ]
    loss = costs.on_hosts.all_reduce(tuple(layout.axes), LOSS_BYTES).seconds
    total = max(averaged) + loss
    from_first_to_last = max(engine.ends[each[-1]] for each in passes) - min(engine.starts[each[0]] for each in passes)
    shown = max(range(len(lines)), key=lambda number: busy(lines[number])) if worker is None else worker
    line, own = lines[shown], around[shown]
    exchanging = sum(count * costs.exchanged(*kind) for kind, count in step.counts[shown].items())
    behind = max(0.0, averaged[shown] - engine.ends[line[-1]]) + loss  # collectives that are not simulated
    return Step(
        seconds=total,
        computing=sum(engine.alone[number] for number in passes[shown]) - exchanging,
        exchanging=exchanging,
        averaging=own.gathering + own.after + behind,
        updating=own.updating,
        sharing=busy(line) - sum(engine.alone[number] for number in line),
        idle=total - busy(line) - behind,
        bubble=1 - sum(map(busy, passes)) / len(passes) / from_first_to_last if from_first_to_last else 0.0,
        sent_bytes=max(sent_bytes(costs)),
    )


def _simulated(costs: Costs, programs: Programs, around: Sequence[_AroundPasses]) -> Engine:
    """Simulate a step, without what overlaps with its last passes."""
    machine, on_hosts, step = costs.machine, costs.on_hosts, graph_of(costs.layout)
    threads = action_threads(costs, programs)

    def seconds(action: Action) -> float:
        if isinstance(action, BeforePasses):
            own = around[step.graph.owners[action.stage]]
            return own.after if isinstance(action, AfterPasses) else own.before
        messages = step.messages_by_kind[action.letter, action.stage]
        return costs.seconds(action, threads.get(action, 1)) + machine.message_seconds * messages

    def message(sender: int, receiver: int) -> tuple[float, float]:
        way = sender, receiver, costs.stage_message_bytes
        return on_hosts.message(*way), on_hosts.carrying(*way)

    hosts = None
    if machine.slowdown or on_hosts.per_host > machine.cores_per_host or threads:
        workers = range(len(programs))
        hosts = SharedHosts(
            [on_hosts.host_of(worker) for worker in workers],
            [on_hosts.alike(worker) for worker in workers],
            machine.slowdown_of,
            lambda action: threads.get(action, 1),
            machine.cores_per_host,
        )
    return Engine(step.graph, seconds, message, waking=machine.waking_seconds, hosts=hosts)


def action_threads(costs: Costs, programs: Programs) -> dict[Action, int]:
    """Return, by action, its number of threads, if more than one.

    It is the number in `OMP_NUM_THREADS`, else the executor's: its share of the cores of its pipeline.
    """
    machine = costs.machine
    if machine.device == "cuda":
        return {}
    if costs.threads is not None:
        return {action: costs.threads for program in programs for action in program} if costs.threads > 1 else {}
    cores = machine.cores_per_host // costs.on_hosts.pipelines
    if cores <= 1:
        return {}
    return threads_by_plan(programs, cores, costs.estimated)


def _around_passes(costs: Costs, program: Sequence[Action]) -> _AroundPasses:
    """Return the seconds around the passes of the worker with a program, if no other rank computes."""
    shard, machine, on_hosts, stages = costs.layout.shard, costs.machine, costs.on_hosts, stages_of(program)
    updating = machine.step_seconds + machine.update_seconds(costs.optimizer) * costs.updated(*stages)
    weights = [one for one in costs.weights_by_holders(*stages) if one.count]
    collective = on_hosts.all_reduce if shard == "none" else on_hosts.half
    # Replicas that shard gradients or weights exchange them within passes.
    averaging = [collective(one.axes, one.bytes, "shared") for one in weights if shard in ("none", "optimizer")]
    gathering = [
        on_hosts.half(one.axes, one.gathered_bytes, "shared") for one in weights if shard in ("optimizer", "gradients")
    ]
    return _AroundPasses(updating, one_after_another(gathering).alone, one_after_another(averaging))


def _end_of_average(costs: Costs, program: Sequence[Action], seconds: float, started: float, ended: float) -> float:
    """Return when the gradients have been averaged, bucket after bucket, behind the last pass that computes some.

    Either all buckets follow the first one at once, or the last one follows the end of the pass.

    Args:
        seconds: of the whole average, without this overlap.
        started: when the last pass did.
        ended: when it did.
    """
    size_bytes = costs.weights(*stages_of(program)) * NUMBER_BYTES
    buckets = max(1, round(size_bytes / BUCKET_BYTES))
    return max(started + (ended - started) / buckets + seconds, ended + seconds / buckets)


def least_seconds(costs: Costs) -> float:
    """Return a lower bound for the seconds of a step, without simulating its schedule.

    A worker begins after the forward passes of the stages before its first one, and their backward passes follow its
    last one, unless that is for weights alone.
    """
    layout, machine, on_hosts, outline = costs.layout, costs.machine, costs.on_hosts, costs.layout.outline
    if not outline.letters <= KIND_OF.keys():  # actions of new kinds may take any time
        return machine.step_seconds
    pp, micro_batches, threads = layout.size("pp"), layout.micro_batches, _possible_threads(costs)

    def fastest(kind: str, stage: int) -> float:
        return min(costs.pass_seconds(kind, stage, number) for number in threads)

    def passes(stage: int) -> tuple[float, float, float]:
        """Return the least seconds of a forward pass, of a backward pass, and of its part that others wait for."""
        forward, backward = fastest("F", stage), fastest("B", stage)
        if "I" not in outline.letters:
            return forward, backward, backward
        for_inputs = fastest("I", stage)
        return forward, min(backward, for_inputs + fastest("W", stage)), min(backward, for_inputs)

    first_with = dict[tuple[int, ...], int]()  # by parts: stages with the same ones are computed once
    alike = [first_with.setdefault(tuple(layout.parts(one).values()), one) for one in range(len(layout.split))]
    passes_of = {one: passes(one) for one in first_with.values()}
    weights_of = {one: costs.weights_by_holders(one)[0].count for one in first_with.values()}
    stages = [passes_of[one] for one in alike]
    work, path, held = ([0.0] * pp for _ in range(3))  # of each worker: for a micro-batch; weights, without experts
    for stage, (forward, backward, awaited) in enumerate(stages):
        worker = outline.owners[stage]
        work[worker] += forward + backward
        path[worker] += forward + awaited
        held[worker] += weights_of[alike[stage]]
    found = micro_batches * sum(work) / pp
    begins = ends = 0.0  # of the stages before
    for worker, (forward, _, awaited) in zip(range(pp), stages, strict=False):
        average = on_hosts.all_reduce(SAME_WEIGHTS, held[worker] * NUMBER_BYTES, "shared")
        taken = average.seconds if average.overlaps else average.alone
        shown = max(0.0, taken - work[worker]) if layout.shard == "none" else 0.0  # the rest, behind the last pass
        found = max(found, begins + micro_batches * work[worker] + shown, begins + micro_batches * path[worker] + ends)
        begins, ends = begins + forward, ends + awaited
    share = layout.size(*SAME_WEIGHTS) if layout.shard != "none" else 1
    update = machine.update_seconds(costs.optimizer) * min(held) / share
    return machine.step_seconds + max(found, micro_batches * min(work) + update)


def _possible_threads(costs: Costs) -> set[int]:
    """Return the numbers of threads that an action may have: the cores that other workers leave it.

    As measured, it need not be fastest with most of them.
    """
    machine, workers = costs.machine, costs.layout.size("pp")
    if machine.device == "cuda":
        return {1}
    if costs.threads is not None:
        return {costs.threads}
    cores = max(1, machine.cores_per_host // costs.on_hosts.pipelines)
    most = most_threads(workers, cores, costs.estimated)
    return {share_of_cores(cores, busy, most) for busy in range(1, workers + 1)}
