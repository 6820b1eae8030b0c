"""Programs that know nothing of the lab but `dist.init_process_group("lab")`, under launch.sh and under torchrun."""

import atexit
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import children, finish, free_port, process_of, start, wait_for
from support.terminals import fork_launcher, fork_python

from distlab.comm.recorder import Ledger
from distlab.launching.programs import summarize_at_exit
from distlab.run.logs import human_bytes

PLAIN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import distlab

dist.init_process_group("lab")
torch.manual_seed(0)
net = DistributedDataParallel(nn.Linear(64, 256))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    net(torch.ones(8, 64) * (1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(step, flush=True)
weight = net.module.weight.detach().clone()
dist.all_reduce(weight, dist.ReduceOp.MAX)
assert torch.equal(weight, net.module.weight), "all ranks have the same weights"
dist.destroy_process_group()
"""
SUM = """
import torch
import torch.distributed as dist
from distlab.comm.context import Options
dist.init_process_group("lab", pg_options=Options(transport="gloo"))
x = torch.full((3,), 1.0 + dist.get_rank())
dist.all_reduce(x, group=dist.new_group([0, 1]))
assert x.tolist() == [3, 3, 3]
dist.destroy_process_group()
"""
DEADLOCK = """
import torch, datetime
import torch.distributed as dist
import distlab
dist.init_process_group("lab", timeout=datetime.timedelta(seconds=2))
x = torch.zeros(10)
if dist.get_rank() == 0:
    dist.recv(x, 1)
else:
    dist.recv(x, 0)
"""
FAULTY = """
import torch
import torch.distributed as dist
import distlab
from distlab.run import failure
failure.watch_nccl = lambda context: print("watches the waits of rank", context.rank)
dist.init_process_group("lab")
dist.all_gather_into_tensor(torch.zeros(dist.get_world_size()), torch.ones(1))
raise TypeError("a fault")
"""
HANGS_IN_NCCL = """
import time
import torch
import torch.distributed as dist
from distlab.comm.context import Context, Options
from distlab.comm.waits import Wait
from distlab.run.failure import watch_nccl
options = Options(timeout_seconds=0.2)
context = Context(0, 2, options, "nccl", ["here"] * 2, dist.HashStore(), torch.device("cpu"))
watch_nccl(context)
with context.waits.during(Wait("recv", "receive", (1,), line="program.py line 8")):
    time.sleep(60)
"""
CTRL_C = "import sys; sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)"
LATE = """
import datetime, os, time
import torch.distributed as dist
import distlab
if os.environ["RANK"] == "1":
    time.sleep(60)
dist.init_process_group("lab", timeout=datetime.timedelta(seconds=1))
"""


def written(folder: Path, text: str) -> Path:
    program = folder / "program.py"
    program.write_text(text)
    return program


def alone() -> dict[str, Any]:
    """The variables of a rank without others."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}


@pytest.mark.quick
def test_torchs_ddp_is_counted_and_summed_up(tmp_path: Path) -> None:
    ended = fork_launcher(written(tmp_path, PLAIN.format(steps=4)), "--world_size", "3").finish()
    assert (ended.status, ended.err) == (0, "")
    [sent] = [line for line in ended.out.splitlines() if " of all_reduce in " in line]
    own_bytes = 4 * (4 * 4 * (64 * 256 + 256) // 3) + 4 * 4 * 64 * 256 // 3  # around a ring: four buckets, a weight
    assert sent == f"# rank 0 sent {human_bytes(own_bytes)} of all_reduce in 5 messages"


@pytest.mark.quick
def test_the_seconds_that_rank_0_has_waited_are_summed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(atexit, "register", lambda summarize: summarize())
    for rank in range(2):
        context: Any = SimpleNamespace(rank=rank, waited_so_far=lambda: 12.34, ledger=Ledger())
        summarize_at_exit(context)
    assert capsys.readouterr().out == "# rank 0 waited 12.3 s for other ranks\n"


def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    """Without DDP, whose import takes as long as that of torch.

    The summary is there with options of the program's own, and only once, although there are two groups.
    """
    program = written(tmp_path, SUM)
    ended = fork_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program).finish()
    assert ended.status == 0, ended.err
    assert ended.out.count("# rank 0 sent") == 1


def test_an_exception_prints_its_traceback(tmp_path: Path) -> None:
    for kind, ranks in (("TypeError", 1), ("GeneratorExit", 2)):  # the second one is no `Exception`
        program = written(tmp_path, FAULTY.replace("TypeError", kind))
        of_one = finish(start(sys.executable, program, **alone())) if ranks == 1 else None
        ended = of_one or fork_launcher(program, "--world-size", "2").finish()
        assert ended.status == 1
        assert f'raise {kind}("a fault")' in ended.err
        assert "watches the waits of rank 0" in ended.out
        assert "FutureWarning" not in ended.err, "torch's, of a name that is old since 2.13"
        assert ended.err.splitlines()[-1].endswith(f"failed: {kind}: a fault"), ended.err


def test_ctrl_c_ends_a_program_in_a_sentence(tmp_path: Path) -> None:
    program = written(tmp_path, FAULTY.replace('raise TypeError("a fault")', CTRL_C))
    ended = fork_python(program, **alone()).finish()
    assert (ended.status, ended.err) == (130, "# interrupted\n")


def test_a_rank_that_does_not_connect_ends_in_a_sentence(tmp_path: Path) -> None:
    ended = fork_launcher(written(tmp_path, LATE)).finish()
    assert ended.status == 1
    assert "Traceback" not in ended.err
    why = "rank 0 could not connect to all other ranks: no answer (init_process_group's timeout sets how long to wait)"
    assert f"# {why}" == ended.err.splitlines()[-1], ended.err


def test_more_threads_than_any_machine_has_are_refused(tmp_path: Path) -> None:
    ended = fork_launcher(written(tmp_path, PLAIN.format(steps=1)), OMP_NUM_THREADS="99999999").finish()
    assert ended.status == 2
    assert "OMP_NUM_THREADS=99999999: give at most 1,024 threads" in ended.err


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    told = tmp_path / "it trains"
    program = PLAIN.format(steps=10**9).replace("print(step, flush=True)", f"open({str(told)!r}, 'w').close()")
    launcher = fork_launcher(written(tmp_path, program))
    assert wait_for(told.exists, 30)
    os.kill(process_of(1, children(launcher.pid)), signal.SIGKILL)
    ended = launcher.finish()
    assert ended.status != 0
    assert ended.err.splitlines()[-1] == "# rank 1 was terminated by SIGKILL"


def test_a_deadlock_is_told_with_both_lines(tmp_path: Path) -> None:
    ended = fork_launcher(written(tmp_path, DEADLOCK)).finish()
    lines = (ended.out + ended.err).splitlines()
    assert "#   rank 0  waits in recv (program.py line 8)  -> rank 1" in lines
    assert "#   rank 1  waits in recv (program.py line 10)  -> rank 0" in lines
    assert ended.err.splitlines()[-1] == "# deadlock: rank 0 waits for rank 1, which waits for rank 0"


def test_a_thread_that_nccl_does_not_let_go_is_told_at_the_deadline(tmp_path: Path) -> None:
    ended = fork_python(written(tmp_path, HANGS_IN_NCCL)).finish(20)
    assert ended.status == 1
    waited = (
        r"# rank 0 waited 0\.\d s for recv from rank 1, program.py line 8: no answer \(init_process_group's timeout .*"
    )
    assert re.fullmatch(waited, ended.err.rstrip()), ended.err
