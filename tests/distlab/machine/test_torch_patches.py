"""What the lab relies on inside of torch is still there, and still does what the lab needs."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from support.terminals import fork_python
from torch.optim import SGD, Adam, AdamW, Optimizer

from distlab.machine.torch_patches import (
    cpp_log_level,
    running_backward_pass,
    silence_torch_warnings,
    without_compiler,
)

# A store's process goes while a connection is in use: torch's C++ code writes a trace about it.
LOSES_A_STORE = """
import multiprocessing, sys, torch.distributed as dist
from distlab.machine.torch_patches import cpp_log_level, silence_torch_warnings
from distlab.rendezvous.addresses import listen_at
from distlab.rendezvous.store import open_bound_store

def hold(port):
    held = open_bound_store("127.0.0.1", port, 5)
    __import__("time").sleep(60)

def lose():
    with listen_at("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(port,))
    holder.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    holder.kill()
    holder.join()
    try:
        store.check(["key"])
    except dist.DistError:
        print("lost")

cpp_log_level().value = 1  # torch's default
lose()
silence_torch_warnings()
print("silenced", file=sys.stderr, flush=True)
lose()
"""


def test_the_cpp_log_level_is_where_it_was() -> None:
    assert 0 <= cpp_log_level().value <= 2, "of INFO, WARNING, ERROR"


def test_torch_writes_no_trace_once_it_is_silenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    (tmp_path / "program.py").write_text(LOSES_A_STORE)
    ended = fork_python(tmp_path / "program.py").finish()
    assert (ended.status, ended.out) == (0, "lost\nlost\n"), ended.err
    before, _, after = ended.err.partition("silenced\n")
    assert ("frame #" in before, after) == (True, ""), ended.err


def test_the_log_level_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setattr(level := cpp_log_level(), "value", 0)
    silence_torch_warnings()
    assert level.value == 0


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
