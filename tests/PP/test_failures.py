"""A rank that stops, dies, runs out of memory or computes no number: every run ends soon, and says who and why."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import LAB, Ended, finish, free_port, run, run_script, start

TINY = "--dmodel 16 --num-heads 2 --n-layers 3 --seq-len 16 --data sample --device cpu --steps 1000000".split()
NAIVE, MICRO_BATCHES = "PP/1F1B/intro_PP_1F1B.py", "PP/microbatches/intro_PP_microbatches.py"
DDP = "DP/ddp/intro_DP_DDP.py"
HYBRID = "hybrid/intro_hybrid.py"
TIMEOUT = 5
TO_SAY_SO = 9  # seconds for the ranks to tell each other, and to end; the computer may be busy
LAUNCHER_ENDS_IN = 10

# Python runs this before a script: SIGUSR1 then stands for an allocation that fails.
NO_MEMORY = """
import signal
def no_memory(*_):
    raise MemoryError("3 TB")
signal.signal(signal.SIGUSR1, no_memory)
"""


def wait_for_steps(out: Path) -> None:
    """Return when the run is well under way."""
    for _ in range(1200):
        time.sleep(0.05)
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) > 3:
            return
    raise AssertionError("no steps")


@contextmanager
def terminals(script: str, world_size: int, tmp_path: Path) -> "Iterator[list[subprocess.Popen[str]]]":
    """All ranks of a script, started as in terminals of their own, that train for ever."""
    (tmp_path / "sitecustomize.py").write_text(NO_MEMORY)
    flags = [*TINY, "--timeout", str(TIMEOUT), "--master-port", str(free_port()), "--out", str(tmp_path / "run")]
    path = f"{LAB / 'src'}{os.pathsep}{tmp_path}"
    ranks = [start(sys.executable, script, str(rank), *flags, PYTHONPATH=path) for rank in range(world_size)]
    try:
        wait_for_steps(tmp_path / "run")
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def last_line(ended: Ended) -> str:
    assert ended.status == 1, ended.err
    assert "Traceback" not in ended.err, ended.err
    assert "frame #" not in ended.err, ended.err
    return ended.err.splitlines()[-1]


@pytest.mark.parametrize("script", [MICRO_BATCHES, DDP])
def test_a_stopped_rank_in_terminals(script: str, tmp_path: Path) -> None:
    with terminals(script, 3, tmp_path) as ranks:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        waits = []
        for end in [finish(ranks[rank], deadline=TIMEOUT + TO_SAY_SO) for rank in (0, 2)]:
            assert re.fullmatch(
                r"# rank 1( \(stage 1\))? does not answer, and the others wait: stopped, cut off, or computing for "
                f"longer than --timeout {TIMEOUT}",
                last_line(end),
            ), end.err
            assert re.search(r"#   rank 1( \(stage 1\))?  waits for nothing that it has named", end.out), end.out
            own = re.search(
                r"^# rank [02]( \(stage [02]\))? waited (\d+\.\d) s for .+(no answer|a rank has ended)", end.err
            )
            assert own, end.err
            waits.append(float(own[2]))
        assert TIMEOUT <= max(waits) < TIMEOUT + 2


@pytest.mark.parametrize(("script", "world_size", "killed"), [(NAIVE, 3, 1), (HYBRID, 6, 4)])
def test_a_killed_rank_in_terminals(script: str, world_size: int, killed: int, tmp_path: Path) -> None:
    place = {NAIVE: r" \(stage 1\)", HYBRID: r" \(stage 1 of replica 1\)"}[script]
    with terminals(script, world_size, tmp_path) as ranks:
        ranks[killed].kill()
        for rank in sorted({*range(world_size)} - {killed}):
            sentence = last_line(finish(ranks[rank], deadline=TIMEOUT + TO_SAY_SO))
            assert re.match(f"# rank {killed}{place} has ended without a word", sentence), sentence


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_takes_the_notices_with_it(sent: signal.Signals, tmp_path: Path) -> None:
    with terminals(MICRO_BATCHES, 3, tmp_path) as ranks:
        os.kill(ranks[0].pid, sent)
        for rank in (1, 2):
            sentence = last_line(finish(ranks[rank], deadline=TIMEOUT + TO_SAY_SO))
            assert re.match(r"# rank 0 \(stage 0\) (has ended|does not answer)", sentence), sentence


def test_a_rank_without_memory_in_terminals(tmp_path: Path) -> None:
    with terminals(MICRO_BATCHES, 3, tmp_path) as ranks:
        os.kill(ranks[1].pid, signal.SIGUSR1)
        for end in [finish(rank, deadline=TIMEOUT + TO_SAY_SO) for rank in ranks]:
            assert last_line(end) == "# rank 1 (stage 1) failed: out of memory: 3 TB"


@contextmanager
def launched(topology: str, tmp_path: Path, victim: int) -> "Iterator[tuple[subprocess.Popen[str], int]]":
    """A topology that trains for ever under launch.sh, and the process of one of its ranks."""
    launcher = start("./launch.sh", topology, *TINY, "--timeout", str(TIMEOUT), "--out", str(tmp_path))
    try:
        wait_for_steps(tmp_path)
        children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()
        named = f"RANK={victim}\0".encode()
        yield (
            launcher,
            next(
                pid for pid in map(int, children) if b"\0" + named in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            ),
        )
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.communicate()


def test_a_stopped_rank_under_the_launcher(tmp_path: Path) -> None:
    with launched("hybrid", tmp_path, victim=4) as (launcher, rank_4):
        os.kill(rank_4, signal.SIGSTOP)
        end = finish(launcher, deadline=TIMEOUT + LAUNCHER_ENDS_IN + 5)
        sentence = last_line(end)
        assert sentence.startswith("# rank 4 (stage 1 of replica 1) does not answer, and the others wait"), end.err
        assert end.out.count("who waits for whom:") == 1
        assert not Path(f"/proc/{rank_4}").exists()


def test_a_killed_rank_under_the_launcher(tmp_path: Path) -> None:
    with launched("hybrid", tmp_path, victim=4) as (launcher, rank_4):
        os.kill(rank_4, signal.SIGKILL)
        killed = time.monotonic()
        sentence = last_line(finish(launcher, deadline=LAUNCHER_ENDS_IN))
        assert time.monotonic() - killed < LAUNCHER_ENDS_IN
        assert sentence == "# rank 4 (stage 1 of replica 1) failed: it was ended by SIGKILL"


FIRST = r"first not finite is the output of model\.layers\.\d\.\S+ \(\w+\)"


@pytest.mark.parametrize(
    ("topology", "where"),
    [
        ("dp-ga", ", on rank 0"),
        ("pp-dapple", r", on rank 0 \(stage 0\)"),
        ("hybrid", r", on rank 0 \(stage 0 of replica 0\)"),
    ],
)
def test_a_loss_that_is_no_number_ends_all_ranks(topology: str, where: str, tmp_path: Path) -> None:
    end = run("./launch.sh", topology, *TINY, "--lr", "1e30", "--out", tmp_path, deadline=60)
    sentence = last_line(end)
    assert re.fullmatch(rf"# the loss of step 1 is nan: {FIRST}{where} \(is --lr 1e\+30 too large\?\)", sentence), (
        end.err
    )
    steps = [line.split()[0] for line in end.out.splitlines() if not line.startswith("#")]
    assert steps == ["0"]


def test_a_loss_that_is_no_number_in_one_process(tmp_path: Path) -> None:
    end = run_script("primer/intro.py", *TINY, "--lr", "1e30", "--out", tmp_path)
    assert re.fullmatch(rf"# the loss of step 1 is nan: {FIRST} \(is --lr 1e\+30 too large\?\)", last_line(end)), (
        end.err
    )
