"""One input tried: its commands started, watched to their end, and judged."""

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.bad_inputs.inputs import PYTHON, BadInput
from support.processes import LAB

SECONDS = 15.0  # within which each has to end
MEMORY_BYTES = 12 * 2**30  # of address space for each process, so that a value taken seriously spares this machine


@dataclass
class Outcome:
    """What became of one."""

    bad: BadInput
    seconds: float
    sentence: str
    problems: list[str] = field(default_factory=list)


def run(bad: BadInput, cwd: Path) -> Outcome:
    """Start its commands, wait for their end, and look at the last one's."""
    mark = f"{os.getpid()}-{id(bad)}"
    env = {**os.environ, "PYTHONPATH": str(LAB / "src"), "OMP_NUM_THREADS": "1", "BAD_INPUT": mark}
    bad.prepare()
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        )
        for command in bad.commands
    ]
    problems, seconds, sentence = [], 0.0, ""
    deadline = started + 2 * SECONDS  # how long it takes is told, too, where that is too long
    for process in reversed(processes):
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            problems.append("did not end")
        seconds = max(seconds, time.monotonic() - started)
        problems += judge(process.returncode, err, out, bad.names if process is processes[-1] else ())
        if process is processes[-1]:
            sentence = err.strip().splitlines()[-1] if err.strip() else ""
    if seconds > SECONDS:
        problems.append(f"took {seconds:.1f} s")
    left = left_behind(mark)
    if left:
        problems.append(f"left {len(left)} processes behind")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return Outcome(bad, seconds, sentence, problems)


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
        yield f"names none of {', '.join(names)}: {sentences[0][:300]}"


def left_behind(mark: str) -> list[int]:
    """Processes with a mark in their environment."""
    for _ in range(20):  # those that end need a moment for it
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"BAD_INPUT={mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        if not found:
            return []
        time.sleep(0.1)
    return found


def shown(command: Sequence[str]) -> str:
    """A command as one would type it, the longest arguments cut."""
    words = (word if len(word) < 200 else f"{word[:20]}...({len(word)} characters)" for word in command)
    return shlex.join(word.replace(f"{LAB}/", "").replace(PYTHON, "python") for word in words)
