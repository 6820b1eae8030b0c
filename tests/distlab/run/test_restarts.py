"""`launch.sh --max-restarts`: all start again from the last checkpoint, and the run is that of no failure."""

import os
import re
import signal
from pathlib import Path

import pytest
from support.chapters import losses, train_on
from support.processes import children, process_of, wait_for_steps
from support.terminals import fork_launcher

SHAPE = "--data sample --dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24 --steps 100".split()
FLAGS = ["--world-size", "2", "--batch-size", "1", *SHAPE, "--optimizer", "adam", "--lr", "1e-3"]
SCRIPT = "DP/zero/intro_DP_ZeRO.py"  # sharded replicas cannot do without a restart
LAUNCH = ("dp-zero", *FLAGS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train_on(2, SCRIPT, tmp_path_factory.mktemp("undisturbed"), *FLAGS)[-1]


def test_the_losses_are_those_of_an_undisturbed_run(
    expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice: before the first checkpoint, whereupon the run begins again, and after it."""
    monkeypatch.setattr("distlab.launching.local_ranks.FORKED_STARTS", 3)
    process = fork_launcher(*LAUNCH, "--save-every", "50", "--max-restarts", "2", "--out", tmp_path)
    for rank, steps in ((0, 10), (1, 52)):
        wait_for_steps(tmp_path, process, steps=steps)
        os.kill(process_of(rank, children(process.pid)), signal.SIGKILL)
    ended = process.finish()
    assert ended.status == 0, ended.err
    assert losses(tmp_path) == expected
    for number in (1, 2):
        assert f"# a rank has failed: starting all ranks again, {number} of 2 times\n" in ended.out
    assert ended.out.count("\n0 ") == 2
    resumed = re.findall(rf"# resuming from {tmp_path}/checkpoints/step-0+(\d+), after \1 steps\n", ended.out)
    assert resumed == ["50"], ended.out


DYING = """
import os, signal, sys
print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], "as a fork" if "torch" in sys.modules else "", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_third_start_is_of_a_new_interpreter_if_restarts_are_not_used_up(restarts: int, tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    ended = fork_launcher(script, "--world-size", "1", "--max-restarts", restarts).finish()
    started = [line for line in ended.out.splitlines() if line.startswith("start")]
    assert started == ["start 0 as a fork", "start 1 as a fork", "start 2 "][: restarts + 1]
    assert ended.status == 2 - restarts, ended.err
    if ended.status:
        assert ended.err.splitlines()[-1] == "# rank 0 was terminated by SIGKILL"


FAILING = """
'''A script whose rank 0 fails.'''
from distlab.run.main import main
from distlab.run.steps import NotFiniteError
from distlab.settings.replicas import DataParallelSettings
from simplellm.errors import InputError
DEFAULTS = DataParallelSettings()
def train(run):
    print("# rank", run.rank, "starts", flush=True)
    if run.rank == 0:
        raise {error}
    run.log(0, [])
if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
"""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("InputError('--lr 3: give less')", 2, "rank 0 failed: --lr 3: give less"),
        ("NotFiniteError('step 0: the loss is nan, on rank 0')", 1, "step 0: the loss is nan, on rank 0"),
    ],
)
def test_a_failure_that_would_come_again_ends_the_run(error: str, status: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(error=error))
    flags = ["--world-size", "2", "--max-restarts", "2", "--out", tmp_path / "run"]
    ended = fork_launcher(script, *flags).finish()
    assert ended.status == status
    assert ended.err.splitlines()[-1] == f"# {said}"
    assert ended.err.count(said) == 1, "the launcher says it, once"
    log = (tmp_path / "run/rank0.log").read_text().splitlines()
    assert log[-1] == f"# {said.removeprefix('rank 0 failed: ')}"
    assert ended.out.count("# rank 0 starts") == 1
    assert "starting all ranks again" not in ended.out


def test_checkpoints_of_another_run_are_none_to_go_on_from(tmp_path: Path) -> None:
    train_on(2, SCRIPT, tmp_path, *FLAGS, "--steps", "2", "--save-every", "1")
    again = [*LAUNCH, "--max-restarts", "1", "--out", tmp_path]
    refused = fork_launcher(*again).finish()
    assert refused.status == 2
    assert refused.err.splitlines()[-1].startswith(f"# --out {tmp_path}: has checkpoints of another run; ")
    gone_on = fork_launcher(*again, "--steps", "3", "--resume", tmp_path).finish()
    assert gone_on.status == 0, gone_on.err
