"""Deadlocks: three ways in which ranks wait for each other forever, how the lab reports them, and the fixes.

    ./launch.sh deadlock --case both-send         neighbors that both send first
    ./launch.sh deadlock --case order             a pipeline whose stages use different orders
    ./launch.sh deadlock --case skipped           a collective that one rank skips
    ./launch.sh deadlock --case order --cure      any of the cases, fixed

A rank only sees that it waits. At the deadline of a wait (`--timeout`), the ranks exchange what they wait for.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from distlab.axes.layout import Layout
from distlab.comm.names import named
from distlab.pipeline.actions import Backward, Forward
from distlab.pipeline.engine import ScheduleError
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.run.main import main
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import RunSettings, WorldSize
from simplellm.errors import require


@dataclass
class DeadlockSettings(WorldSize, RunSettings):
    case: Literal["both-send", "order", "skipped"] = "both-send"  # which deadlock
    cure: bool = False  # run the fixed version

    @property
    def layout(self) -> Layout:
        return {"pp" if self.case == "order" else "dp": self.world_size}


DEFAULTS = DeadlockSettings(timeout=5, device="cpu")


def both_send(run: Run[DeadlockSettings]) -> None:
    """Exchange tensors between neighbors; a send completes only when the other side receives."""
    mine, theirs = torch.full((1000,), float(run.rank), device=run.device), torch.empty(1000, device=run.device)
    for other in [rank for rank in (run.rank - 1, run.rank + 1) if 0 <= rank < run.world_size]:
        with named("the tensor", "tensors"):
            if run.settings.cure and run.rank > other:  # one of the two receives first
                dist.recv(theirs, other)
                dist.send(mine, other)
            else:
                dist.send(mine, other)
                dist.recv(theirs, other)


def order(run: Run[DeadlockSettings]) -> None:
    """Send a pipeline's messages; the first stage waits for a gradient before it sends the next micro-batch."""
    programs = all_stages("gpipe", run.world_size, micro_batches=2)
    if not run.settings.cure:
        programs[0] = [Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)]  # naive; the others use gpipe
    try:
        simulate(programs)  # the check that every pipeline of the lab makes before it starts
    except ScheduleError as error:
        if run.rank == 0:
            say(f"checked before the run: {error}")
            say("now the same run without the check:")
    stage, last, sent = run.rank, run.world_size - 1, list[Any]()
    for action in programs[stage]:
        forward = isinstance(action, Forward)
        source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        with named(f"the {'activations' if forward else 'gradients'} of micro-batch {action.micro_batch}", "messages"):
            if 0 <= source <= last:
                dist.recv(torch.empty(1000, device=run.device), source)
            if 0 <= target <= last:
                sent.append(dist.isend(torch.zeros(1000, device=run.device), target))
    for message in sent:
        message.wait()


def skipped(run: Run[DeadlockSettings]) -> None:
    """Average at every step, although the last rank runs out of data one step early; then rank 0 receives from it."""
    value, last, steps = torch.zeros(1000, device=run.device), run.world_size - 1, 3
    for step in range(steps):
        if step == steps - 1 and run.rank == last and not run.settings.cure:
            continue  # no data, so nothing to average; but the other ranks wait for this one
        with named(f"the gradients of step {step}", "gradients"):
            dist.all_reduce(value, dist.ReduceOp.AVG)
    with named("the result", "results"):
        if run.rank == last:
            dist.send(value, 0)
        elif run.rank == 0:
            dist.recv(value, last)


def try_case(run: Run[DeadlockSettings]) -> None:
    require(run.world_size >= 2, f"--world-size {run.world_size}: a deadlock needs at least 2 ranks")
    {"both-send": both_send, "order": order, "skipped": skipped}[run.settings.case](run)
    if run.rank == 0:
        say(f"{run.settings.case}: all ranks have finished")


if __name__ == "__main__":
    main(try_case, DEFAULTS, __doc__)
