"""How far layouts scale on clusters that are written down in docs/machines: predicted by the planner, nothing is run.

python bench/scaling.py --png imgs/scaling.png

The model has 8.9 billion weights (4096 wide, 32 layers, 32 heads) and sequences of 2,048 tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab_runs import LAB
from tables import print_head, print_row

from distlab_planner.costs import Costs
from distlab_planner.layouts import SAME_WEIGHTS, RunLayout
from distlab_planner.machine import Machine, read_machine
from distlab_planner.model import NUMBER_BYTES, Model, Sizes
from distlab_planner.step import LOSS_BYTES, predict
from simplellm import command_line

MACHINES = LAB / "docs/machines"
NAMES = ("cluster", "oversubscribed")
MODEL = Model(Sizes(4096, 32, 32, 16384, 2048, 32000), n_layers=32)
SLICES = (1, 2, 4, 8, 16, 32)
REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128)  # of 8 ranks each
ROWS = 4  # sequences of a replica, where their number grows with that of the replicas
BATCH = 512  # sequences of all replicas, where it does not
EVERY = (1, 4, 16, 64, 256, 1024)  # steps between two averages


@dataclass
class Settings:
    """What to draw."""

    png: Path | None = None
    """file for the figure"""


@dataclass(frozen=True)
class Curve:
    """Shares of the speed that the ranks would have if each of them, or each replica, were as fast as alone."""

    name: str
    x: Sequence[int]
    efficiency: Sequence[float]


def costs_of(machine: Machine, dp: int, tp: int, batch_size: int) -> Costs:
    """Those of `dp` replicas of `tp` ranks, with so many sequences for each replica, of at most `ROWS` at a time."""
    parts = max(1, batch_size // ROWS)
    layout = RunLayout({"dp": dp, "tp": tp}, batch_size, parts, "dapple", "none", "none", (MODEL.n_layers,))
    wide = replace(machine, hosts=max(machine.hosts, -(-layout.ranks // machine.ranks_per_host)))
    return Costs(wide, MODEL, layout)


def step_seconds(machine: Machine, dp: int, tp: int, batch_size: int) -> float:
    return predict(costs_of(machine, dp, tp, batch_size)).seconds


def tensor_parallel(name: str) -> Curve:
    """One replica: its speed for each rank, beside that of one rank alone."""
    machine = read_machine(MACHINES / f"{name}.json")
    alone = step_seconds(machine, 1, 1, ROWS)
    return Curve(name, SLICES, [alone / tp / step_seconds(machine, 1, tp, ROWS) for tp in SLICES])


def data_parallel(name: str, is_weak: bool) -> Curve:
    """Replicas of 8 slices: the speed of each beside that of one alone; the batch grows with them or does not."""
    machine = read_machine(MACHINES / f"{name}.json")
    found = []
    for dp in REPLICAS:
        rows = ROWS if is_weak else BATCH // dp
        alone = step_seconds(machine, 1, 8, rows if is_weak else BATCH) / (1 if is_weak else dp)
        found.append(alone / step_seconds(machine, dp, 8, rows))
    return Curve(f"{name}, {'each replica' if is_weak else 'all'} {ROWS if is_weak else BATCH}", REPLICAS, found)


def local_sgd(bandwidth: float) -> Curve:
    """Two replicas of 8 slices at two sites: the speed of each, beside that of one alone.

    The weights are averaged after an update, and nothing is computed meanwhile. The loss is summed only then, too, as
    with `--report-every H`.
    """
    machine = read_machine(MACHINES / "two-sites.json")
    link = replace(machine.between, bytes_per_second=bandwidth)
    machine = replace(machine, between=link, hosts=2, ranks_per_host=8)
    alone, costs = step_seconds(machine, 1, 8, ROWS), costs_of(machine, 2, 8, ROWS)
    on_hosts, weights_bytes = costs.on_hosts, costs.weights(0) * NUMBER_BYTES
    average = on_hosts.all_reduce(SAME_WEIGHTS, weights_bytes).seconds
    loss = on_hosts.all_reduce(tuple(costs.layout.axes), LOSS_BYTES).seconds
    found = [alone / (alone + (average + loss) / every) for every in EVERY]
    return Curve(f"{bandwidth * 8 / 1e9:g} Gbit/s", EVERY, found)


def panels() -> Iterator[tuple[str, str, list[Curve]]]:
    """Titles, what x is, and curves."""
    yield "tensor parallelism, beside one rank", "ranks that share a layer", [tensor_parallel(name) for name in NAMES]
    both = [data_parallel(name, is_weak) for name in NAMES for is_weak in (True, False)]
    yield "data parallelism, beside one replica", "replicas of 8 ranks", both
    curves = [local_sgd(gigabits / 8 * 1e9) for gigabits in (1, 10, 100)]
    yield "local SGD, beside one of two sites", "steps between averages (H)", curves


def main(settings: Settings) -> None:
    found = list(panels())
    for title, label, curves in found:
        print_head(f"{title}: {label}", *(f"{x}:" for x in curves[0].x))
        for curve in curves:
            print_row(curve.name, *(f"{share:.0%}" for share in curve.efficiency))
        print()
    if settings.png is not None:
        draw(settings.png, found)


def draw(png: Path, found: Sequence[tuple[str, str, list[Curve]]]) -> None:
    from distlab.reports.style import SERIES, save, subplots

    figure, axes = subplots(3.6, columns=len(found), sharey=True)
    for panel, (title, label, curves) in zip(axes, found, strict=True):
        for curve, color in zip(curves, SERIES, strict=False):
            panel.plot(curve.x, curve.efficiency, "o-", color=color, label=curve.name)
        panel.set(xscale="log", title=title.replace(", ", "\n"), xlabel=label, ylim=(0, 1.05))
        panel.set_xticks(curves[0].x[::2] if len(curves[0].x) > 6 else curves[0].x)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.minorticks_off()
        panel.legend(fontsize=8, handlelength=1.2, loc="upper left" if "SGD" in title else "lower left")
    axes[0].set_ylabel("share of the speed of each alone")
    axes[0].yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    save(figure, png)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__ or "")
