"""The planner's predictions beside the clock: real runs of the hybrid in many layouts, each in turns with a reference.

python bench/planner.py --machine runs/machine.json --measured runs/planner.jsonl --png runs/planner.png
python bench/planner.py --machine runs/machine.json --quick
python bench/planner.py --machine runs/machine.json --measured runs/planner.jsonl --only "small 2.1.1" "asleep"

The ranks are forks that run the chapter's own script, on random tokens. Between its steps the reference runs: passes of
blocks on all cores at once, whose time the machine's file says. Both are slow when the computer is, and measured times
are divided by how slow the reference was. In the layouts "asleep" an action computes next to nothing, and then sleeps
until it has taken what it should.

What was measured is kept in the file of --measured, and not measured again. Predictions are made anew each time.
"""

import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from distlab.comm.devices import keep_freed_memory
from distlab.comm.processes import end_with_parent
from distlab.pipeline.actions import KINDS, Action
from distlab.planner.costs import Costs
from distlab.planner.layouts import Layout
from distlab.planner.machine import Machine, Measured, PassSeconds, read_machine, write_machine
from distlab.planner.measuring import BLOCKS, Passes, build
from distlab.planner.memory import held, process_bytes
from distlab.planner.model import Sizes
from distlab.planner.step import Step, predict
from distlab.reports.memory import read_largest
from distlab.run.prediction import Prediction
from distlab.run.progress import each
from distlab.run.settings import RunSettings, parse
from distlab.run.training import TrainingRun
from simplellm import command_line
from simplellm.dataloaders import TinyStories
from simplellm.errors import require
from simplellm.llama import LLamaStage
from simplellm.tokenizers import SPTokenizer

LAB = Path(__file__).resolve().parents[1]
BATCH = 12  # sequences per step, of all replicas together
MODELS = {
    "small": "--dmodel 96 --num-heads 4 --n-layers 6 --seq-len 64",
    "large": "--dmodel 192 --num-heads 6 --n-layers 4 --seq-len 96",
    "asleep": "--dmodel 16 --num-heads 2 --n-layers 6 --seq-len 4 --optimizer sgd",
}
# dp.pp.tp, micro-batches, schedule, and then what the replicas shard, or what is recomputed
LAYOUTS = {
    "small": """
        1.1.1 1; 1.1.1 4; 1.1.1 4 recompute blocks; 1.1.1 12 recompute all
        2.1.1 1; 2.1.1 3; 3.1.1 1; 4.1.1 3; 6.1.1 1
        2.1.1 3 shard optimizer; 2.1.1 3 shard gradients; 2.1.1 3 shard weights; 4.1.1 1 shard optimizer
        1.1.2 1; 1.1.2 4; 1.1.4 2; 2.1.2 3
        1.2.1 1 naive; 1.2.1 4 naive; 1.2.1 4 gpipe; 1.2.1 4 dapple; 1.2.1 12 dapple; 1.2.1 4 interleaved
        1.2.1 4 zb-h1; 1.2.1 6 zb-h2; 1.2.1 4 zb-v; 1.2.1 6 dualpipe-v
        1.2.1 4 gpipe recompute all; 1.2.1 4 dapple recompute blocks
        1.3.1 6 gpipe; 1.3.1 6 dapple; 1.3.1 6 interleaved; 1.3.1 12 zb-h1; 1.3.1 6 zb-v
        1.4.1 12 dapple; 1.4.1 4 zb-h1; 1.8.1 12 dapple
        2.2.1 3 dapple; 2.2.1 6 zb-v; 2.2.1 3 dapple shard optimizer; 2.3.1 3 dapple; 3.2.1 4 gpipe; 4.2.1 3 dapple
        1.2.2 4 dapple; 2.2.2 2 dapple""",
    "large": """
        1.1.1 1; 1.1.1 4 recompute blocks; 2.1.1 1; 2.1.1 3 shard optimizer; 4.1.1 1; 1.1.2 1; 1.1.2 4
        1.2.1 4 naive; 1.2.1 4 gpipe; 1.2.1 4 dapple; 1.2.1 12 interleaved; 1.2.1 4 zb-h1; 1.2.1 6 zb-v; 1.3.1 6 dapple
        2.2.1 3 dapple; 1.2.2 4 dapple""",
    "asleep": """
        1.1.1 4; 2.1.1 1; 4.1.1 3; 4.1.1 3 shard optimizer; 8.1.1 1
        1.2.1 4 naive; 1.2.1 4 gpipe; 1.2.1 12 dapple; 1.2.1 4 interleaved; 1.2.1 4 zb-h1; 1.2.1 6 zb-v
        1.2.1 4 dapple recompute blocks; 1.4.1 4 gpipe; 1.4.1 12 dapple; 1.4.1 4 interleaved; 1.4.1 12 zb-h1
        1.4.1 12 zb-h2; 1.4.1 12 zb-v; 1.4.1 12 dualpipe-v; 1.8.1 12 dapple; 1.8.1 12 gpipe recompute all
        2.2.1 3 dapple; 2.3.1 6 gpipe; 2.4.1 6 zb-h1; 4.2.1 3 dapple""",
}
QUICK = (
    "small 1.1.1 4; small 2.1.1 3; small 4.1.1 3; small 1.1.2 4; small 1.2.1 4 dapple; small 1.3.1 6 interleaved; "
    "small 2.2.1 3 dapple; large 2.1.1 1; large 1.2.1 4 dapple; asleep 1.4.1 12 dapple; asleep 2.2.1 3 dapple"
)
WARM_UP = 2  # steps
CALIBRATIONS = 3  # how slow the computer is at the moment is in one minute's measurements
IN_A_ROW = 2  # steps of a turn; the reference runs before and after them
SLEEP = 8e-3  # seconds of a block's forward pass over a sequence
SECONDS_TO_SETTLE = 0.03
REFERENCE_SECONDS = 0.08  # about as long does the reference run at a time
REFERENCE_ROWS = 8  # sequences of its passes: what slows small products is not what slows large ones
DEADLINE = 60  # seconds that ranks may take for what is asked of them
SCRIPT = "hybrid/intro_hybrid.py"


@dataclass
class Settings:
    """What to measure."""

    machine: Path = Path("runs/machine.json")
    """the machine, as distlab.calibrate writes it; what it has not got of the models is measured, three times"""
    measured: Path | None = None
    """JSON lines with what was measured, to be read and continued"""
    turns: int = 5
    """turns of each layout, of two steps each; the median counts"""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORDS ...")] = ()
    """only layouts whose names begin like one of these: "small 1.2.1", "asleep" """
    quick: bool = False
    """only some layouts, in three minutes"""
    at_most: int | None = None
    """how many layouts to measure now"""
    png: Path | None = None
    """file for the figure"""


@dataclass
class Record:
    """What was measured of a layout: by turn, seconds of a step, and of the reference before and after it."""

    name: str
    steps: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)  # of these, by rank 0
    in_collectives: list[float] = field(default_factory=list)  # of these
    reference: list[float] = field(default_factory=list)  # the mean of before and after
    held_bytes: int = 0  # by the rank that holds most
    process_bytes: int = 0  # at the peak, of rank 0


@dataclass(frozen=True)
class Compared:
    """A layout's prediction beside what was measured, in seconds of the undisturbed machine."""

    record: Record
    layout: Layout
    step: Step
    seconds: float
    held_bytes: int
    process_bytes: float

    @property
    def error(self) -> float:
        return self.step.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.held_bytes / self.record.held_bytes - 1

    @property
    def process_error(self) -> float:
        return self.process_bytes / self.record.process_bytes - 1


def names() -> list[str]:
    """Of all layouts: "small 1.2.1 4 dapple"."""
    lines = {model: text.replace("\n", ";").split(";") for model, text in LAYOUTS.items()}
    return [f"{model} {' '.join(line.split())}" for model, each_of in lines.items() for line in each_of if line.strip()]


def flags_of(name: str) -> list[str]:
    """The flags of the hybrid for a layout."""
    model, sizes, micro_batches, *rest = name.split()
    dp, pp, tp = sizes.split(".")
    flags = f"{MODELS[model]} --dp {dp} --pp {pp} --tp {tp} --batch-size {BATCH // int(dp)} --data sample --device cpu"
    flags += f" --micro-batches {micro_batches}"
    if rest and rest[0] not in ("shard", "recompute"):
        flags += f" --schedule {rest.pop(0)}"
    return [*flags.split(), *(f"--{rest[0]} {rest[1]}".split() if rest else [])]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("intro_hybrid", LAB / SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sizes_of(flags: str) -> Sizes:
    """The sizes of a model, given by its flags."""
    settings = parse(script().DEFAULTS, "", [*flags.split(), "--dp", "1", "--pp", "1", "--tp", "1", "0"])
    heads, vocab_size = settings.num_heads, SPTokenizer().vocab_size
    return Sizes(settings.dmodel, heads, heads, 4 * settings.dmodel, settings.seq_len, vocab_size)


def costs_of(name: str, machine: Machine, machine_file: Path) -> Costs:
    """What the planner knows of a layout."""
    settings = parse(script().DEFAULTS, "", [*flags_of(name), "0"])
    costs = Prediction.of(settings, machine_file).costs
    if not name.startswith("asleep"):
        return costs
    seconds = {kind: (SLEEP * share,) for kind, share in {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.items()}
    block, none = PassSeconds(**seconds), PassSeconds(**dict.fromkeys(seconds, (0.0,)))
    passes = Measured(costs.model.sizes, 1, 1, (1,), none, block, block)
    ranks = costs.layout.ranks
    free = Machine(
        **{**vars(costs.machine), "cores_per_host": 1, "slowdown": (1.0,) * ranks, "measured": (passes,)}
        | {"crowded_seconds": 0.0, "optimizer_seconds": 0.0}
    )
    return replace(costs, machine=free)


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
        os.dup2(os.open(f"{folder}/rank{rank}.txt", os.O_WRONLY | os.O_CREAT), number)
    module, script_path = script(), LAB / SCRIPT
    Gate.pipe = pipe
    module.TinyStories = Gate  # type: ignore[attr-defined]
    if costs is not None:
        os.environ["OMP_NUM_THREADS"] = "1"  # or threads that have nothing to do would spin on the others' cores
        fall_asleep(costs)
    settings: RunSettings = parse(module.DEFAULTS, "", [*flags, "--out", folder, str(rank)])
    run: TrainingRun[Any] = TrainingRun(settings, script_path)
    module.train(run)
    run.close()
    pipe.send([tuple(times) for times in run.records.times])
    os._exit(0)


def fall_asleep(costs: Costs) -> None:
    """Have each action take what it should, most of it asleep."""

    def slowly(action: Action, *args: Any, run: Any) -> Any:
        until = time.perf_counter() + costs.seconds(action)
        computed = run(action, *args)
        time.sleep(max(0.0, until - time.perf_counter()))
        return computed

    for kind, run in {kind: kind.run for kind in KINDS.values()}.items():
        kind.run = functools.partialmethod(slowly, run=run)  # type: ignore[assignment]


def run_reference(pipe: Connection, sizes: Sizes) -> None:
    """On one core: passes of blocks, as often as the pipe says, and the mean of their seconds."""
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    keep_freed_memory()  # as ranks do
    net = build(LLamaStage, sizes, BLOCKS, 1, torch.device("cpu"))
    passes = Passes(net, sizes, REFERENCE_ROWS, sizes.vocab_size)
    passes.run("FB")
    while True:
        count, started = pipe.recv(), time.perf_counter()
        for _ in range(count):
            passes.run("FB")
        pipe.send((time.perf_counter() - started) / count)


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


@dataclass(frozen=True)
class Case:
    """A layout that is to be measured."""

    name: str
    flags: list[str]  # of the hybrid
    ranks: int
    asleep: Costs | None = None  # what its actions take instead of computing


def measure(cases: Sequence[Case], machine: Machine, sizes: Sizes, turns: int, port: int) -> list[Record]:
    """Run layouts of one model, in turns with each other, if there are several, and with the reference."""
    records = [Record(case.name) for case in cases]
    steps = WARM_UP + turns * IN_A_ROW
    references, running = Children(), list[Children]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            count = 0
            if any(case.asleep is None for case in cases):
                count = max(1, round(REFERENCE_SECONDS / expected_reference(machine, sizes)))
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
                    keep_times(record, answers[0])
            for number, (record, ranks) in enumerate(zip(records, running, strict=True)):
                ranks.join()
                record.held_bytes = sum(read_largest(Path(folder, str(number))))
                last = json.loads(Path(folder, str(number), "metrics.jsonl").read_text().splitlines()[-1])
                record.process_bytes = last["peak_memory_bytes"]
        finally:
            for children in (*running, references):
                children.end()
    return records


def keep_times(record: Record, times: Sequence[tuple[float, ...]]) -> None:
    """Keep the mean of each turn's steps."""
    for first in range(WARM_UP, len(times), IN_A_ROW):
        columns = zip(*times[first : first + IN_A_ROW], strict=True)
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


def compare(record: Record, machine: Machine, machine_file: Path) -> Compared:
    costs = costs_of(record.name, machine, machine_file)
    seconds = undisturbed(record, machine, costs.model.sizes)
    optimizer = "sgd" if record.name.startswith("asleep") else "adam"
    holds = [held(costs, worker, optimizer) for worker in range(costs.layout.pp)]
    most = max(of_worker.total for of_worker in holds)
    process = process_bytes(costs, 0, holds[0])
    return Compared(record, costs.layout, predict(costs, worker=0), statistics.median(seconds), most, process)


def machine_of(path: Path, models: Mapping[str, str], calibrations: int = CALIBRATIONS) -> Machine:
    """The machine's file, with the passes of some models, given by their flags.

    What is not there is measured, several times in turns; the medians count.
    """
    known = {entry.sizes for entry in read_machine(path).measured} if path.exists() else set()
    missing = {model: flags for model, flags in models.items() if sizes_of(flags) not in known}
    if missing:
        path.parent.mkdir(exist_ok=True, parents=True)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, f"{number}.json") for number in range(calibrations)]
            for file in files if path.exists() else ():
                shutil.copy(path, file)  # so that it keeps the models that it has
            for file, model in each(list(itertools.product(files, missing)), "measurements of the machine"):
                calibrate(file, missing[model])
            path.write_text(json.dumps(medians([json.loads(file.read_text()) for file in files])))
        write_machine(read_machine(path), path)
    return read_machine(path)


def calibrate(file: Path, flags: str) -> None:
    """Measure this machine for the model of these flags."""
    pairs = zip(flags.split()[::2], flags.split()[1::2], strict=True)
    sizes = [part for flag, value in pairs if flag != "--n-layers" for part in (flag, value)]
    command = [sys.executable, "-m", "distlab.calibrate", str(file), *sizes, "--device", "cpu"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    require(done.returncode == 0, f"{file}: measuring has failed: {done.stderr.strip()[-300:]}")


def medians(values: Sequence[Any]) -> Any:
    """Several measurements of one machine, as in its file, as one: every number is the median of theirs."""
    first = values[0]
    if isinstance(first, dict):
        return {key: medians([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [medians(of_one) for of_one in zip(*values, strict=True)]
    return statistics.median(values) if isinstance(first, float) else first


def kinds(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Those whose ranks computed, and those whose ranks slept."""
    found: dict[str, list[Compared]] = {"computing": [], "asleep": []}
    for one in compared:
        found["asleep" if one.record.name.startswith("asleep") else "computing"].append(one)
    return {kind: several for kind, several in found.items() if several}


def report(compared: Sequence[Compared]) -> Iterator[str]:
    """The table, the worst first, and what its errors come to."""
    heads = "layout | predicted, ms | measured, ms | error | most of it | waited | memory, error | of the process"
    yield f"| {heads} |"
    yield f"|---|{'---:|' * 3}---|{'---:|' * 3}"
    for one in sorted(compared, key=lambda one: -abs(one.error)):
        share = statistics.fmean(one.record.waited) / statistics.fmean(one.record.steps)
        times = f"{one.step.seconds * 1e3:,.0f} | {one.seconds * 1e3:,.0f} | {one.error:+.1%}"
        memory = f"{one.memory_error:+.1%} | {one.process_error:+.1%}"
        yield f"| {one.record.name} | {times} | {one.step.bound} | {share:.0%} | {memory} |"
    for kind, several in kinds(compared).items():
        errors = sorted(abs(one.error) for one in several)
        within = sum(error <= 0.2 for error in errors) / len(errors)
        yield (
            f"# {kind}: {len(several)} layouts, median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; "
            f"{within:.0%} within 20%; memory off by at most {max(abs(one.memory_error) for one in several):.1%}, "
            f"the process's by {max(abs(one.process_error) for one in several):.1%}"
        )


def layout_kind(layout: Layout) -> str:
    """What a layout divides, for the figure."""
    sizes = {"replicas": layout.dp, "stages": layout.pp, "slices": layout.tp}
    divided = [name for name, size in sizes.items() if size > 1]
    return divided[0] if len(divided) == 1 else "several of these" if divided else "one rank"


def draw(png: Path, compared: Sequence[Compared]) -> None:
    """Predicted against measured, with a band of 10 %."""
    from distlab.reports.style import INK, PALE, SERIES, save, subplots

    columns = kinds(compared)
    figure, axes = subplots(4.2, columns=len(columns), squeeze=False)
    names_of_kinds = ["one rank", "replicas", "stages", "slices", "several of these"]
    for panel, (kind, several) in zip(axes[0], columns.items(), strict=True):
        ends = [f(s for one in several for s in (one.seconds, one.step.seconds)) * 1e3 for f in (min, max)]
        ticks = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
        line = [ends[0] * 0.8, ends[1] * 1.25]
        panel.fill_between(line, [x * 0.9 for x in line], [x * 1.1 for x in line], color=PALE, label="within 10 %")
        panel.plot(line, line, color=INK, linewidth=0.8)
        for color, name in zip(SERIES, names_of_kinds, strict=False):
            chosen = [one for one in several if layout_kind(one.layout) == name]
            points = [[one.seconds * 1e3 for one in chosen], [one.step.seconds * 1e3 for one in chosen]]
            panel.plot(*points, "o", color=color, label=name)
        title = {"computing": "ranks that compute", "asleep": "ranks that sleep"}[kind]
        panel.set(xscale="log", yscale="log", title=title, xlabel="measured, ms a step", ylabel="predicted, ms a step")
        panel.set(xlim=line, ylim=line)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_ticks([ms for ms in ticks if line[0] <= ms <= line[1]])
            axis.set_major_formatter(lambda ms, _: f"{ms:,.0f}")
        panel.minorticks_off()
    axes[0][0].legend(loc="upper left")
    save(figure, png)


def main(settings: Settings) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)  # or a rank that is alone would compute with one thread
    torch.set_num_threads(1)  # forks have no threads
    require(settings.turns > 0, f"--turns {settings.turns}: give 1 or more")
    quick = {" ".join(name.split()) for name in QUICK.split(";")}
    chosen = [name for name in names() if not settings.quick or name in quick]
    chosen = [name for name in chosen if not settings.only or name.startswith(settings.only)]
    require(bool(chosen), f"--only {' '.join(settings.only)}: there is no such layout")
    computing = {model: flags for model, flags in MODELS.items() if model != "asleep"}
    machine = machine_of(settings.machine, computing, 1 if settings.quick else CALIBRATIONS)
    records = dict[str, Record]()
    kept = settings.measured
    if kept is not None and kept.exists():
        read = [Record(**json.loads(line)) for line in kept.read_text().splitlines()]
        records = {record.name: record for record in read if record.name in chosen}
    missing = [name for name in chosen if name not in records][: settings.at_most]
    for number, name in enumerate(each(missing, "layouts")):
        port = 21_000 + (os.getpid() + number) % 4000
        costs = costs_of(name, machine, settings.machine)
        case = Case(name, flags_of(name), costs.layout.ranks, costs if name.startswith("asleep") else None)
        [records[name]] = measure([case], machine, costs.model.sizes, settings.turns, port)
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps(vars(records[name])) + "\n")
    compared = [compare(record, machine, settings.machine) for record in records.values()]
    for line in report(compared):
        print(line)
    if settings.png is not None:
        draw(settings.png, compared)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__ or "")
