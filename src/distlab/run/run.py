"""A rank's part of a run: its identity, its device, its steps, and the components that it owns."""

import json
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm import devices
from distlab.comm.context import Options, context_of
from distlab.comm.grid import Grid
from distlab.comm.heap import set_up_heap
from distlab.comm.layout import layout_flags, layout_size
from distlab.comm.processes import leave
from distlab.comm.recorder import STEP, recorder
from distlab.comm.traffic import traffic
from distlab.comm.waits import TrafficError, reason
from distlab.rendezvous import ranks as rendezvous
from distlab.rendezvous.notices import notices
from distlab.rendezvous.torchrun import is_store_in_launcher, started_by_torchrun
from distlab.reports import memory
from distlab.run.checkpointer import Batches, Checkpointer, TrainingState, prepare_checkpoints
from distlab.run.commands import next_commands
from distlab.run.failure import Failure
from distlab.run.folders import claim, new_folder
from distlab.run.logs import RankOutput, RunLog, say, take_over_output
from distlab.run.not_finite import NotFiniteError
from distlab.run.progress import Progress, status_line
from distlab.run.resume import ResumePolicy, marked
from distlab.run.run_on import LossSum, RunningOn
from distlab.run.settings import ResumableSettings, RunSettings, as_flag, as_json
from simplellm.errors import InputError, require

SettingsT = TypeVar("SettingsT", bound=RunSettings)
BatchT = TypeVar("BatchT")


class Run(Generic[SettingsT]):
    """One rank's part of a run."""

    def __init__(self, settings: SettingsT, script: Path) -> None:
        self.settings = settings
        self.rank, self.world_size = identity(settings)
        Failure.rank = self.rank
        self.grid = Grid(self.rank, settings.layout, settings.held)
        self.has_terminal = self.rank == 0 or not started_by_torchrun()  # of its own, or as the first rank
        take_over_output(self.rank, self.has_terminal)
        self._device_type = devices.pick_device_type(settings.device)
        # What rank 0 decided for all.
        self.decided = self._join(script) if settings.layout else self._begin_alone(script)
        self.out = Path(self.decided["out"])
        self.checkpointer: Checkpointer | None = None  # None if the settings are not resumable
        if isinstance(settings, ResumableSettings):
            self.checkpointer = Checkpointer(settings, self.out, self.rank, self.decided)
        self.first_step = self.checkpointer.first_step if self.checkpointer else 0
        self._continues = self.checkpointer is not None and self.checkpointer.continues
        self._keep_files()
        self.records = RunLog(self.out, self.rank, self.device, getattr(settings, "tensorboard", False))
        # Set by `track`: the search for the cause of a non-finite loss, and the memory report.
        self.explain_not_finite: Callable[[int], str] | None = None
        self.memory: memory.MemoryReport | None = None
        self.running_on: RunningOn | None = None  # with `--run-on`
        recorder.enabled, recorder.programs = getattr(settings, "trace", False), None  # until there is a pipeline
        # For random operations such as dropout; initial weights and data do not depend on it.
        torch.manual_seed(settings.seed + self.rank)
        if self.rank == 0:
            self._introduce(script)

    def _take_place(self, places: Sequence[devices.Place]) -> None:
        """Set this rank's device and number of threads, given the places of all ranks."""
        self._places, self.local_ranks = places, len(devices.local_ranks(places, self.rank))
        self.device = devices.pick_device(places, self.rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # autograd's thread may begin with a matrix product; torch warns of what it then does itself
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        else:
            set_up_heap()
        pipelines = self.grid.pipelines_on_host(self.local_ranks)
        computing = pipelines if self.settings.one_stage_at_a_time else self.local_ranks
        torch.set_num_threads(devices.threads_per_rank(computing))

    @property
    def ranks_of_hosts(self) -> list[int]:
        """How many ranks each host has."""
        return list(Counter(place.host for place in self._places).values())

    @property
    def shared_cores(self) -> int | None:
        """Cores of this host for each of the pipelines that it runs; None if the number of threads must not change."""
        pipelines = self.grid.pipelines_on_host(self.local_ranks)
        return None if self.device.type == "cuda" else devices.cores_to_share(pipelines)

    def _begin_alone(self, script: Path) -> dict[str, Any]:
        self._take_place([devices.own_place(self._device_type, self.settings.master_addr)])
        self._connect(dist.HashStore(), "gloo")
        return decide(self.settings, script)

    def _connect(self, store: dist.Store, library: Literal["gloo", "nccl"]) -> None:
        """Make the process group of all ranks."""
        settings = self.settings
        options = Options(
            library=library,
            transport=settings.transport,
            timeout_seconds=settings.timeout,
            threads=torch.get_num_threads(),
            places=self._places,
            describe=self.grid.describe,
            remark=say,
        )
        try:
            dist.init_process_group(
                "lab",
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=settings.timeout),
                pg_options=options,
            )
        except (dist.DistError, RuntimeError) as error:
            sentence = f"rank {self.rank} could not connect to all other ranks: {reason(error)}"
            raise TrafficError(sentence, error) from error

    def _join(self, script: Path) -> dict[str, Any]:
        """Meet the other ranks, compare settings, and set up the process group; returns what rank 0 decided."""
        settings, rank, size, seconds = self.settings, self.rank, self.world_size, self.settings.timeout
        by_torchrun = started_by_torchrun()
        address = os.environ.get("MASTER_ADDR", settings.master_addr) if by_torchrun else settings.master_addr
        port = settings.master_port or 29500
        store = rendezvous.open_store(rank, settings.master_addr, port, seconds, say)
        place = devices.own_place(self._device_type, address)
        same = {"the script": script.name} | {as_flag(name): value for name, value in as_json(settings).items()}

        def decide_all() -> dict[str, Any]:
            places = rendezvous.read_places(store, size)
            backend = devices.pick_backend(settings.backend, places)
            devices.check_transport(settings.transport, places)
            return {"backend": backend, **decide(settings, script)}

        decided = rendezvous.agree(store, rank, size, place, same, decide_all, seconds, say)
        self._take_place(rendezvous.read_places(store, size))
        devices.keep_to_interface(address, on_one_host=by_torchrun and self.local_ranks == size)
        self._connect(store, decided["backend"])
        context = context_of()
        if context.is_over_nccl:
            context.waits.watch(_end)
        notices.open(store, rank, size, context, is_rank_0s=not is_store_in_launcher())
        traffic.connect()
        return decided

    def _keep_files(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            log = (self.out / f"rank{self.rank}.log").open("a" if self._continues else "w", buffering=1)
            if self.rank == 0:
                self._write_config()
        except OSError as error:
            raise InputError(f"--out {self.out}: cannot write there ({error.strerror}); give another folder") from error
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, RankOutput)
            stream.keep_in(log)

    def _write_config(self) -> None:
        config = {"settings": as_json(self.settings), "layout": self.settings.layout, "world_size": self.world_size}
        config |= {name: value for name, value in self.decided.items() if name != "out"}
        (self.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _introduce(self, script: Path) -> None:
        ranks, threads = "one process", torch.get_num_threads()
        if self.settings.layout:
            ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)} over {context_of().library}"
        say(f"{script.stem}: {ranks} on {self.device.type}, {threads} thread{'s' * (threads > 1)} each")
        if self.settings.layout:
            rendezvous.say_hosts(self._places, self.grid.axis("tp").size, say)
        override = devices.tf32_override() if self.device.type == "cuda" else None
        if override is not None:
            say(f"warning: with {override}, float32 products use TF32, so layouts agree to three digits only")
        if self.checkpointer is not None:
            self.checkpointer.introduce()
        for remark in self.settings.remarks(self.decided):
            say(remark)

    def track(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Register what changes during training, for checkpoints; `model` is this rank's part of it, unwrapped."""
        sizes = {name: getattr(self.settings, name) for name in marked(self.settings, ResumePolicy.MODEL)}
        if self.checkpointer is not None:
            self.checkpointer.state = TrainingState(dict(model.named_parameters()), sizes, optimizer)

    def count_steps(
        self,
        batches: "Batches[BatchT]",
        steps: int,
        per_step: int,
        unit: str,
        after_step: Callable[[int], None] = lambda _: None,
    ) -> Iterator[tuple[int, BatchT]]:
        """Number the steps, give each its batch, record it, and save checkpoints.

        Args:
            batches: one for each step; a resumed run continues at the checkpoint's position.
            steps: total number of steps, including those before the checkpoint that the run resumes from.
            per_step: size of the global batch, in `unit` ("tokens", "inputs").
            after_step: called with each step's number before it is recorded; its time does not count as step time.

        Raises:
            InputError: the run is to be saved or resumed, but the script has not called `track`.
        """
        checkpointer = self.checkpointer
        count = checkpointer.restore(batches) if checkpointer else 0
        self.records.begin(per_step, unit, count, continue_at=self.first_step if self._continues else None)
        tell = say if self.has_terminal else lambda _: None
        done = f"; {self.first_step:,} of {steps:,} are done" if self.first_step else ""
        tell(f"{steps - self.first_step:,} steps of {per_step:,} {unit} each{done}")
        progress = Progress(steps, tell, done=self.first_step, speed=self.records.average_speed)
        source, step = iter(batches), self.first_step
        taken: dict[int, BatchT] = {}  # the last batches, by step
        while step < steps:
            if step not in taken:
                taken[step] = next(source)
            with self.records.timing_a_step(), recorder.span(STEP, f"step {step}"):
                yield step, taken[step]
            if self.running_on is not None and self.running_on.must_undo:
                self.running_on.undo()
                self.records.take_back(2)
                progress.take_back()
                step -= 1
                continue
            taken.pop(step - 1, None)
            after_step(step)
            self.records.record(step)
            if checkpointer and checkpointer.is_due(step, steps):
                with self.records.timing_apart("checkpoints", f"saving after {step + 1:,} steps"):
                    checkpointer.save(step + 1, batches, self.records)
            progress.advance()
            step += 1

    def global_loss(self, step: int, losses: Iterable[Tensor]) -> float:
        """Return the loss of the global batch, on every rank, and record it.

        `losses` are this rank's micro-batch losses, scalars whose sum is the loss of its replica; empty if another
        stage of the replica computes them. Ranks that share a stage all compute the same losses.
        """
        under_way = self.sum_loss(step, losses)
        loss = self.records.loss = under_way.wait()
        if not math.isfinite(loss):
            own = under_way.own.item()
            cause = self.explain_not_finite(step) if self.explain_not_finite else self._first_not_finite(own)
            raise NotFiniteError(f"the loss of step {step} is {loss}{cause}{self._lr_hint}")
        return loss

    @property
    def _lr_hint(self) -> str:
        """The end of a sentence about what is not finite."""
        return f" (is --lr {self.settings.lr:g} too large?)" if hasattr(self.settings, "lr") else ""

    def sum_loss(self, step: int, losses: Iterable[Tensor]) -> LossSum:
        """Start to add up the loss of the global batch; the arguments are those of `global_loss`."""
        own = sum((loss.detach().double() for loss in losses), torch.zeros((), dtype=torch.float64, device=self.device))
        total = own.clone()
        transfer = traffic.all_reduce(total, f"the loss of step {step}", kind="loss", op=dist.ReduceOp.SUM)
        return LossSum(step, own, total, transfer, self.grid.size // self.grid.axis("pp").size)

    def _first_not_finite(self, own_loss: float) -> str:
        """The first rank whose loss is not finite, for the message; all ranks must call this method."""
        first = torch.tensor(self.world_size if math.isfinite(own_loss) else self.rank, device=self.device)
        what = "the first rank whose loss is not finite"
        traffic.all_reduce(first, what, kind="control", op=dist.ReduceOp.MIN).wait()
        return f", first on {self.grid.describe(int(first))}" if first < self.world_size > 1 else ""

    def close(self) -> None:
        """Wait until all ranks have finished, and print the summary.

        The process group is not destroyed; it ends with the process. Destroying it could hang: the destructor joins
        gloo's thread while it holds the GIL, and that thread may need the GIL to release its last message.
        """
        copied_bytes = self.running_on.copied_bytes if self.running_on else 0
        held = self.memory.collect(self.rank, self.world_size, self.device, copied_bytes) if self.memory else []
        traces = self._gather_traces() if recorder.enabled else []
        traffic.all_reduce(torch.zeros((), device=self.device), "the end of the run", kind="control").wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # NCCL's wait() only orders the stream
        if any(event[0] == STEP for trace in traces for event in trace["events"]):
            self._keep_trace(traces)
        elif traces:
            say("--trace recorded nothing: this run took no steps")
        if held and self.rank == 0:
            memory.keep(self.out / "memory.json", held)
            for line in memory.as_table(held):
                say(line)
        self.summarize()

    def _gather_traces(self) -> list[dict[str, Any]]:
        """The recorded events of all ranks on rank 0; [] on other ranks. Sent as JSON, so that nothing is unpickled."""
        own = torch.frombuffer(bytearray(json.dumps(recorder.as_json()).encode()), dtype=torch.uint8)
        if self.rank > 0:
            for part in (torch.tensor(len(own)), own):
                traffic.send(part.to(self.device), "the trace", to=0, kind="trace").wait()
            return []
        traces = [own]
        for rank in range(1, self.world_size):
            trace = torch.empty((), dtype=torch.int64, device=self.device)
            for _ in range(2):  # its size, and then itself
                traffic.receive(trace, f"the trace of {self.grid.describe(rank)}", source=rank).wait()
                trace = trace if trace.dim() else torch.empty(int(trace), dtype=torch.uint8, device=self.device)
            traces.append(trace.cpu())
        return [json.loads(trace.numpy().tobytes()) for trace in traces]

    def _keep_trace(self, recorded: list[dict[str, Any]]) -> None:
        """Write and draw the events of all ranks, and print a summary of them."""
        from distlab.reports.timeline import draw, measured_panel
        from distlab.reports.trace import merge, write_chrome

        trace = merge(recorded, self.grid.layout, recorder.programs, bool(self.running_on))
        write_chrome(trace, self.out / "trace.json")
        for line in trace.report():
            say(line)
        title = "A step as measured" if trace.programs is None else "A step as measured, under the plan"
        if find_spec("matplotlib") is None:
            say("timeline.png was not drawn, which needs matplotlib: pip install matplotlib")
            return
        draw(self.out / "timeline.png", [measured_panel(title, trace)])

    def summarize(self) -> None:
        """On rank 0, print what the run cost and what can be done with it now."""
        status_line.clear()
        if self.rank == 0:
            self.records.summary()
            if self.settings.transport == "shared" and not traffic.shares_memory:
                say("--transport shared changed nothing: this run put nothing into shared memory")
            for remark in self.settings.remarks_at_the_end(self.records.times):
                say(remark)
            say(f"logs and metrics are in {self.out}")
            for what, seconds in self.records.seconds_apart.items():
                say(f"{what} took {seconds:.2f} s (not counted in step times)")
            if self.checkpointer and isinstance(self.settings, ResumableSettings) and self.records.steps:
                for command in next_commands(self.settings, self.out, self.checkpointer.saved):
                    say(command)


def _end(error: TrafficError) -> NoReturn:
    """End this rank from another thread, whatever its main thread is doing."""
    try:
        Failure.of(error).end()
    finally:
        leave(1)


def decide(settings: RunSettings, script: Path) -> dict[str, Any]:
    """What rank 0 decides for all ranks: the run's folder, its data, the checkpoint to resume from."""
    out = (settings.out or new_folder(Path("runs") / script.stem)).absolute()
    decided = {"out": str(out), **settings.decide()}
    claim(out)  # before its checkpoints are touched
    if isinstance(settings, ResumableSettings):
        settings.check_folders()  # again: the run that had the folder may have left checkpoints
        decided |= prepare_checkpoints(settings, out, decided["data_identity"])
    return decided


def identity(settings: RunSettings) -> tuple[int, int]:
    """This process's rank and the world size, from torchrun or the command line; `InputError` if they disagree."""
    asked, flags = layout_size(settings.layout), layout_flags(settings.layout)
    if started_by_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        require(size == asked, f"{flags}: torchrun started {size} ranks; make the two agree")
        sentence = f"rank {settings.rank}: torchrun made this process rank {rank}; leave the rank out"
        require(settings.rank in (-1, rank), sentence)
        return rank, size
    rank = 0 if settings.rank == -1 and asked == 1 else settings.rank
    given = "no rank given" if rank == -1 else f"rank {rank}"  # -1 is the default
    advice = "give each process its own rank as the first argument, or start all of them with launch.sh"
    require(0 <= rank < asked, f"{given}: {flags} has the ranks 0 to {asked - 1}; {advice}")
    return rank, asked
