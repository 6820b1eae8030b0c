"""A rank's part of a run: its identity, its steps, and the components that it owns."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.axes.layout import pipelines_on_host, times_counted
from distlab.comm.names import CONTROL, named
from distlab.machine import devices
from distlab.machine.processes import started_by_torchrun
from distlab.reports import memory
from distlab.run.commands import NOTE_OF_FOLDER, next_commands
from distlab.run.logs import LEDGER, RunLog, remove_records_of_the_end
from distlab.run.model import ModelParts
from distlab.run.provenance import provenance
from distlab.run.starting import Joined, identity, start_alone
from distlab.run.steps import NotFiniteError, Steps
from distlab.run.terminal import Terminal, counted, say
from distlab.settings.common import ResumableSettings, RunSettings, as_json
from distlab.settings.folders import write_config
from distlab.settings.resume_policy import ResumePolicy, marked
from simplellm.errors import InputError

if TYPE_CHECKING:
    from distlab.checkpoints.format import Checkpoint
    from distlab.run.checkpointer import Batches, Checkpointer
    from distlab.run.recording import Recording

SettingsT = TypeVar("SettingsT", bound=RunSettings)
BatchT = TypeVar("BatchT")


class Run(Generic[SettingsT]):
    """One rank's part of a run."""

    resumed: "Checkpoint | None" = None  # the one from which the run resumes
    checkpointer: "Checkpointer | None" = None  # of a run that saves checkpoints, or resumes from one
    recording: "Recording | None" = None  # with `--record-gradients`
    has_tracked = False  # whether the script has called `track`, which sets the next two
    _parts: ModelParts
    _optimizer: Optimizer
    kind_of_steps: type[Steps] = Steps
    kind_of_log: type[RunLog] = RunLog
    joins_late = False  # whether the other ranks have begun without this process
    steps_overlap = False  # whether a rank may begin a step before the others have ended the one before it

    def __init__(self, settings: SettingsT, script: Path) -> None:
        self.settings, self._script = settings, script
        self.rank, self.world_size = identity(settings)
        self.is_first = self.rank == 0 and not self.joins_late  # which prints and writes
        self.has_terminal = self.is_first or not started_by_torchrun()  # a separate one, or as the first rank
        self.terminal = Terminal(self.rank, self.has_terminal)
        self.joined = joined = self._join(script)
        self.grid, self.device = joined.grid, joined.device
        self.context, self.decided = joined.context, joined.decided
        self.out = Path(self.decided["out"])
        if isinstance(settings, ResumableSettings) and settings.has_checkpoints:
            from distlab.run.checkpointer import CANDIDATES, Checkpointer, choose

            identity_of_data = self.decided["data_identity"]
            if folders := self.decided.pop(CANDIDATES, []):
                self.resumed = choose(settings, folders, self.out, identity_of_data, self.joins_late)
                self.decided["resume"] = str(self.resumed.folder)
            self.checkpointer = Checkpointer(settings, self.out, self.rank, identity_of_data, self.resumed)
        self.first_step = self.resumed.step if self.resumed and not self.joins_late else 0
        # Whether the records of a run in the same folder are continued.
        self.continues = self.joins_late or (self.resumed is not None and self.resumed.is_of_run(self.out))
        self._keep_files()
        has_tensorboard = getattr(settings, "tensorboard", False)
        status = self.terminal.status
        self.records = self.kind_of_log(
            self.out, self.context, self.rank, self.is_first, tensorboard=has_tensorboard, status=status
        )
        self.memory: memory.MemoryReport | None = None  # set by `track`
        self.recorder = self.context.recorder
        self.recorder.enabled = getattr(settings, "trace", False)
        # For random operations such as dropout; initial weights and data do not depend on it.
        torch.manual_seed(settings.seed + self.rank)
        if self.is_first:
            self._introduce(script)

    def _join(self, script: Path) -> Joined:
        if not self.settings.layout:
            return start_alone(self.settings, script)
        from distlab.run.joining import join

        return join(self.settings, script)

    @property
    def shared_cores(self) -> int | None:
        """Return this host's cores for each of its pipelines; None if the number of threads must not change."""
        pipelines = pipelines_on_host(self.grid.layout, self.joined.local_ranks)
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
        if self.resumed is not None:
            from distlab.settings.resuming import remarks

            for remark in remarks(self.settings, self.resumed):
                say(remark)
        for remark in self.settings.remarks(self.decided):
            say(remark)

    def track(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Register the state that changes during training, for checkpoints; `model` is this rank's part, unwrapped."""
        sizes = {name: getattr(self.settings, name) for name in marked(self.settings, ResumePolicy.MODEL)}
        self._track(ModelParts({0: model}, sizes, [0], self.grid, nn.functional.cross_entropy), optimizer)

    def _track(self, parts: ModelParts, optimizer: Optimizer) -> None:
        """Give the state to the components that keep it."""
        self._parts, self._optimizer, self.has_tracked = parts, optimizer, True
        steps = getattr(self.settings, "record_gradients", None)
        if steps is not None:
            from distlab.run.recording import Recording

            shares = getattr(self.settings, "micro_batches", 1) if self.world_size == 1 else 0
            recorded = range(self.first_step, self.first_step + steps)
            updated, held, wait = parts.parameters(), parts.held(), parts.wait_for_weights
            self.recording = Recording(self.out, self.rank, recorded, updated, held, optimizer, shares, wait)

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

    def meet(self, what: str = "the end of the run") -> None:
        """Wait for all other ranks; `what` names the wait."""
        with named(what, CONTROL):
            dist.all_reduce(torch.zeros((), device=self.device))

    def global_loss(self, step: int, losses: Iterable[Tensor]) -> float:
        """Return the loss of the global batch, on every rank, and record it.

        `losses` are this rank's micro-batch losses, scalars whose sum is the loss of its replica; empty if another
        stage of the replica computes them. Ranks that share a stage all compute the same losses.

        Raises:
            NotFiniteError: it is infinite or NaN.
        """
        own = self._sum_of(losses)
        total = own.clone()
        with named(f"the loss of step {step}", "loss"):
            dist.all_reduce(total)
        return self._checked_loss(step, total.item() / times_counted(self.grid.layout), own)

    def _sum_of(self, losses: Iterable[Tensor]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return sum((loss.detach().double() for loss in losses), zero)

    def _checked_loss(self, step: int, loss: float, own: Tensor) -> float:
        """Record the loss of the global batch, and return it; `own` is this rank's share."""
        self.records.values["loss"] = loss
        if not math.isfinite(loss):
            cause = self._why_not_finite(step, own.item())
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

    def close(self) -> None:
        """Wait until all ranks have finished, print the summary, and close everything that the run has opened."""
        if self.recording is not None:
            self.recording.end()
        accounts, traces = self._end_together()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # NCCL's wait() only orders the stream
        if traces:
            from distlab.run.tracing import keep_trace

            keep_trace(traces, self.out, self.grid, self.recorder, self.steps_overlap)
        held = [account.pop("memory") for account in accounts]
        if held and all(held):  # every rank has taken a step
            memory.keep(self.out / "memory.json", held)
            for line in memory.as_table(dict(zip(sorted(self.grid.alive), held, strict=True))):
                say(line)
        if accounts and self.records.times:
            self._keep_ledger(accounts)
        self.summarize()
        self.records.close()
        dist.destroy_process_group()
        self.grid.keep(self.grid.alive)  # without groups: what they hold goes now, also where the run is kept
        self.terminal.give_back()
        if self.joined.claim is not None:
            self.joined.claim.release()

    def _end_together(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Wait for all ranks; on the first rank, return the account and the memory of each, and their traces."""
        account = self.records.account() | {"memory": self.memory.counts(self.recorder) if self.memory else {}}
        traces = []
        if self.recorder.enabled:
            from distlab.run.tracing import gather_traces

            traces = gather_traces(self.context)
        store = self.joined.store
        store.set(f"account/{self.rank}", json.dumps(account))
        self.meet()
        alive = sorted(self.grid.alive) if self.is_first else []
        return [json.loads(store.get(f"account/{rank}")) for rank in alive], traces

    def _keep_ledger(self, accounts: Sequence[dict[str, Any]]) -> None:
        """Write the bytes that each rank sent."""
        named = [{"name": self.grid.describe(account["rank"]), **account} for account in accounts]
        (self.out / LEDGER).write_text(json.dumps(named) + "\n")

    def end_early(self, error: BaseException) -> None:
        """After an error, when no rank waits for others any more: keep what can be kept."""
        if isinstance(error, KeyboardInterrupt):
            self.summarize()

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
            if isinstance(self.settings, ResumableSettings) and self.records.times:
                saved = self.checkpointer.saved if self.checkpointer else None
                for command in next_commands(self.settings, self.out, saved):
                    say(command)
            if getattr(self.settings, "page", False):
                from distlab.settings.optional_packages import page_writer

                say(f"the run as a page: {page_writer()(self.out, has_ended=True)}")
