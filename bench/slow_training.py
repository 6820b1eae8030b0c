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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from network import LAB, SEQ_LEN, SEQUENCES, Layout, running

from distlab.reports import style
from distlab.run.progress import each

sys.path.insert(0, str(LAB / "tests"))

from hosts import two_hosts_with_a_link, why_not

MODEL = (
    f"--dmodel 96 --num-heads 6 --n-layers 4 --seq-len {SEQ_LEN} --data sample --device cpu --transport gloo".split()
)
TRAINING = "--optimizer adamw --lr 2e-3".split()
DP = f"--world-size 2 --batch-size {SEQUENCES // 2}"
ALONE = "no communication"


@dataclass
class Settings:
    steps: int = 512
    """steps of the runs whose loss is compared; a multiple of --sync-every"""
    sync_every: int = 64
    """steps between two exchanges of the weights (H), in all methods but dp-ga; a multiple of 4"""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """of weights and data"""
    mbit: float = 10
    """bandwidth of the link, Mbit/s"""
    latency_ms: float = 50
    """one-way latency of the link"""
    rounds: int = 2
    """rounds of H steps whose time is measured on the link; 2 steps of dp-ga for each"""
    png: Path | None = None
    """figure to draw"""
    json: Path | None = None
    """file to keep the numbers in"""
    recorded: Path | None = None
    """file that `--json` has written: its numbers are shown and drawn, and nothing is measured"""
    port: int = 29561
    """where rank 0 listens"""


def methods(h: int) -> dict[str, str]:
    """By name, the script and the flags of each method that exchanges weights every `h` steps."""
    averaging, diloco = "DP/weight_aggr/intro_DP_WA.py", f"DP/diloco/intro_DP_DiLoCo.py {DP} --sync-every {h}"
    rarely, streaming = f"--report-every {h}", f"--fragments 4 --overlap-steps {h // 8}"
    never = 10**6
    return {
        ALONE: f"{averaging} {DP} --sync-every {never} --report-every {never}",
        "dp-ga": f"DP/gradient_aggr/intro_DP_GA.py {DP}",
        "dp-wa": f"{averaging} {DP} --sync-every {h}",
        "dp-wa, rare loss": f"{averaging} {DP} --sync-every {h} {rarely}",
        "DiLoCo": f"{diloco} {rarely}",
        "streaming": f"{diloco} {rarely} {streaming}",
        "streaming, int4": f"{diloco} {rarely} {streaming} --compress int4",
    }


@dataclass
class Result:
    """What was measured of a method.

    Attributes:
        seconds: of a step on the link.
        sent_bytes: of rank 0 after so many steps as there are in the first run's records, without validation.
        validation: by seed, [step, validation loss] pairs.
    """

    method: str
    seconds: float
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


def measure(settings: Settings) -> Iterator[Result]:
    reason = why_not()
    if reason:
        raise SystemExit(f"# {reason}")
    h, every = settings.sync_every, ["--eval-every", str(settings.sync_every), "--eval-sequences", "64"]
    with tempfile.TemporaryDirectory() as folder, two_hosts_with_a_link() as (hosts, link):
        for number, (name, script) in enumerate(each(list(methods(h).items()), "methods")):
            link.shape(settings.mbit, settings.latency_ms)
            is_slow = name == "dp-ga"
            layout = Layout(name, script, (0, 1), lambda *_: 0.0, 1 if is_slow else h)
            place = Path(folder) / f"link-{number}"
            with running(layout, hosts, settings.port, place, [*MODEL, *TRAINING]) as steps:
                seconds = steps.seconds_of_next(settings.rounds * (2 if is_slow else 1), layout.sync_every)
            print(f"# {name}: {seconds * 1000:.0f} ms a step", file=sys.stderr, flush=True)
            result = Result(name, seconds, [], {})
            for seed in settings.seeds if name != ALONE else ():
                flags = [*MODEL, *TRAINING, "--steps", str(settings.steps), "--seed", str(seed), *every]
                records = train(script, Path(folder) / f"{number}-{seed}", flags, settings.port + 1)
                scored = [(r["step"] + 1, r["validation_loss"]) for r in records if "validation_loss" in r]
                result.validation[str(seed)] = scored
                if not result.sent_bytes:
                    sent = [sum(n for kind, n in r["sent_bytes"].items() if kind != "validation") for r in records]
                    result.sent_bytes = [sum(sent[:count]) for count, _ in scored]
            yield result


def table(results: list[Result]) -> Iterator[str]:
    """Lines of markdown."""
    alone, exact = (next(result for result in results if result.method == name) for name in (ALONE, "dp-ga"))
    yield "| method | tokens/s | of no communication | bytes sent | dp-ga's bytes over these | validation loss | gap |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        row = [f"{SEQUENCES * SEQ_LEN / result.seconds:,.0f}", f"{alone.seconds / result.seconds:.1%}"]
        if result.validation:
            sent, losses = result.sent_bytes[-1], result.final()
            gap = statistics.fmean(a - b for a, b in zip(losses, exact.final(), strict=True))
            spread = f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
            row += [f"{sent:,}", f"{exact.sent_bytes[-1] / sent:,.1f}", spread, f"{gap:+.3f}"]
        else:
            row += ["0", "", "", ""]
        yield f"| {result.method} | " + " | ".join(row) + " |"


def draw(png: Path, results: list[Result], link: str) -> None:
    """Validation loss against seconds on the link, and against the bytes that rank 0 has sent."""
    figure, panels = style.subplots(4.2, 1, 2, sharey=True)
    curves: dict[str, Any] = {}
    for number, result in enumerate(result for result in results if result.validation):
        color = style.SERIES[number % len(style.SERIES)]
        count, loss = zip(*result.mean_curve(), strict=True)
        seconds = [steps * result.seconds for steps in count]
        for axes, where in zip(panels, (seconds, result.sent_bytes), strict=True):
            [curves[result.method]] = axes.plot(where, loss, color=color, marker="o", markersize=3.5)
    panels[0].set(xscale="log", xlabel=f"seconds, {link}", ylabel="validation loss")
    panels[1].set(xscale="log", xlabel="sent by rank 0")
    for axes, formatter in zip(panels, ("{x:,.0f}", style.units("B")), strict=True):
        axes.xaxis.set_major_formatter(formatter)
        axes.xaxis.set_minor_formatter("")
    panels[1].legend(curves.values(), curves.keys(), fontsize="small")
    style.save(figure, png)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.recorded is None:
        if settings.sync_every % 8 or settings.steps % settings.sync_every or not settings.seeds or settings.rounds < 1:
            raise SystemExit("# --sync-every is a multiple of 8, --steps one of --sync-every; give a seed and a round")
        results = list(measure(settings))
    else:
        results = [Result(**json.loads(line)) for line in settings.recorded.read_text().splitlines()]
    for line in table(results):
        print(line)
    if settings.json is not None:
        settings.json.write_text("".join(json.dumps(vars(result)) + "\n" for result in results))
    if settings.png is not None:
        draw(settings.png, results, f"{settings.mbit:g} Mbit/s and {settings.latency_ms:g} ms")


if __name__ == "__main__":
    main()
