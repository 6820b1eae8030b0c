"""Everything of torch that the lab patches or overrides without a public interface for it.

Tried with torch 2.13.0; tests/distlab/comm/test_torch_patches.py fails when a release changes what is relied on here.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.optim import Optimizer


def silence_torch_warnings() -> None:
    """Keep torch's C++ code from printing a trace when a connection is lost, which the lab's own sentence reports.

    `TORCH_CPP_LOG_LEVEL=ERROR` does the same, but torch reads it while it is imported, before a script can set it. A
    level that the user has set is kept.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):
            cpp_log_level().value = 2  # errors only


def cpp_log_level() -> ctypes.c_int:
    """The variable that holds the log level of torch's C++ code.

    Raises:
        OSError, ValueError: this build of torch has no such library or variable.
    """
    name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")


def without_compiler(kind: type[Optimizer]) -> type[Optimizer]:
    """An optimizer class that does not import torch's compiler, which takes longer than the first training steps.

    torch imports it at an optimizer's first use, only to exempt the optimizer from compilation. Here the methods are
    already marked as exempt, and `step` is the plain one under `no_grad`. If a release of torch does this in another
    way, the import happens and nothing else changes.
    """
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dict__.setdefault("__dynamo_disable", plain)
    plain_step = getattr(kind.step, "__wrapped__", None)
    return kind if plain_step is None else type(kind.__name__, (kind,), {"step": torch.no_grad()(plain_step)})


class Rounds(Protocol):
    """What `Agent` asks of its rendezvous besides torchrun's interface; see `distlab.rendezvous.nodes`."""

    ranks_of: Sequence[int]  # how many ranks each machine has, by node rank

    @property
    def restarts(self) -> int: ...
    def check_others(self) -> None: ...
    def all_finished(self) -> bool: ...


class Agent(LocalElasticAgent):
    """torchrun's agent, with restarts and failures that several machines share, and an end within seconds.

    - torchrun counts the failures of its own machine. Here the rendezvous counts the starts of all ranks, so that all
      machines and all ranks (TORCHELASTIC_RESTART_COUNT) have the same number.
    - A failure whose error file says `recurs_on_restart` is not followed by a restart.
    - A failure on another machine ends the ranks here; ranks that have finished are restarted if one on another machine
      fails after them. torchrun's wait at the end (`_exit_barrier`) neither notices nor restarts.
    - No call to the store waits without end, as torchrun's do when it numbers the ranks and at the end.
    - Ranks that run get `seconds_to_end` before SIGKILL; in two places torchrun insists on 30.
    """

    def __init__(self, spec: WorkerSpec, log_dir: str, seconds_to_end: int) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir))
        self._rounds, self._seconds_to_end = cast(Rounds, spec.rdzv_handler), seconds_to_end

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, size = sum(self._rounds.ranks_of[:group_rank]), sum(self._rounds.ranks_of)
        return [Worker(own, first + own, first + own, size, size) for own in range(spec.local_world_size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._remaining_restarts = worker_group.spec.max_restarts - self._rounds.restarts
        pids = super()._start_workers(worker_group)
        assert self._pcontext is not None
        close = self._pcontext.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            close(death_sig, self._seconds_to_end)

        self._pcontext.close = close_soon  # type: ignore[method-assign]
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and not self._rounds.all_finished():
            result = RunResult(WorkerState.HEALTHY)
        if result.state is WorkerState.HEALTHY:
            self._rounds.check_others()
        if any(failure.error_file_data.get("recurs_on_restart") for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result

    def _exit_barrier(self) -> None:
        pass
