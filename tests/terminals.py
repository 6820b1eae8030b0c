"""The ranks of a script as in terminals of their own, forked from the tests' process: that takes no import of torch."""

import contextlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from processes import LAB, Ended, free_port


@dataclass
class Rank:
    """A forked rank, and where its output goes."""

    pid: int
    out: Path
    err: Path
    status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def finish(self, deadline: float) -> Ended:
        """Wait for its end, at most `deadline` seconds."""
        ends = time.monotonic() + deadline
        while self.poll() is None:
            assert time.monotonic() < ends, f"did not end within {deadline} s:\n{self.err.read_text()}"
            time.sleep(0.02)
        assert self.status is not None
        return Ended(self.status, self.out.read_text(), self.err.read_text())


@contextmanager
def terminals(script: str | Path, world_size: int, tmp_path: Path, *flags: str) -> Iterator[list[Rank]]:
    """All ranks of a script, each with its number as the first argument.

    SIGUSR1 stands for an allocation that fails.
    """
    ranks: list[Rank] = []
    port = str(free_port())
    try:
        for rank in range(world_size):
            out, err = tmp_path / f"{rank}.out", tmp_path / f"{rank}.err"
            args = [str(rank), *flags, "--master-port", port, "--out", str(tmp_path / "run")]
            pid = os.fork()
            if pid == 0:
                _become(LAB / script, args, out, err)
            ranks.append(Rank(pid, out, err))
        yield ranks
    finally:
        for each in ranks:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGKILL)
                os.waitpid(each.pid, 0)


def _become(script: Path, args: list[str], out: Path, err: Path) -> None:
    """Run `script` in this process, to its end."""
    with contextlib.suppress(BaseException):
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGUSR1, _no_memory)
        sys.argv = [str(script), *args]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    os._exit(99)


def _no_memory(_: int, __: FrameType | None) -> None:
    raise MemoryError("3 TB")
