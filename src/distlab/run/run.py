"""A rank's part of a run: who it is, where it computes, the steps it takes, and the parts that it owns."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm.devices import (
    cores_to_share,
    host_name,
    keep_to_interface,
    patient_threads,
    pick_backend,
    pick_device,
    threads_per_rank,
)
from distlab.comm.grid import Grid, layout_flags, layout_size
from distlab.comm.recorder import STEP, recorder
from distlab.comm.traffic import traffic
from distlab.comm.waits import TrafficError, reason
from distlab.rendezvous import ranks as rendezvous
from distlab.rendezvous.notices import notices
from distlab.run.checkpointer import Batches, Checkpointer, TrainingState, choose_checkpoint
from distlab.run.logs import RankOutput, RunLog, new_folder, say, say_costs, take_over_output
from distlab.run.not_finite import NotFiniteError
from distlab.run.resume import ResumePolicy, marked
from distlab.run.settings import ResumableSettings, RunSettings, as_json
from simplellm.errors import InputError

SettingsT = TypeVar("SettingsT", bound=RunSettings)
BatchT = TypeVar("BatchT")


class Run(Generic[SettingsT]):
    """One rank's part of a run.

    Attributes:
        settings: the command line.
        rank: of this process, 0 to `world_size` - 1.
        world_size: number of ranks.
        grid: this rank's place among replicas and stages.
        device: where this rank computes.
        decided: what rank 0 decided for all.
        out: the run's folder.
        records: of its steps.
        checkpointer: what saves and restores; None for a script whose settings are not resumable.
        explain_not_finite: asked for the cause when the loss is not finite; all ranks call it.
        reports: asked for lines when the run ends; all ranks call them.
    """

    def __init__(self, settings: SettingsT, script: Path) -> None:
        self.settings = settings
        self.rank, self.world_size = identity(settings)
        self.grid = Grid.of(self.rank, settings.layout)
        traffic.describe = self.grid.describe
        take_over_output(self.rank, shares_terminal=rendezvous.started_by_torchrun())
        self.device = pick_device(settings.device, self.rank)
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        computing = self._local_ranks // (self.grid.pp if settings.one_stage_at_a_time else 1)
        torch.set_num_threads(threads_per_rank(max(1, computing)))
        self.decided = self._join(script) if settings.layout else decide(settings, script)
        self.out = Path(self.decided["out"])
        self.checkpointer: Checkpointer | None = None
        if isinstance(settings, ResumableSettings):
            self.checkpointer = Checkpointer(settings, self.out, self.rank, self.decided)
        self._keep_files()
        self.records = RunLog(self.out, self.rank, self.device, getattr(settings, "tensorboard", False))
        self.explain_not_finite: Callable[[int], str] | None = None
        self.reports: list[Callable[[], Iterable[str]]] = []
        self._state: TrainingState | None = None
        recorder.enabled = getattr(settings, "trace", False)
        torch.manual_seed(settings.seed + self.rank)  # weights and data do not depend on it; dropout would
        if self.rank == 0:
            self._introduce(script)

    @property
    def first_step(self) -> int:
        """0, or the number of steps that the checkpoint has taken which the run resumes from."""
        return self.checkpointer.first_step if self.checkpointer else 0

    @property
    def shared_cores(self) -> int | None:
        """Cores of this host for each of the pipelines that it runs; None where threads are not ours to set."""
        return None if self.device.type == "cuda" else cores_to_share(max(1, self._local_ranks // self.grid.pp))

    def _join(self, script: Path) -> dict[str, Any]:
        """Find the other ranks, agree, and set up the process group; returns what rank 0 decided."""
        settings, timeout = self.settings, timedelta(seconds=self.settings.timeout)
        by_torchrun = rendezvous.started_by_torchrun()
        backend = pick_backend(settings.backend, self.device, self._local_ranks)
        address = os.environ.get("MASTER_ADDR", settings.master_addr) if by_torchrun else settings.master_addr
        keep_to_interface(address, on_one_host=by_torchrun and self._local_ranks == self.world_size)
        store = self._store = rendezvous.open_store(
            self.rank, settings.master_addr, settings.master_port or 29500, settings.timeout, say
        )
        rendezvous.publish_host(store, self.rank, host_name(address))
        same = {"the script": script.name} | {f"--{name.replace('_', '-')}": v for name, v in as_json(settings).items()}
        decided = rendezvous.agree(
            store, self.rank, self.world_size, same, lambda: decide(settings, script), settings.timeout, say
        )
        try:
            with patient_threads():
                dist.init_process_group(
                    backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
                )
        except (dist.DistError, RuntimeError) as error:
            sentence = f"rank {self.rank} could not connect to all other ranks: {reason(error)}"
            raise TrafficError(sentence, error) from error
        traffic.timeout_seconds = settings.timeout
        notices.open(store, self.rank, self.world_size, traffic, is_rank_0s=not rendezvous.is_store_in_launcher())
        return decided

    @property
    def _continues(self) -> bool:
        """Whether the run's folder has the earlier part of this run."""
        return self.checkpointer is not None and self.checkpointer.continues

    def _keep_files(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            log = (self.out / f"rank{self.rank}.log").open("a" if self._continues else "w", buffering=1)
        except OSError as error:
            raise InputError(f"--out {self.out}: cannot write there ({error.strerror}); give another folder") from error
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, RankOutput)
            stream.keep_in(log)
        if self.rank == 0:
            config = {"settings": as_json(self.settings), "layout": self.settings.layout, "world_size": self.world_size}
            config |= {name: value for name, value in self.decided.items() if name != "out"}
            (self.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _introduce(self, script: Path) -> None:
        ranks = "one process"
        if dist.is_initialized():
            ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)} over {dist.get_backend()}"
        threads = torch.get_num_threads()
        say(f"{script.stem}: {ranks} on {self.device.type}, {threads} thread{'s' * (threads > 1)} each")
        if dist.is_initialized():
            rendezvous.say_hosts(self._store, self.world_size, self.grid.tp, say)
        if self.checkpointer is not None:
            self.checkpointer.introduce()
        for remark in self.settings.remarks(self.decided):
            say(remark)

    def track(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Hand over what changes while the run trains, for checkpoints.

        Args:
            model: this rank's part of it, without what wraps it.
            optimizer: of all its parameters.
        """
        sizes = {name: getattr(self.settings, name) for name in marked(self.settings, ResumePolicy.MODEL)}
        self._state = TrainingState(dict(model.named_parameters()), sizes, optimizer)

    def count_steps(
        self,
        batches: "Batches[BatchT]",
        steps: int,
        per_step: int,
        unit: str,
        after_step: Callable[[int], None] = lambda _: None,
    ) -> Iterator[tuple[int, BatchT]]:
        """Number the steps, give each its batch, keep the records of each, and save checkpoints.

        Args:
            batches: as many as there are steps to take; a resumed run continues at the checkpoint's position in them.
            steps: how many there are, with those that an earlier part of the run took.
            per_step: what the global batch holds, counted in `unit` ("tokens", "inputs").
            unit: see `per_step`.
            after_step: called with each step's number before it is put on record; the time that it takes is not the
                step's.

        Raises:
            InputError: the run is to be saved or resumed, and the script has not called `track`.
        """
        checkpointer, state, count = self.checkpointer, self._state, 0
        if checkpointer is not None and checkpointer.is_needed:
            if state is None:
                raise InputError("--save-every and --resume need a script that calls run.track before its first step")
            count = checkpointer.restore(state, batches)
        self.records.begin(per_step, unit, count, continue_at=self.first_step if self._continues else None)
        source = iter(batches)
        for step in range(self.first_step, steps):
            with self.records.timing_a_step(), recorder.span(STEP, f"step {step}"):
                yield step, next(source)
            after_step(step)
            self.records.record(step)
            if checkpointer is not None and state is not None and checkpointer.is_due(step, steps):
                checkpointer.save(step + 1, state, batches, self.records)

    def global_loss(self, step: int, losses: Iterable[Tensor]) -> float:
        """The loss of the global batch, on every rank and in the records.

        Args:
            step: the optimizer step, from 0.
            losses: this rank's micro-batch losses, scalars whose sum is the loss of its replica; none where another
                stage of the replica computes it. Ranks that hold slices of a stage all compute the same.
        """
        own = sum((loss.detach().double() for loss in losses), torch.zeros((), dtype=torch.float64, device=self.device))
        total = own.clone()
        traffic.all_reduce(total, f"the loss of step {step}", kind="loss", op=dist.ReduceOp.SUM).wait()
        loss = self.records.loss = total.item() / (self.grid.dp * self.grid.tp)
        if not math.isfinite(loss):
            cause = self.explain_not_finite(step) if self.explain_not_finite else self._first_not_finite(own.item())
            lr = f" (is --lr {self.settings.lr:g} too large?)" if hasattr(self.settings, "lr") else ""
            raise NotFiniteError(f"the loss of step {step} is {loss}{cause}{lr}")
        return loss

    def _first_not_finite(self, own_loss: float) -> str:
        """The first rank whose loss is not finite; all must call it."""
        first = torch.tensor(self.world_size if math.isfinite(own_loss) else self.rank, device=self.device)
        traffic.all_reduce(
            first, "the first rank whose loss is not finite", kind="control", op=dist.ReduceOp.MIN
        ).wait()
        return f", first on {self.grid.describe(int(first))}" if first < self.world_size > 1 else ""

    def close(self) -> None:
        """Say what the run came to, and wait until all ranks have finished.

        The process group is left to end with the process. To destroy it would risk a hang: the destructor joins gloo's
        thread while it holds Python's lock, which that thread may be waiting for to let go of its last message.
        """
        lines = [line for report in self.reports for line in report()]
        traces = self._gather_traces() if recorder.enabled else []
        if dist.is_initialized():
            traffic.all_reduce(torch.zeros((), device=self.device), "the end of the run", kind="control").wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # NCCL's wait() only orders the stream
        if traces:
            self._keep_trace(traces)
        if self.rank == 0:
            for line in lines:
                say(line)
        self.summarize()

    def _gather_traces(self) -> list[dict[str, Any]]:
        """On rank 0, what all ranks recorded; the others hand theirs over, through the store where they met."""
        piece = 1_000_000  # characters to a value of the store, which takes 8 MiB at most
        if self.rank > 0:
            text = json.dumps(recorder.as_json())
            pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
            for number, part in enumerate(pieces):
                self._store.set(f"trace/{self.rank}/{number}", part)
            self._store.set(f"trace/{self.rank}", str(len(pieces)))
            return []
        recorded = [recorder.as_json()]
        for rank in range(1, self.world_size):
            with traffic.named(f"the trace of {self.grid.describe(rank)}"):
                count = int(self._store.get(f"trace/{rank}"))
                text = "".join(self._store.get(f"trace/{rank}/{number}").decode() for number in range(count))
            recorded.append(json.loads(text))
        return recorded

    def _keep_trace(self, recorded: list[dict[str, Any]]) -> None:
        """Write and draw what all ranks recorded, and say what it comes to."""
        from distlab.reports.timeline import draw, measured_panel
        from distlab.reports.trace import merge, write_chrome

        trace = merge(recorded, self.grid.dp, self.grid.pp, recorder.programs, self.grid.tp)
        write_chrome(trace, self.out / "trace.json")
        for line in trace.report():
            say(line)
        title = "A step as measured" + (", under the plan" if trace.programs is not None else "")
        draw(self.out / "timeline.png", [measured_panel(title, trace)])

    def summarize(self) -> None:
        """Say, on rank 0, what the run cost."""
        if self.rank == 0:
            self.records.summary()
            say_costs(self.rank, self.device)
            say(f"logs and metrics are in {self.out}")
            if self.checkpointer is not None and self.checkpointer.seconds:
                say(f"checkpoints took {self.checkpointer.seconds:.2f} s (not counted in step times)")


def decide(settings: RunSettings, script: Path) -> dict[str, Any]:
    """What rank 0 decides for all: the run's folder, its data, the checkpoint to resume from."""
    out = (settings.out or new_folder(Path("runs") / script.stem)).absolute()
    decided = {"out": str(out), **settings.decide()}
    if isinstance(settings, ResumableSettings) and settings.resume is not None:
        checkpoint = choose_checkpoint(settings, out, decided["data_identity"])
        decided["resume"] = str(checkpoint.folder.absolute())
    return decided


def identity(settings: RunSettings) -> tuple[int, int]:
    """This process's rank and the world size: from torchrun's environment, else from the command line.

    Raises:
        InputError: the rank is missing or outside the world, or the flags and torchrun disagree on the world.
    """
    asked = layout_size(settings.layout)
    if rendezvous.started_by_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size != asked:
            raise InputError(f"{layout_flags(settings.layout)}: torchrun started {size} ranks; make the two agree")
        if settings.rank not in (-1, rank):
            raise InputError(f"rank {settings.rank}: torchrun made this process rank {rank}; leave the rank out")
        return rank, size
    rank = 0 if settings.rank < 0 and asked == 1 else settings.rank
    if not 0 <= rank < asked:
        given = "no rank given" if rank < 0 else f"rank {rank}"
        raise InputError(
            f"{given}: {layout_flags(settings.layout)} has the ranks 0 to {asked - 1}; give each process its own as "
            "the first argument, or start them all with launch.sh"
        )
    return rank, asked
