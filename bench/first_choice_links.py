"""Whether the planner's first choice is the fastest layout over a link between two hosts, beside those of `network.py`.

    python bench/first_choice_links.py --machine runs/machine.json     a quarter of an hour; needs root, and Linux

The planner is told the link's bandwidth and latency, and chooses a layout for two ranks, and for four. What it chose
and the layouts of `network.py` that train what one process trains run over the same simulated links.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import network
from calibrations import machine_of, sizes_of
from first_choice import described
from network import EXACT, MODEL, SEQUENCES, Wire
from tables import print_head, print_row

from distlab.comm.link import Link
from distlab_planner.costs import Costs
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import Machine
from distlab_planner.model import Model
from distlab_planner.search import find_layouts
from distlab_planner.step import predict
from simplellm import command_line
from simplellm.errors import require

FLAGS = " ".join(MODEL[: MODEL.index("--optimizer")])
N_LAYERS = int(MODEL[MODEL.index("--n-layers") + 1])
RANKS_PER_HOST = (1, 2)


@dataclass
class Settings:
    """What to measure."""

    machine: Path = Path("runs/machine.json")
    """the machine, as distlab.calibrate writes it; if it has not got the model, that is measured"""
    mbit: tuple[float, ...] = (10, 100, 1000)
    """bandwidths, Mbit/s"""
    latency_ms: tuple[float, ...] = (0, 5, 50)
    """one-way latencies"""
    runs: int = 2
    """runs of each layout, one after all others; the faster one counts, as other load can only slow a run"""


def two_hosts(machine: Machine, ranks_per_host: int, wire: Wire) -> Machine:
    """The machine as two hosts, each with half of its cores and no shared memory, and the link between them."""
    ranks = range(1, ranks_per_host + 1)
    return replace(
        machine,
        hosts=2,
        ranks_per_host=ranks_per_host,
        cores_per_host=max(1, machine.cores_per_host // 2),
        between=Link(machine.inside.latency_seconds + wire.latency_seconds, wire.bytes_per_second),
        slowdown=tuple(machine.slowdown_of(2 * here) / machine.slowdown_of(2) for here in ranks),
        all_reduces=tuple(entry for entry in machine.all_reduces if entry.transport == "gloo"),
    )


def as_run(model: Model, layout: RunLayout, machine: Machine) -> network.Layout:
    """A layout of the planner's as a run between two hosts, with the planner's prediction."""

    def link_seconds(wire: Wire, model_bytes: float, message_bytes: float, step_seconds: float) -> float:
        hosts = two_hosts(machine, layout.ranks // 2, wire)
        return predict(Costs(hosts, model, layout, threads=1)).seconds - step_seconds

    half = layout.ranks // 2
    script = f"hybrid/intro_5d.py {layout.flags(model)}"
    return network.Layout(described(layout, model), script, (0,) * half + (1,) * half, link_seconds)


def fastest(grids: Sequence[network.Grid]) -> network.Grid:
    """Of each layout over each link, the fastest of several runs."""
    return {link: {name: min(grid[link][name] for grid in grids) for name in row} for link, row in grids[0].items()}


def print_table(grid: network.Grid, chosen: dict[tuple[float, float, int], str]) -> None:
    """Each link's first choice beside the fastest layout of the table."""
    ranks_of = {layout.name: len(layout.hosts) for layout in network.LAYOUTS if layout.name in EXACT}
    heads = "link, Mbit/s:", "latency, ms:", "ranks:", "first choice", "ms, predicted / measured:"
    print_head(*heads, "fastest of the table", "ms:", "first ÷ fastest:")
    for (mbit, ms, ranks), first in chosen.items():
        row = grid[mbit, ms]
        measured, predicted = row[first]
        best = min((name for name, of_name in ranks_of.items() if of_name == ranks), key=lambda name: row[name][0])
        choice = f"`{first}`", f"{predicted * 1e3:,.0f} / {measured * 1e3:,.0f}"
        fastest_ms, ratio = f"{row[best][0] * 1e3:,.0f}", f"{measured / row[best][0]:.2f}"
        print_row(f"{mbit:g}", f"{ms:g}", ranks, *choice, best, fastest_ms, ratio)


def main(settings: Settings) -> None:
    require(min(settings.mbit, default=0) > 0, "--mbit: give bandwidths above 0")
    require(min(settings.latency_ms, default=-1) >= 0, "--latency-ms: give latencies of 0 or more")
    require(settings.runs > 0, f"--runs {settings.runs}: give 1 or more")
    reason = network.why_not()
    require(not reason, str(reason))
    machine = machine_of(settings.machine, {"network": FLAGS})
    model = Model(sizes_of(FLAGS), N_LAYERS)
    chosen: dict[tuple[float, float, int], str] = {}
    runs: dict[str, network.Layout] = {}
    for mbit, ms, half in itertools.product(settings.mbit, settings.latency_ms, RANKS_PER_HOST):
        hosts = two_hosts(machine, half, Wire(mbit * 1e6 / 8, ms / 1e3))
        found = find_layouts(model, hosts, 2 * half, SEQUENCES, float("inf"), optimizer="sgd", top=1, threads=1)
        first = as_run(model, found.rows[0].layout, machine)
        chosen[mbit, ms, 2 * half] = first.name
        runs[first.name] = first
    layouts = [layout for layout in network.LAYOUTS if layout.name in EXACT] + list(runs.values())
    asked = network.Settings(mbit=list(settings.mbit), latency_ms=list(settings.latency_ms))
    grids = [network.measure_between_hosts(asked, layouts) for _ in range(settings.runs)]
    print_table(fastest(grids), chosen)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__ or "")
