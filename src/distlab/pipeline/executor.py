"""Runs one worker of a pipeline: takes its actions in order, and moves activations and gradients between stages.

Receives are posted ahead of their use and sends are left to finish by themselves, so a message travels while both of
its ends compute. Each kind of message arrives in the order in which it was sent; `plan.simulate` checks that both ends
agree on it. Between two stages of one worker tensors are handed over as they are.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.devices import patient_threads
from distlab.comm.grid import Grid
from distlab.comm.recorder import COMPUTE, recorder
from distlab.comm.traffic import Transfer, traffic
from distlab.pipeline.actions import Action, Program, Result, describe_stages, stages_of
from distlab.pipeline.activations import SavedActivations
from distlab.pipeline.plan import Link, Plan, busy_workers, find_takers, simulate
from simplellm.errors import InputError

POSTED_AHEAD = 2  # receives under way per link: one that is needed next, one that travels meanwhile

Loss = Callable[[Tensor, Tensor], Tensor]


class Stage:
    """One stage of the model, as its actions see it.

    Attributes:
        net: the stage's part of the model.
        micro_batches: of the step: token ids, each (batch, seq).
        live: by micro-batch, what its actions keep for later ones; a forward pass its input and its output.
        losses: by micro-batch, its share of the loss; on the last stage.
    """

    def __init__(self, net: nn.Module, loss: Loss | None, kept: SavedActivations | None) -> None:
        self.net, self._loss, self._kept = net, loss, kept
        self.live: dict[int, tuple[Tensor, ...]] = {}
        self._holds: dict[int, object] = {}

    def begin(self, micro_batches: Sequence[Tensor]) -> None:
        """Forget the last step."""
        self.micro_batches = micro_batches
        targets = [x[:, 1:].numel() for x in micro_batches]
        self._shares = [count / sum(targets) for count in targets]
        self.losses: dict[int, Tensor] = {}

    def forward(self, micro_batch: int, x: Tensor) -> Tensor:
        """The stage's output for x, or on the last stage the micro-batch's share of the loss: their sum is the mean."""
        with self._kept.counting() if self._kept else contextlib.nullcontext():
            y: Tensor = self.net(x)
            if self._loss is not None:
                y = self._loss(y, self.micro_batches[micro_batch]) * self._shares[micro_batch]
                self.losses[micro_batch] = y.detach()
        return y

    def keep(self, micro_batch: int, x: Tensor, y: Tensor) -> None:
        """Keep input and output of a forward pass for the backward pass."""
        self.live[micro_batch] = x, y
        if self._kept is not None:
            self._holds[micro_batch] = self._kept.keep(y)

    def release(self, micro_batch: int) -> tuple[Tensor, ...]:
        """What is kept of a micro-batch, which is no longer."""
        self._holds.pop(micro_batch, None)
        return self.live.pop(micro_batch)


class Pipeline:
    """One rank's stages and their traffic with those of other ranks.

    Args:
        stages: this rank's part of the model, or by stage its parts where the programs give it several.
        programs: the schedule, all workers' lists; a worker is a place along the pipeline, `grid.stage`.
        grid: where this rank stands; each replica is a pipeline of its own.
        loss: (output of the last stage, micro-batch) -> mean loss over the micro-batch's targets.
        width: of the activations between stages: (batch, seq, `width`), float32.
        cores: which the workers of this pipeline share, if they do: an action then takes those of the workers that the
            plan says are idle meanwhile. None leaves the number of threads alone.

    Attributes:
        owners: by stage, the worker that holds it.
        stages: by stage, this rank's parts of the model.
        has_first, has_last: whether this rank holds the first stage, and the last, which computes the loss.
        kept: counts the activations while a trace is recorded.

    Raises:
        ScheduleError: the schedule cannot run.
        InputError: this rank cannot run it.
    """

    def __init__(
        self,
        stages: nn.Module | Mapping[int, nn.Module],
        programs: Sequence[Program],
        grid: Grid,
        loss: Loss,
        width: int,
        cores: int | None = None,
    ) -> None:
        plan = simulate(programs)
        if len(programs) != grid.pp:
            raise InputError(f"the schedule is for {len(programs)} workers, and the pipeline has {grid.pp}")
        self.program, self.owners, self.grid, self.width = programs[grid.stage], plan.owners, grid, width
        self.stages = _check_stages(stages, self.program, grid.stage)
        last = max(self.owners)
        self.has_first, self.has_last = 0 in self.stages, last in self.stages
        parameters = [parameter for net in self.stages.values() for parameter in net.parameters()]
        self.kept = SavedActivations(parameters) if recorder.enabled else None
        self._stages = {s: Stage(net, loss if s == last else None, self.kept) for s, net in self.stages.items()}
        self._labels = plan.labels
        self._usual_threads = torch.get_num_threads()
        self._threads: dict[Action, int] = {}
        if cores:
            self._threads = {action: max(1, cores // busy) for action, busy in busy_workers(plan)[grid.stage].items()}
        self._takers = find_takers(programs)
        self._incoming = {link: results for link, results in plan.messages.items() if link[1] == grid.stage}
        self._acknowledged = _acknowledged(programs, plan, grid.stage)
        self._channels = _channels(plan.messages)
        self._connect(plan.messages, parameters[0].device)
        self._sent: dict[Result, Transfer] = {}
        self._handed_over: dict[Result, Tensor] = {}
        recorder.programs = programs

    def step(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """Run all actions over the micro-batches; gradients are added to `parameter.grad`.

        Args:
            micro_batches: token ids, each (batch, seq); sizes may differ. Every rank gets them: the first stage reads
                them as its input, the last as its targets.

        Returns:
            With the last stage, each micro-batch's share of the loss: their sum is the mean over all targets. Else [].

        Raises:
            InputError: the schedule is for another number of micro-batches.
            TrafficError: another rank ended, or did not answer within the deadline.
        """
        planned = 1 + max(action.micro_batch for action in self.program)
        if len(micro_batches) != planned:
            raise InputError(f"{len(micro_batches)} micro-batches: the schedule is for {planned}")
        self._micro_batches = micro_batches
        for stage in self._stages.values():
            stage.begin(micro_batches)
        self._inboxes = {link: _Inbox(self._post_receive, results) for link, results in self._incoming.items()}
        for action in self.program:
            if self._threads:
                torch.set_num_threads(self._threads[action])
            self._execute(action)
            if self.kept is not None:
                recorder.keeps(self.kept.now_bytes)
        if self._threads:
            torch.set_num_threads(self._usual_threads)
        self._settle(list(self._sent))  # a send that is dropped before it has ended never arrives
        return [loss for stage in self._stages.values() for _, loss in sorted(stage.losses.items())]

    def _execute(self, action: Action) -> None:
        received = [self._take(result) for result in action.needs(len(self.owners)) if result.stage != action.stage]
        with recorder.span(COMPUTE, self._labels[action]):
            computed = action.run(self._stages[action.stage], *received)
        for result in action.results:
            if result in self._takers:
                self._hand_over(result, computed[result.kind])

    def _hand_over(self, result: Result, tensor: Tensor) -> None:
        """Give a result to the worker whose action needs it."""
        worker = self.owners[self._takers[result].stage]
        if worker == self.grid.stage:
            self._handed_over[result] = tensor
            return
        to, group = self.grid.rank_of(worker), self._channels[self.grid.stage, worker, result.kind]
        self._sent[result] = traffic.send(tensor, str(result), to=to, kind=result.kind, group=group)

    def _take(self, result: Result) -> Tensor:
        """A result of another stage, when it has arrived."""
        worker = self.owners[result.stage]
        if worker == self.grid.stage:
            return self._handed_over.pop(result)
        tensor = self._inboxes[worker, self.grid.stage, result.kind].take()
        self._settle(self._acknowledged[result])
        return tensor

    def _settle(self, results: Iterable[Result]) -> None:
        """Let go of messages that have been sent: their tensors had to stay as they were until then."""
        for result in results:
            if result in self._sent:
                self._sent.pop(result).wait()

    def _post_receive(self, result: Result) -> tuple[Tensor, Transfer]:
        x, worker = self._micro_batches[result.micro_batch], self.owners[result.stage]
        tensor = torch.empty(*x.shape, self.width, device=x.device)
        source, group = self.grid.rank_of(worker), self._channels[worker, self.grid.stage, result.kind]
        return tensor, traffic.receive(tensor, str(result), source=source, group=group)

    def _connect(self, links: Iterable[Link], device: torch.device) -> None:
        """Exchange a message over each link, one after the other.

        NCCL sets up a link when it is first used, and both ends must then be at the same one.
        """
        tensor = torch.zeros(1, device=device)
        for link in sorted(links, key=lambda link: (min(link[:2]), max(link[:2]), link)):
            sender, receiver, kind = link
            what, group = f"the first message for {kind}", self._channels[link]
            if self.grid.stage == sender:
                traffic.send(tensor, what, to=self.grid.rank_of(receiver), kind="control", group=group).wait()
            elif self.grid.stage == receiver:
                traffic.receive(tensor, what, source=self.grid.rank_of(sender), group=group).wait()


class _Inbox:
    """The messages of one link, in the order in which they come."""

    def __init__(self, post_receive: Callable[[Result], tuple[Tensor, Transfer]], expected: Iterable[Result]) -> None:
        self._post_receive, self._expected = post_receive, iter(expected)
        self._posted: deque[tuple[Tensor, Transfer]] = deque()
        for _ in range(POSTED_AHEAD):
            self._post_next()

    def _post_next(self) -> None:
        for result in self._expected:
            self._posted.append(self._post_receive(result))
            return

    def take(self) -> Tensor:
        """The next message, when it has arrived."""
        tensor, transfer = self._posted.popleft()
        transfer.wait()
        self._post_next()
        return tensor


def _check_stages(stages: nn.Module | Mapping[int, nn.Module], program: Program, worker: int) -> dict[int, nn.Module]:
    """The parts of the model by stage, when they and the actions of the program fit together."""
    holds = stages_of(program)
    if isinstance(stages, nn.Module):
        if len(holds) > 1:
            raise InputError(f"worker {worker} runs the {describe_stages(program)}; give a module for each")
        stages = {holds[0]: stages}
    for stage in sorted({*holds} ^ {*stages}):
        if stage in holds:
            raise InputError(f"worker {worker} runs stage {stage} and has no module for it")
        raise InputError(f"worker {worker} has a module for stage {stage}, which its program never runs")
    for action in program:
        if type(action).run is Action.run:
            raise InputError(f"stage {action.stage} cannot run {action}: {type(action).__name__} has no method run")
    return {stage: stages[stage] for stage in holds}


def _acknowledged(programs: Sequence[Program], plan: Plan, worker: int) -> dict[Result, list[Result]]:
    """By each message that a worker receives, its own messages that had been used up before that one was sent."""
    mine = {result for link, results in plan.messages.items() if link[0] == worker for result in results}
    theirs = {result for link, results in plan.messages.items() if link[1] == worker for result in results}
    acknowledged: dict[Result, list[Result]] = {}
    for program in programs:
        used: list[Result] = []
        for action in program:
            used += [result for result in action.needs(len(plan.owners)) if result in mine]
            for result in theirs.intersection(action.results):
                acknowledged[result], used = used, []
    return acknowledged


def _channels(links: Iterable[Link]) -> "dict[Link, dist.ProcessGroup | None]":
    """The process group of each link; every rank must call it.

    A group carries out messages in turn, over gloo those of each direction between two ranks, over NCCL those of both
    together: one that is posted ahead would take another kind's, or hold up what the other side needs first. So where
    kinds of message (over NCCL, and directions) share a way, each gets a group of its own, but the first.
    """
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    channels: dict[Link, tuple[str, bool]] = {}
    ways: dict[tuple[int, ...], set[tuple[str, bool]]] = {}
    for link in links:
        sender, receiver, kind = link
        channels[link] = kind, nccl and sender > receiver
        way = (min(sender, receiver), max(sender, receiver)) if nccl else (sender, receiver)
        ways.setdefault(way, set()).add(channels[link])
    groups: dict[tuple[str, bool], dist.ProcessGroup | None] = dict.fromkeys(sorted(set(channels.values())))
    if any(len(sharing) > 1 for sharing in ways.values()):
        with traffic.named("all ranks to make the pipeline's channels"), patient_threads():
            for channel in list(groups)[1:]:
                groups[channel] = dist.new_group(timeout=timedelta(seconds=traffic.timeout_seconds))
    return {link: groups[channel] for link, channel in channels.items()}
