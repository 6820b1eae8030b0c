"""Training on two hosts that are far apart: loss against seconds and against bytes, for each way to exchange weights.

    python bench/slow_training.py --json far.jsonl --png far.png     needs root, and Linux
    python bench/slow_training.py --steps 128 --seeds 0 --rounds 1   a short run
    python bench/slow_training.py --recorded far.jsonl --png far.png   table and figure again

Two measurements make the figure. The loss at equal tokens does not depend on the link: each method trains over
loopback, with each seed, and evaluates on the validation split. The seconds of a step do: each method trains between
two network namespaces whose link has a bandwidth and a latency (as in bench/network.py), for a few rounds. A point of
the figure is a validation loss at the number of its step times the seconds of a step. The bytes are those that rank 0
has counted in its ledger, without those of the validation.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from network import LAB, Layout, running

from distlab.reports import style

sys.path.insert(0, str(LAB / "tests"))

from support.hosts import two_hosts_with_a_link, why_not
from turns import each

SEQUENCES, SEQ_LEN = 4, 64  # of the global batch
MODEL = (
    f"--dmodel 48 --num-heads 6 --n-layers 2 --seq-len {SEQ_LEN} --data sample --device cpu --transport gloo".split()
)
TRAINING = "--optimizer adamw --warmup-steps 64 --lr-schedule cosine".split()
DP = f"--world-size 2 --batch-size {SEQUENCES // 2}"
REPORTS = 8  # cycles of H steps from one sum of the losses to the next, where they are rare
ALONE, EXACT, AVERAGED, DILOCO = "no communication", "dp-ga", "dp-wa", "DiLoCo"


@dataclass
class Settings:
    steps: int = 2048
    """steps of the runs whose loss is compared; a multiple of --sync-every"""
    sync_every: int = 64
    """steps between two exchanges of the weights (H), in all methods but dp-ga; a multiple of 8"""
    lr: float = 5e-4
    """inner learning rate, after a rise over 64 steps; it falls to 0 along half a cosine"""
    other_lr: list[float] = field(default_factory=lambda: [1e-3, 2e-3])
    """learning rates at which the losses of dp-ga, dp-wa and DiLoCo are compared too, with the first seed"""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """of weights and data"""
    mbit: float = 10
    """bandwidth of the link, Mbit/s"""
    latency_ms: float = 50
    """one-way latency of the link"""
    rounds: int = 1
    """rounds of 8 H steps whose time is measured on the link; 4 steps of dp-ga for each"""
    png: Path | None = None
    """figure to draw"""
    json: Path | None = None
    """file to keep the numbers in"""
    recorded: Path | None = None
    """file that `--json` has written: its numbers are shown and drawn, and nothing is measured"""
    port: int = 29561
    """where rank 0 listens"""


@dataclass
class Method:
    """A way to train on two hosts.

    Attributes:
        script: and its flags.
        trains_like: the name of another method that gives the same losses; by default, losses are measured.
    """

    script: str
    trains_like: str | None = None


def methods(h: int) -> dict[str, Method]:
    """By name, the methods; all but dp-ga exchange weights every `h` steps."""
    averaging, diloco = "DP/weight_aggr/intro_DP_WA.py", f"DP/streaming/intro_DP_Streaming.py {DP} --sync-every {h}"
    rarely, streaming = f"--report-every {REPORTS * h}", f"--fragments 2 --overlap-steps {3 * h // 8}"
    never = 10**6
    return {
        ALONE: Method(f"{averaging} {DP} --sync-every {never} --report-every {never}", ALONE),
        EXACT: Method(f"DP/gradient_aggr/intro_DP_GA.py {DP}"),
        AVERAGED: Method(f"{averaging} {DP} --sync-every {h}"),
        f"{AVERAGED}, rare loss": Method(f"{averaging} {DP} --sync-every {h} {rarely}", AVERAGED),
        DILOCO: Method(f"{diloco} {rarely}"),
        "streaming": Method(f"{diloco} {rarely} {streaming}"),
        "streaming, int4": Method(f"{diloco} {rarely} {streaming} --compress int4"),
    }


@dataclass
class Result:
    """What was measured of a method.

    Attributes:
        lr: inner learning rate.
        seconds: of a step on the link; None at other learning rates than `--lr`.
        sent_bytes: of rank 0 after so many steps as there are in the first run's records, without validation.
        validation: by seed, [step, validation loss] pairs.
    """

    method: str
    lr: float
    seconds: float | None
    sent_bytes: list[int]
    validation: dict[str, list[tuple[int, float]]]

    def final(self) -> list[float]:
        """The last validation loss of each seed."""
        return [points[-1][1] for points in self.validation.values()]

    def mean_curve(self) -> list[tuple[int, float]]:
        """By number of steps, the mean validation loss over the seeds."""
        curves = self.validation.values()
        return [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def train(script: str, out: Path, flags: list[str], port: int) -> list[dict[str, Any]]:
    """The records of a run of two ranks over loopback."""
    path, *own = script.split()
    environment = os.environ | {"PYTHONPATH": str(LAB / "src"), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(LAB / path), str(rank), *own, *flags, "--out", str(out), "--master-port", str(port)],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        if any([process.wait(1800) for process in ranks]):
            raise SystemExit(f"# a rank of {script} has failed")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def measure(settings: Settings) -> list[Result]:
    reason = why_not()
    if reason:
        raise SystemExit(f"# {reason}")
    ways, seeds = methods(settings.sync_every), settings.seeds
    trained = {name: way for name, way in ways.items() if way.trains_like is None}
    jobs = [(name, settings.lr, seed) for name in trained for seed in seeds]
    jobs += [(name, lr, seeds[0]) for lr in settings.other_lr for name in (EXACT, AVERAGED, DILOCO)]
    results: dict[tuple[str, float], Result] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the ends of what is below: no host stays
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds in seconds_on_the_link(settings, ways, Path(folder)):
            results[name, settings.lr] = Result(name, settings.lr, seconds, [], {})
        for number, (name, lr, seed) in enumerate(each(jobs, "runs")):
            result = results.setdefault((name, lr), Result(name, lr, None, [], {}))
            every, steps = str(settings.sync_every), str(settings.steps)
            flags = [*MODEL, *TRAINING, "--lr", str(lr), "--steps", steps, "--seed", str(seed)]
            flags += ["--eval-every", every, "--eval-sequences", "64"]
            records = train(ways[name].script, Path(folder) / str(number), flags, settings.port + 1)
            scored = [(r["step"] + 1, r["validation_loss"]) for r in records if "validation_loss" in r]
            result.validation[str(seed)] = scored
            sent = [sum(n for kind, n in r["sent_bytes"].items() if kind != "validation") for r in records]
            result.sent_bytes = result.sent_bytes or [sum(sent[:count]) for count, _ in scored]
            print(f"# {name}, lr {lr:g}, seed {seed}: {scored[-1][1]:.4f}", file=sys.stderr, flush=True)
    return list(results.values())


def seconds_on_the_link(settings: Settings, ways: dict[str, Method], folder: Path) -> Iterator[tuple[str, float]]:
    """The seconds of a step of each method on the slow link."""
    with two_hosts_with_a_link() as (hosts, link):
        for number, (name, way) in enumerate(each(list(ways.items()), "methods")):
            link.shape(settings.mbit, settings.latency_ms)
            every, rounds = (1, 4) if name == EXACT else (REPORTS * settings.sync_every, 1)
            layout = Layout(name, way.script, (0, 1), lambda *_: 0.0, every)
            flags = [*MODEL, *TRAINING, "--lr", str(settings.lr)]
            with running(layout, hosts, settings.port, folder / f"link-{number}", flags) as steps:
                seconds = steps.seconds_of_next(settings.rounds * rounds, every)
            print(f"# {name}: {seconds * 1000:.0f} ms a step", file=sys.stderr, flush=True)
            yield name, seconds


def tables(results: list[Result]) -> Iterator[str]:
    """Lines of markdown: speed, bytes and losses of all methods; then losses at each learning rate."""
    found = {(result.method, result.lr): result for result in results}
    lr = results[0].lr
    alone, exact = found[ALONE, lr], found[EXACT, lr]
    yield "| method | tokens/s | of no communication | bytes sent | dp-ga's bytes over these | validation loss | gap |"
    yield "|---|---|---|---|---|---|---|"
    assert alone.seconds is not None
    for result in results:
        if result.seconds is None:
            continue
        row = [f"{SEQUENCES * SEQ_LEN / result.seconds:,.0f}", f"{alone.seconds / result.seconds:.1%}"]
        if result.validation:
            sent, losses = result.sent_bytes[-1], result.final()
            spread = f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
            row += [f"{sent:,}", f"{exact.sent_bytes[-1] / sent:,.1f}", spread, f"{gap(result, exact):+.3f}"]
        else:
            row += ["", "", "", ""]
        yield f"| {result.method} | " + " | ".join(row) + " |"
    yield from ("", "| learning rate | seeds | dp-ga | dp-wa | DiLoCo | gap of dp-wa | gap of DiLoCo | over dp-wa's |")
    yield "|---|---|---|---|---|---|---|---|"
    for rate in dict.fromkeys(result.lr for result in results):
        exact, averaged, diloco = (found[name, rate] for name in (EXACT, AVERAGED, DILOCO))
        losses_of_all = [f"{statistics.fmean(result.final()):.3f}" for result in (exact, averaged, diloco)]
        gaps = gap(averaged, exact), gap(diloco, exact)
        row = [f"{rate:g}", str(len(exact.validation)), *losses_of_all, *(f"{one:+.3f}" for one in gaps)]
        yield "| " + " | ".join([*row, f"{gaps[1] / gaps[0]:.2f}"]) + " |"


def gap(result: Result, exact: Result) -> float:
    """The mean over the seeds of how much higher a method's last loss is than dp-ga's."""
    return statistics.fmean(a - b for a, b in zip(result.final(), exact.final(), strict=True))


def draw(png: Path, results: list[Result], link: str) -> None:
    """Validation loss against seconds on the link, and against the bytes that rank 0 has sent."""
    figure, panels = style.subplots(4.2, 1, 2, sharey=True)
    curves: dict[str, Any] = {}
    drawn = [(result, result.seconds) for result in results if result.validation and result.seconds is not None]
    for number, (result, seconds_of_a_step) in enumerate(drawn):
        color = style.SERIES[number % len(style.SERIES)]
        count, loss = zip(*result.mean_curve(), strict=True)
        seconds = [steps * seconds_of_a_step for steps in count]
        for axes, where in zip(panels, (seconds, result.sent_bytes), strict=True):
            [curves[result.method]] = axes.plot(where, loss, color=color, marker="o", markersize=3.5)
    panels[0].set(xscale="log", xlabel=f"seconds, {link}", ylabel="validation loss")
    panels[1].set(xscale="log", xlabel="sent by rank 0")
    for axes, formatter in zip(panels, ("{x:,.0f}", style.units("B")), strict=True):
        axes.xaxis.set_major_formatter(formatter)
        axes.xaxis.set_minor_formatter("")
    style.legend(figure, curves)
    style.save(figure, png)


def read(recorded: Path) -> list[Result]:
    """What `--json` has kept; `SystemExit` if it is not there or has something else."""
    try:
        return [Result(**json.loads(line)) for line in recorded.read_text().splitlines()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"# {recorded}: not the numbers of this benchmark ({error!r})") from error


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.recorded is None:
        if settings.sync_every % 8 or settings.steps % settings.sync_every or not settings.seeds or settings.rounds < 1:
            raise SystemExit("# --sync-every is a multiple of 8, --steps one of --sync-every; give a seed and a round")
        results = measure(settings)
    else:
        results = read(settings.recorded)
    for line in tables(results):
        print(line)
    if settings.json is not None:
        settings.json.write_text("".join(json.dumps(vars(result)) + "\n" for result in results))
    if settings.png is not None:
        draw(settings.png, results, f"{settings.mbit:g} Mbit/s and {settings.latency_ms:g} ms")


if __name__ == "__main__":
    main()
