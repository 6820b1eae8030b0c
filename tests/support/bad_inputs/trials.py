"""One input tried: its commands forked from this process, watched to their end, and judged."""

import contextlib
import ctypes
import importlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.bad_inputs.inputs import PYTHON, BadInput
from support.processes import LAB, alive, children
from support.terminals import Fork, fork_command

SECONDS = 15.0  # within which each has to end
MEMORY_BYTES = 12 * 2**30  # of address space for each process, so that a value taken seriously spares this machine
NOBODY = 65534


@dataclass
class Outcome:
    """What became of one."""

    seconds: float
    sentence: str
    problems: list[str] = field(default_factory=list)


def can_be_nobody() -> bool:
    """Whether this process may become a user without rights, who can read the lab and its packages."""
    needed = [LAB, Path(sys.prefix)]
    return os.getuid() == 0 and all(each.stat().st_mode & 1 for path in needed for each in (path, *path.parents))


def import_before_forks() -> None:
    """Import what the commands import: for speed, and as another user may not read the interpreter's own modules."""
    warnings.simplefilter("ignore", DeprecationWarning)  # some of them will leave Python
    for name in sorted(sys.stdlib_module_names - {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter"}):
        if not name.startswith("_"):
            try:
                importlib.import_module(name)
            except ImportError:  # of another system
                continue
    for name in (
        "encodings.idna",
        "encodings.latin_1",
        "encodings.utf_16",
        "datasets",
        "matplotlib.pyplot",
        "pyarrow.parquet",
        "safetensors.torch",
        "sentencepiece",
    ):
        importlib.import_module(name)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Inside, the processes that a command leaves behind become children of this one."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(36, 0)


@adopting()
def run(bad: BadInput, cwd: Path) -> Outcome:
    """Start its commands, wait for their end, and look at the last one's."""

    def limit() -> None:
        os.chdir(cwd)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        if bad.as_nobody:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    bad.prepare()
    started = time.monotonic()
    forks = [fork_command(command, limit, OMP_NUM_THREADS="1") for command in bad.commands]
    problems, seconds, sentence = [], 0.0, ""
    deadline = started + 2 * SECONDS  # how long it takes is told, too, where that is too long
    for fork in reversed(forks):
        out, err, is_late = end_of(fork, deadline)
        if is_late:
            problems.append("did not end")
        seconds = max(seconds, time.monotonic() - started)
        problems += judge(fork.returncode or 0, err, out, bad.names if fork is forks[-1] else ())
        if fork is forks[-1]:
            sentence = err.strip().splitlines()[-1] if err.strip() else ""
    if seconds > SECONDS:
        problems.append(f"took {seconds:.1f} s")
    if left := left_behind():
        problems.append(f"left {len(left)} processes behind")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return Outcome(seconds, sentence, problems)


def end_of(fork: Fork, deadline: float) -> tuple[str, str, bool]:
    """What a command printed, and whether it had to be killed."""
    try:
        return *fork.communicate(timeout=max(0.1, deadline - time.monotonic())), False
    except subprocess.TimeoutExpired:
        os.killpg(fork.pid, signal.SIGKILL)
        return *fork.communicate(), True


def judge(status: int, err: str, out: str, names: Sequence[str]) -> Iterator[str]:
    """What is wrong with an end."""
    lines = err.splitlines()
    sentences = [line for line in lines if line.startswith("# ")]
    if status == 0:
        yield "exit status 0"
    elif status < 0:
        yield f"ended by signal {-status}"
    if "Traceback" in err + out or any(not line.startswith("# ") for line in lines):
        yield "more than sentences:\n" + err[-1500:]
    elif len(sentences) != 1:
        yield f"{len(sentences)} sentences:\n{err[-1500:]}"
    elif names and not any(name in sentences[0] for name in names):
        yield f"names none of {', '.join(name[:200] for name in names)}: {sentences[0][:300]}"


def left_behind() -> list[int]:
    """Processes that run on, a moment after the commands have ended."""
    for _ in range(20):
        found = [pid for pid in children(os.getpid()) if alive(pid)]
        if not found:
            return []
        time.sleep(0.1)
    return found


def shown(command: Sequence[str]) -> str:
    """A command as one would type it, the longest arguments cut."""
    words = (word if len(word) < 200 else f"{word[:20]}...({len(word)} characters)" for word in command)
    return ascii(shlex.join(word.replace(f"{LAB}/", "").replace(PYTHON, "python") for word in words))[1:-1]
