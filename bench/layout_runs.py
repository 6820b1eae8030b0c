"""Real runs of the hybrid's layouts, in turns with each other and with a reference that says how slow the computer is.

The ranks are forks that run the chapter's own script, on random tokens. Between its steps the reference runs: passes of
blocks on all cores at once, whose time the machine's file says. Both are slow when the computer is, and measured times
are divided by how slow the reference was. What each of them does first in a turn, with cold caches, does not count. In
the layouts "asleep" an action computes next to nothing, and then sleeps until it has taken what it should.
"""

import contextlib
import functools
import importlib.util
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import distlab  # noqa: F401  # before torch, as in launched runs: it sets how long threads wait in a loop

# isort: split
import torch
from torch import Tensor

from distlab.machine.heap import set_up_heap
from distlab.machine.processes import end_with_parent
from distlab.pipeline.actions import ACTION_KINDS, Action
from distlab.reports.records import read_largest
from distlab.run.logs import peak_memory_bytes
from distlab.run.main import training_run
from distlab.run.training import TrainingRun
from distlab.settings.common import RunSettings, parse
from distlab_planner.costs import Costs
from distlab_planner.machine import Machine
from distlab_planner.measuring import AT_A_TIME, BLOCKS, Passes, build
from distlab_planner.model import Sizes
from simplellm.compiler import Compiler
from simplellm.dataloaders import TinyStories
from simplellm.errors import require
from simplellm.experts import equal_loads
from simplellm.llama import LLamaStage
from simplellm.tokenizers import SPTokenizer

LAB = Path(__file__).resolve().parents[1]
SCRIPT = "hybrid/intro_5d.py"

WARM_UP = 2  # steps
IN_A_ROW = 3  # steps of a turn; the reference runs before and after them. The first finds cold caches, and is left out
SECONDS_TO_SETTLE = 0.03
REFERENCE_SECONDS = 0.08  # about as long does the reference run at a time
REFERENCE_ROWS = 8  # sequences of its passes: what slows small products is not what slows large ones
DEADLINE = 180  # seconds that ranks may take for what is asked of them, such as to compile


@dataclass(frozen=True)
class Case:
    """A layout that is to be measured."""

    name: str
    flags: list[str]  # of the hybrid
    ranks: int
    asleep: Costs | None = None  # what its actions take instead of computing


@dataclass
class Record:
    """What was measured of a layout: by turn, seconds of a step, and of the reference before and after it."""

    name: str
    steps: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)  # of these, by rank 0
    in_collectives: list[float] = field(default_factory=list)  # of these
    reference: list[float] = field(default_factory=list)  # the mean of before and after
    held_bytes: int = 0  # by the rank that holds most
    process_bytes: list[int] = field(default_factory=list)  # at the peak, by rank


def hybrid_script() -> ModuleType:
    """The hybrid's script as a module."""
    spec = importlib.util.spec_from_file_location("intro_5d", LAB / SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Gate(TinyStories):
    """Random tokens instead of stories, which a rank gets when it is told to go on."""

    pipe: Connection
    steps = 0

    def __next__(self) -> Tensor:
        if self.steps >= WARM_UP and (self.steps - WARM_UP) % IN_A_ROW == 0:
            self.pipe.send(None)
            self.pipe.recv()
        self.steps += 1
        shape = self._batch_size, self._seq_l
        return torch.randint(SPTokenizer().vocab_size, shape, generator=torch.Generator().manual_seed(self.steps))


def run_rank(pipe: Connection, rank: int, flags: Sequence[str], costs: Costs | None, folder: str) -> None:
    """A rank of a layout; sends the times of its steps at the end. With `costs`, its actions sleep."""
    end_with_parent(signal.SIGKILL)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(os.open(f"{folder}-rank{rank}.txt", os.O_WRONLY | os.O_CREAT), number)
    module, script_path = hybrid_script(), LAB / SCRIPT
    Gate.pipe = pipe
    module.TinyStories = Gate  # type: ignore[attr-defined]
    if costs is not None:
        os.environ["OMP_NUM_THREADS"] = "1"  # or threads that have nothing to do would spin on the others' cores
        fall_asleep(costs)
    settings: RunSettings = parse(module.DEFAULTS, "", [*flags, "--out", folder, str(rank)])
    run: TrainingRun[Any] = training_run(settings, script_path)
    module.train(run)
    run.close()
    pipe.send(([tuple(times) for times in run.records.times], peak_memory_bytes(run.device)))
    os._exit(0)


def fall_asleep(costs: Costs) -> None:
    """Have each action take what it should, most of it asleep."""

    def slowly(action: Action, *args: Any, run: Any) -> Any:
        until = time.perf_counter() + costs.seconds(action)
        computed = run(action, *args)
        time.sleep(max(0.0, until - time.perf_counter()))
        return computed

    for kind, run in {kind: kind.run for kind in ACTION_KINDS.values()}.items():
        kind.run = functools.partialmethod(slowly, run=run)  # type: ignore[assignment]


def run_reference(pipe: Connection, sizes: Sizes) -> None:
    """On one core: passes of blocks, as often as the pipe says, and the mean of their seconds."""
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    set_up_heap()  # as ranks do
    net = build(LLamaStage, sizes, BLOCKS, 1, torch.device("cpu"))
    passes = Passes(net, sizes, REFERENCE_ROWS, sizes.vocab_size, Compiler() if sizes.compiled else None)
    balanced = contextlib.ExitStack()
    balanced.enter_context(equal_loads([net]))
    passes.run("FB", micro_batches=AT_A_TIME)
    while True:
        count = pipe.recv()
        passes.run("FB", micro_batches=AT_A_TIME)
        started = time.perf_counter()
        for _ in range(count):
            passes.run("FB", micro_batches=AT_A_TIME)
        pipe.send((time.perf_counter() - started) / count / AT_A_TIME)


class Children:
    """Forks of this process, each with a pipe to it."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self._processes: list[Any] = []

    def add(self, work: Any, *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        own, other = context.Pipe()
        process = context.Process(target=work, args=(other, *args))
        process.start()
        other.close()
        self.pipes.append(own)
        self._processes.append(process)

    def answers(self, what: str) -> list[Any]:
        """What each of them sends next."""
        found = []
        for pipe in self.pipes:
            try:
                require(pipe.poll(DEADLINE), f"{what}: no answer within {DEADLINE} s")
                found.append(pipe.recv())
            except EOFError:
                require(False, f"{what}: a rank has failed")
        return found

    def tell(self, what: Any) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def join(self) -> None:
        """Wait until they have ended."""
        for process in self._processes:
            process.join(DEADLINE)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def expected_reference(machine: Machine, sizes: Sizes) -> float:
    """What the reference takes by the machine's file."""
    known = next(entry for entry in machine.measured if (entry.sizes, entry.tp, entry.threads) == (sizes, 1, 1))
    seconds = sum(known.seconds("block", kind, REFERENCE_ROWS) for kind in ("F", "B"))
    return BLOCKS * seconds * machine.slowdown_of(machine.cores_per_host)


def measure(cases: Sequence[Case], machine: Machine, sizes: Sizes, turns: int, port: int) -> list[Record]:
    """Run layouts of one model, in turns with each other, if there are several, and with the reference."""
    torch.set_num_threads(1)  # forks have no threads
    records = [Record(case.name) for case in cases]
    steps = WARM_UP + turns * IN_A_ROW
    references, running = Children(), list[Children]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            count = 0
            if any(case.asleep is None for case in cases):
                count = max(1, round(REFERENCE_SECONDS / AT_A_TIME / expected_reference(machine, sizes)))
                for _ in range(machine.cores_per_host):
                    references.add(run_reference, sizes)
            for number, case in enumerate(cases):
                ranks, own = Children(), Path(folder, str(number))
                running.append(ranks)
                own.mkdir()
                flags = [*case.flags, "--steps", str(steps), "--master-port", str(port + number)]
                for rank in range(case.ranks):
                    ranks.add(run_rank, rank, flags, case.asleep, str(own))
                ranks.answers(case.name)  # when they have warmed up
            before = reference_seconds(references, count, "the reference")
            in_turn = list(zip(cases, records, running, strict=True))
            for turn, (case, record, ranks) in itertools.product(range(turns), in_turn):
                ranks.tell(None)
                answers = ranks.answers(case.name)
                after = reference_seconds(references, count, "the reference")
                record.reference.append((before + after) / 2)
                before = after
                if turn == turns - 1:
                    (times, _), *_ = answers
                    keep_times(record, times)
                    record.process_bytes = [peak for _, peak in answers]
            for number, (record, ranks) in enumerate(zip(records, running, strict=True)):
                ranks.join()
                record.held_bytes = sum(read_largest(Path(folder, str(number))))
        finally:
            for children in (*running, references):
                children.end()
    return records


def keep_times(record: Record, times: Sequence[tuple[float, ...]]) -> None:
    """Keep the mean of each turn's steps but the first."""
    for first in range(WARM_UP, len(times), IN_A_ROW):
        columns = zip(*times[first + 1 : first + IN_A_ROW], strict=True)
        for values, column in zip((record.steps, record.waited, record.in_collectives), columns, strict=True):
            values.append(statistics.fmean(column))


def reference_seconds(references: Children, count: int, what: str) -> float:
    """The mean over all cores; 0 without a reference. It begins when no thread of the ranks spins any more."""
    if not count:
        return 0.0
    time.sleep(SECONDS_TO_SETTLE)
    references.tell(count)
    return statistics.fmean(references.answers(what))


def undisturbed(record: Record, machine: Machine, sizes: Sizes) -> list[float]:
    """Seconds of a step in each turn, divided by how slow the reference was."""
    if not any(record.reference):
        return record.steps
    usual = expected_reference(machine, sizes)
    return [step * usual / other for step, other in zip(record.steps, record.reference, strict=True)]
