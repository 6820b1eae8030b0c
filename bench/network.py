"""Which layout to choose on which network: training steps over a link between two hosts with limited speed.

    python bench/network.py                                  the whole grid, some ten minutes; needs root, and Linux
    python bench/network.py --mbit 10 --latency-ms 50        one link
    python bench/network.py --recorded bench/network.jsonl   figure and tables again, from those in bench/README.md

The two hosts are network namespaces. Each layout is one run of the lab's own script, whose ranks are started as in
separate terminals, so that any rank can be on either host; while it trains, the link is changed, and the seconds of
the steps are read from its records. Latency is one-way: a round trip takes twice as long.

Beside it stands what a simple model predicts: the seconds of a step without shaping, and the latency of the messages
that wait for each other, and the bytes that cross the link in one direction over its bandwidth. For pipelines,
`distlab.pipeline.plan` simulates the schedule with messages that take that long. The model leaves out what overlaps
with computing (its gradients are sent after the backward pass), the pieces in which gloo sends a large tensor, a few
at a time, TCP's windows and acknowledgements, and the queues that messages of different kinds form before the link.
TCP is Reno's, and the link loses nothing.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from turns import each

from distlab.parallel.options import encoded_bytes
from distlab.pipeline.actions import ActionCosts
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.reports import style
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SPTokenizer

LAB = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(LAB / "tests"))

from support.hosts import Host, Link, two_hosts_with_a_link, why_not  # noqa: E402

SEQUENCES, SEQ_LEN = 8, 64  # of the global batch, in all layouts
# With SGD, an average of weights after every step is that of the gradients.
MODEL = f"--dmodel 96 --num-heads 6 --n-layers 4 --seq-len {SEQ_LEN} --optimizer sgd --data sample --device cpu".split()
MODEL += ["--transport", "gloo"]  # the prediction below is that of a ring of all ranks


@dataclass
class Settings:
    mbit: list[float] = field(default_factory=lambda: [10, 100, 1000])
    """bandwidths, Mbit/s"""
    latency_ms: list[float] = field(default_factory=lambda: [0, 5, 50])
    """one-way latencies"""
    layouts: list[str] = field(default_factory=list)
    """names of layouts, as in the table; all by default"""
    cycles: int = 5
    """steps per cell, of which the median is used; two rounds for --sync-every 8, one for 64"""
    png: Path | None = LAB / "imgs" / "network.png"
    """figure to draw"""
    json: Path | None = None
    """file to keep the numbers in"""
    recorded: Path | None = None
    """file that `--json` has written: its numbers are shown and drawn, and nothing is measured"""
    port: int = 29557
    """where rank 0 listens"""


@dataclass(frozen=True)
class Wire:
    """A link, as the model knows it."""

    bytes_per_second: float
    latency_seconds: float

    def seconds(self, messages: float, size_bytes: float) -> float:
        """For messages one after another, of `size_bytes` together."""
        return messages * self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Layout:
    """A way to train on two hosts.

    Attributes:
        name: in the table.
        script: and its flags.
        hosts: of each rank, 0 or 1.
        link_seconds: (the wire, bytes of the whole model's weights, bytes of a micro-batch's activations, seconds of a
            step without shaping) -> the seconds that the link adds to a step.
        sync_every: steps to a round.
    """

    name: str
    script: str
    hosts: tuple[int, ...]
    link_seconds: Callable[[Wire, float, float, float], float]
    sync_every: int = 1


def pipeline_seconds(wire: Wire, message_bytes: float, micro_batches: int, step_seconds: float) -> float:
    """What the messages between two stages add to a step, by DAPPLE's schedule.

    Stages take equally long, and a backward pass twice as long as a forward pass.
    """
    programs = all_stages("dapple", 2, micro_batches)
    forward = step_seconds / simulate(programs, ActionCosts(1, 2)).makespan
    slow = ActionCosts(forward, 2 * forward, transfer=wire.seconds(1, message_bytes))
    return simulate(programs, slow).makespan - step_seconds


# An all-reduce over two hosts is two messages, one after another: the halves that each adds up, and the sums. Among
# four ranks in a ring, a number passes six times to the next rank; half of those are on the same host if ranks 0 and
# 1 are, none if they are not.
PAIR, RING_BY_TWO, RING_BY_ONE = 2, 3, 6


def averaging(sync_every: int, is_loss_rare: bool = False) -> Callable[[Wire, float, float, float], float]:
    """Gradients or weights all-reduced by two ranks, and the loss in every step or only in steps that do not count."""
    loss = 0 if is_loss_rare else PAIR
    return lambda wire, model, message, step: wire.seconds(loss + PAIR / sync_every, model / sync_every)


def streaming_seconds(wire: Wire, model_bytes: float, message_bytes: float, step_seconds: float) -> float:
    """What fragments in integers of 4 bits add to a step: what is left of an exchange after its overlap."""
    fragment = encoded_bytes("int4", int(model_bytes / 4 / FRAGMENTS))
    return max(0, wire.seconds(PAIR, fragment) - OVERLAP * step_seconds) * FRAGMENTS / H


DP = f"--world-size 2 --batch-size {SEQUENCES // 2}"
HYBRID = f"hybrid/intro_5d.py --dp 2 --pp 2 --batch-size {SEQUENCES // 2} --micro-batches {SEQUENCES // 2}"
PP = f"PP/schedules/intro_PP_schedules.py --world-size 2 --batch-size {SEQUENCES} --micro-batches {SEQUENCES}"
WA = f"DP/weight_aggr/intro_DP_WA.py {DP} --sync-every"
H, FRAGMENTS, OVERLAP = 64, 2, 24
DILOCO = f"DP/streaming/intro_DP_Streaming.py {DP} --sync-every {H} --report-every {8 * H}"
STREAMING = f"{DILOCO} --fragments {FRAGMENTS} --overlap-steps {OVERLAP} --compress int4"
LAYOUTS = [
    Layout("dp-ga", f"DP/gradient_aggr/intro_DP_GA.py {DP}", (0, 1), averaging(1)),
    Layout("dp-wa, H = 1", f"{WA} 1", (0, 1), averaging(1)),
    Layout("dp-wa, H = 8", f"{WA} 8", (0, 1), averaging(8), 8),
    Layout(f"dp-wa, H = {H}", f"{WA} {H}", (0, 1), averaging(H), H),
    Layout(f"DiLoCo, H = {H}", DILOCO, (0, 1), averaging(H, is_loss_rare=True), H),
    Layout("streaming, int4", STREAMING, (0, 1), streaming_seconds, H),
    Layout(
        "pp-dapple across",
        f"{PP} --schedule dapple",
        (0, 1),
        lambda wire, model, message, step: wire.seconds(PAIR, 0) + pipeline_seconds(wire, message, SEQUENCES, step),
    ),
    Layout(
        "hybrid, replicas across",
        HYBRID,
        (0, 0, 1, 1),
        lambda wire, model, message, step: wire.seconds(RING_BY_TWO + PAIR, model),
    ),
    Layout(
        "hybrid, pipelines across",
        HYBRID,
        (0, 1, 0, 1),  # the two pipelines share the link
        lambda wire, model, message, step: (
            wire.seconds(RING_BY_ONE, 0) + pipeline_seconds(wire, 2 * message, SEQUENCES // 2, step)
        ),
    ),
]
EXACT = {layout.name for layout in LAYOUTS if layout.sync_every == 1}  # they train what one process trains


class Steps:
    """The records of a run in progress, as they arrive."""

    def __init__(self, metrics: Path, ranks: "list[subprocess.Popen[bytes]]") -> None:
        self._metrics, self._ranks = metrics, ranks

    def so_far(self) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        whole, _, _ = self._metrics.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def await_count(self, count: int, deadline: float) -> None:
        """Return when there are that many, or at the deadline (on `time.monotonic`)."""
        while len(self.so_far()) < count and time.monotonic() < deadline:
            if any(rank.poll() is not None for rank in self._ranks):
                said = [file.read_text() for file in sorted(self._metrics.parent.glob("*.err"))]
                raise SystemExit(f"# a rank has exited: {''.join(said)}")
            time.sleep(0.02)

    def seconds_of_next(self, rounds: int, steps_to_round: int) -> float:
        """The median over the next rounds of a step's mean seconds; the step that is under way does not count."""
        begun, started = len(self.so_far()), time.monotonic()
        least = begun + 1 + min(rounds, 2) * steps_to_round
        self.await_count(least, started + 600)
        self.await_count(begun + 1 + rounds * steps_to_round, started + 20)
        seconds = [record["seconds"] for record in self.so_far()[begun + 1 :]]
        whole = len(seconds) // steps_to_round * steps_to_round
        if not whole:
            raise SystemExit("# no step within ten minutes")
        return statistics.median(
            statistics.fmean(seconds[first : first + steps_to_round]) for first in range(0, whole, steps_to_round)
        )


@contextmanager
def running(
    layout: Layout, hosts: tuple[Host, Host], port: int, out: Path, model: Sequence[str] = MODEL
) -> Iterator[Steps]:
    """A layout's ranks, each on its host with one thread, while they train; `model` has the flags of the model."""
    script, *flags = layout.script.split()
    meet = ["--master-addr", hosts[0].address, "--master-port", str(port), "--timeout", "600"]
    environment = os.environ | {
        "PYTHONPATH": str(LAB / "src"),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of every address without a name
    }
    out.mkdir()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, place in enumerate(layout.hosts):
            command = [sys.executable, LAB / script, str(rank), *flags, *model, *meet]
            command += ["--steps", "1000000", "--out", out]
            with (out / f"rank{rank}.err").open("w") as said:
                ranks.append(
                    subprocess.Popen(
                        hosts[place].command(*command), env=environment, stdout=subprocess.DEVNULL, stderr=said
                    )
                )
        steps = Steps(out / "metrics.jsonl", ranks)
        steps.await_count(3, time.monotonic() + 120)
        yield steps
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


Cell = tuple[float, float]  # seconds of a step: measured, predicted
Grid = dict[tuple[float, float], dict[str, Cell]]  # by bandwidth and latency, by layout


def measure_between_hosts(settings: Settings, layouts: list[Layout]) -> Grid:
    reason = why_not()
    if reason:
        raise SystemExit(f"# {reason}")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the ends of what is below: no host stays
    with tempfile.TemporaryDirectory() as folder, two_hosts_with_a_link() as (hosts, link):
        grid = measure(settings, layouts, hosts, link, Path(folder))
    print(f"# took {time.monotonic() - started:.0f} s", file=sys.stderr)
    return grid


def read(recorded: Path, names: list[str]) -> Grid:
    """The grid that `--json` has kept; `SystemExit` if it is not there or lacks a layout."""
    try:
        rows = [json.loads(line) for line in recorded.read_text().splitlines()]
        return {(row["mbit"], row["latency_ms"]): {name: tuple(row["layouts"][name]) for name in names} for row in rows}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"# {recorded}: no numbers of these layouts ({error!r})") from error


def measure(settings: Settings, layouts: list[Layout], hosts: tuple[Host, Host], link: Link, folder: Path) -> Grid:
    """Every layout over every link."""
    grid: Grid = {(mbit, ms): {} for mbit in settings.mbit for ms in settings.latency_ms}
    model_bytes, message_bytes = sizes()
    for number, layout in enumerate(each(layouts, "layouts")):
        link.shape(0, 0)
        with running(layout, hosts, settings.port + number, folder / str(number)) as steps:
            rounds = {1: settings.cycles, 8: 2}.get(layout.sync_every, 1)
            unshaped = steps.seconds_of_next(3 * rounds, layout.sync_every)
            sent = {kind: size for record in steps.so_far() for kind, size in record["sent_bytes"].items()}
            print(f"# {layout.name}: {unshaped * 1000:.0f} ms a step without shaping", file=sys.stderr, flush=True)
            for (mbit, ms), row in grid.items():
                link.shape(mbit, ms)
                measured = steps.seconds_of_next(rounds, layout.sync_every)
                wire = Wire(mbit * 1e6 / 8, ms / 1e3)
                predicted = unshaped + layout.link_seconds(wire, model_bytes, message_bytes, unshaped)
                row[layout.name] = measured, predicted
                sentence = f"#   {mbit:g} Mbit/s, {ms:g} ms: {measured * 1000:.0f} ms, predicted {predicted * 1000:.0f}"
                print(sentence, file=sys.stderr, flush=True)
            if layout in LAYOUTS:
                check_sizes(layout, sent, model_bytes, message_bytes)
    return grid


def sizes() -> tuple[float, float]:
    """Bytes of the model's weights, which are those of its gradients, and of a message between two stages."""
    shape = dict(zip(MODEL[::2], MODEL[1::2], strict=True))
    width = int(shape["--dmodel"])
    options = {"dmodel": width, "num_heads": int(shape["--num-heads"]), "n_layers": int(shape["--n-layers"])}
    net = LLama(CausalLLama, SPTokenizer().vocab_size, ctx_size=SEQ_LEN, **options)
    return sum(p.nbytes for p in net.parameters()), SEQ_LEN * width * 4  # micro-batches are of one sequence


def check_sizes(layout: Layout, sent: dict[str, float], model_bytes: float, message_bytes: float) -> None:
    """The ledger's bytes of a step are those that the model counts with."""
    for kind, expected in (("weights", model_bytes), ("gradients", model_bytes)):
        if len(layout.hosts) == 2 and sent.get(kind) and "PP" not in layout.script and sent[kind] != expected:
            raise SystemExit(f"# {layout.name}: the ledger has {sent[kind]} bytes of {kind}, the model {expected}")
    if "activations" in sent and sent["activations"] % message_bytes:
        raise SystemExit(f"# {layout.name}: the ledger has {sent['activations']} bytes of activations")


def tables(grid: Grid, names: list[str]) -> Iterator[str]:
    """Lines of markdown: tokens a second, each link's best exact layout in bold; seconds beside their prediction."""
    head = "| link, Mbit/s | latency, ms | " + " | ".join(names) + " |"
    rule = "|" + "---|" * (len(names) + 2)
    yield from ("Tokens a second:", "", head, rule)
    for (mbit, ms), row in grid.items():
        best = min((measured for name, (measured, _) in row.items() if name in EXACT), default=0)
        cells = [f"{SEQUENCES * SEQ_LEN / row[name][0]:,.0f}" for name in names]
        cells = [
            f"**{cell}**" if name in EXACT and row[name][0] == best else cell
            for name, cell in zip(names, cells, strict=True)
        ]
        yield f"| {mbit:g} | {ms:g} | " + " | ".join(cells) + " |"
    yield from ("", "Milliseconds a step, measured / predicted:", "", head, rule)
    for (mbit, ms), row in grid.items():
        cells = [f"{row[name][0] * 1000:,.0f} / {row[name][1] * 1000:,.0f}" for name in names]
        yield f"| {mbit:g} | {ms:g} | " + " | ".join(cells) + " |"
    ratios = [measured / predicted for row in grid.values() for measured, predicted in row.values()]
    near = sum(abs(ratio - 1) <= 0.3 for ratio in ratios)
    yield from ("", f"{near} of {len(ratios)} are within 30 % of the prediction.")


def draw(png: Path, grid: Grid, names: list[str]) -> None:
    """A panel for each link: bars as measured, a mark where the model has them; the best exact layout stands out."""
    bandwidths, latencies = sorted({mbit for mbit, _ in grid}), sorted({ms for _, ms in grid})
    height = 0.8 + len(bandwidths) * (0.8 + 0.19 * len(names))
    figure, panels = style.subplots(height, len(bandwidths), len(latencies), squeeze=False, sharex=True, sharey=True)
    best_exact, exact, inexact = style.ORANGE, style.BLUE, style.SKY
    for (mbit, ms), row in grid.items():
        axes = panels[bandwidths.index(mbit)][latencies.index(ms)]
        speeds = {name: SEQUENCES * SEQ_LEN / row[name][0] for name in names}
        best = max((name for name in names if name in EXACT), key=lambda name: speeds[name], default=None)
        colors = [best_exact if name == best else exact if name in EXACT else inexact for name in names]
        axes.barh(names, speeds.values(), color=colors)
        predicted = [SEQUENCES * SEQ_LEN / row[name][1] for name in names]
        [marks] = axes.plot(predicted, names, "|", color=style.INK, markersize=9, markeredgewidth=1.6)
        axes.set(xscale="log", xlim=(50, 20_000), title=f"{mbit:g} Mbit/s, {ms:g} ms")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(visible=False, axis="y")
    panels[0][0].invert_yaxis()
    for axes in panels[-1]:
        axes.set_xlabel("tokens/s")
    legend = {"same training as one process": exact, "the best of these": best_exact, "averages every H steps": inexact}
    style.legend(figure, {**{kind: style.swatch(color) for kind, color in legend.items()}, "predicted": marks})
    style.save(figure, png)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    known = [layout.name for layout in LAYOUTS]
    if not set(settings.layouts) <= set(known):
        raise SystemExit(f"# --layouts: give one of {'; '.join(known)}")
    if min(settings.mbit, default=0) <= 0 or min(settings.latency_ms, default=-1) < 0 or settings.cycles < 1:
        raise SystemExit("# --mbit and --cycles are more than 0, --latency-ms at least 0")
    layouts = [layout for layout in LAYOUTS if layout.name in (settings.layouts or known)]
    names = [layout.name for layout in layouts]
    grid = read(settings.recorded, names) if settings.recorded else measure_between_hosts(settings, layouts)
    for line in tables(grid, names):
        print(line)
    if settings.png is not None:
        draw(settings.png, grid, names)
    if settings.json is not None:
        rows = ({"mbit": mbit, "latency_ms": ms, "layouts": row} for (mbit, ms), row in grid.items())
        settings.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
