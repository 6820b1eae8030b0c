"""A rank's part of a run: its identity, its steps, and the components that it owns."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm.names import CONTROL, named
from distlab.machine import devices
from distlab.machine.processes import NEWCOMER, started_by_torchrun
from distlab.reports import memory
from distlab.run.commands import NOTE_OF_FOLDER, next_commands
from distlab.run.logs import LEDGER, RunLog, remove_records_of_the_end
from distlab.run.loss_sum import LossSum, NotFiniteError
from distlab.run.provenance import provenance
from distlab.run.starting import identity, start_alone
from distlab.run.steps import Steps
from distlab.run.terminal import Terminal, counted, say
from distlab.settings.common import ResumableSettings, RunSettings, as_json
from distlab.settings.folders import Claim, write_config
from distlab.settings.resume import ResumePolicy, marked
from simplellm.errors import InputError, require

if TYPE_CHECKING:
    from distlab.run.checkpointer import Batches, Checkpointer
    from distlab.run.recording import Recording
    from distlab.run.repair import Repair
    from distlab.run.run_on import RunningOn
    from distlab.run.state_copy import StateCopy

SettingsT = TypeVar("SettingsT", bound=RunSettings)
BatchT = TypeVar("BatchT")
RunT = TypeVar("RunT", bound="Run[Any]")


class Run(Generic[SettingsT]):
    """One rank's part of a run."""

    checkpointer: "Checkpointer | None" = None  # of a run that saves checkpoints, or resumes from one
    recording: "Recording | None" = None  # with `--record-gradients`
    repair: "Repair | None" = None  # with `--repair`
    copy: "StateCopy | None" = None  # of the state before the last update, with `--run-on` or `--repair`
    kind_of_steps: type[Steps[Any]] = Steps

    def __init__(self, settings: SettingsT, script: Path) -> None:
        self.settings, self._script = settings, script
        self.rank, self.world_size = identity(settings)
        is_newcomer = NEWCOMER in os.environ  # in the place of a rank that has died
        # The first rank prints and writes; if it dies, the one of the others that has been there longest does.
        self.is_first = self.rank == 0 and not is_newcomer
        self.has_terminal = self.is_first or not started_by_torchrun()  # a separate one, or as the first rank
        self.terminal = Terminal(self.rank, self.has_terminal)
        is_watched = not settings.can_repair or self.world_size == 1 or "LAB_LAUNCHER" in os.environ
        require(is_watched, "--repair: only launch.sh notices deaths; start the ranks with it, or with --repair off")
        self._everyone = tuple(range(self.world_size))
        if settings.layout:
            from distlab.run.joining import join, join_late

            self.joined = joined = (join_late if is_newcomer else join)(settings, script)
        else:
            self.joined = joined = start_alone(settings, script)
        self.grid = joined.grid.copy() if settings.can_repair else joined.grid
        self.device, self.context, self.decided = joined.device, joined.context, joined.decided
        self.out = Path(self.decided["out"])
        if isinstance(settings, ResumableSettings) and settings.has_checkpoints:
            from distlab.run.checkpointer import Checkpointer

            self.checkpointer = Checkpointer(settings, self.out, self.rank, self.decided)
        self.first_step = self.checkpointer.first_step if self.checkpointer else 0
        self.continues = is_newcomer or (self.checkpointer is not None and self.checkpointer.continues)
        self._keep_files()
        has_tensorboard = getattr(settings, "tensorboard", False)
        status = self.terminal.status
        self.records = RunLog(
            self.out, self.context, self.rank, self.is_first, tensorboard=has_tensorboard, status=status
        )
        self.memory: memory.MemoryReport | None = None  # set by `track`
        self.running_on: RunningOn | None = None  # with `--run-on`
        self.recorder = self.context.recorder
        self.recorder.enabled = getattr(settings, "trace", False)
        # For random operations such as dropout; initial weights and data do not depend on it.
        torch.manual_seed(settings.seed + self.rank)
        if self.is_first:
            self._introduce(script)
        if settings.can_repair and self.world_size > 1:
            from distlab.run.repair import Repair
            from distlab.run.repairable_steps import RepairableSteps

            self.kind_of_steps, self.repair = RepairableSteps, Repair(joined, settings.timeout, self.first_step)

    def __enter__(self: RunT) -> RunT:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    @property
    def shared_cores(self) -> int | None:
        """Return this host's cores for each of its pipelines; None if the number of threads must not change."""
        pipelines = self.grid.pipelines_on_host(self.joined.local_ranks)
        return None if self.device.type == "cuda" else devices.cores_to_share(pipelines)

    def _keep_files(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            log = (self.out / f"rank{self.rank}.log").open(
                "a" if self.continues else "w", buffering=1, encoding="utf-8", errors="backslashreplace"
            )
            if self.is_first:
                if not self.continues:
                    remove_records_of_the_end(self.out)
                config: dict[str, Any] = {"settings": as_json(self.settings), "layout": self.settings.layout}
                config |= {"world_size": self.world_size, "script": str(self._script.resolve())}
                config |= {name: value for name, value in self.decided.items() if name != "out"}
                write_config(self.out, config | provenance(self.device))
                if note := os.environ.get(NOTE_OF_FOLDER):
                    Path(note).write_bytes(os.fsencode(self.out))
        except OSError as error:
            raise InputError(f"--out {self.out}: cannot write there ({error.strerror}); give another folder") from error
        self.terminal.keep_in(log)

    def _introduce(self, script: Path) -> None:
        ranks, threads = "one process", counted(torch.get_num_threads(), "threads")
        if self.settings.layout:
            ranks = f"{counted(self.world_size, 'ranks')} over {self.context.library}"
        say(f"{script.stem}: {ranks} on {self.device.type}, {threads}{' each' * (self.world_size > 1)}")
        if self.settings.layout:
            from distlab.rendezvous.ranks import say_hosts

            say_hosts(self.joined.places, self.grid.axis("tp").size)
        override = devices.tf32_override() if self.device.type == "cuda" else None
        if override is not None:
            say(f"warning: with {override}, float32 products use TF32, so layouts agree to three digits only")
        if self.checkpointer is not None:
            self.checkpointer.introduce()
        for remark in self.settings.remarks(self.decided):
            say(remark)

    def track(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Register the state that changes during training, for checkpoints; `model` is this rank's part, unwrapped."""
        if self.checkpointer is not None:
            sizes = {name: getattr(self.settings, name) for name in marked(self.settings, ResumePolicy.MODEL)}
            self.checkpointer.register(dict(model.named_parameters()), sizes, optimizer)
        self._record(dict(model.named_parameters()), dict(model.named_parameters()), optimizer)

    def _record(
        self, updated: Mapping[str, nn.Parameter], held: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> None:
        """With `--record-gradients`, record the first steps; the arguments are those of `Recording`."""
        steps = getattr(self.settings, "record_gradients", None)
        if steps is None:
            return
        from distlab.run.recording import Recording

        shares = getattr(self.settings, "micro_batches", 1) if self.world_size == 1 else 0
        recorded = range(self.first_step, self.first_step + steps)
        self.recording = Recording(self.out, self.rank, recorded, updated, held, optimizer, shares)

    def count_steps(
        self,
        batches: "Batches[BatchT]",
        steps: int,
        per_step: int,
        unit: str,
        after_step: Callable[[int], None] = lambda _: None,
    ) -> Iterator[tuple[int, BatchT]]:
        """Number the steps, give each its batch, record it, and save checkpoints; see `Steps` for the arguments."""
        return iter(self.kind_of_steps(self, batches, steps, per_step, unit, after_step))

    @contextlib.contextmanager
    def surviving(self) -> Iterator[tuple[int, ...]]:
        """With `--repair`, if a rank dies while the code inside runs, repair the run; then the code has to run again.

        Inside `steps`, the step begins again by itself. Yields the ranks that are left, by their original numbers: the
        same object as before, unless the groups have been made again. Among each other, the ranks have new numbers:
        those of torch.distributed.
        """
        if self.repair is None:
            yield self._everyone
            return
        try:
            yield self.repair.alive
        except Exception as error:
            self.repair.after(error)
            self._take_over(self.repair.alive)

    def _take_over(self, alive: tuple[int, ...]) -> None:
        """After a repair, become the rank that prints and writes, if that one has died."""
        self.context = self.joined.context
        self.grid.keep(alive)
        if not self.is_first and self.rank == alive[0]:
            self.is_first = self.has_terminal = True
            self.terminal.speak_for_all()
            self.joined.claim = Claim(self.out)
        if self.is_first and self.repair is not None and self.repair.done is not None:
            say(self.repair.done.sentence)

    def meet(self) -> None:
        """Wait for all other ranks."""
        with named("the end of the run", CONTROL):
            dist.all_reduce(torch.zeros((), device=self.device))

    def global_loss(self, step: int, losses: Iterable[Tensor]) -> float:
        """Return the loss of the global batch, on every rank, and record it; `losses` are those of `LossSum.begin`."""
        return self._wait_for_loss(self.sum_loss(step, losses))

    def _wait_for_loss(self, under_way: LossSum) -> float:
        step, loss = under_way.step, under_way.wait()
        self.records.loss = loss
        if not math.isfinite(loss):
            cause = self._why_not_finite(step, under_way.own.item())
            raise NotFiniteError(f"the loss of step {step} is {loss}{cause}{self._lr_hint}")
        return loss

    def _why_not_finite(self, step: int, own_loss: float) -> str:
        """Return the cause of a loss that is not finite, for the message; all ranks must call this method."""
        from distlab.run.not_finite import first_rank

        return first_rank(own_loss, self.grid, self.world_size, self.device)

    @property
    def _lr_hint(self) -> str:
        """Return the end of a sentence about a value that is not finite."""
        return f" (is --lr {self.settings.lr:g} too large?)" if hasattr(self.settings, "lr") else ""

    def sum_loss(self, step: int, losses: Iterable[Tensor]) -> LossSum:
        """Start to add up the loss of the global batch (`LossSum.begin`)."""
        return LossSum.begin(step, losses, self.grid.layout, self.device)

    def close(self) -> None:
        """Wait until all ranks have finished, print the summary, and close everything that the run has opened."""
        if self.recording is not None:
            self.recording.end(self._wait_for_weights)
        held: list[list[int]] = []
        traces: list[dict[str, Any]] = []
        has_met = False
        while not has_met:
            with self.surviving():
                if self.repair is not None and self.repair.is_at_the_end:  # another rank has yet to
                    self.meet()
                held, traces = self._collect()
                self.joined.store.set(f"account/{self.rank}", json.dumps(self.records.account()))
                self.meet()
                has_met = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # NCCL's wait() only orders the stream
        if traces:
            from distlab.run.tracing import keep_trace

            keep_trace(traces, self.out, self.grid, self.recorder, bool(self.running_on))
        if held and self.is_first:
            alive, by_rank = zip(*sorted(zip(self.grid.alive, held, strict=True)), strict=True)
            memory.keep(self.out / "memory.json", by_rank)
            for line in memory.as_table(by_rank, alive):
                say(line)
        if self.is_first and self.records.steps:
            self._keep_ledger()
        self.summarize()
        self.records.close()
        dist.destroy_process_group()
        self.grid.keep(self.grid.alive)  # without groups
        self.terminal.give_back()
        if self.joined.claim is not None:
            self.joined.claim.release()

    def _wait_for_weights(self) -> None:
        """Wait until this rank has all the weights with which it computes."""

    def _keep_ledger(self) -> None:
        """Write the bytes that each rank sent; not after a repair, which numbers the ranks again."""
        if self.repair is not None and self.repair.survivor.epoch:
            return
        accounts = [json.loads(self.joined.store.get(f"account/{rank}")) for rank in range(self.world_size)]
        named = [{"name": self.grid.describe(account["rank"]), **account} for account in accounts]
        (self.out / LEDGER).write_text(json.dumps(named) + "\n")

    def _collect(self) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Return the memory that each rank held and, on the first rank, their traces."""
        copied_bytes = self.copy.size_bytes if self.copy else 0
        held = self.memory.collect(self.context, copied_bytes) if self.memory else []
        if not self.recorder.enabled:
            return held, []
        from distlab.run.tracing import gather_traces

        return held, gather_traces(self.context)

    def summarize(self) -> None:
        """On rank 0, print the costs of the run and the commands for next steps."""
        self.terminal.status.clear()
        if self.is_first:
            self.records.summary()
            if self.settings.transport == "shared" and not self.context.shares_memory:
                say("--transport shared changed nothing: this run put nothing into shared memory")
            for remark in self.settings.remarks_at_the_end(self.records.times):
                say(remark)
            say(f"logs and metrics are in {self.out}")
            for what, seconds in self.records.seconds_apart.items():
                say(f"{what} took {seconds:.2f} s (not counted in step times)")
            if isinstance(self.settings, ResumableSettings) and self.records.steps:
                saved = self.checkpointer.saved if self.checkpointer else None
                for command in next_commands(self.settings, self.out, saved):
                    say(command)
            if getattr(self.settings, "page", False):
                from distlab.settings.beside import page_writer

                say(f"the run as a page: {page_writer()(self.out, has_ended=True)}")
