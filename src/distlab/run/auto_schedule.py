"""`--schedule auto` in a run: a rehearsal measures the costs of the passes, for which a schedule is then searched."""

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.grid import Axis, Grid
from distlab.comm.group import open_queues
from distlab.comm.names import CONTROL, counted_as, named
from distlab.pipeline.actions import ACTION_KINDS, Action, ActionCosts
from distlab.pipeline.activations import MicroBatch, PartOf, Stage, StageLoss
from distlab.pipeline.plan import simulate
from distlab.pipeline.rehearsal import now, rehearse
from distlab.pipeline.schedules import all_stages
from distlab.run.terminal import say
from distlab.run.training import TrainingRun
from distlab.settings.stages import ScheduleSettings
from simplellm.experts import equal_loads
from simplellm.saved_activations import SavedActivations

REHEARSALS = 3  # measured; the fastest is the time of an undisturbed pass
COLUMNS = "FRIW"  # the first columns of the table: seconds of each kind of pass; R only with recomputation
ScheduleSettingsT = TypeVar("ScheduleSettingsT", bound=ScheduleSettings)


def find_schedule(
    run: TrainingRun[ScheduleSettingsT], nets: Mapping[int, nn.Module], loss: StageLoss, part_of: PartOf | None = None
) -> list[list[Action]]:
    """Return the lists of actions of all workers, the same on all ranks; the arguments are those of `Pipeline`.

    All ranks must call this, before any hook is registered that collects gradients.

    Raises:
        InputError: a stage's activations of one micro-batch exceed `--keep-at-most`.
    """
    args, workers = run.settings, run.grid.axis("pp").size
    with equal_loads(nets.values()):
        costs = measure(args, run.grid, run.device, nets, loss, part_of)
    sizes, again = (workers, args.micro_batches, args.chunks_per_stage), args.recompute == "all"
    programs = all_stages(args.schedule, *sizes, costs, args.limit, again)
    if run.rank == 0:
        plan, kinds = simulate(programs, costs), COLUMNS if again else COLUMNS.replace("R", "")
        of_kinds = {kind: sum(costs.seconds(ACTION_KINDS[kind](stage, 0)) for stage in nets) for kind in kinds}
        ms = ", ".join(f"{kind} {seconds * 1e3:.1f}" for kind, seconds in of_kinds.items())
        kept = ", ".join(f"{size / 1e6:.4g}" for size in plan.peak_bytes)
        say(f"auto: rank 0 takes {ms} ms for a micro-batch, a message {costs.transfer * 1e3:.1f} ms")
        say(f"auto: by the plan, workers idle {sum(plan.bubble) / workers:.1%} of a step and keep {kept} MB")
    return programs


def measure(
    args: ScheduleSettings,
    grid: Grid,
    device: torch.device,
    nets: Mapping[int, nn.Module],
    loss: StageLoss,
    part_of: PartOf | None = None,
) -> ActionCosts:
    """Measure the times of passes and messages, and the bytes that stages keep; rank 0's values on every rank.

    The workers of a pipeline rehearse in turn, so that workers that share a processor do not disturb each other. Each
    stage runs the same actions as in training, on an artificial micro-batch; its gradients are dropped.

    Args:
        args: of the run, for the sizes of stages and micro-batches.
        grid: the ranks; all of them call this.
        device: where the passes run.
        nets: the stages of this worker, by index.
        loss: of the last stage.
        part_of: the part of a micro-batch that this rank computes, if ranks share sequences.
    """
    pipeline = grid.axis("pp")
    stages, width, recompute = args.stages, args.dmodel, args.recompute == "all"
    ids = torch.zeros(args.batch_size // args.micro_batches, args.seq_len, dtype=torch.int64, device=device)
    part = None if part_of is None else part_of(ids)
    ids = ids if part is None else part.ids
    table = torch.zeros(stages + 1, len(COLUMNS) + 3, dtype=torch.float64)  # a row for each stage; last row: messages
    with counted_as("control"):
        for worker in range(pipeline.size):
            _meet(f"the rehearsal of worker {worker}", device)
            if worker == pipeline.rank:
                for stage, net in nets.items():
                    own = loss if stage == stages - 1 else None
                    here = MicroBatch(Stage(net, own, SavedActivations(net.parameters())), ids, part=part)
                    table[stage] = _rehearse(here, stage, stages, width, recompute)
        for worker in range(pipeline.size - 1):
            _meet(f"the rehearsal of messages between the workers {worker} and {worker + 1}", device)
            if pipeline.rank in (worker, worker + 1):
                seconds = _exchange(pipeline, worker, torch.zeros(*ids.shape, width, device=device))
                if pipeline.rank == worker:  # the other end may begin a round when its answer has already arrived
                    table[-1, 0] += seconds / (pipeline.size - 1)
        table = table.to(device)
        with named("the times of the rehearsal", CONTROL):
            dist.all_reduce(table)
            dist.broadcast(table, 0)
    *rows, (transfer, *_) = (table / (grid.size // pipeline.size)).tolist()
    forward, again, backward, weight, inputs, whole, factors = zip(*rows, strict=True)
    both = [part + other for part, other in zip(backward, weight, strict=True)]
    return ActionCosts(
        forward,
        both,
        transfer,
        activation_bytes=whole,
        weight_share=[part / of for part, of in zip(weight, both, strict=True)],
        weight_bytes_share=[part / of for part, of in zip(factors, whole, strict=True)],
        measured={("R", stage): seconds for stage, seconds in enumerate(again)} if recompute else {},
        input_bytes_share=[part / of for part, of in zip(inputs, whole, strict=True)] if recompute else 0.0,
    )


def _meet(what: str, device: torch.device) -> None:
    with named(what, CONTROL):
        dist.all_reduce(torch.zeros(1, device=device))


def _rehearse(here: MicroBatch, index: int, stages: int, width: int, recompute: bool) -> Tensor:
    """Return the seconds of a stage's F, R, I and W, and the bytes it keeps after F, at most, and after I: (7,)."""
    net, kept = here.stage.net, here.stage.saved
    assert kept is not None
    letters = "fRIW" if recompute else "FIW"
    seconds, sizes, peak = {kind: list[float]() for kind in letters.upper()}, dict[str, int](), 0
    with torch.random.fork_rng({p.device for p in net.parameters() if p.is_cuda}):
        for _ in range(1 + REHEARSALS):  # the first one, which loads kernels and allocates memory, does not count
            for action, taken in rehearse([ACTION_KINDS[a](index, 0) for a in letters], lambda _: here, stages, width):
                seconds[action.letter.upper()].append(taken)
                sizes[action.letter.upper()] = kept.now_bytes
            # The memory that I needs temporarily counts only on top of an input, not of all that F keeps.
            peak = kept.take_recent_peak() if recompute else sizes["F"]
    net.zero_grad(set_to_none=True)
    fastest = [min(seconds[kind][1:]) if kind in seconds else 0.0 for kind in COLUMNS]
    return torch.tensor([*fastest, sizes["F"], peak, sizes["I"]], dtype=torch.float64)


def _exchange(pipeline: Axis, first: int, tensor: Tensor) -> float:
    """Return the seconds that a message takes from one worker to the next, or back."""
    is_first = pipeline.rank == first
    ranks = pipeline.ranks[first : first + 2]
    other = ranks[1] if is_first else ranks[0]
    open_queues([*ranks, ranks[0]], tensor.nbytes, tensor)
    seconds = []
    for _ in range(1 + REHEARSALS):
        start = now(tensor.device)
        with named("a message of the rehearsal", CONTROL):
            if is_first:
                dist.send(tensor, other)
            dist.recv(tensor, other)
            if not is_first:
                dist.send(tensor, other)
        seconds.append(now(tensor.device) - start)
    return min(seconds[1:]) / 2
