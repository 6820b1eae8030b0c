"""Kills random ranks of random topologies at random times, and checks how the runs end and resume.

    python bench/kills.py                       60 kills, all topologies
    python bench/kills.py --transport shared    the same in shared memory
    python bench/kills.py --kills 5 --seed 7 --topologies hybrid "tp --world-size 2"

Each run saves checkpoints. One of its ranks gets SIGKILL: while the ranks start, after some step, or while they save.
The run must then end by itself, with a status other than 0 and a last line that names the rank. No process may be left
behind, no process on the machine may still have any of the memory that the ranks shared, and no complete checkpoint may
be lost. When the run is resumed (or restarted, if there was no checkpoint yet), its losses must equal those of an
undisturbed run; with torch's DDP up to rounding, because the wrapper arranges its buckets anew after its first step,
and so adds in another order.
"""

import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab_runs import LAB
from tables import print_head, print_row
from turns import each

from distlab.axes.layout import layout_size
from distlab.checkpoints.format import Checkpoint, candidates
from distlab.launch import find_script
from distlab.settings.scripts import read_script_for
from simplellm import command_line

SHAPE = "--data sample --device cpu --dmodel 32 --num-heads 2 --n-layers 3 --seq-len 24".split()
STEPS, SAVE_EVERY = 40, 8
RUN = [*SHAPE, *f"--steps {STEPS} --save-every {SAVE_EVERY} --keep 99".split()]
TOPOLOGIES = (
    "primer",
    "dp-ga",
    "dp-wa",
    "ddp",
    "mydp",
    "pp-1f1b",
    "pp-gpipe --world-size 2",
    "pp-dapple",
    "pp-zb",
    "pp-zbv --world-size 2",
    "tp --world-size 2",
    "hybrid-plain",
    "hybrid",
    "hybrid --dp 1 --pp 2 --tp 2",
)
ROUNDED = ("ddp",)  # topologies whose resumed losses are those of the undisturbed run up to rounding
SECONDS_TO_END = 10.0  # maximum time of a correct end
SECONDS_TO_RUN = 120.0  # after this time, a run is considered to hang
MARK = "LAB_KILLS_RUN"  # in the environment of all processes of a run


@dataclass
class Settings:
    kills: int = 60
    """how many"""
    seed: int = 0
    """of all that is random"""
    topologies: tuple[str, ...] = TOPOLOGIES
    """names that launch.sh knows, with flags"""
    transport: Literal["auto", "shared", "gloo"] = "auto"
    """of all runs"""


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
    shared: int = 0  # pieces of memory that the ranks shared before the kill
    kept: int = 0  # those of them that some process still has afterwards
    lost: int = 0
    goes_on: bool = False

    @property
    def is_clean(self) -> bool:
        return self.status > 0 and f"rank {self.rank}" in self.last_line and "SIGKILL" in self.last_line

    @property
    def is_good(self) -> bool:
        """All that a kill may be asked to come to."""
        in_time = self.seconds < SECONDS_TO_END
        return self.is_clean and in_time and self.goes_on and not (self.orphans or self.kept or self.lost)


def ranks_of(topology: str) -> int:
    """The number of ranks of a topology; `InputError` if launch.sh refuses its flags."""
    name, *own = topology.split()
    script, flags = find_script(name)
    return layout_size(read_script_for(script, [*flags, *RUN, *own], name)[1].layout)


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
                name = (folder / "comm").read_text().split()  # ranks are forks, with the environment of their launcher
                yield int(folder.name), int(name[1]) if name[0] == "rank" else None


def shared_memory(pids: Iterable[int]) -> set[str]:
    """The names, of which no two are alike, of memory that ranks share and that these processes map or hold open."""
    found: set[str] = set()
    for folder in (Path(f"/proc/{pid}") for pid in pids):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            texts = [(folder / "maps").read_text()]
            for descriptor in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    texts.append(os.readlink(descriptor))
            found.update(*(re.findall(r"/memfd:(lab-\w+)", text) for text in texts))
    return found


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


def await_rank(rank: int, mark: str, process: "subprocess.Popen[str]") -> int | None:
    """The process of a rank, which may not have started yet; None if the run has ended."""
    while process.poll() is None:
        found = [pid for pid, its_rank in processes(mark) if its_rank == rank]
        if found:
            return found[0]
        time.sleep(0.02)
    return None


def send_kill(pid: int) -> None:
    """Send SIGKILL to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end(process: "subprocess.Popen[str]", seconds: float) -> tuple[int, str]:
    """Wait for a run's end: its exit status, and what it said on stderr. A run that hangs is killed: -SIGKILL."""
    try:
        _, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks end with their launcher
        _, err = process.communicate()
        return -signal.SIGKILL, err
    return process.returncode, err


def kill_one(
    topology: str, ranks: int, folder: Path, mark: str, expected: list[float], random_numbers: random.Random
) -> Outcome:
    moment = random_numbers.choice(["starting", "training", "training", "saving"])
    outcome = Outcome(topology, moment, random_numbers.randrange(ranks))
    while True:  # until the kill comes before the end
        out = folder / mark / str(random_numbers.random())
        process = launch(topology, out, mark)
        await_moment(moment, out, process, random_numbers)
        pid = await_rank(outcome.rank, mark, process)
        before, shared = whole_checkpoints(out), shared_memory(pid for pid, _ in processes(mark))
        if pid is not None and len(losses(out)) < STEPS:
            send_kill(pid)
        killed = time.monotonic()
        outcome.status, err = end(process, SECONDS_TO_RUN)
        outcome.seconds = time.monotonic() - killed
        if outcome.status != 0 or len(losses(out)) < STEPS:
            break  # else the rank had done its part of the last step, so that there was nothing left to kill
    outcome.last_line = (err.strip().splitlines() or [""])[-1]
    time.sleep(0.2)
    left = [pid for pid, _ in processes(mark)]
    outcome.orphans, outcome.shared = len(left), len(shared)
    outcome.kept = len(shared & shared_memory(int(process.name) for process in Path("/proc").glob("[0-9]*")))
    for pid in left:
        send_kill(pid)
    outcome.lost = len(before - whole_checkpoints(out))
    resume = ["--resume", str(out)] if whole_checkpoints(out) else []
    status, err = end(launch(topology, out, mark, *resume), SECONDS_TO_RUN)
    after = losses(out)
    # 2 is a refusal: where only the end was disturbed, the last checkpoint is of the last step.
    tolerance = 1e-6 if topology.split()[0] in ROUNDED else 0.0
    is_same = len(after) == len(expected) and all(
        math.isclose(loss, wanted, rel_tol=tolerance) for loss, wanted in zip(after, expected, strict=True)
    )
    outcome.goes_on = status in (0, 2) and is_same
    if not outcome.goes_on:
        first = next((step for step, pair in enumerate(zip(after, expected)) if pair[0] != pair[1]), len(after))  # noqa: B905
        outcome.last_line += f" / resumed with {resume}, {len(after)} steps, differs from step {first} on: {err}"
    return outcome


def main(settings: Settings) -> None:
    random_numbers = random.Random(settings.seed)
    RUN.extend(["--transport", settings.transport])
    ranks = {topology: ranks_of(topology) for topology in settings.topologies}
    outcomes: list[Outcome] = []
    # Ctrl-C: then the table is of the kills so far.
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        expected: dict[str, list[float]] = {}
        for number in each(range(settings.kills), "kills"):
            topology = settings.topologies[number % len(settings.topologies)]
            if topology not in expected:
                status, err = end(launch(topology, folder / topology, "undisturbed"), SECONDS_TO_RUN)
                expected[topology] = losses(folder / topology)
                assert status == 0, f"{topology} does not run: {err}"
            mark = f"kill {number}"
            outcome = kill_one(topology, ranks[topology], folder, mark, expected[topology], random_numbers)
            outcomes.append(outcome)
            if not outcome.is_good:
                print(f"# look at kill {number}: {outcome}", flush=True)
    counts = "orphans:", "lost:", "resumed equal:"
    print_head("topology", "kills:", "good:", "clean ends:", "seconds to it: median, worst", *counts)
    for topology in [*settings.topologies, "all"]:
        mine = [outcome for outcome in outcomes if topology in (outcome.topology, "all")]
        if mine:
            seconds = [outcome.seconds for outcome in mine]
            good, clean, equal, orphans, lost = (
                sum(getattr(outcome, kind) for outcome in mine)
                for kind in ("is_good", "is_clean", "goes_on", "orphans", "lost")
            )
            times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
            print_row(topology, len(mine), good, clean, times, orphans, lost, equal)
    shared, kept = (sum(getattr(outcome, kind) for outcome in outcomes) for kind in ("shared", "kept"))
    print(
        f"# the ranks shared {shared} pieces of memory before the kills; processes still had {kept} of them afterwards"
    )
    if not all(outcome.is_good for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
