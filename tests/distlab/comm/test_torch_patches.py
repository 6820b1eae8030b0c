"""What the lab relies on inside of torch is still there, and still does what the lab needs."""

import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.optim import SGD, Adam, AdamW, Optimizer

from distlab.comm.torch_patches import cpp_log_level, running_backward_pass, without_compiler
from distlab.rendezvous.agent import Agent
from distlab.rendezvous.store import open_bound_store

# A store's process goes while a connection is in use: torch's C++ code writes a trace about it.
LOSES_A_STORE = """
import multiprocessing, torch.distributed as dist
from distlab.comm.torch_patches import silence_torch_warnings
from distlab.rendezvous.store import listen_at, open_bound_store

def hold(port):
    held = open_bound_store("127.0.0.1", port, 5)
    __import__("time").sleep(60)

with listen_at("127.0.0.1", 0) as listener:
    port = listener.getsockname()[1]
holder = multiprocessing.get_context("fork").Process(target=hold, args=(port,))
holder.start()
{silence}
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
holder.kill()
holder.join()
try:
    store.check(["key"])
except dist.DistError:
    print("lost")
"""


def test_the_cpp_log_level_is_where_it_was() -> None:
    assert 0 <= cpp_log_level().value <= 2, "of INFO, WARNING, ERROR"


@pytest.mark.parametrize(("silence", "is_quiet"), [("silence_torch_warnings()", True), ("", False)])
def test_torch_writes_no_trace_when_it_is_silenced(
    silence: str, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    program = [sys.executable, "-c", LOSES_A_STORE.format(silence=silence)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "lost\n"), ended.stderr
    assert ("frame #" not in ended.stderr) == is_quiet, ended.stderr


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD])
def test_optimizers_have_plain_methods_below_torchs_wrappers(kind: type[Optimizer]) -> None:
    """The effect is in tests/distlab/run/test_optimizers.py."""
    method: Any
    for method in (Optimizer.add_param_group, Optimizer.zero_grad, kind.step):
        assert callable(method.__wrapped__)
    assert issubclass(without_compiler(kind), kind)
    assert without_compiler(kind).__name__ == kind.__name__
    assert Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"]  # type: ignore[attr-defined]
    assert "__dynamo_disable" in inspect.getsource(torch._compile._disable_dynamo)


def test_torchruns_agent_has_what_ours_overrides() -> None:
    for name in ("_assign_worker_ranks", "_start_workers", "_monitor_workers", "_exit_barrier"):
        own, torchs = (inspect.signature(getattr(kind, name)).parameters for kind in (Agent, LocalElasticAgent))
        assert list(own) == list(torchs), name
    assert "_exit_barrier()" in inspect.getsource(SimpleElasticAgent._invoke_run)
    assert "self._remaining_restarts" in inspect.getsource(SimpleElasticAgent._invoke_run)
    assert "self._pcontext.close(" in inspect.getsource(LocalElasticAgent._shutdown)
    assert inspect.signature(PContext.close).parameters["timeout"].default == 30, "if it is a setting now, use that"


class Rendezvous(StaticTCPRendezvous):
    """Of two ranks on this machine, which is the second of two, in their third round."""

    ranks_of = (3, 2)
    restarts = 2

    def __init__(self) -> None:
        self._held, port = open_bound_store("127.0.0.1", 0, 5)
        self.asked = 0
        super().__init__("127.0.0.1", port, rank=1, world_size=2, run_id="test", timeout=5)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._held, 1, 2, RendezvousStoreInfo(self.master_addr, self.master_port))

    def check_others(self) -> None:
        pass

    def all_finished(self) -> bool:
        self.asked += 1
        return self.asked > 1


def run_agent(program: str, folder: Path, rendezvous: Rendezvous, max_restarts: int = 2) -> RunResult:
    """Run a program on two ranks; they find `folder` in `sys.argv[1]`."""
    spec = WorkerSpec(
        role="rank",
        local_world_size=2,
        entrypoint=sys.executable,
        args=("-c", program, str(folder)),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    handlers = {sent: signal.getsignal(sent) for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        return Agent(spec, str(folder / "errors"), seconds_to_end=1).run()
    finally:
        for sent, handler in handlers.items():
            signal.signal(sent, handler)


TELLS = """
import json, os, pathlib, sys
names = "RANK WORLD_SIZE LOCAL_RANK TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE".split()
told = json.dumps([os.environ[name] for name in names])
pathlib.Path(sys.argv[1], os.environ["LOCAL_RANK"]).write_text(told)
"""


def test_ranks_and_restarts_are_those_of_the_rendezvous(tmp_path: Path) -> None:
    rendezvous = Rendezvous()
    assert run_agent(TELLS, tmp_path, rendezvous).state is WorkerState.SUCCEEDED
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert told == [["3", "5", "0", "2", "True"], ["4", "5", "1", "2", "True"]]
    assert rendezvous.asked == 2, "until all have finished"


FAILS = """
import json, os, pathlib, signal, sys, time
if os.environ["LOCAL_RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[1], "ignores").touch()
    time.sleep(60)
while not pathlib.Path(sys.argv[1], "ignores").exists():
    time.sleep(0.05)
with pathlib.Path(sys.argv[1], "starts").open("a") as starts:
    starts.write("1")
record = {"message": "nan", "timestamp": 0, "recurs_on_restart": True}
pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
sys.exit(1)
"""


@pytest.mark.alone
def test_ranks_that_do_not_hear_end_in_seconds_and_what_recurs_is_not_restarted(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = run_agent(FAILS, tmp_path, Rendezvous(), max_restarts=5)
    assert time.monotonic() - started < 15, "torchrun's own 30 s"
    assert ended.state is WorkerState.FAILED
    assert {rank: failure.exitcode for rank, failure in ended.failures.items()} == {3: -signal.SIGKILL, 4: 1}
    assert (tmp_path / "starts").read_text() == "1"


def test_each_backward_pass_has_a_number_of_its_own() -> None:
    seen: list[int | None] = []
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        for hooked in (y, x):
            hooked.register_hook(lambda _: seen.append(running_backward_pass()))
        y.sum().backward()
    assert None not in seen
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert running_backward_pass() is None
