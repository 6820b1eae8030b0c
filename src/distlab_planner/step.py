"""The time of a step: a simulation of its schedule, with each worker's work before and after, and final collectives.

All replicas, and all ranks that share a stage, do the same at the same time, so that one rank of each worker stands for
them all.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.parallel.options import BUCKET_BYTES
from distlab.pipeline.actions import Action, Programs, stages_of
from distlab.pipeline.engine import Engine
from distlab.pipeline.plan import most_threads, share_of_cores, threads_by_plan
from distlab_planner.costs import Costs
from distlab_planner.graph import AfterPasses, BeforePasses, graph_of
from distlab_planner.hosts import SharedHosts
from distlab_planner.machine import KIND_OF
from distlab_planner.model import NUMBER_BYTES
from distlab_planner.sent import LOSS_BYTES, sent_bytes
from distlab_planner.traffic import CollectiveSeconds, RankGroup, one_after_another

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


def predict(costs: Costs, worker: int | None = None) -> Step:
    """Predict the step of a layout in steady state, with the activities of a worker; by default, the busiest."""
    layout, machine, on_hosts = costs.layout, costs.machine, costs.on_hosts
    programs, step = layout.programs(), graph_of(layout)
    threads = action_threads(costs, programs)
    updates, gathers, last = zip(*(_around_passes(costs, program) for program in programs), strict=True)
    first = list(map(operator.add, updates, gathers))
    workers, after = range(len(programs)), [0.0 if one.overlaps else one.alone for one in last]

    def seconds(action: Action) -> float:
        if isinstance(action, BeforePasses):
            return (after if isinstance(action, AfterPasses) else first)[step.graph.owners[action.stage]]
        messages = step.messages[action.letter, action.stage]
        return costs.seconds(action, threads.get(action, 1)) + machine.message_seconds * messages

    def message(sender: int, receiver: int) -> tuple[float, float]:
        way = sender, receiver, costs.stage_message_bytes
        return on_hosts.message(*way), on_hosts.carrying(*way)

    hosts = None
    if machine.slowdown or on_hosts.per_host > machine.cores_per_host or threads:
        hosts = SharedHosts(
            [on_hosts.host_of(worker) for worker in workers],
            [on_hosts.alike(worker) for worker in workers],
            machine.slowdown_of,
            lambda action: threads.get(action, 1),
            machine.cores_per_host,
        )
    played = Engine(step.graph, seconds, message, waking=machine.waking_seconds, hosts=hosts)
    starts, ends, alone = (
        [[times[index] for index in line] for line in step.graph.lines]
        for times in (played.starts, played.ends, played.alone)
    )
    averaged = [
        _averaged(costs, program, whole, started[-2], ended[-2]) if whole.overlaps else ended[-1]
        for program, whole, started, ended in zip(programs, last, starts, ends, strict=True)
    ]
    loss = on_hosts.all_reduce(RankGroup(layout.ranks, 1), LOSS_BYTES).seconds
    total = max(averaged) + loss
    busy = [sum(map(operator.sub, *times)) for times in zip(ends, starts, strict=True)]
    seen = max(workers, key=lambda worker: busy[worker]) if worker is None else worker
    exchanging = sum(count * costs.exchanged(*kind) for kind, count in step.counts[seen].items())
    behind = max(0.0, averaged[seen] - ends[seen][-1]) + loss  # collectives that are not simulated
    whole = max(line[-2] for line in ends) - min(line[1] for line in starts)  # from the first to the last pass
    passes = [sum(map(operator.sub, e[1:-1], s[1:-1])) for s, e in zip(starts, ends, strict=True)]
    return Step(
        seconds=total,
        computing=sum(alone[seen][1:-1]) - exchanging,
        exchanging=exchanging,
        averaging=gathers[seen] + after[seen] + behind,
        updating=updates[seen],
        sharing=busy[seen] - sum(alone[seen]),
        idle=total - busy[seen] - behind,
        bubble=1 - sum(passes) / len(passes) / whole if whole else 0.0,
        sent_bytes=max(sent_bytes(costs)),
    )


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


def _around_passes(costs: Costs, program: Sequence[Action]) -> tuple[float, float, CollectiveSeconds]:
    """Return a worker's seconds of update and other work, of gathering weights, and of averaging its gradients."""
    layout, machine, on_hosts = costs.layout, costs.machine, costs.on_hosts
    weights = [one for one in costs.weights_by_holders(*stages_of(program)) if one.count]
    update = machine.step_seconds + machine.update_seconds(costs.optimizer) * costs.updated(*stages_of(program))
    collective = on_hosts.all_reduce if layout.shard == "none" else on_hosts.half
    average = one_after_another([collective(one.holders, one.bytes, "shared") for one in weights])
    if layout.shard == "none":
        return update, 0.0, average
    gathered = one_after_another([collective(one.holders, one.gathered_bytes, "shared") for one in weights]).alone
    gather = gathered if layout.shard != "weights" else 0.0
    return update, gather, average if layout.shard == "optimizer" else CollectiveSeconds(0.0, 0.0, False)


def _averaged(costs: Costs, program: Sequence[Action], whole: CollectiveSeconds, started: float, ended: float) -> float:
    """Return when the gradients have been averaged, bucket after bucket, behind the last pass that computes some."""
    size_bytes = costs.weights(*stages_of(program)) * NUMBER_BYTES
    buckets = max(1, round(size_bytes / BUCKET_BYTES))
    now = 0.0
    for bucket in range(1, buckets + 1):
        now = max(now, started + (ended - started) * bucket / buckets) + whole.seconds / buckets
    return now


def least_seconds(costs: Costs) -> float:
    """Return a lower bound for the seconds of a step, without simulating its schedule.

    A worker begins after the forward passes of the stages before its first one, and their backward passes follow its
    last one, unless that is for weights alone.
    """
    layout, machine, on_hosts = costs.layout, costs.machine, costs.on_hosts
    pp, micro_batches, stages = layout.size("pp"), layout.micro_batches, len(layout.split)
    outline = layout.outline
    if not outline.letters <= KIND_OF.keys():  # actions of new kinds may take any time
        return machine.step_seconds
    splits_backward = "I" in outline.letters
    alike: dict[tuple[int, ...], list[int]] = {}
    for stage in range(stages):
        alike.setdefault(tuple(layout.parts(stage).values()), []).append(stage)

    # An action has the cores that other workers leave it. As measured, it need not be fastest with most of them.
    counts = {1 if machine.device == "cuda" else costs.threads or 1}
    if machine.device == "cpu" and costs.threads is None:
        cores = max(1, machine.cores_per_host // on_hosts.pipelines)
        most = most_threads(pp, cores, costs.estimated)
        counts = {share_of_cores(cores, busy, most) for busy in range(1, pp + 1)}

    def seconds(kind: str, stage: int) -> float:
        return min(costs.pass_seconds(kind, stage, threads) for threads in counts)

    forward, input_, whole, weights = ([0.0] * stages for _ in range(4))
    for same in alike.values():
        stage = same[0]
        forward_seconds, backward_seconds = seconds("F", stage), seconds("B", stage)
        input_seconds = whole_seconds = backward_seconds
        if splits_backward:
            input_seconds = min(backward_seconds, seconds("I", stage))
            whole_seconds = min(backward_seconds, seconds("I", stage) + seconds("W", stage))
        held_weights = costs.weights_by_holders(stage)[0].count
        for other in same:
            forward[other], weights[other] = forward_seconds, held_weights
            input_[other], whole[other] = input_seconds, whole_seconds
    work, path, held = ([0.0] * pp for _ in range(3))  # of each worker: for a micro-batch; weights, without experts
    for stage in range(stages):
        worker = outline.owners[stage]
        work[worker] += forward[stage] + whole[stage]
        path[worker] += forward[stage] + input_[stage]
        held[worker] += weights[stage]
    found = micro_batches * sum(work) / pp
    begins = ends = 0.0  # of the stages before
    for worker in range(pp):
        average = on_hosts.all_reduce(on_hosts.replicas, held[worker] * NUMBER_BYTES, "shared")
        taken = average.seconds if average.overlaps else average.alone
        shown = max(0.0, taken - work[worker]) if layout.shard == "none" else 0.0  # the rest, behind the last pass
        found = max(found, begins + micro_batches * work[worker] + shown, begins + micro_batches * path[worker] + ends)
        begins, ends = begins + forward[worker], ends + input_[worker]
    share = layout.copies if layout.shard != "none" else 1
    update = machine.update_seconds(costs.optimizer) * min(held) / share
    return machine.step_seconds + max(found, micro_batches * min(work) + update)
