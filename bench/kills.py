"""Kills random ranks of random topologies at random moments, and looks at how the runs end and go on.

    python bench/kills.py                       60 kills, all topologies
    python bench/kills.py --kills 5 --seed 7 --topologies hybrid tp

Each run saves checkpoints. One of its ranks gets SIGKILL: while the ranks start, between two steps, or while they save.
The run has to end by itself, with a status that is not 0 and a last line that names the rank; no process and no whole
checkpoint may be left or lost; and gone on with, its losses have to be those of a run that nobody disturbed.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from distlab.checkpoints import Checkpoint, candidates

LAB = Path(__file__).resolve().parents[1]
SHAPE = "--data sample --device cpu --dmodel 32 --num-heads 2 --n-layers 3 --seq-len 24".split()
STEPS, SAVE_EVERY = 40, 8
RUN = [*SHAPE, *f"--steps {STEPS} --save-every {SAVE_EVERY} --keep 99".split()]
TOPOLOGIES = {  # and the number of ranks
    "primer": 1,
    "dp-ga": 3,
    "dp-wa": 3,
    "ddp": 2,
    "mydp": 3,
    "pp-1f1b": 3,
    "pp-gpipe": 2,
    "pp-dapple": 3,
    "tp --world-size 2": 2,
    "hybrid": 6,
    "hybrid --dp 1 --pp 2 --tp 2": 4,
}
MARK = "LAB_KILLS_RUN"  # in the environment of all processes of a run


@dataclass
class Settings:
    kills: int = 60
    """how many"""
    seed: int = 0
    """of all that is random"""
    topologies: tuple[str, ...] = tuple(TOPOLOGIES)
    """which of the topologies, with their flags"""


@dataclass
class Outcome:
    """What a kill came to."""

    topology: str
    moment: str
    rank: int
    status: int = 0
    seconds: float = 0.0
    last_line: str = ""
    orphans: int = 0
    lost: int = 0
    goes_on: bool = False

    @property
    def is_clean(self) -> bool:
        return self.status != 0 and f"rank {self.rank}" in self.last_line and "SIGKILL" in self.last_line


def launch(topology: str, out: Path, mark: str, *flags: str) -> "subprocess.Popen[str]":
    name, *own = topology.split()
    command: list[str | Path] = [LAB / "launch.sh", name, *RUN, *own, "--out", out, *flags]
    env = {**os.environ, MARK: mark}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)


def processes(mark: str) -> Iterator[tuple[int, int | None]]:
    """The processes of a run, and each one's rank if it has one."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in environment:
                ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
                yield int(folder.name), ranks[0] if ranks else None


def losses(out: Path) -> list[float]:
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def whole_checkpoints(out: Path) -> set[str]:
    found = (candidate for candidate in candidates(out) if isinstance(candidate, Checkpoint))
    return {checkpoint.folder.name for checkpoint in found if checkpoint.problem() is None}


def await_moment(moment: str, out: Path, process: "subprocess.Popen[str]", random_numbers: random.Random) -> None:
    """Return at a random time of that kind, or when the run has ended."""
    step = random_numbers.randrange(STEPS - 2)
    seconds = random_numbers.uniform(0, 2.5)
    started = time.monotonic()
    while process.poll() is None and time.monotonic() - started < 60:
        if moment == "starting" and time.monotonic() - started > seconds:
            return
        if moment == "training" and len(losses(out)) > step:
            return
        if moment == "saving" and len(losses(out)) > step and any((out / "checkpoints").glob("*.unfinished")):
            return
        time.sleep(0.002)


def kill_one(topology: str, folder: Path, mark: str, expected: list[float], random_numbers: random.Random) -> Outcome:
    moment = random_numbers.choice(["starting", "training", "training", "saving"])
    outcome = Outcome(topology, moment, random_numbers.randrange(TOPOLOGIES[topology]))
    while True:  # until the kill comes before the end
        out = folder / mark / str(random_numbers.random())
        process = launch(topology, out, mark)
        await_moment(moment, out, process, random_numbers)
        pid = None
        while pid is None and process.poll() is None:  # a rank may not have started yet
            pid = next((pid for pid, rank in processes(mark) if rank == outcome.rank), None)
        before = whole_checkpoints(out)
        try:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pid = None
        killed = time.monotonic()
        try:
            _, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, err = process.communicate()
        if pid is not None and process.returncode:
            break
    outcome.seconds, outcome.status = time.monotonic() - killed, process.returncode
    outcome.last_line = (err.strip().splitlines() or [""])[-1]
    time.sleep(0.2)
    left = [pid for pid, _ in processes(mark)]
    outcome.orphans = len(left)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    outcome.lost = len(before - whole_checkpoints(out))
    resume = ["--resume", str(out)] if whole_checkpoints(out) else []
    _, err = launch(topology, out, mark, *resume).communicate(timeout=120)
    after = losses(out)
    outcome.goes_on = after == expected
    if not outcome.goes_on:
        first = next((step for step, pair in enumerate(zip(after, expected)) if pair[0] != pair[1]), len(after))  # noqa: B905
        outcome.last_line += f" / gone on with {resume}, {len(after)} steps, differs from step {first} on: {err}"
    return outcome


def main(settings: Settings) -> int:
    random_numbers = random.Random(settings.seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected: dict[str, list[float]] = {}
        for number in range(settings.kills):
            topology = settings.topologies[number % len(settings.topologies)]
            if topology not in expected:
                launch(topology, folder / topology, "undisturbed").communicate(timeout=120)
                expected[topology] = losses(folder / topology)
                assert len(expected[topology]) == STEPS, f"{topology} does not run"
            outcome = kill_one(topology, folder, f"kill {number}", expected[topology], random_numbers)
            outcomes.append(outcome)
            if not (outcome.is_clean and outcome.goes_on and outcome.seconds < 10) or outcome.orphans or outcome.lost:
                print(f"# look at kill {number}: {outcome}", flush=True)
    print(
        "| topology | kills | clean ends | seconds to it: median, worst | orphans | checkpoints lost | went on equal |"
    )
    print("|---|---:|---:|---|---:|---:|---:|")
    for topology in [*settings.topologies, "all"]:
        mine = [outcome for outcome in outcomes if topology in (outcome.topology, "all")]
        if mine:
            seconds = [outcome.seconds for outcome in mine]
            clean, equal = (sum(getattr(outcome, kind) for outcome in mine) for kind in ("is_clean", "goes_on"))
            orphans, lost = (sum(getattr(outcome, kind) for outcome in mine) for kind in ("orphans", "lost"))
            times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
            print(f"| {topology} | {len(mine)} | {clean} | {times} | {orphans} | {lost} | {equal} |")
    return 0 if all(outcome.is_clean and outcome.goes_on and not outcome.orphans for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
