"""A run's checkpoints: the one it resumes from, their contents, and when they are written."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from distlab.axes.layout import EXPERTS, REPLICAS, Layout, layout_size
from distlab.checkpoints.format import (
    PER_RANK_OPTIMIZER_STATE,
    UNFINISHED,
    Checkpoint,
    checksum_of,
    latest_valid,
    no_checkpoint,
    place_of,
    valid,
)
from distlab.checkpoints.saving import make_room, read_into, restore, save, state_of, tensors_in
from distlab.comm.context import context_of
from distlab.comm.together import texts_of_all, together
from distlab.run.model import ModelParts
from distlab.run.terminal import counted, say
from distlab.settings.common import ResumableSettings, as_json
from distlab.settings.resuming import check_data
from simplellm.errors import InputError, require

if TYPE_CHECKING:
    from distlab.run.logs import RunLog

CANDIDATES = "candidates"  # the key among rank 0's decisions
BatchT = TypeVar("BatchT", covariant=True)


class Batches(Protocol[BatchT]):
    """A source of batches with a position in the data that is the same on all ranks."""

    def __iter__(self) -> Iterator[BatchT]: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Checkpointer:
    """Loads the checkpoint from which a run resumes, and writes one every `--save-every` steps.

    A run that does neither has no checkpointer.
    """

    def __init__(
        self,
        settings: ResumableSettings,
        out: Path,
        rank: int,
        data_identity: dict[str, Any] | None,
        resumed: Checkpoint | None,
    ) -> None:
        self._settings, self._out, self._rank, self._data_identity = settings, out, rank, data_identity
        # Number of steps at the last checkpoint in the run's folder.
        self.saved = resumed.step if resumed is not None and resumed.is_of_run(out) else None
        tokenizer = settings.tokenizer_model  # read now: it may be in a checkpoint that the run will delete
        self._tokenizer = None if tokenizer is None else tokenizer.read_bytes()

    def load(self, resumed: Checkpoint, parts: ModelParts, optimizer: Optimizer, batches: Batches[Any]) -> int:
        """Load a checkpoint's state; return how many tokens (or inputs, …) its steps consumed."""
        layout, parameters = self._settings.layout, parts.parameters()
        what = f"all ranks to read the checkpoint of step {resumed.step}"
        with parts.changing_shards():
            together(what, lambda: restore(resumed, parameters, optimizer, self._rank, layout))
        saved = tensors_in(resumed.folder) if parts.outer or parts.compressor else {}
        if parts.outer is not None:
            before = _of_a_replica(resumed.layout, resumed.record["settings"])
            is_same = before == _of_a_replica(layout, as_json(self._settings))
            own = {name: tensor for name, tensor in parts.outer.state().items() if is_same and name in saved}
            together(what, lambda: read_into(own, resumed))
            parts.outer.load_state(own)
        if parts.compressor is not None and resumed.layout == layout:
            device = next(iter(parameters.values())).device
            kept = {name: torch.empty(saved[name].size, device=device) for name in parts.compressor.names_in(saved)}
            together(what, lambda: read_into(kept, resumed))
            parts.compressor.load_state(kept)
        if resumed.record.get("position"):
            try:
                batches.load_state_dict(resumed.record["position"])
            except InputError as error:
                raise InputError(f"--resume {resumed.folder}: {error.with_flags()}") from error
        return resumed.count

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether to save after `step`, in a run of `steps` steps."""
        every = self._settings.save_every
        return every is not None and ((step + 1) % every == 0 or step + 1 == steps)

    def save(
        self, steps: int, parts: ModelParts, optimizer: Optimizer, position: dict[str, int], log: "RunLog"
    ) -> None:
        """Write a checkpoint after `steps` steps, at this position in the data; all ranks must call this method."""
        args = self._settings
        record = {
            "architecture": args.architecture,
            "step": steps,
            "unit": log.unit,
            log.unit: log.count(steps),
            "position": position,
            "model": parts.sizes,
            "data": self._data_identity,
            "settings": as_json(args),
            "layout": args.layout,
            "world_size": layout_size(args.layout),
            PER_RANK_OPTIMIZER_STATE: args.per_rank_optimizer_state,
            "torch": torch.__version__,
        }
        tensors: dict[str, Any] = {}
        for state in (parts.outer, parts.compressor):
            tensors |= {} if state is None else state.state()
        with parts.outer.as_model() if parts.outer else nullcontext():
            tensors |= state_of(parts.parameters(), optimizer, self._rank, args.per_rank_optimizer_state)
            save(self._out, tensors, record, self._tokenizer, args.keep)
        self.saved = steps

    def has(self, steps: int) -> bool:
        """Return whether the checkpoint after `steps` steps is complete."""
        return place_of(self._out, steps, "").exists()

    def discard_unfinished(self, steps: int) -> None:
        """Delete what an interrupted `save` has left."""
        shutil.rmtree(place_of(self._out, steps, UNFINISHED), ignore_errors=True)


def _of_a_replica(layout: Layout, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide which part of the model each rank of a replica holds, and in which order."""
    sizes = {name: size for name, size in layout.items() if name not in (REPLICAS, EXPERTS) and size > 1}
    stages = ("schedule", "chunks_per_stage", "layers_per_stage") if "pp" in sizes else ()
    return sizes | {name: settings.get(name) for name in stages}


def prepare_checkpoints(settings: ResumableSettings, out: Path) -> dict[str, list[str]]:
    """On rank 0, find checkpoints to resume from, by the sizes of files, or make room for a new run's checkpoints.

    Returns:
        Their folders under `CANDIDATES`, latest first, for `choose` on each rank; nothing for a new run.
    """
    if settings.resume is None:
        if settings.save_every:
            make_room(out)
        return {}
    latest_valid(settings.resume, say, at_a_glance=True)  # says which newer ones are skipped
    found = list(valid(settings.resume, at_a_glance=True))
    if settings.save_every and not found[0].is_of_run(out):
        make_room(out)
    return {CANDIDATES: [str(checkpoint.folder.absolute()) for checkpoint in found]}


def choose(
    settings: ResumableSettings,
    folders: list[str],
    out: Path,
    data_identity: dict[str, Any] | None,
    joins_late: bool = False,
) -> Checkpoint:
    """Return the first of some checkpoints whose files are intact; all ranks call this, and share the work.

    The ranks of each host check all files, because hosts may see different files. A run that continues in its folder
    then has no later checkpoints there. A rank that joins late only needs the options of the model, which are the same
    in each checkpoint of the run; the others may have deleted the one from which they have resumed.

    Raises:
        InputError: there is none, or it belongs to a different kind of run; on all ranks.
    """
    assert settings.resume is not None
    if joins_late:
        return latest_valid(settings.resume, at_a_glance=True)
    reasons = []
    for folder in map(Path, folders):
        what = f"all ranks to check {folder.name}"
        told = [json.loads(text) for text in texts_of_all(together(what, partial(_verdict, folder)), what)]
        problem = next((problem for problem, _ in told if problem is not None), None)
        if problem is None and any(record != told[0] for record in told):
            problem = "its record differs between hosts"
        if problem is None:
            checkpoint = latest_valid(folder, at_a_glance=True)
            _check(settings, checkpoint, out, data_identity)
            return checkpoint
        reasons.append(f"{folder.name}: {problem}")
        if not dist.get_rank():
            say(f"skipped a checkpoint: {reasons[-1]}")
    raise no_checkpoint(settings.resume, reasons)


def _verdict(folder: Path) -> str:
    """Return as JSON the damage of this rank's share of a checkpoint's files, if any, and the record's checksum."""
    here = context_of().here(range(dist.get_world_size()))
    try:
        checkpoint = latest_valid(folder, at_a_glance=True)
    except InputError as error:
        return json.dumps((str(error), ""))
    share = here.index(dist.get_rank()), len(here)
    return json.dumps((checkpoint.problem(share=share), checksum_of(checkpoint.record)))


def _check(
    settings: ResumableSettings, checkpoint: Checkpoint, out: Path, data_identity: dict[str, Any] | None
) -> None:
    """Raise `InputError` on all ranks if a run cannot resume from a checkpoint, else make room in its folder."""
    settings.check_checkpoint(checkpoint)
    check_data(checkpoint, data_identity)
    continues, (asked, steps) = checkpoint.is_of_run(out), settings.length
    sentence = f"{asked}: {checkpoint.folder} has taken {counted(checkpoint.step, 'steps')} already; give more"
    require(steps >= checkpoint.step + (not continues), sentence)  # in its own folder, a run may be complete
    problem = ""
    if continues and not dist.get_rank():  # now: after a restart, the run resumes from the latest checkpoint
        try:
            make_room(out, checkpoint)
        except InputError as error:
            problem = str(error)
    problem = texts_of_all(problem, "rank 0 to make room for checkpoints")[0]
    require(not problem, problem)
