"""Real processes for tests: the ranks of a world, and commands, each with a deadline after which it is killed."""

import fcntl
import functools
import gc
import io
import itertools
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distlab.comm.context import Context, Options, TransportName, context_of
from distlab.launching.forks import fork_ranks
from distlab.launching.processes import Ranks
from distlab.machine.devices import Place
from distlab.rendezvous.ranks import open_store
from distlab.settings.common import parse
from distlab.settings.training import TrainSettings
from distlab_exercises.forked import forked
from simplellm.sources import open_source

LAB = Path(__file__).resolve().parents[2]
LAUNCH = sys.executable, "-m", "distlab.launch"
PORTS = range(10_000, 29_000)  # below those that the kernel hands out, and --master-port's default
PORTS_OF_A_PROCESS = 250


@functools.cache
def own_ports() -> "itertools.cycle[int]":
    """Ports that no other process of any tests on this machine takes: it locks a file, until it and its forks end.

    Without the lock, another process could be given a port before the rank that is to listen there does.
    """
    blocks = range(PORTS.start, PORTS.stop, PORTS_OF_A_PROCESS)
    for first in random.SystemRandom().sample(blocks, len(blocks)):
        file = Path(tempfile.gettempdir(), f"lab-ports-{first}")
        with suppress(FileExistsError):
            file.touch(exist_ok=False)
            file.chmod(0o444)  # other users lock it, too
        lock = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return itertools.cycle(range(first, first + PORTS_OF_A_PROCESS))
    raise AssertionError(f"other processes have locked all of {PORTS}")


def free_port() -> int:
    """A port at which nothing listens: another each time, and none that the kernel gives to a socket meanwhile."""
    for port in itertools.islice(own_ports(), PORTS_OF_A_PROCESS):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise AssertionError("none of this process's ports is free")


@functools.cache
def before_forks() -> None:
    """Do once, for all ranks that will be forked, what each of them would do anew, in up to a second.

    That is to import what ranks import as they run (torch imports more at its first `record_function`, which optimizers
    call), to read the lab's code, and to parse the generator's stories.
    """
    import torch._dynamo  # for DDP, and for a stage that is given gradients
    import torch.distributed.checkpoint

    import distlab.checkpoints.writer
    import distlab.run.checkpointer
    import distlab.run.main  # noqa: F401
    import simplellm.absent_weights  # noqa: F401
    from distlab.run.joining import code_of_packages
    from distlab.run.provenance import revision

    code_of_packages()
    revision()
    parse(TrainSettings(), "", ["--data", "sample"])
    next(open_source("sample", "train", 0).read(0))
    with torch.autograd.profiler.record_function(""):
        pass


def collect_before_a_fork() -> None:
    """Collect garbage, and hide what there is by then from the collector.

    A store that an earlier test held, collected in a fork, would join a thread that is not there. And the collector
    writes to every object that it looks at, and so copies memory that forks share.
    """
    gc.collect()
    gc.freeze()


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, deadline: float = 60) -> list[Any]:
    """Run `work(rank, *args)` in a fork for each rank (`forked`), and return what each returned, by rank.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or did not finish by the deadline.
    """
    before_forks()
    collect_before_a_fork()
    results: dict[int, Any] = {}
    with forked(world_size, functools.partial(_answer, work, args)) as waiting:
        while waiting:
            ready = wait(list(waiting), timeout=deadline)
            assert ready, f"ranks {sorted(waiting.values())} did not finish within {deadline} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    error, results[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                assert not error, f"rank {rank}:\n{error}"
    return [results[rank] for rank in range(world_size)]


def meeting_of(world_size: int) -> Barrier:
    """Where forked ranks, with `.wait(seconds)`, wait for each other without their process group.

    A rank that is silent, or late, is so until the others have found it out, however long that takes.
    """
    return multiprocessing.get_context("fork").Barrier(world_size)


def make_group_of_one() -> None:
    """Make this process a rank without others, as a run on one rank is."""
    options = Options(places=[Place("this host")])
    dist.init_process_group("lab", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)


def leave_group() -> None:
    """Leave the group of one, in a fork of the tests' process or for tests of what forks ranks by itself."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(work: Callable[..., Any], args: tuple[Any, ...], rank: int, pipe: Connection) -> None:
    try:
        leave_group()
        ended: tuple[str | None, Any] = None, work(rank, *args)
    except BaseException:
        ended = traceback.format_exc(), None
    answer = io.BytesIO()
    torch.save(ended, answer)  # whole tensors: what torch sends over a pipe stays in the memory of this process
    pipe.send_bytes(answer.getvalue())


def join(rank: int, world_size: int, port: int, timeout_seconds: float = 30, options: Options | None = None) -> Context:
    """Make the lab's process group over loopback, in a process of `run_ranks`; the ranks are seeded differently.

    By default, all ranks are on one host.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(1000 + rank)
    leave_group()
    timeout = timedelta(seconds=timeout_seconds)
    with redirect_stdout(io.StringIO()):  # tests see only what their ranks print
        store = open_store(rank, "localhost", port, timeout_seconds)
    options = options or Options()
    options.places = options.places or [Place("this host")] * world_size
    dist.init_process_group("lab", store=store, rank=rank, world_size=world_size, timeout=timeout, pg_options=options)
    return context_of()


@contextmanager
def process_group(
    rank: int, world_size: int, port: int, timeout_seconds: float = 30, options: Options | None = None
) -> Iterator[Context]:
    """`join`, and at the end wait for the other ranks.

    The group is not destroyed, it ends with the process: see `distlab.run.run.Run.close`.
    """
    yield join(rank, world_size, port, timeout_seconds, options)
    dist.barrier()


def run_group(
    world_size: int, work: Callable[..., Any], *args: Any, transport: TransportName = "auto", deadline: float = 60
) -> list[Any]:
    """`run_ranks` within a process group."""
    port = free_port()

    def in_group(rank: int) -> Any:
        with process_group(rank, world_size, port, options=Options(transport=transport)):
            return work(rank, *args)

    return run_ranks(world_size, in_group, deadline=deadline)


@dataclass
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


def start(*command: object, cwd: Path = LAB, **environment: str) -> "subprocess.Popen[str]":
    """Start a command in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": str(LAB / "src"), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_server(*args: object, cwd: Path = LAB) -> "subprocess.Popen[str]":
    """Start `./launch.sh` with a command that serves until Ctrl-C. Linux ends it when these tests are killed."""
    program = "import signal; from distlab import launch; from distlab.machine.processes import end_with_parent"
    return start(sys.executable, "-c", f"{program}; end_with_parent(signal.SIGKILL); launch.main()", *args, cwd=cwd)


class Started(Protocol):
    """What `subprocess.Popen` and `terminals.Fork` have in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


def finish(process: Started, deadline: float = 60) -> Ended:
    """Wait for a started command; kill it and all its children when the deadline has passed.

    Raises:
        AssertionError: it did not end by the deadline.
    """
    try:
        out, err = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {deadline} s:\n{out}\n{err}") from None
    except KeyboardInterrupt:  # the tests are to end
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode is not None
    return Ended(process.returncode, out, err)


def run(*command: object, deadline: float = 60, cwd: Path = LAB, **environment: str) -> Ended:
    """Run a command to its end."""
    return finish(start(*command, cwd=cwd, **environment), deadline)


def run_script(script: str, *flags: object, deadline: float = 60, **environment: Any) -> Ended:
    """Run one of the lab's scripts, in one process, to its end."""
    return run(sys.executable, LAB / script, *flags, deadline=deadline, **environment)


def assert_told(by_rank: list[tuple[str, float]], failing: int, what: str, is_silent: bool) -> None:
    """Each rank but the failing one, which is silent or has exited, has soon named its wait for the others."""
    for rank, (sentence, seconds) in enumerate(by_rank):
        if rank != failing:
            peers = " and ".join(str(peer) for peer in range(len(by_rank)) if peer != rank)
            assert sentence.startswith(f"rank {rank} waited ")
            assert f" s for {what} from ranks {peers}: {'no answer' if is_silent else 'a rank has exited'}" in sentence
            assert seconds < 15, "before the timeout"


def ranks_of(folder: Path, program: str, forks: int = 0) -> Ranks:
    """A launcher's processes for a script with this text, none of which has started; `forks` of them will be forks."""
    (folder / "script.py").write_text(program)
    script = [str(folder / "script.py")]
    return Ranks(script, folder / "errors", fork_ranks(script, forks))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """True as soon as the condition is, False if it is not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def children(pid: int) -> list[int]:
    """The processes below `pid`."""
    below: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():  # a thread's children are its own
            below += map(int, (task / "children").read_text().split())
    return below + [deeper for child in below for deeper in children(child)]


def environment(pid: int) -> dict[str, str]:
    """A process's environment; {} if it has ended."""
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return {}


def process_of(rank: int, pids: Iterable[int]) -> int:
    """The one of some processes that is a rank."""
    (pid,) = [pid for pid in pids if environment(pid).get("RANK") == str(rank) or name(pid) == f"rank {rank}"]
    return pid


def name(pid: int) -> str:
    """What a process is called; forked ranks call themselves by their number. "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def alive(pid: int) -> bool:
    """Whether a process has yet to end."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def parent(pid: int) -> int:
    """The process that has started another one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def steps_taken(out: Path) -> int:
    """How many steps the records of a run hold, which may be going on."""
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_steps(out: Path, *run: Started, steps: int = 4) -> None:
    """Return when a run has taken that many steps; `run` is its processes.

    Raises:
        AssertionError: one of them has ended before, or a minute has passed; with what each printed, and where forks
            of `terminals` were.
    """
    wait_for(lambda: steps_taken(out) >= steps or any(process.poll() is not None for process in run))
    if (taken := steps_taken(out)) < steps:
        for process in run:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGABRT)  # whereupon a fork prints its stacks
        ended = [finish(process, 10) for process in run]
        raise AssertionError(f"{taken} steps:\n" + "\n".join(f"{end.out}\n{end.err}" for end in ended))
