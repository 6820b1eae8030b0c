"""A rank's part of a training run that keeps checkpoints and goes on from them, whatever it trains."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.checkpoints.format import Checkpoint, latest_valid
from distlab.checkpoints.saving import restore, save, state_of, supersede
from distlab.run.logs import say
from distlab.run.resume import check_data
from distlab.run.run import Run
from distlab.run.settings import ResumableSettings, as_json
from simplellm.errors import InputError

ResumableSettingsT = TypeVar("ResumableSettingsT", bound=ResumableSettings)


class Batches(Protocol):
    """What gives a run its batches, and knows its position in the data, the same on all ranks."""

    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


class ResumableRun(Run[ResumableSettingsT]):
    """A run that keeps checkpoints with `--save-every`, and with `--resume` goes on from one.

    Attributes:
        first_step: 0, or the number of steps that the checkpoint has taken which this run goes on from.
    """

    def __init__(self, settings: ResumableSettingsT, script: Path) -> None:
        super().__init__(settings, script)
        self._state: tuple[nn.Module, Optimizer, Batches] | None = None
        tokenizer = settings.tokenizer_model
        self._tokenizer = None if tokenizer is None else tokenizer.read_bytes()  # it may lie in a checkpoint that goes
        self._besides_seconds: defaultdict[str, float] = defaultdict(float)

    @cached_property
    def _checkpoint(self) -> Checkpoint | None:
        """The one to go on from, as rank 0 chose it."""
        folder = self._decided.get("resume")
        return None if folder is None else latest_valid(Path(folder), at_a_glance=True)

    @property
    def first_step(self) -> int:
        return 0 if self._checkpoint is None else self._checkpoint.step

    @property
    def _goes_on(self) -> bool:
        return self._checkpoint is not None and self.out.resolve() in self._checkpoint.folder.resolve().parents

    def _decide(self, script: Path) -> dict[str, Any]:
        args = self.settings
        decided = {**super()._decide(script), **self._choose_data()}
        if args.resume is not None:
            checkpoint = latest_valid(args.resume, say)
            args.resume_policy.check(checkpoint, args)
            check_data(checkpoint, decided["data_identity"])
            goes_on = Path(decided["out"]).resolve() in checkpoint.folder.resolve().parents
            asked, steps = args.length
            if steps < checkpoint.step + (not goes_on):  # in its own folder, a run may find that all is done
                raise InputError(f"{asked}: {checkpoint.folder} has taken {checkpoint.step} steps already; give more")
            if goes_on:  # already now: a run that is started again goes on from the last one that is left
                supersede(Path(decided["out"]), checkpoint.step)
            decided["resume"] = str(checkpoint.folder.absolute())
        return decided

    def _choose_data(self) -> dict[str, Any]:
        """What rank 0 decides on the data; its `data_identity` is a part of it."""
        return {"data_identity": self.settings.data_identity}

    def _introduce(self, script: Path) -> None:
        super()._introduce(script)
        if self._checkpoint is not None:
            say(f"going on from {self._checkpoint.folder}, after {self._checkpoint.step} steps")

    def register_state(self, net: nn.Module, optimizer: Optimizer, batches: Batches) -> None:
        """Say what a checkpoint of this run is to hold.

        With `--resume`, all take on the checkpoint's state before the first step.

        Args:
            net: the model, or this rank's part of it, without what wraps it.
            optimizer: of all its parameters.
            batches: where the batches of the steps come from.
        """
        self._state = net, optimizer, batches

    def _begin(self) -> tuple[int, int]:
        if self._checkpoint is None:
            return super()._begin()
        if self._state is not None:
            net, optimizer, batches = self._state
            restore(self._checkpoint, net, optimizer, self.rank, self.settings.layout)
            if self._checkpoint.record.get("position"):
                batches.load_state_dict(self._checkpoint.record["position"])
        return self.first_step, self._checkpoint.count

    def _end_step(self, step: int, is_last: bool) -> None:
        """With `--save-every`, write a checkpoint."""
        args = self.settings
        if not args.save_every or ((step + 1) % args.save_every and not is_last) or self._state is None:
            return
        net, optimizer, _ = self._state
        with self._besides_the_steps("checkpoints"):
            tensors = state_of(net, optimizer, self.rank, args.per_rank_optimizer_state)
            save(self.out, tensors, self._record(step + 1), self._tokenizer, args.keep)

    def _record(self, steps: int) -> dict[str, Any]:
        """What a checkpoint's record says after so many steps."""
        args = self.settings
        assert self._state is not None
        _, _, batches = self._state
        return {
            "architecture": args.resume_policy.architecture,
            "step": steps,
            "unit": self._log.unit,
            self._log.unit: self._log.count,
            "position": batches.state_dict(),
            "model": {name: getattr(args, name) for name in args.resume_policy.sizes},
            "data": self._decided["data_identity"],
            "settings": as_json(args),
            "layout": args.layout,
            "world_size": self.world_size,
            "own_moments": args.per_rank_optimizer_state,
            "torch": torch.__version__,
        }

    @contextlib.contextmanager
    def _besides_the_steps(self, what: str) -> Iterator[None]:
        """Count the time that something takes which is no part of a step."""
        started = time.perf_counter()
        yield
        self._besides_seconds[what] += time.perf_counter() - started

    def summarize(self) -> None:
        super().summarize()
        for what, seconds in self._besides_seconds.items() if self.rank == 0 else ():
            say(f"besides the steps, {what} took {seconds:.2f} s")
