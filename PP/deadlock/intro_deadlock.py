"""Deadlocks: three ways in which ranks wait for each other forever, how the lab reports them, and the fixes.

    python PP/deadlock/intro_deadlock.py <rank> --case order      in three terminals, with the ranks 0, 1 and 2
    ./launch.sh deadlock --case both-send                         neighbors that both send first
    ./launch.sh deadlock --case order                             a pipeline whose stages use different orders
    ./launch.sh deadlock --case skipped                           a collective that one rank skips
    ./launch.sh deadlock --case order --cure                      any of the cases, fixed

In a deadlock nothing crashes, and no rank can detect it alone: each only sees that it waits. Every wait in the lab has
a name and a deadline (`--timeout`, which is short here). When it passes, the ranks exchange what they wait for.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from distlab.axes.layout import Layout
from distlab.comm.names import named
from distlab.pipeline.actions import Backward, Forward
from distlab.pipeline.engine import Graph, ScheduleError
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.run.main import main
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import RunSettings, WorldSize
from simplellm.errors import InputError


@dataclass
class DeadlockSettings(WorldSize, RunSettings):
    case: Literal["both-send", "order", "skipped"] = "both-send"
    """which deadlock"""
    cure: bool = False
    """run the fixed version"""

    @property
    def layout(self) -> Layout:
        return {"pp" if self.case == "order" else "dp": self.world_size}

    def check(self) -> None:
        super().check()
        if self.world_size < 2:
            raise InputError(f"--world-size {self.world_size}: a deadlock needs at least 2 ranks")


DEFAULTS = DeadlockSettings(timeout=5, device="cpu")


def both_send(run: Run[DeadlockSettings]) -> None:
    """Exchange tensors between neighbors; a send completes only when the other side receives."""
    mine, theirs = torch.full((1000,), float(run.rank), device=run.device), torch.empty(1000, device=run.device)
    for lower in range(run.world_size - 1):
        if run.rank not in (lower, lower + 1):
            continue
        other = 2 * lower + 1 - run.rank
        with named("the tensor", "tensors"):
            if run.settings.cure and run.rank == lower + 1:  # one of the two receives first
                dist.recv(theirs, other)
                dist.send(mine, other)
            else:
                dist.send(mine, other)
                dist.recv(theirs, other)


def order(run: Run[DeadlockSettings]) -> None:
    """Run a pipeline whose first stage waits for a gradient before it has sent the next input of the last stage."""
    programs = all_stages("gpipe", run.world_size, micro_batches=2)
    if not run.settings.cure:
        programs[0] = [Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)]  # naive; the others use gpipe
    try:
        simulate(programs)  # the check that every pipeline of the lab makes before it starts
    except ScheduleError as error:
        if run.rank == 0:
            say(f"checked before the run: {error}")
            say("now the same run without the check:")
    takers = Graph(programs).takers  # which action needs the result of another stage
    sent: list[Any] = []
    for action in programs[run.rank]:
        for result in action.needs(run.world_size):
            if result.stage != run.rank:
                with named(str(result), "messages"):
                    dist.recv(torch.empty(1000, device=run.device), result.stage)
        for result in action.results:
            if result in takers:
                to = takers[result].stage
                with named(str(result), "messages"):
                    sent.append(dist.isend(torch.zeros(1000, device=run.device), to))
    for message in sent:
        message.wait()


def skipped(run: Run[DeadlockSettings]) -> None:
    """Average at every step, although the last rank runs out of data one step early; then rank 0 receives from it."""
    value, steps = torch.zeros(1000, device=run.device), 3
    last = run.world_size - 1
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
    case = run.settings.case
    {"both-send": both_send, "order": order, "skipped": skipped}[case](run)
    if run.rank == 0:
        say(f"{case}: all ranks have finished")


if __name__ == "__main__":
    main(try_case, DEFAULTS, __doc__)
