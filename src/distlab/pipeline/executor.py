"""Runs one worker of a pipeline: executes its actions in order, and exchanges activations and gradients between stages.

Receives are posted ahead of their use and sends complete in the background, so sender and receiver compute while a
message is in transit. Between ranks that share memory, a message is there when the sender has copied it into a queue.
Messages of one kind arrive in the order in which they were sent; `plan.simulate` checks that both ends expect the same
order. Two stages of one worker exchange tensors directly, without a message or a copy.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.devices import patient_threads
from distlab.comm.endpoint import is_over_nccl
from distlab.comm.grid import Grid
from distlab.comm.names import counted_as
from distlab.comm.queues import SharedQueue
from distlab.comm.recorder import COMPUTE, recorder
from distlab.comm.traffic import Transfer, traffic
from distlab.pipeline.actions import Action, ActionCosts, Programs, Result, stages_of
from distlab.pipeline.activations import Loss, SavedActivations, Stage
from distlab.pipeline.plan import Link, acknowledged, most_on_the_way, simulate, threads_by_plan
from simplellm.errors import require

POSTED_AHEAD = 2  # receives posted per link: the one needed next, and one more in transit

Modules = nn.Module | Mapping[int, nn.Module]  # of one stage, or by stage


class PreparedAction(NamedTuple):
    """An action of this rank's program, with what it exchanges with other stages."""

    action: Action
    stage: Stage
    label: str
    needs: list[Result]  # of other stages
    gives: list[Result]  # to other stages
    threads: int | None  # that it computes with; None leaves the number unchanged


class Pipeline:
    """One rank's stages and their traffic with those of other ranks.

    Args:
        stages: this rank's part of the model; a mapping from stage to module if the rank holds several stages.
        programs: the schedule: each worker's list of actions; this rank is worker `grid.axis("pp").rank`.
        grid: this rank's position in the layout; each replica is a separate pipeline.
        loss: (output of the last stage, micro-batch) -> mean loss over the micro-batch's targets.
        width: width of the activations between stages: (batch, seq, `width`), float32.
        cores: number of cores that this pipeline's workers share: an action also uses the cores of workers that the
            plan shows idle at the same time. None leaves the number of threads unchanged.
        costs: of the actions, for that plan, of which only the ratios matter; and the multiply-adds of a layer, which
            decide how many threads have enough to do. By default all stages cost the same, and threads always pay.
        run_on: leave the last sends of a step to complete during the next one. A collective of all ranks has to follow
            the last step.

    Raises:
        InputError: the schedule cannot run at all (`ScheduleError`), or not with these stages or on this rank.
    """

    def __init__(
        self,
        stages: Modules,
        programs: Programs,
        grid: Grid,
        loss: Loss,
        width: int,
        *,
        cores: int | None = None,
        costs: ActionCosts | None = None,
        run_on: bool = False,
    ) -> None:
        plan, workers = simulate(programs), len(programs)
        ranks = grid.axis("pp")  # of the pipeline
        require(workers == ranks.size, f"the schedule is for {workers} workers but the pipeline has {ranks.size}")
        self._ranks, self.width, self._plan, self._worker, self._run_on = ranks.ranks, width, plan, ranks.rank, run_on
        self.owners = [plan.owners[stage] for stage in sorted(plan.owners)]  # by stage, the worker that holds it
        self.program = programs[self._worker]  # this worker's actions
        held = stages_of(self.program)
        self.stages = dict.fromkeys(held[:1], stages) if isinstance(stages, nn.Module) else dict(stages)
        given = sorted(self.stages)
        require(given == held, f"worker {self._worker} runs the stages {held} but has modules for {given}")
        for action in itertools.chain.from_iterable(programs):  # of all workers, or the others would wait for one
            what = f"stage {action.stage} cannot run {action}: {type(action).__name__} does not implement run"
            require(type(action).run is not Action.run, what)
        last = len(self.owners) - 1
        self.has_first, self.has_last = 0 in self.stages, last in self.stages  # the last stage computes the loss
        parameters = [parameter for net in self.stages.values() for parameter in net.parameters()]
        self.kept = SavedActivations(parameters) if recorder.enabled else None  # counted only for a trace
        self._stages = {s: Stage(net, loss if s == last else None, self.kept) for s, net in self.stages.items()}
        self._threads = threads_by_plan(programs, cores, costs) if cores else {}
        self._prepared = [self._prepare(action) for action in self.program]
        self._incoming = {link: results for link, results in plan.messages.items() if link[1] == self._worker}
        self._acknowledged = acknowledged(programs, plan, self._worker)
        self._channels = _channels(plan.messages)
        self._queues: dict[Link, SharedQueue | None] = {}  # None where the ends of a link do not share memory
        self._slots, self._queued_elements = most_on_the_way(programs), 0  # by link; what a slot has room for
        self._is_cold = is_over_nccl()  # until the first step is complete
        self._connect()
        self._posted: dict[Result, tuple[Tensor, Transfer]] = {}
        self._sent: dict[Result, Transfer] = {}
        self._sent_before: dict[Result, Transfer] = {}  # with `run_on`, the last sends of the step before
        self._handed_over: dict[Result, Tensor] = {}
        recorder.programs = programs

    def step(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """Run all actions over the micro-batches; gradients are added to `parameter.grad`.

        Args:
            micro_batches: token ids, each (batch, seq); sizes may differ. Every rank gets them: the first stage uses
                them as its input, the last as its targets.

        Returns:
            On the rank of the last stage, each micro-batch's share of the loss; they add up to the mean over all
            targets. On other ranks, [].

        Raises:
            InputError: the schedule is for a different number of micro-batches; or the transport is "shared", and the
                ranks cannot share memory.
            TrafficError: another rank exited, or did not answer within the deadline.
        """
        planned = 1 + max(action.micro_batch for action in self.program)
        require(len(micro_batches) == planned, f"{len(micro_batches)} micro-batches: the schedule is for {planned}")
        targets = [x[:, 1:].numel() for x in micro_batches]
        for stage in self._stages.values():
            stage.micro_batches, stage.losses = micro_batches, {}
            stage.shares = [count / sum(targets) for count in targets]
        for action in self.program:
            action.prepare(self._stages[action.stage])
        self._micro_batches, usual_threads = micro_batches, torch.get_num_threads()
        self._share_memory(micro_batches)
        self._expected = {link: iter(results) for link, results in self._incoming.items()}
        if self._is_cold:
            self._warm_up(micro_batches[0])
        for link in [*filter(self._posts_ahead, self._incoming)] * POSTED_AHEAD:
            self._post_next(link)
        try:
            for prepared in self._prepared:
                self._run(prepared)
        finally:
            torch.set_num_threads(usual_threads)
        if self._run_on:
            self._sent, self._sent_before = self._sent_before, self._sent
        self._settle(list(self._sent))  # a send whose handle is dropped before it has completed never arrives
        self._is_cold = False
        return [loss for stage in self._stages.values() for _, loss in sorted(stage.losses.items())]

    def _prepare(self, action: Action) -> PreparedAction:
        """Look up once what is the same in every step."""
        needs = [result for result in action.needs(len(self.owners)) if result.stage != action.stage]
        gives = [result for result in action.results if result in self._plan.takers]
        label, threads = self._plan.labels[action], self._threads.get(action)
        return PreparedAction(action, self._stages[action.stage], label, needs, gives, threads)

    def _run(self, prepared: PreparedAction) -> None:
        """Receive what an action needs from other stages, compute, and send what they need."""
        if prepared.threads:
            torch.set_num_threads(prepared.threads)
        received = [self._take(result) for result in prepared.needs]
        with recorder.span(COMPUTE, prepared.label):
            computed = prepared.action.run(prepared.stage, *received)
        for result in prepared.gives:
            self._give(result, computed[result.kind])
        if self.kept is not None:
            recorder.keeps(self.kept.take_recent_peak())  # within the action, where blocks are recomputed
            recorder.keeps(self.kept.now_bytes)

    def _give(self, result: Result, tensor: Tensor) -> None:
        """Pass a result to the worker whose action needs it."""
        worker = self.owners[self._plan.takers[result].stage]
        if worker == self._worker:
            self._handed_over[result] = tensor
        else:
            to, link = self._ranks[worker], (self._worker, worker, result.kind)
            group, queue = self._channels[link], self._queues.get(link)
            transfer = traffic.send(tensor, str(result), to=to, kind=result.kind, group=group, queue=queue)
            if not transfer.was_waited_for():
                self._sent[result] = transfer

    def _take(self, result: Result) -> Tensor:
        """A result of another stage; waits until it has arrived."""
        if result in self._handed_over:
            return self._handed_over.pop(result)
        link = self.owners[result.stage], self._worker, result.kind
        if result not in self._posted:
            self._post_next(link)
        tensor, transfer = self._posted.pop(result)
        transfer.wait()
        if self._posts_ahead(link):
            self._post_next(link)
        self._settle(self._acknowledged[result])
        return tensor

    def _settle(self, results: Iterable[Result]) -> None:
        """Wait for the sends of these messages; until they complete, their tensors must not change."""
        for result in results:
            if result in self._sent:
                self._sent.pop(result).wait()

    def _posts_ahead(self, link: Link) -> bool:
        """Whether the receives of a link are posted before they are needed; a queue needs no posting."""
        return not self._is_cold and self._queues.get(link) is None

    def _post_next(self, link: Link) -> None:
        """Post the receive of a link's next message, if there is one."""
        result = next(self._expected[link], None)
        if result is not None:
            x = self._micro_batches[result.micro_batch]
            tensor, source = torch.empty(*x.shape, self.width, device=x.device), self._ranks[link[0]]
            group, queue = self._channels[link], self._queues.get(link)
            transfer = traffic.receive(tensor, str(result), source=source, group=group, queue=queue)
            self._posted[result] = tensor, transfer

    def _share_memory(self, micro_batches: Sequence[Tensor]) -> None:
        """Before the first step and before one with larger micro-batches, make queues for this worker's links."""
        elements = max(x.numel() for x in micro_batches) * self.width
        if elements <= self._queued_elements:
            return
        self._queued_elements = elements
        like = torch.empty(0, device=micro_batches[0].device)
        for link, group in self._channels.items():  # in the same order on all workers
            sender, receiver, _ = link
            if self._worker in (sender, receiver):
                ends = self._ranks[sender], self._ranks[receiver]
                self._queues.pop(link, None)  # all of whose messages have been received
                self._queues[link] = traffic.new_queue(*ends, self._slots[link], elements, like, group)

    def _warm_up(self, ids: Tensor) -> None:
        """Over NCCL, before the first receive is posted, run a forward and a backward pass of each stage on zeros.

        CUDA loads a kernel at its first use ("lazy loading" in NVIDIA's CUDA C++ Programming Guide), and may wait until
        the GPU is idle to do so. If a receive were already posted, the GPU would stay busy until its message arrived,
        and the sender may need a result of this rank before it can send: a deadlock. Some kernels, such as those of the
        optimizer, are still loaded during the first step, so no receive is posted ahead in that step either.
        """
        with counted_as("control"):  # of tensor-parallel layers
            for index, stage in self._stages.items():
                zeros = torch.zeros(*ids.shape, self.width, device=ids.device, requires_grad=True)
                stage.rehearse(ids, ids if index == 0 else zeros)

    def _connect(self) -> None:
        """Exchange a message over each link in turn: NCCL connects a link at its first use, which blocks both ends."""
        tensor = torch.zeros(1, device=traffic.device)
        for (sender, receiver, kind), group in self._channels.items():
            what = f"the first message for {kind}"
            if self._worker == sender:
                traffic.send(tensor, what, to=self._ranks[receiver], kind="control", group=group).wait()
            elif self._worker == receiver:
                traffic.receive(tensor, what, source=self._ranks[sender], group=group).wait()


def _channels(links: Iterable[Link]) -> "dict[Link, dist.ProcessGroup | None]":
    """The process group of each link; every rank must call this function.

    Within a group, messages between two ranks are ordered: over gloo, those in one direction; over NCCL, those in both.
    With a single group, gloo would deliver a message of one kind as one of another kind, and with NCCL a receive posted
    ahead would block a send that the peer needs first. So where links connect the same two ranks, each kind of message
    gets a group; over NCCL, each direction too.
    """
    nccl = is_over_nccl()
    channels = {link: (link[2], nccl and link[0] > link[1]) for link in links}
    ways = Counter(tuple(sorted(link[:2])) if nccl else link[:2] for link in channels)
    groups: dict[tuple[str, bool], dist.ProcessGroup | None] = dict.fromkeys(sorted(set(channels.values())))
    if max(ways.values(), default=1) > 1:
        with traffic.named("all ranks to create the pipeline's channels"), patient_threads():
            for channel in list(groups)[1:]:
                groups[channel] = dist.new_group(timeout=traffic.group_timeout)
    return {link: groups[channel] for link, channel in channels.items()}
