"""A run's checkpoints: which one it resumes from, what they hold, and when one is written."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.checkpoints.format import PER_RANK_OPTIMIZER_STATE, Checkpoint, latest_valid
from distlab.checkpoints.saving import restore, save, state_of, supersede
from distlab.comm.grid import layout_size
from distlab.run.logs import RunLog, say
from distlab.run.resume import check_data, per_step, replicas
from distlab.run.settings import ResumableSettings, as_json
from simplellm.errors import InputError

BatchT = TypeVar("BatchT", covariant=True)


class Batches(Protocol[BatchT]):
    """What gives a run its batches, and knows its position in the data, the same on all ranks."""

    def __iter__(self) -> Iterator[BatchT]: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


@dataclass
class TrainingState:
    """What a script hands over with `Run.track`: all that changes while it trains.

    Attributes:
        parameters: that this rank holds, by their names in the whole model.
        model: what a checkpoint's record says of the model.
        optimizer: of all parameters.
    """

    parameters: dict[str, nn.Parameter]
    model: dict[str, Any]
    optimizer: Optimizer


class Checkpointer:
    """Restores the checkpoint that a run resumes from, and writes one every `--save-every` steps.

    Args:
        settings: of the run.
        out: the run's folder.
        rank: of this process.
        decided: what rank 0 decided for all; the checkpoint to resume from and the data's identity are in it.

    Attributes:
        resumed: the checkpoint that the run resumes from; None for a new run.
        continues: whether `out` is the folder of the run that wrote it, whose records are then continued.
        seconds: that writing took.
    """

    def __init__(self, settings: ResumableSettings, out: Path, rank: int, decided: dict[str, Any]) -> None:
        self._settings, self._out, self._rank = settings, out, rank
        self._data_identity = decided["data_identity"]
        folder = decided.get("resume")
        self.resumed = None if folder is None else latest_valid(Path(folder), at_a_glance=True)
        self.continues = self.resumed is not None and self.resumed.is_of_run(out)
        tokenizer = settings.tokenizer_model
        self._tokenizer = None if tokenizer is None else tokenizer.read_bytes()  # it may lie in a checkpoint that goes
        self.seconds = 0.0

    @property
    def first_step(self) -> int:
        """0, or the number of steps that the checkpoint has taken which the run resumes from."""
        return 0 if self.resumed is None else self.resumed.step

    @property
    def is_needed(self) -> bool:
        """Whether the run was asked to save or to resume."""
        return bool(self._settings.save_every) or self.resumed is not None

    def restore(self, state: TrainingState, batches: Batches[Any]) -> int:
        """Take on the checkpoint's state; returns how many tokens, inputs, … its steps took, 0 for a new run."""
        if self.resumed is None:
            return 0
        restore(self.resumed, state.parameters, state.optimizer, self._rank, self._settings.layout)
        if self.resumed.record.get("position"):
            batches.load_state_dict(self.resumed.record["position"])
        return self.resumed.count

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to save after a step of so many."""
        every = self._settings.save_every
        return every is not None and ((step + 1) % every == 0 or step + 1 == steps)

    def save(self, steps: int, state: TrainingState, batches: Batches[Any], log: RunLog) -> None:
        """Write a checkpoint after so many steps; all ranks call it."""
        args = self._settings
        started = time.perf_counter()
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
        self.seconds += time.perf_counter() - started

    def introduce(self) -> None:
        """Say where the run resumes, and whether its batch is another one."""
        if self.resumed is None:
            return
        say(f"resuming from {self.resumed.folder}, after {self.resumed.step} steps")
        for name, before in per_step(self.resumed, self._settings).items():
            now = getattr(self._settings, name) * replicas(self._settings.layout)
            if now != before:
                say(f"the global batch is {now}, and was {before} before: --{name.replace('_', '-')} sets it")


def choose_checkpoint(settings: ResumableSettings, out: Path, data_identity: dict[str, Any] | None) -> Checkpoint:
    """The checkpoint to resume from, as rank 0 decides it for all.

    Raises:
        InputError: there is none that is whole, it is another run's, or it has taken all steps already.
    """
    assert settings.resume is not None
    checkpoint = latest_valid(settings.resume, say)
    settings.check_checkpoint(checkpoint)
    check_data(checkpoint, data_identity)
    continues = checkpoint.is_of_run(out)
    asked, steps = settings.length
    if steps < checkpoint.step + (not continues):  # in its own folder, a run may find that all is done
        raise InputError(f"{asked}: {checkpoint.folder} has taken {checkpoint.step} steps already; give more")
    if continues:  # already now: a run that is restarted resumes from the last one that is left
        supersede(out, checkpoint.step)
    return checkpoint
