"""A rank that stops, dies, runs out of memory or computes no number: every run ends soon, and says who and why."""

import contextlib
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import Ended, Started, alive, children, finish, process_of, wait_for, wait_for_steps
from support.terminals import Fork, fork_launcher, fork_python, terminals

from distlab.rendezvous.notices import SECONDS_BETWEEN_LOOKS

TINY = "--dmodel 16 --num-heads 2 --n-layers 3 --seq-len 16 --data sample --device cpu --steps 1000000".split()
NAIVE, MICRO_BATCHES = "PP/1F1B/intro_PP_1F1B.py", "PP/microbatches/intro_PP_microbatches.py"
REPLICAS = "DP/gradient_aggr/intro_DP_GA.py"
HYBRID = "hybrid/intro_hybrid.py"
FOUR_RANKS = "--dp 2 --pp 2".split()
ZB_V = "--schedule zb-v --n-layers 4".split()
TIMEOUT = 3  # of a run in which a rank is stopped: nothing but the time tells that
LONG_TIMEOUT = 60  # of a run in which a rank is killed: the others find it out long before
TO_SAY_SO = 20  # seconds for the ranks to tell each other, and to end; the computer may be busy
LAUNCHER_ENDS_IN = 20


@contextmanager
def training(
    script: str, world_size: int, tmp_path: Path, *flags: str, timeout: int = LONG_TIMEOUT
) -> Iterator[list[Fork]]:
    """All ranks of a script, started as in terminals of their own, that train for ever."""
    with terminals(script, world_size, tmp_path, *TINY, "--timeout", str(timeout), *flags) as ranks:
        wait_for_steps(tmp_path / "run", *ranks)
        yield ranks


def last_line(ended: Ended) -> str:
    assert ended.status == 1, ended.err
    assert "Traceback" not in ended.err, ended.err
    assert "frame #" not in ended.err, ended.err
    return ended.err.splitlines()[-1]


def test_a_stopped_rank(tmp_path: Path) -> None:
    """In terminals and under the launcher: two runs at once, as they do nothing but wait."""
    with (
        training(MICRO_BATCHES, 3, tmp_path / "terminals", *ZB_V, timeout=TIMEOUT) as ranks,
        launched(tmp_path / "launched", 0, timeout=TIMEOUT) as (launcher, launched_rank),
    ):
        for stopped in (launched_rank, ranks[1].pid):
            os.kill(stopped, signal.SIGSTOP)
        place = [rf"( \(stages {rank} and {5 - rank}\))?" for rank in range(3)]
        waits = []
        for end in [ranks[rank].finish(TIMEOUT + TO_SAY_SO) for rank in (0, 2)]:
            told = last_line(end)
            assert re.match(f"# rank 1{place[1]} does not answer\\b", told), end.err
            assert all(state in told for state in ("others wait", "stopped", "cut off", "computing")), told
            assert re.findall(r"--timeout (\d+)", told) == [str(TIMEOUT)], told
            assert set(re.findall(r"\brank (\d+)", told)) == {"1"}, told
            assert re.search(rf"#   rank 1{place[1]}  has published no wait", end.out), end.out
            own = re.search(
                rf"^# rank (0{place[0]}|2{place[2]}) waited (?P<seconds>\d+\.\d) s for .*"
                r"the (activations of micro-batch|gradients of micro-batch|loss of step) \d+.*: "
                "(no answer|a rank has exited)",
                end.err,
            )
            assert own, end.err
            waits.append(float(own["seconds"]))
        assert max(waits) >= TIMEOUT
        end = finish(launcher, deadline=TIMEOUT + LAUNCHER_ENDS_IN + 5)
        sentence = last_line(end)
        assert sentence.startswith("# rank 0 (stage 0 of replica 0) does not answer, and the others wait"), end.err
        assert end.out.count("who waits for whom:") == 1
        assert not Path(f"/proc/{launched_rank}").exists()


def test_a_killed_rank_in_terminals(tmp_path: Path) -> None:
    with training(HYBRID, 4, tmp_path, *FOUR_RANKS, *ZB_V) as ranks:
        os.kill(ranks[3].pid, signal.SIGKILL)
        for end in [rank.finish(TO_SAY_SO) for rank in ranks[:3]]:
            sentence = "# rank 3 (stages 1 and 2 of replica 1) has exited without reporting a cause"
            assert last_line(end).startswith(sentence), end.err


WAITING = """
'''Rank 2 computes for long, and the others wait for it, in a chain or all together.'''
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from distlab.comm.names import named
from distlab.run.main import main
from distlab.settings.replicas import DataParallelSettings
DEFAULTS = DataParallelSettings()
def train(run):
    x = torch.zeros(1)
    folder = Path(__file__).parent
    (folder / f"ready.{{run.rank}}").touch()
    while not (folder.parent / "go").exists():
        time.sleep(0.02)
    if run.rank == 2:
        time.sleep(3)
    {work}
if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
"""
CHAIN = """
    with named("the chain", "check"):
        if run.rank < 2:
            dist.recv(x, run.rank + 1)
        if run.rank > 0:
            dist.send(x, run.rank - 1)
"""
AVERAGE = """
    with named("the average", "check"):
        dist.all_reduce(x)
"""


def test_a_rank_that_is_lost_while_it_waits_is_not_taken_for_one_that_waits(tmp_path: Path) -> None:
    """Four runs at once, as they do nothing but wait."""
    cases = list(itertools.product({"chain": CHAIN, "average": AVERAGE}.items(), (signal.SIGKILL, signal.SIGSTOP)))
    with contextlib.ExitStack() as stack:
        worlds = []
        for (name, work), sent in cases:
            folder = tmp_path / f"{name}-{sent.name}"
            folder.mkdir()
            script = folder / "waiting.py"
            script.write_text(WAITING.format(work=work))
            worlds.append(stack.enter_context(terminals(script, 3, folder, "--timeout", "3", "--data", "sample")))
        assert wait_for(lambda: len(list(tmp_path.glob("*/ready.*"))) == 3 * len(cases))
        (tmp_path / "go").touch()  # now, as rank 2 of the first run would else have ended its work long ago
        time.sleep(1.7)  # longer than a wait needs to be worth a notice
        for ranks, (_, sent) in zip(worlds, cases, strict=True):
            os.kill(ranks[1].pid, sent)
        for ranks, (_, sent) in zip(worlds, cases, strict=True):
            killed = sent == signal.SIGKILL
            state = "has exited without reporting a cause" if killed else "does not answer, and the others wait"
            for end in [ranks[rank].finish(2 * TIMEOUT + TO_SAY_SO) for rank in (0, 2)]:
                assert last_line(end).startswith(f"# rank 1 {state}"), (end.out, end.err)


@pytest.mark.parametrize(("sent", "timeout"), [(signal.SIGKILL, LONG_TIMEOUT), (signal.SIGSTOP, TIMEOUT)])
def test_rank_0_takes_the_notices_with_it(sent: signal.Signals, timeout: int, tmp_path: Path) -> None:
    with training(MICRO_BATCHES, 3, tmp_path, timeout=timeout) as ranks:
        os.kill(ranks[0].pid, sent)
        for rank in (1, 2):
            sentence = last_line(ranks[rank].finish(TIMEOUT + TO_SAY_SO))
            assert re.match(r"# rank 0 \(stage 0\) (has exited|does not answer)", sentence), sentence


def test_the_store_goes_while_it_is_asked(tmp_path: Path) -> None:
    with training(NAIVE, 3, tmp_path) as ranks:
        os.kill(ranks[0].pid, signal.SIGSTOP)
        time.sleep(SECONDS_BETWEEN_LOOKS + 0.5)  # by now the others wait for an answer
        os.kill(ranks[0].pid, signal.SIGKILL)
        for rank in (1, 2):
            sentence = last_line(ranks[rank].finish(TO_SAY_SO))  # and no trace of torch's, from C++
            assert re.match(r"# rank 0( \(stage 0\))? (has exited|does not answer)", sentence), sentence


@pytest.mark.parametrize("victim", [0, 1])  # rank 0 takes the store with it, but first waits until all have heard it
def test_a_rank_without_memory_in_terminals(victim: int, tmp_path: Path) -> None:
    with training(MICRO_BATCHES, 3, tmp_path) as ranks:
        os.kill(ranks[victim].pid, signal.SIGUSR1)
        for end in [rank.finish(TO_SAY_SO) for rank in ranks]:
            assert last_line(end) == f"# rank {victim} (stage {victim}) failed: out of memory: 3 TB", end.err


@contextmanager
def launched(tmp_path: Path, victim: int, *command: str, timeout: int = LONG_TIMEOUT) -> Iterator[tuple[Started, int]]:
    """A run that trains for ever, by default under launch.sh, and the process of one of its ranks."""
    flags = [*TINY, "--timeout", str(timeout), "--out", str(tmp_path)]
    launcher = fork_python(*command, *flags) if command else fork_launcher("hybrid", *FOUR_RANKS, *flags)
    try:
        wait_for_steps(tmp_path, launcher)
        yield launcher, process_of(victim, children(launcher.pid))
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.communicate()


def test_a_killed_rank_under_plain_torchrun(tmp_path: Path) -> None:
    """Which gives the size of the world; it trains by a schedule of one's own."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", MICRO_BATCHES)
    with launched(tmp_path, 1, *torchrun, "--schedule", "examples/own_schedule.py") as (launcher, rank):
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config["world_size"], Path(config["settings"]["schedule"]).name) == (2, "own_schedule.py")
        os.kill(rank, signal.SIGKILL)
        end = finish(launcher, deadline=LAUNCHER_ENDS_IN)
        assert end.status == 1
        assert "Signal 9 (SIGKILL) received" in end.err  # torchrun's own words; it ends the others at once
        assert "frame #" not in end.err


def test_a_stopped_rank_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", REPLICAS)
    with launched(tmp_path, 0, *torchrun) as (launcher, rank):
        os.kill(rank, signal.SIGSTOP)
        launcher.kill()
        launcher.wait()
        try:
            assert wait_for(lambda: not alive(rank), 5), "it was left behind"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


SENTIMENT = (
    "--world-size 2 --tp 2 --dim 16 --heads 2 --layers 1 --samples 64 --seq-len 16 --data sample --device cpu".split()
)
FIRST = r"the first non-finite tensor is the output of model\.layers\.\d\.\S+ \(\w+\)"


@pytest.mark.quick
def test_a_loss_that_is_no_number_ends_all_ranks(tmp_path: Path) -> None:
    end = fork_launcher("hybrid", *FOUR_RANKS, *TINY, "--lr", "1e30", "--out", tmp_path).finish()
    where = r", on rank 0 \(stage 0 of replica 0\)"
    sentence = last_line(end)
    assert re.fullmatch(rf"# the loss of step 1 is nan: {FIRST}{where} \(is --lr 1e\+30 too large\?\)", sentence), (
        end.err
    )
    steps = [line.split()[0] for line in end.out.splitlines() if not line.startswith("#")]
    assert steps == ["0"]


@pytest.mark.parametrize(
    ("script", "world_size", "flags", "told"),
    [
        pytest.param("primer/intro.py", 1, TINY, f"step 1 is nan: {FIRST}", marks=pytest.mark.quick),
        pytest.param(REPLICAS, 3, TINY, f"step 1 is nan: {FIRST}, on rank 0", marks=pytest.mark.quick),
        ("TP/sentiment/tp_tensor_parallel.py", 2, SENTIMENT, r"step \d+ is nan, first on rank 0"),  # without a cause
    ],
)
def test_a_loss_that_is_no_number_in_terminals(
    script: str, world_size: int, flags: list[str], told: str, tmp_path: Path
) -> None:
    with terminals(script, world_size, tmp_path, *flags, "--lr", "1e30") as ranks:
        for end in [rank.finish(30) for rank in ranks]:
            sentence = rf"# the loss of {told} \(is --lr 1e\+30 too large\?\)"
            assert re.fullmatch(sentence, last_line(end)), end.err
