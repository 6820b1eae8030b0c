"""The chapter on MPI as a reader runs it: under mpirun, in worlds of several sizes, and when a rank fails."""

import importlib.util
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.processes import LAB, Ended, alive, finish, start, wait_for

from distlab.launch import launch as launch_command
from simplellm.errors import InputError

MPI = LAB / "mpi"
HERE = Path(__file__).parent
MPIRUN = str(Path(sys.executable).with_name("mpirun"))
FLOAT = 4  # bytes
SLEEPS = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}  # MPICH: a rank that waits leaves its core to other tests
NO_PLUGINS: dict[str, Any] = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take as long as the tests


def mpirun(ranks: int, *command: str | Path, **environment: str) -> Ended:
    return finish(start(MPIRUN, "-n", str(ranks), sys.executable, *command, cwd=MPI, **SLEEPS, **environment))


def end_soon(pids: list[int]) -> bool:
    return wait_for(lambda: not any(alive(pid) for pid in pids), 10)


def test_the_chapters_own_tests_for_several_ranks_pass_and_none_is_skipped() -> None:
    files = [f"tests/test_{name}.py" for name in "get_info transformer_forward transformer_backward".split()]
    ended = mpirun(4, *"-m pytest -l -v -p no:cacheprovider --with-mpi".split(), *files, **NO_PLUGINS)
    assert ended.status == 0, ended.out + ended.err
    assert len(re.findall(r"=+ \d+ passed in ", ended.out)) == 4, ended.out


def test_without_mpirun_the_tests_for_several_ranks_are_skipped_and_the_others_pass() -> None:
    ended = finish(start(sys.executable, "-m", "pytest", "mpi/tests", **NO_PLUGINS))
    assert ended.status == 0, ended.out
    assert re.search(r"^10 passed, \d+ skipped", ended.out, re.MULTILINE)


def test_all_cases() -> None:
    ranks = 3
    ended = mpirun(ranks, "mpi-test.py", "--seed", "1")
    assert ended.status == 0, ended.out + ended.err
    for name in ("myAllreduce", "ringAllreduce", "myAlltoall"):
        (line,) = [line for line in ended.out.splitlines() if line.startswith(name)]
        assert re.findall(r"(\d+) of (\d+) right, [\d.]+ ms", line) == [("100", "100"), ("20", "20"), ("20", "20")]
    shown = re.findall(r"^rank (\d) had \[(.*)\] and got \[(.*)\]$", ended.out, re.MULTILINE)
    assert [int(rank) for rank, _, _ in shown] == [*range(ranks)] * 5, "five cases, each in rank order"
    for rank, had, got in shown[:ranks]:
        assert had.split() == [str(10 * int(rank) + index) for index in range(4)]
        assert got.split() == [str(5 * ranks * (ranks - 1) + ranks * index) for index in range(4)]
    assert "WRONG" not in ended.out
    _, _, _, of_pairs, *_ = re.findall(r"^# bytes counted on rank 0: (\S+)$", ended.out, re.MULTILINE)
    assert of_pairs == "64"
    results = [line for line in ended.out.splitlines() if not line.startswith("#")]
    assert len(results) == len(shown) + 3 + 2, "what ranks had and got, and the rows of two tables"


@pytest.mark.parametrize(
    ("methods", "case", "verdict"),
    [
        ("myAllreduce ringAllreduce", "all", " 0 of 100 right"),
        ("ringAllreduce", "myallreduce", " 0 of 100 right"),
        ("Alltoall", "alltoall", "WRONG: it should be"),
    ],
)
def test_what_does_nothing_for_small_arrays_is_found_out(methods: str, case: str, verdict: str, tmp_path: Path) -> None:
    change = "".join(
        f"""
def {name}(self, src, *more, right=Communicator.{name}):
    if src.size > 99_999:
        right(self, src, *more)
Communicator.{name} = {name}
"""
        for name in methods.split()
    )
    ended = mpirun(2, changed(tmp_path, change, case))
    assert ended.status == 1, ended.err
    wrong = [line for line in ended.out.splitlines() if verdict in line]
    assert case == "alltoall" or [line.split()[0] for line in wrong] == methods.split()
    assert wrong


def changed(folder: Path, change: str, case: str) -> Path:
    """mpi-test.py as it would be with a change to the Communicator."""
    script = folder / "changed.py"
    script.write_text(f"""
import os, runpy, signal, sys
from mpi4py import MPI
sys.path.insert(0, {str(MPI)!r})
from mpi_wrapper import Communicator
open(__file__ + f".{{MPI.COMM_WORLD.Get_rank()}}.pid", "w").write(str(os.getpid()))
{change}
sys.argv = ["mpi-test.py", "--test_case", {case!r}]
runpy.run_path({str(MPI / "mpi-test.py")!r}, run_name="__main__")
""")
    return script


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_refusals_and_counted_bytes(ranks: int) -> None:
    ended = mpirun(ranks, HERE / "ranks.py")
    assert ended.status == 0, ended.err
    counted = json.loads(ended.out)
    n, src = ranks, 6 * ranks * FLOAT  # bytes on each rank
    others = n - 1
    chunks = [7 // n + (index < 7 % n) for index in range(n)]
    left_out = [[chunks[(rank + step) % n] for step in (0, 1, 1, 2)] for rank in range(n)]
    assert counted == {
        "Allreduce": [2 * src * others] * n,
        "Allgather": [(src + n * src) * others] * n,
        "Reduce_scatter": [(src + src // n) * others] * n,
        "Alltoall": [(src // n + src // n) * others] * n,
        "myAllreduce": [2 * src * others] + [2 * src] * others,
        "ringAllreduce": [4 * src * others // n] * n,
        "ringAllreduce of 7": [(4 * 7 - sum(sizes)) * FLOAT for sizes in left_out],
        "myAlltoall": [2 * (src // n) * others] * n,
    }


@pytest.mark.parametrize(
    ("failure", "last_line"),
    [
        ("raise RuntimeError('the disk is on fire')", "# rank 3 failed: RuntimeError: the disk is on fire"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
    ],
)
def test_a_failed_rank_ends_all(failure: str, last_line: str | None, tmp_path: Path) -> None:
    change = f"""
def fail(self, *_):
    if self.Get_rank() == 3:
        {failure}
    self.Barrier()
Communicator.myAlltoall = fail"""
    started = time.monotonic()
    ended = mpirun(4, changed(tmp_path, change, "myalltoall"))
    assert ended.status != 0
    assert time.monotonic() - started < 20
    if last_line:
        assert ended.err.splitlines()[-1] == last_line
    ranks = [int(pid.read_text()) for pid in tmp_path.glob("*.pid")]
    assert len(ranks) == 4
    assert end_soon(ranks)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_launcher_leaves_no_rank_behind(sent: signal.Signals, tmp_path: Path) -> None:
    begun = "open(__file__ + f'.{self.Get_rank()}.begun', 'w')"
    wait = f"def wait(self, *_):\n    {begun}\n    while self.Get_rank() == 0: pass\n    self.Barrier()\n"
    wait += "Communicator.Allreduce = wait"
    script = changed(tmp_path, wait, "allreduce")
    launcher = start(sys.executable, "-m", "distlab.launch", script, "--world-size", "3", cwd=LAB, **SLEEPS)
    assert wait_for(lambda: len(list(tmp_path.glob("*.begun"))) == 3, 30)
    ranks = [int(pid.read_text()) for pid in tmp_path.glob("*.pid")]
    assert all(alive(pid) for pid in ranks)
    launcher.send_signal(sent)
    assert finish(launcher, 20).status != 0
    assert end_soon(ranks)


def test_a_wrong_value_is_one_sentence() -> None:
    ended = mpirun(2, "mpi-test.py", "--seed", "-1")
    assert (ended.status, ended.out, ended.err.strip()[:27]) == (2, "", "# --seed -1: give 0 or more")
    assert len(ended.err.strip().splitlines()) == 1


@pytest.fixture
def no_exec(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that launch.py would have become; it ends with exit status 0 instead."""
    commands: list[list[str]] = []

    def execv(_: str, command: list[str]) -> None:
        commands.append(command)
        sys.exit()

    monkeypatch.setattr(os, "execv", execv)
    return commands


def test_launch_finds_mpirun_beside_the_interpreter_first(
    no_exec: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "mpirun"
    other.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    script, python = str(MPI / "mpi-test.py"), sys.executable
    for executable, flags in ((python, ""), (python, "--seed 3 --world_size=1"), ("/nowhere/python", "")):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(SystemExit):
            launch_command(["mpi", *flags.split()])
    assert no_exec == [
        [MPIRUN, "-n", "8", python, script],
        [MPIRUN, "-n", "1", python, script, "--seed", "3"],
        [str(other), "-n", "8", "/nowhere/python", script],
    ]


@pytest.mark.parametrize("missing", ["mpirun", "mpi4py"])
def test_launch_says_what_is_missing(missing: str, no_exec: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "mpirun":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"mpi-test\.py needs MPI, with mpirun on the PATH: pip install mpi4py mpich"):
        launch_command(["mpi"])
    assert not no_exec


def test_launch_runs_the_chapter_and_passes_its_flags_and_status_on() -> None:
    helped = finish(start("./launch.sh", "mpi", "--world-size", "2", "--help"))
    assert helped.status == 0
    assert helped.out.count("usage: mpi-test.py") == 1, "that of one rank"
    refused = finish(start("./launch.sh", "mpi", "--world-size", "2", "--test-case", "foo"))
    assert refused.status == 2
    assert refused.err.strip().startswith("# --test_case foo: give one of all, allreduce, allgather")
