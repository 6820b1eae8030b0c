"""A rank's part of a run: who it is, where it computes, the steps it takes, what it says."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
from distlab.comm.traffic import TrafficError, reason, traffic
from distlab.rendezvous import ranks as meeting
from distlab.rendezvous.notices import notices
from distlab.run.logs import RankOutput, RunLog, new_folder, say, say_costs, take_over_output
from distlab.run.not_finite import NotFiniteError
from distlab.run.settings import RunSettings, as_json
from simplellm.errors import InputError

if TYPE_CHECKING:
    from distlab.reports.trace import Trace

SettingsT = TypeVar("SettingsT", bound=RunSettings)
BatchT = TypeVar("BatchT")


class Run(Generic[SettingsT]):
    """One rank's part of a run: who it is, where it computes, where its files go.

    Attributes:
        settings: the command line.
        rank: of this process, 0 to `world_size` - 1.
        world_size: number of ranks.
        grid: this rank's place among replicas and stages.
        device: where this rank computes.
        out: the run's folder.
    """

    def __init__(self, settings: SettingsT, script: Path) -> None:
        self.settings = settings
        self.rank, self.world_size = identity(settings)
        self.grid = Grid.of(self.rank, settings.layout)
        traffic.describe = self.grid.describe
        take_over_output(self.rank, shares_terminal=meeting.started_by_torchrun())
        self.device = pick_device(settings.device, self.rank)
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        torch.set_num_threads(threads_per_rank(self._local_ranks))
        self._decided = self._join(script) if settings.layout else self._decide(script)
        self.out = Path(self._decided["out"])
        self._keep_files()
        self._log = RunLog(self.out, self.rank, self.device, getattr(settings, "tensorboard", False))
        recorder.enabled = getattr(settings, "trace", False)
        torch.manual_seed(settings.seed + self.rank)  # weights and data do not depend on it; dropout would
        if self.rank == 0:
            self._introduce(script)

    @property
    def shared_cores(self) -> int | None:
        """Cores of this host for each of the pipelines that it runs; None where threads are not ours to set."""
        return None if self.device.type == "cuda" else cores_to_share(max(1, self._local_ranks // self.grid.pp))

    def _join(self, script: Path) -> dict[str, Any]:
        """Meet the other ranks, agree, and set up the process group."""
        settings, timeout = self.settings, timedelta(seconds=self.settings.timeout)
        by_torchrun = meeting.started_by_torchrun()
        backend = pick_backend(settings.backend, self.device, self._local_ranks)
        address = os.environ.get("MASTER_ADDR", settings.master_addr) if by_torchrun else settings.master_addr
        keep_to_interface(address, on_one_host=by_torchrun and self._local_ranks == self.world_size)
        store = self._store = meeting.open_store(
            self.rank, settings.master_addr, settings.master_port or 29500, settings.timeout, say
        )
        meeting.publish_host(store, self.rank, host_name(address))
        same = {"the script": script.name} | {f"--{name.replace('_', '-')}": v for name, v in as_json(settings).items()}
        decided = meeting.agree(
            store, self.rank, self.world_size, same, lambda: self._decide(script), settings.timeout, say
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
        in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        notices.open(store, self.rank, self.world_size, traffic, is_rank_0s=not (by_torchrun and in_agent))
        return decided

    @property
    def _goes_on(self) -> bool:
        """True if the run's folder has the earlier part of this run."""
        return False

    def _decide(self, script: Path) -> dict[str, Any]:
        """What rank 0 decides for all."""
        out = self.settings.out or new_folder(Path("runs") / script.stem)
        return {"out": str(out.absolute())}

    def _keep_files(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            log = (self.out / f"rank{self.rank}.log").open("a" if self._goes_on else "w", buffering=1)
        except OSError as error:
            raise InputError(f"--out {self.out}: cannot write there ({error.strerror}); give another folder") from error
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, RankOutput)
            stream.keep_in(log)
        if self.rank == 0:
            config = {"settings": as_json(self.settings), "layout": self.settings.layout, "world_size": self.world_size}
            config |= {name: value for name, value in self._decided.items() if name != "out"}
            (self.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _introduce(self, script: Path) -> None:
        ranks = "one process"
        if dist.is_initialized():
            ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)} over {dist.get_backend()}"
        threads = torch.get_num_threads()
        say(f"{script.stem}: {ranks} on {self.device.type}, {threads} thread{'s' * (threads > 1)} each")
        if dist.is_initialized():
            meeting.say_hosts(self._store, self.world_size, self.grid.tp, say)

    def count_steps(
        self,
        batches: Iterable[BatchT],
        steps: int,
        per_step: int,
        unit: str,
        after_step: "Callable[[int], None] | None" = None,
    ) -> Iterator[tuple[int, BatchT]]:
        """Number the steps, give each its batch, and keep the records of each.

        Args:
            batches: as many as there are steps to take.
            steps: how many there are, with those that an earlier part of the run took.
            per_step: what the global batch holds, counted in `unit` ("tokens", "inputs").
            unit: see `per_step`.
            after_step: called with each step's number before it is put on record; the time that it takes is not the
                step's.
        """
        first, before = self._begin()
        self._log.expect_steps(per_step, unit, before, go_on_at=first if self._goes_on else None)
        source = iter(batches)
        for step in range(first, steps):
            with self._log.timing_a_step(), recorder.span(STEP, f"step {step}"):
                yield step, next(source)
            if after_step is not None:
                after_step(step)
            self._log.record(step)
            self._end_step(step, is_last=step + 1 == steps)

    def _begin(self) -> tuple[int, int]:
        """Before the first step: its number, and how much of the unit those before it took."""
        return 0, 0

    def _end_step(self, step: int, is_last: bool) -> None:
        """After a step has been put on record."""

    def global_loss(self, step: int, losses: Iterable[Tensor]) -> float:
        """The loss of the global batch, on every rank and in the records.

        Args:
            step: the optimizer step, from 0.
            losses: this rank's micro-batch losses, scalars whose sum is the loss of its replica; none where another
                stage of the replica computes it. Ranks that hold slices of a stage all compute the same.
        """
        own = sum((loss.detach().double() for loss in losses), torch.zeros((), dtype=torch.float64, device=self.device))
        own_loss = own.clone()
        traffic.all_reduce(own, f"the loss of step {step}", kind="loss", op=dist.ReduceOp.SUM).wait()
        self._log.loss = own.item() / (self.grid.dp * self.grid.tp)
        if not math.isfinite(self._log.loss):
            self._own_loss = own_loss.item()
            raise NotFiniteError(f"the loss of step {step} is {self._log.loss}{self._why_not_finite()}")
        return self._log.loss

    def _why_not_finite(self) -> str:
        """What is known of a loss that is not finite: the first rank that computed it; all must call it."""
        first = torch.tensor(self.world_size if math.isfinite(self._own_loss) else self.rank, device=self.device)
        traffic.all_reduce(
            first, "the first rank whose loss is not finite", kind="control", op=dist.ReduceOp.MIN
        ).wait()
        where = f", first on {self.grid.describe(int(first))}" if first < self.world_size > 1 else ""
        return f"{where} (is --lr {self.settings.lr:g} too large?)" if hasattr(self.settings, "lr") else where

    def close(self) -> None:
        """Say what the run came to, and wait until all ranks have finished.

        The process group is left to end with the process. To destroy it would risk a hang: the destructor joins gloo's
        thread while it holds Python's lock, which that thread may be waiting for to let go of its last message.
        """
        trace = self._gather_trace() if recorder.enabled else None
        if dist.is_initialized():
            traffic.all_reduce(torch.zeros((), device=self.device), "the end of the run", kind="control").wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # NCCL's wait() only orders the stream
        if trace is not None:
            self._keep_trace(trace)
        self.summarize()

    def _gather_trace(self) -> "Trace | None":
        """On rank 0, what all ranks recorded; the others hand theirs over, through the store where they met."""
        from distlab.reports.trace import merge

        piece = 1_000_000  # characters to a value of the store, which takes 8 MiB at most
        if self.rank > 0:
            text = json.dumps(recorder.as_json())
            pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
            for number, part in enumerate(pieces):
                self._store.set(f"trace/{self.rank}/{number}", part)
            self._store.set(f"trace/{self.rank}", str(len(pieces)))
            return None
        recorded = [recorder.as_json()]
        for rank in range(1, self.world_size):
            with traffic.named(f"the trace of {self.grid.describe(rank)}"):
                count = int(self._store.get(f"trace/{rank}"))
                text = "".join(self._store.get(f"trace/{rank}/{number}").decode() for number in range(count))
            recorded.append(json.loads(text))
        return merge(recorded, self.grid.dp, self.grid.pp, recorder.programs, self.grid.tp)

    def _keep_trace(self, trace: "Trace") -> None:
        """Write and draw what all ranks recorded, and say what it comes to."""
        from distlab.reports.timeline import draw, measured_panel
        from distlab.reports.trace import write_chrome

        write_chrome(trace, self.out / "trace.json")
        for line in trace.report():
            say(line)
        title = "A step as measured" + (", under the plan" if trace.programs is not None else "")
        draw(self.out / "timeline.png", [measured_panel(title, trace)])

    def summarize(self) -> None:
        """Say, on rank 0, what the run cost."""
        if self.rank == 0:
            self._log.summary()
            say_costs(self.rank, self.device)
            say(f"logs and metrics are in {self.out}")


def identity(settings: RunSettings) -> tuple[int, int]:
    """This process's rank and the world size: from torchrun's environment, else from the command line.

    Raises:
        InputError: the rank is missing or outside the world, or the flags and torchrun disagree on the world.
    """
    asked = layout_size(settings.layout)
    if meeting.started_by_torchrun():
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
