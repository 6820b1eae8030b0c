"""The planner's predictions beside the clock: real runs of the hybrid in many layouts, each in turns with a reference.

python bench/planner.py --machine runs/machine.json --measured runs/planner.jsonl --png runs/planner.png
python bench/planner.py --machine runs/machine.json --quick
python bench/planner.py --machine runs/machine.json --measured runs/planner.jsonl --only "small 2.1.1" "asleep"

What was measured is kept in the file of --measured, and not measured again. Predictions are made anew each time.
"""

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from calibrations import CALIBRATIONS, machine_of
from layout_runs import Case, Record, hybrid_script, measure, undisturbed
from turns import each

from distlab.settings.common import parse
from distlab_planner.costs import Costs
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import Machine, Measured, PassSeconds
from distlab_planner.memory import held, process_bytes
from distlab_planner.prediction import Prediction
from distlab_planner.step import Step, predict
from simplellm import command_line
from simplellm.errors import require

BATCH = 12  # sequences per step, of all replicas together
MODELS = {
    "small": "--dmodel 96 --num-heads 4 --n-layers 6 --seq-len 64",
    "large": "--dmodel 192 --num-heads 6 --n-layers 4 --seq-len 96",
    "experts": "--dmodel 96 --num-heads 4 --hidden-dim 192 --n-layers 6 --seq-len 64 --experts 8 --experts-per-token 2",
    "compiled": "--dmodel 192 --num-heads 6 --n-layers 4 --seq-len 96 --compile",
    "asleep": "--dmodel 16 --num-heads 2 --n-layers 6 --seq-len 4 --optimizer sgd",
}
# dp.pp.tp, micro-batches, schedule, and then what the replicas share or shard, or what is recomputed
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
    "experts": """
        1.1.1 1; 1.1.1 4; 2.1.1 1; 2.1.1 1 ep 2; 2.1.1 3 ep 2; 4.1.1 1 ep 2; 4.1.1 1 ep 4; 1.2.1 4 dapple
        2.2.1 3 dapple ep 2; 1.1.2 4; 2.1.1 3 ep 2 recompute blocks""",
    "compiled": """
        1.1.1 1; 1.1.1 4; 1.1.1 4 recompute blocks; 2.1.1 1; 2.1.1 3; 2.1.1 3 shard optimizer; 4.1.1 1
        1.2.1 4 dapple; 1.2.1 4 gpipe; 2.2.1 3 dapple""",
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
SLEEP = 8e-3  # seconds of a block's forward pass over a sequence


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


@dataclass(frozen=True)
class Compared:
    """A layout's prediction beside what was measured, in seconds of the undisturbed machine."""

    record: Record
    layout: RunLayout
    step: Step
    seconds: float
    held_bytes: int
    process_bytes: list[float]  # by worker

    @property
    def error(self) -> float:
        return self.step.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.held_bytes / self.record.held_bytes - 1

    @property
    def process_error(self) -> float:
        """Of the worker's first rank for which it is largest."""
        ranks = [self.layout.first_rank(worker) for worker in range(self.layout.size("pp"))]
        measured = [self.record.process_bytes[rank] for rank in ranks]
        return max((p / m - 1 for p, m in zip(self.process_bytes, measured, strict=True)), key=abs)


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
    if len(rest) % 2:
        flags += f" --schedule {rest.pop(0)}"
    return [*flags.split(), *(word if place % 2 else f"--{word}" for place, word in enumerate(rest))]


def costs_of(name: str, machine: Machine, machine_file: Path) -> Costs:
    """What the planner knows of a layout."""
    settings = parse(hybrid_script().DEFAULTS, "", [*flags_of(name), "0"])
    costs = Prediction.of(settings, machine_file).costs
    if not name.startswith("asleep"):
        return costs
    seconds = {kind: (SLEEP * share,) for kind, share in {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.items()}
    block, none = PassSeconds(**seconds), PassSeconds(**dict.fromkeys(seconds, (0.0,)))
    passes = Measured(costs.model.sizes, 1, 1, (1,), none, block, block)
    ranks = costs.layout.ranks
    free = Machine(
        **{**vars(costs.machine), "cores_per_host": 1, "slowdown": (1.0,) * ranks, "measured": (passes,)}
        | {"waking": (), "optimizer_seconds": 0.0, "sgd_seconds": 0.0}
    )
    return replace(costs, machine=free)


def compare(record: Record, machine: Machine, machine_file: Path) -> Compared:
    costs = costs_of(record.name, machine, machine_file)
    seconds = undisturbed(record, machine, costs.model.sizes)
    holds = [held(costs, worker) for worker in range(costs.layout.size("pp"))]
    most = max(of_worker.total for of_worker in holds)
    process = [process_bytes(costs, worker, holds[worker]) for worker in range(costs.layout.size("pp"))]
    return Compared(record, costs.layout, predict(costs, worker=0), statistics.median(seconds), most, process)


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


def layout_kind(layout: RunLayout) -> str:
    """What a layout divides, for the figure."""
    sizes = {"replicas": layout.size("dp"), "stages": layout.size("pp"), "slices": layout.size("tp")}
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
    require(settings.turns > 0, f"--turns {settings.turns}: give 1 or more")
    quick = {" ".join(name.split()) for name in QUICK.split(";")}
    chosen = [name for name in names() if not settings.quick or name in quick]
    chosen = [name for name in chosen if not settings.only or name.startswith(settings.only)]
    require(bool(chosen), f"--only {' '.join(settings.only)}: there is no such layout")
    computed = {name.split()[0] for name in chosen} - {"asleep"} or {"small"}
    computing = {model: flags for model, flags in MODELS.items() if model in computed}
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
