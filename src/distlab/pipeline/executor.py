"""Runs one worker of a pipeline: receives the inputs of an action, runs it, and sends its results to other stages.

A `Flow` holds the state of one step; the `Links` to other workers live from step to step.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.grid import Grid
from distlab.comm.context import context_of
from distlab.comm.recorder import COMPUTE
from distlab.pipeline.actions import Action, ActionCosts, Programs, Result, stages_of
from distlab.pipeline.activations import MicroBatch, PartOf, Stage, StageLoss
from distlab.pipeline.links import Links, WorkerLink
from distlab.pipeline.plan import Plan, simulate, threads_by_plan
from distlab.pipeline.rehearsal import warm_up
from simplellm.errors import require
from simplellm.saved_activations import SavedActivations

Modules = nn.Module | Mapping[int, nn.Module]  # of one stage, or by stage
POSTED_AHEAD = 2  # receives posted per link, before they are needed: the one needed next, and one more in transit


class Pipeline:
    """One rank's stages and their traffic with the stages of other ranks.

    Args:
        stages: this rank's part of the model; a mapping from stage to module if the rank holds several stages.
        programs: the schedule: each worker's list of actions; this rank is worker `grid.axis("pp").rank`.
        grid: this rank's position in the layout; each replica is a separate pipeline.
        loss: (output of the last stage, micro-batch) -> mean loss over the micro-batch's targets.
        width: width of the activations between stages: (batch, seq, `width`), float32.
        cores: number of cores that the workers of one pipeline share: an action also uses the cores of workers that
            the plan shows idle at the same time. None leaves the number of threads unchanged.
        costs: costs of the actions for that plan (only their ratios matter), and the multiply-adds of a layer, which
            decide how many threads have enough to do. By default all stages cost the same, and threads always pay.
        part_of: the part of a micro-batch that this rank sees, if that is not all of its token ids: where ranks share
            sequences, or tokens attend within documents.
        run_on: leave the last sends of a step to complete during the next one. A collective of all ranks has to follow
            the last step.
        pipelines: number of replicas whose workers follow these programs together, as those of `rerouting` do; every
            rank then runs the program with its own number, and several may hold a stage.
        dtype: activations and their gradients have it on the link to another rank: in bfloat16 they are half as
            large, and rounded. By default, and between the stages of one rank, they have torch's default dtype.

    Raises:
        InputError: the schedule cannot run at all (`ScheduleError`), or not with these stages or on this rank.
    """

    is_cold: bool  # over NCCL, until the first step of a schedule is complete

    def __init__(
        self,
        stages: Modules,
        programs: Programs,
        grid: Grid,
        loss: StageLoss,
        width: int,
        *,
        cores: int | None = None,
        costs: ActionCosts | None = None,
        part_of: PartOf | None = None,
        run_on: bool = False,
        pipelines: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        context, workers = context_of(), grid.axis("pp") if pipelines == 1 else grid.axis("dp", "pp")
        self.pipelines = pipelines
        self._recorder, self._worker, self._workers = context.recorder, workers.rank, workers.size
        self.width, self._cores, self._costs, self._run_on = width, cores, costs, run_on
        self.part_of, self.message_dtype = part_of, dtype
        self.links = Links(workers.ranks, workers.rank)
        plan = self._checked(programs)
        self.owners = [plan.owners[stage] for stage in sorted(plan.owners)]  # by stage, the worker that holds it
        held = stages_of(programs[self._worker])
        self.stages = dict.fromkeys(held[:1], stages) if isinstance(stages, nn.Module) else dict(stages)
        given = sorted(self.stages)
        require(given == held, f"worker {self._worker} runs the stages {held} but has modules for {given}")
        parameters = [parameter for net in self.stages.values() for parameter in net.parameters()]
        self.kept = SavedActivations(parameters) if self._recorder.enabled else None  # counted only for a trace
        last = len(self.owners) - 1  # computes the loss
        self.held = {s: Stage(net, loss if s == last else None, self.kept) for s, net in self.stages.items()}
        self._use(programs, plan)

    def follow(self, programs: Programs) -> None:
        """From the next step on, run another schedule, in which every stage is on the same worker as before.

        All ranks call this together, between two steps.

        Raises:
            InputError: as the constructor; or a stage would be on another worker.
        """
        plan = self._checked(programs)
        before = {stage: f"worker {worker}" for stage, worker in enumerate(self.owners)}
        now = {stage: f"worker {worker}" for stage, worker in plan.owners.items()}
        for stage in sorted(before.keys() | now.keys()):
            own, other = (where.get(stage, "no worker") for where in (before, now))
            require(own == other, f"stage {stage} is on {own}; in the schedule to follow, it is on {other}")
        self._use(programs, plan)

    def step(self, micro_batches: Sequence[Tensor], before: Callable[[int], object] = lambda _: None) -> list[Tensor]:
        """Run all actions over the micro-batches; gradients are added to `parameter.grad`.

        Args:
            micro_batches: token ids, each (batch, seq); sizes may differ. Every rank gets them: the first stage uses
                them as its input, the last as its targets.
            before: called before each action, with the number of its micro-batch.

        Returns:
            On the rank of the last stage, each micro-batch's share of the loss; they add up to the mean over all
            targets of a pipeline. On other ranks, [].

        Raises:
            InputError: the schedule is for a different number of micro-batches; or the transport is "shared", and the
                ranks cannot share memory.
            TrafficError: another rank exited, or did not answer within the deadline.
        """
        planned = self._micro_batches
        require(len(micro_batches) == planned, f"{len(micro_batches)} micro-batches: the schedule is for {planned}")
        if self.is_cold:
            warm_up(self.program, self.held, micro_batches[0], self.part_of, len(self.owners), self.width)
        flow = Flow(self, micro_batches)
        usual_threads = torch.get_num_threads()
        try:
            for action in self.program:
                if self._threads:
                    torch.set_num_threads(self._threads[action])
                needed = [result for result in action.needs(len(self.owners)) if result.stage != action.stage]
                received = [flow.take(result) for result in needed]
                before(action.micro_batch)
                with self._recorder.span(COMPUTE, self._plan.labels[action]):
                    computed = action.run(flow.micro_batch(action), *received)
                for result in action.results:
                    if result in self._plan.takers:  # another stage needs it
                        flow.give(result, computed[result.kind])
                if self.kept is not None:
                    self._recorder.keeps(self.kept.take_recent_peak())  # within the action, where blocks are recomputed
                    self._recorder.keeps(self.kept.now_bytes)
        finally:
            torch.set_num_threads(usual_threads)
        self.is_cold = False
        return flow.end(self._run_on)

    def _checked(self, programs: Programs) -> Plan:
        """Return the plan of a schedule if this pipeline can run it; all ranks come to the same answer."""
        plan, workers = simulate(programs, holders=self.pipelines), len(programs)
        require(workers == self._workers, f"the schedule is for {workers} workers but the pipeline has {self._workers}")
        for action in itertools.chain.from_iterable(programs):
            what = f"stage {action.stage} cannot run {action}: {type(action).__name__} does not implement run"
            require(type(action).run is not Action.run, what)
        return plan

    def _use(self, programs: Programs, plan: Plan) -> None:
        self._plan, self.program, self._recorder.programs = plan, programs[self._worker], programs
        self._recorder.pipelines = self.pipelines
        self._micro_batches = 1 + max(action.micro_batch for action in itertools.chain.from_iterable(programs))
        cores = (self._cores or 0) * self.pipelines
        self._threads = threads_by_plan(programs, cores, self._costs, self.pipelines) if cores else {}
        self.is_cold = context_of().is_over_nccl
        self.links.close()
        self.links.open(programs, plan)


class Flow:
    """The state of one step of a pipeline's worker, over micro-batches (batch, seq) of token ids; then discarded."""

    def __init__(self, of: Pipeline, micro_batches: Sequence[Tensor]) -> None:
        targets = [ids[:, 1:].numel() for ids in micro_batches]
        shares = [of.pipelines * count / sum(targets) for count in targets]
        parts = [of.part_of(ids) if of.part_of else None for ids in micro_batches]
        own = [ids if part is None else part.ids for ids, part in zip(micro_batches, parts, strict=True)]
        self._parts = {
            (index, k): MicroBatch(stage, *given)
            for index, stage in sorted(of.held.items())
            for k, given in enumerate(zip(own, shares, parts, strict=True))
        }
        self._links, self._micro_batches, self._width = of.links, own, of.width
        self._like = torch.empty(0, dtype=of.message_dtype, device=own[0].device)
        of.links.make_room(max(ids.numel() for ids in own) * of.width, self._like)
        self._here: dict[Result, Tensor] = {}  # results that another stage of this worker needs
        self._posted: dict[Result, tuple[Tensor, dist.Work]] = {}  # receives
        self._sent: dict[Result, dist.Work] = {}
        self._expected = {link: iter(results) for link, results in of.links.incoming}  # messages yet to be received
        for action in of.program:
            action.prepare(self.micro_batch(action))
        for link in [] if of.is_cold else [*self._expected] * POSTED_AHEAD:
            self._post(link)

    def micro_batch(self, action: Action) -> MicroBatch:
        """Return the micro-batch of an action, on its stage."""
        return self._parts[action.stage, action.micro_batch]

    def take(self, result: Result) -> Tensor:
        """Return a result of another stage, after waiting until it has arrived."""
        link = self._links.link_of.get(result)
        if link is None:
            return self._here.pop(result)
        self._post(link)
        tensor, work = self._posted.pop(result)
        work.wait()
        for arrived in self._links.confirmed[result]:
            if arrived in self._sent:  # until it has been waited for, its tensor is kept
                self._sent.pop(arrived).wait()
        return tensor.to(torch.get_default_dtype())

    def give(self, result: Result, tensor: Tensor) -> None:
        """Pass a result to the stage that needs it."""
        link = self._links.link_of.get(result)
        if link is None:
            self._here[result] = tensor
        elif (work := link.send(result, tensor.to(self._like.dtype))) is not None:
            self._sent[result] = work

    def end(self, run_on: bool) -> list[Tensor]:
        """End the step; on the worker of the last stage, return each micro-batch's share of the loss."""
        self._links.finish(self._sent.values(), run_on)
        return [part.loss for part in self._parts.values() if part.loss is not None]

    def _post(self, link: WorkerLink) -> None:
        """Post the receive of a link's next message, if there is one."""
        result = next(self._expected[link], None)
        if result is not None:
            ids = self._micro_batches[result.micro_batch]
            tensor = self._like.new_empty(*ids.shape, self._width)
            self._posted[result] = tensor, link.receive(result, tensor)
