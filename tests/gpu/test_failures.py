"""A run on the GPU that fails ends soon, with one sentence that says who and why, and leaves no process behind."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gpu_runs import DEADLINE, NCCL, PATIENCE, TRAINING, command
from support.processes import children, environment, finish, process_of, run, start, steps_taken, wait_for

from distlab.machine.devices import SHARE_GPUS

DEADLOCK = """
import datetime
import torch
import torch.distributed as dist
from distlab.comm.context import Options
from distlab.comm.group import device_of

options = Options(library="{library}")
dist.init_process_group("lab", timeout=datetime.timedelta(seconds=5), pg_options=options)
x = torch.zeros(10, device=device_of())
dist.all_reduce(x)
dist.recv(x, 1 - dist.get_rank())
print(x.sum().item())
"""


def test_a_loss_that_is_not_finite_names_its_cause(tmp_path: Path) -> None:
    line = f"hybrid {TRAINING} --lr 1e30 --dp 2 --pp 2 --batch-size 3"
    ended = run(*command(line, "--out", tmp_path), deadline=DEADLINE)
    assert ended.status == 1, ended.err
    last = ended.err.splitlines()[-1]
    first = r"# the loss of step \d is (nan|inf): the first non-finite tensor is the (output|parameter) \S"
    assert re.match(first, last), last
    assert "Traceback" not in ended.err
    assert "device-side assert" not in ended.out + ended.err


@pytest.mark.parametrize(
    "line",
    [
        "hybrid --dp 2 --pp 2 --batch-size 3 --backend gloo",
        f"pp-dapple --world-size 2 --batch-size 6 --backend {NCCL}",
    ],
)
def test_a_killed_rank_is_named_and_leaves_no_orphans(line: str, tmp_path: Path) -> None:
    endless = command(f"{line} --data sample --seq-len 64 --steps 1000000", "--out", tmp_path)
    sharing: dict[str, Any] = {SHARE_GPUS: "1"}
    launcher = start(*endless, **sharing)
    try:
        assert wait_for(lambda: steps_taken(tmp_path) > 3, DEADLINE), "training began"
        ranks = children(launcher.pid)
        os.kill(process_of(1, ranks), signal.SIGKILL)
        ended = finish(launcher, 30 * PATIENCE)
    finally:
        launcher.kill()  # its ranks end with it
    assert ended.status not in (0, 2)
    last = ended.err.splitlines()[-1]
    assert re.match(r"# rank 1 \(stage 1.*\) was terminated by SIGKILL", last), ended.err
    assert "Traceback" not in ended.err
    assert wait_for(lambda: not any(environment(rank) for rank in ranks), 10), "no orphans"


def test_a_deadlock_of_a_program_over_nccl_is_told_with_its_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DEADLOCK.format(library=NCCL))
    sharing: dict[str, Any] = {SHARE_GPUS: "1"}
    ended = run(sys.executable, "-m", "distlab.launch", program, "--world-size", "2", deadline=DEADLINE, **sharing)
    assert ended.status == 1, ended.err
    for rank in range(2):
        told = f"#   rank {rank}  waits in recv (program.py line 12)  -> rank {1 - rank}"
        assert told in (ended.out + ended.err).splitlines(), ended.out + ended.err
    assert ended.err.splitlines()[-1] == "# deadlock: rank 0 waits for rank 1, which waits for rank 0"
