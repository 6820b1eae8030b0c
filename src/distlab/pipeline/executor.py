"""Runs one stage of a pipeline: takes its actions in order, and moves activations and gradients between stages.

Receives are posted ahead of their use and sends are left to finish by themselves, so a message travels while both of
its ends compute. Between two stages messages arrive in the order in which they were sent; `plan.simulate`
checks that both agree on it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.grid import Grid
from distlab.comm.recorder import COMPUTE, recorder
from distlab.comm.traffic import traffic
from distlab.comm.transfer import Transfer
from distlab.pipeline.activations import SavedActivations
from distlab.pipeline.plan import busy_workers, simulate
from distlab.pipeline.schedules import Action, Backward, Forward, Program, message, needs, receiver
from simplellm.errors import InputError

POSTED_AHEAD = 2  # receives under way per neighbour: one that is needed next, one that travels meanwhile


class Pipeline:
    """One rank's stage and its traffic with the stages beside it.

    Args:
        net: this stage's part of the model.
        programs: the schedule, all stages' lists.
        grid: where this rank stands; replicas do not meet here.
        loss: (output of the last stage, micro-batch) -> mean loss over the micro-batch's targets.
        width: of the activations between stages: (batch, seq, `width`), float32.
        cores: which the stages of this pipeline share, if they do: an action then takes those of the stages that the
            plan says are idle meanwhile. None leaves the number of threads alone.

    Raises:
        ScheduleError: the schedule cannot run.
    """

    def __init__(
        self,
        net: nn.Module,
        programs: Sequence[Program],
        grid: Grid,
        loss: Callable[[Tensor, Tensor], Tensor],
        width: int,
        cores: int | None = None,
    ) -> None:
        plan = simulate(programs)
        self.net, self.grid, self.loss, self.width = net, grid, loss, width
        self.program = programs[grid.stage]
        self.is_first, self.is_last = grid.stage == 0, grid.is_last_stage
        self.kept = SavedActivations(net.parameters()) if recorder.enabled else None
        self._usual_threads = torch.get_num_threads()
        self._threads: dict[Action, int] = {}
        if cores:
            self._threads = {action: max(1, cores // busy) for action, busy in busy_workers(plan)[grid.stage].items()}
        self._channels = _channels()
        self._acknowledged = _acknowledged(programs, grid.stage)
        self._connect()
        self._live: dict[int, tuple[Tensor, Tensor, object]] = {}  # by micro-batch: input, output, hold on both
        self._sent: dict[Action, Transfer] = {}
        recorder.programs = programs

    def step(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """Run forward and backward passes over all micro-batches; gradients are added to `parameter.grad`.

        Args:
            micro_batches: token ids, each (batch, seq); sizes may differ. Every stage gets them: the first reads them
                as its input, the last as its targets.

        Returns:
            On the last stage, each micro-batch's share of the loss: their sum is the mean over all targets. Else [].

        Raises:
            InputError: the schedule is for another number of micro-batches.
            TrafficError: a neighbour ended, or did not answer within the deadline.
        """
        planned = len(self.program) // 2
        if len(micro_batches) != planned:
            raise InputError(f"{len(micro_batches)} micro-batches: the schedule is for {planned}")
        self._micro_batches = micro_batches
        targets = [x[:, 1:].numel() for x in micro_batches]
        self._shares = [count / sum(targets) for count in targets]
        self._losses: list[Tensor] = []
        inboxes: dict[type[Action], _Inbox] = {kind: self._open_inbox(kind) for kind in (Forward, Backward)}
        for action in self.program:
            if self._threads:
                torch.set_num_threads(self._threads[action])
            run = self._forward if isinstance(action, Forward) else self._backward
            run(action, inboxes[type(action)])
            if self.kept is not None:
                recorder.keeps(self.kept.now_bytes)
        if self._threads:
            torch.set_num_threads(self._usual_threads)
        self._settle(list(self._sent))  # a send that is dropped before it has ended never arrives
        return self._losses

    def _forward(self, action: Action, inbox: "_Inbox") -> None:
        k = action.micro_batch
        x = self._micro_batches[k] if self.is_first else self._take(inbox).requires_grad_()
        with recorder.span(COMPUTE, str(action)), self.kept.counting() if self.kept else contextlib.nullcontext():
            y = self.net(x)
            if self.is_last:
                y = self.loss(y, self._micro_batches[k]) * self._shares[k]
        if self.is_last:
            self._losses.append(y.detach())
        else:
            self._send(action, y.detach(), to_stage=self.grid.stage + 1)
        self._live[k] = (x, y, self.kept.keep(y) if self.kept else None)

    def _backward(self, action: Action, inbox: "_Inbox") -> None:
        k = action.micro_batch
        gradient = None if self.is_last else self._take(inbox)
        x, y, hold = self._live.pop(k)
        with recorder.span(COMPUTE, str(action)):
            y.backward(gradient)
        del y, hold
        if not self.is_first:
            self._send(action, cast(Tensor, x.grad), to_stage=self.grid.stage - 1)

    def _send(self, action: Action, tensor: Tensor, to_stage: int) -> None:
        kind = _kind(action)
        self._sent[action] = traffic.send(
            tensor, message(action), to=self.grid.rank_of(to_stage), kind=kind, group=self._channels[kind]
        )

    def _take(self, inbox: "_Inbox") -> Tensor:
        source, tensor = inbox.take()
        self._settle(self._acknowledged[source])
        return tensor

    def _settle(self, actions: Iterable[Action]) -> None:
        """Let go of messages that have been sent: their tensors had to stay as they were until then."""
        for action in actions:
            if action in self._sent:
                self._sent.pop(action).wait()

    def _open_inbox(self, kind: type[Action]) -> "_Inbox":
        """The messages that this stage's actions of one kind will need, in that order."""
        mine = (action for action in self.program if isinstance(action, kind))
        expected = (source for action in mine for source in needs(action, self.grid.pp))
        return _Inbox(self._post_receive, (source for source in expected if source.stage != self.grid.stage))

    def _connect(self) -> None:
        """Exchange a message over each link, one after the other.

        NCCL sets up a link when it is first used, and both ends must then be at the same one.
        """
        stage, tensor = self.grid.stage, torch.zeros(1, device=next(self.net.parameters()).device)
        for lower in range(self.grid.pp - 1):
            ends = ((lower, lower + 1), (lower + 1, lower))
            for (kind, group), (giver, taker) in zip(self._channels.items(), ends, strict=True):
                what = f"the first message for {kind}"
                if stage == giver:
                    traffic.send(tensor, what, to=self.grid.rank_of(taker), kind="control", group=group).wait()
                elif stage == taker:
                    traffic.receive(tensor, what, source=self.grid.rank_of(giver), group=group).wait()

    def _post_receive(self, source: Action) -> tuple[Tensor, Transfer]:
        x = self._micro_batches[source.micro_batch]
        tensor = torch.empty(*x.shape, self.width, device=x.device)
        sender, group = self.grid.rank_of(source.stage), self._channels[_kind(source)]
        return tensor, traffic.receive(tensor, message(source), source=sender, group=group)


class _Inbox:
    """Messages of one kind from one neighbour, in the order in which they come."""

    def __init__(self, post_receive: Callable[[Action], tuple[Tensor, Transfer]], expected: Iterable[Action]) -> None:
        self._post_receive, self._expected = post_receive, iter(expected)
        self._posted: deque[tuple[Action, Tensor, Transfer]] = deque()
        for _ in range(POSTED_AHEAD):
            self._post_next()

    def _post_next(self) -> None:
        for source in self._expected:
            self._posted.append((source, *self._post_receive(source)))
            return

    def take(self) -> tuple[Action, Tensor]:
        """The next message, when it has arrived, and the action that sent it."""
        source, tensor, transfer = self._posted.popleft()
        transfer.wait()
        self._post_next()
        return source, tensor


def _kind(action: Action) -> str:
    return "activations" if isinstance(action, Forward) else "gradients of activations"


def _acknowledged(programs: Sequence[Program], stage: int) -> dict[Action, list[Action]]:
    """By each action whose message a stage receives, the stage's own sends that had been used up before it was sent."""
    acknowledged: dict[Action, list[Action]] = {}
    for program in programs:
        used: list[Action] = []
        for action in program:
            used += [source for source in needs(action, len(programs)) if source.stage == stage != action.stage]
            if receiver(action) == stage:
                acknowledged[action], used = used, []
    return acknowledged


def _channels() -> "dict[str, dist.ProcessGroup | None]":
    """The process group for each kind of message; every rank must call it.

    NCCL does what it is given between two ranks strictly in turn: with one channel a receive that is posted ahead would
    hold up the send that the other side needs first.
    """
    backward = None
    if dist.is_initialized() and dist.get_backend() == "nccl":
        backward = dist.new_group(timeout=timedelta(seconds=traffic.timeout_seconds))
    return {"activations": None, "gradients of activations": backward}
