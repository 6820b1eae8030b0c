"""The lab's commands as processes of their own, forked from the tests' process: that takes no import of torch.

`processes.start` starts the very command line, for the tests that are about it.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from distlab import launch as launcher
from distlab.launching.forks import Forked
from distlab.machine.torch_patches import silence_torch_warnings
from support.processes import LAB, Ended, before_forks, collect_before_a_fork, finish, free_port, leave_group

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # of <sched.h>


class Fork(Forked):
    """A program in a session of its own, with what tests use of `subprocess.Popen`.

    SIGUSR1 stands for an allocation that fails.
    """

    def __init__(self, program: Callable[[], object], environment: Mapping[str, str], *outputs: IO[bytes]) -> None:
        super().__init__(os.fork())
        self._outputs = outputs
        if self.pid == 0:
            _become(program, environment, [output.fileno() for output in outputs])

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        # Without moving the place where the program's children may still write.
        out, err = (os.pread(output.fileno(), 1 << 24, 0).decode(errors="replace") for output in self._outputs)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def finish(self, deadline: float = 60) -> Ended:
        """Wait for its end, at most `deadline` seconds."""
        return finish(self, deadline)


def fork_launcher(*args: object, namespace: str = "", **environment: str) -> Fork:
    """`./launch.sh` with these arguments; In a network namespace, if one is named."""

    def launch() -> None:
        if namespace:
            enter(namespace)
        silence_torch_warnings()
        sys.argv = ["launch.sh", *map(str, args)]
        launcher.main()

    return _fork(launch, environment)


def fork_python(*command: object, **environment: str) -> Fork:
    """`python` with one of the lab's scripts, or with -m and a module, and its arguments."""
    return _fork(lambda: _run(*map(str, command)), {"PYTHONPATH": str(LAB / "src"), **environment})


def fork_command(command: Sequence[str], before: Callable[[], object], *outputs: IO[bytes], **environment: str) -> Fork:
    """A command line of launch.sh, or of Python with a script or a module; `before` is called in the fork.

    It writes to files of its own, unless two other files are given for its standard output and its errors.
    """

    def program() -> None:
        before()
        if Path(command[0]).name == "launch.sh":
            silence_torch_warnings()
            sys.argv = [*command]
            launcher.main()
        _run(*command[1:])

    return _fork(program, environment, *outputs)


@contextmanager
def terminals(script: str | Path, world_size: int, tmp_path: Path, *flags: str) -> Iterator[list[Fork]]:
    """All ranks of a script, each with its number as the first argument."""
    ranks: list[Fork] = []
    shared = [*flags, "--master-port", str(free_port()), "--out", str(tmp_path / "run")]
    try:
        for rank in range(world_size):
            ranks.append(fork_python(script, str(rank), *shared))
        yield ranks
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def enter(namespace: str) -> None:
    """Have this process be in a network namespace (see `hosts`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def unshare(kind: int, *commands: str) -> None:
    """Give this process namespaces of its own, and run commands in them."""
    assert ctypes.CDLL(None).unshare(kind) == 0
    for command in commands:
        subprocess.run(command.split(), check=True)


def _fork(program: Callable[[], object], environment: Mapping[str, str], *outputs: IO[bytes]) -> Fork:
    before_forks()
    collect_before_a_fork()
    outputs = outputs or tuple(tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
    return Fork(program, {**os.environ, **environment}, *outputs)


def _run(script: str, *args: str) -> None:
    if script == "-m":
        sys.argv = [*args]
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(LAB / script), *args]
        sys.path.insert(0, str((LAB / script).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _become(program: Callable[[], object], environment: Mapping[str, str], outputs: list[int]) -> None:
    """Run a program in this process, to its end, as if it had been started alone."""
    status = 1
    try:
        os.setsid()
        leave_group()
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
        faulthandler.enable(2)  # not to where the tests' process has it print
        sys.stdin = open(os.devnull)  # noqa: SIM115
        # As with `sys.__stdout__`, their descriptors stay open when another object takes their place.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(LAB)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGUSR1, _no_memory)
        logging.disable(logging.NOTSET)
        program()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


def _no_memory(_: int, __: FrameType | None) -> None:
    raise MemoryError("3 TB")
