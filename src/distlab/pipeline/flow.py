"""The state of one step of a worker: its micro-batches, and the tensors in transit between stages."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.pipeline.actions import Action, Program, Result
from distlab.pipeline.activations import MicroBatch, PartOf, Stage
from distlab.pipeline.links import Links, Way

POSTED_AHEAD = 2  # receives posted per link: the one needed next, and one more in transit


class Flow:
    """The state of one step of a worker; it is discarded at the end of the step.

    Args:
        stages: this worker's stages.
        program: the actions that it will run.
        micro_batches: token ids, each (batch, seq).
        part_of: the part of them that this rank sees, if that is not all.
        width: width of the activations between stages: (batch, seq, `width`).
        message_dtype: of activations and their gradients on the way to another rank; None is torch's default.
        posts_ahead: post receives before they are needed, where there is no queue.
        pipelines: among which the micro-batches are divided.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        links: Links,
        program: Program,
        micro_batches: Sequence[Tensor],
        part_of: PartOf | None,
        width: int,
        message_dtype: torch.dtype | None,
        posts_ahead: bool,
        pipelines: int = 1,
    ) -> None:
        targets = [ids[:, 1:].numel() for ids in micro_batches]
        shares = [pipelines * count / sum(targets) for count in targets]
        parts = [part_of(ids) if part_of else None for ids in micro_batches]
        own = [ids if part is None else part.ids for ids, part in zip(micro_batches, parts, strict=True)]
        self._parts = {
            (index, k): MicroBatch(stage, *given)
            for index, stage in sorted(stages.items())
            for k, given in enumerate(zip(own, shares, parts, strict=True))
        }
        self._links, self._micro_batches, self._width, self._posts_ahead = links, own, width, posts_ahead
        self._like = torch.empty(0, dtype=message_dtype, device=own[0].device)
        links.make_room(max(ids.numel() for ids in own) * width, self._like)
        self._here: dict[Result, Tensor] = {}  # results that another stage of this worker needs
        self._posted: dict[Result, tuple[Tensor, dist.Work]] = {}  # receives
        self._sent: dict[Result, dist.Work] = {}
        self._expected: dict[Way, Iterator[Result]] = {way: iter(results) for way, results in links.incoming}
        for action in program:
            action.prepare(self.micro_batch(action))
        for way in [*self._expected] * POSTED_AHEAD:
            self._post_ahead(way)

    def micro_batch(self, action: Action) -> MicroBatch:
        """Return the micro-batch of an action, on its stage."""
        return self._parts[action.stage, action.micro_batch]

    def take(self, result: Result) -> Tensor:
        """Return a result of another stage, after waiting until it has arrived."""
        way = self._links.ways.get(result)
        if way is None:
            return self._here.pop(result)
        if result not in self._posted:
            self._post(way)
        tensor, work = self._posted.pop(result)
        work.wait()
        self._post_ahead(way)
        for arrived in self._links.confirmed[result]:
            if arrived in self._sent:  # until it has been waited for, its tensor is kept
                self._sent.pop(arrived).wait()
        return tensor.to(torch.get_default_dtype())

    def give(self, result: Result, tensor: Tensor) -> None:
        """Pass a result to the stage that needs it."""
        way = self._links.ways.get(result)
        if way is None:
            self._here[result] = tensor
        elif (work := way.send(result, tensor.to(self._like.dtype))) is not None:
            self._sent[result] = work

    def end(self, run_on: bool) -> list[Tensor]:
        """End the step; on the worker of the last stage, return each micro-batch's share of the loss."""
        self._links.finish(self._sent.values(), run_on)
        return [part.loss for part in self._parts.values() if part.loss is not None]

    def _post_ahead(self, way: Way) -> None:
        if self._posts_ahead and not way.is_queue:
            self._post(way)

    def _post(self, way: Way) -> None:
        """Post the receive of a link's next message, if there is one."""
        result = next(self._expected[way], None)
        if result is not None:
            ids = self._micro_batches[result.micro_batch]
            tensor = self._like.new_empty(*ids.shape, self._width)
            self._posted[result] = tensor, way.receive(result, tensor)
