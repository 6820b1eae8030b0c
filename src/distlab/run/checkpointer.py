"""A run's checkpoints: which one it resumes from, what they hold, and when one is written."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.checkpoints.format import PER_RANK_OPTIMIZER_STATE, latest_valid
from distlab.checkpoints.saving import restore, save, state_of, supersede
from distlab.comm.layout import layout_size
from distlab.run.logs import RunLog, say
from distlab.run.resume import check_data, per_step
from distlab.run.settings import ResumableSettings, as_flag, as_json
from simplellm.errors import require

BatchT = TypeVar("BatchT", covariant=True)


class Batches(Protocol[BatchT]):
    """What gives a run its batches, and knows its position in the data, the same on all ranks."""

    def __iter__(self) -> Iterator[BatchT]: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


@dataclass
class TrainingState:
    """What a script hands over with `Run.track`: all that changes while it trains."""

    parameters: dict[str, nn.Parameter]  # that this rank holds, by their names in the whole model
    model: dict[str, Any]  # what a checkpoint's record says of the model
    optimizer: Optimizer  # of all parameters


class Checkpointer:
    """Restores the checkpoint that a run resumes from, and writes one every `--save-every` steps."""

    def __init__(self, settings: ResumableSettings, out: Path, rank: int, decided: dict[str, Any]) -> None:
        self._settings, self._out, self._rank = settings, out, rank
        self._data_identity, folder = decided["data_identity"], decided.get("resume")
        # The checkpoint to resume from, and whether its run's records, in the same folder, are continued.
        self.resumed = None if folder is None else latest_valid(Path(folder), at_a_glance=True)
        self.continues = self.resumed is not None and self.resumed.is_of_run(out)
        self.first_step = self.resumed.step if self.resumed else 0
        self.saved = self.first_step if self.continues else None  # steps before its folder's last one
        tokenizer = settings.tokenizer_model  # read now: it may be in a checkpoint that the run will delete
        self._tokenizer = None if tokenizer is None else tokenizer.read_bytes()
        self.state: TrainingState | None = None  # until the script has handed it over

    def restore(self, batches: Batches[Any]) -> int:
        """Load the checkpoint's state; returns how many tokens, inputs, … its steps took, 0 for a new run."""
        is_needed = self._settings.save_every or self.resumed
        sentence = "--save-every and --resume need a script that calls run.track before its first step"
        require(not is_needed or self.state is not None, sentence)
        if self.resumed is None or self.state is None:
            return 0
        restore(self.resumed, self.state.parameters, self.state.optimizer, self._rank, self._settings.layout)
        if self.resumed.record.get("position"):
            batches.load_state_dict(self.resumed.record["position"])
        return self.resumed.count

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to save after a step of so many."""
        every = self._settings.save_every
        return every is not None and ((step + 1) % every == 0 or step + 1 == steps)

    def save(self, steps: int, batches: Batches[Any], log: RunLog) -> None:
        """Write a checkpoint after so many steps; all ranks call it."""
        args, state = self._settings, self.state
        assert state is not None
        record = {
            "architecture": args.architecture,
            "step": steps,
            "unit": log.unit,
            log.unit: log.count,
            "position": batches.state_dict(),
            "model": state.model,
            "data": self._data_identity,
            "settings": as_json(args),
            "layout": args.layout,
            "world_size": layout_size(args.layout),
            PER_RANK_OPTIMIZER_STATE: args.per_rank_optimizer_state,
            "torch": torch.__version__,
        }
        tensors = state_of(state.parameters, state.optimizer, self._rank, args.per_rank_optimizer_state)
        save(self._out, tensors, record, self._tokenizer, args.keep)
        self.saved = steps

    def introduce(self) -> None:
        """Say where the run resumes, and whether its batch is another one."""
        if self.resumed is None:
            return
        say(f"resuming from {self.resumed.folder}, after {self.resumed.step} steps")
        for name, before in per_step(self.resumed, self._settings).items():
            now = getattr(self._settings, name) * self._settings.layout.get("dp", 1)
            if now != before:
                say(f"the global batch is {now}, and was {before} before: {as_flag(name)} sets it")
        for remark in self._settings.remarks_on_resuming(self.resumed):
            say(remark)


def prepare_checkpoints(settings: ResumableSettings, out: Path, data_identity: dict[str, Any] | None) -> dict[str, str]:
    """Choose the checkpoint to resume from, if asked for, and clear the run's folder of unfinished and later ones."""
    if settings.resume is None:
        if settings.save_every:
            supersede(out)
        return {}
    checkpoint = latest_valid(settings.resume, say)
    settings.check_checkpoint(checkpoint)
    check_data(checkpoint, data_identity)
    continues, (asked, steps) = checkpoint.is_of_run(out), settings.length
    sentence = f"{asked}: {checkpoint.folder} has taken {checkpoint.step} steps already; give more"
    require(steps >= checkpoint.step + (not continues), sentence)  # in its own folder, a run may be complete
    if continues:  # already now: a run that is restarted resumes from the last checkpoint that is left
        supersede(out, checkpoint.step)
    return {"resume": str(checkpoint.folder.absolute())}
