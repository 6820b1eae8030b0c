"""torchrun's agent as the lab's launcher needs it; it overrides private methods of torch's class.

Tried with torch 2.13.0; tests/distlab/comm/test_torch_patches.py fails when a release changes what is relied on here.
It stands apart from `distlab.comm.torch_patches` because the ranks, which import that, need no agent.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from distlab.rendezvous.forks import ForkedScript


class Rounds(Protocol):
    """What `Agent` needs from its rendezvous in addition to torchrun's interface; see `distlab.rendezvous.nodes`."""

    ranks_of: Sequence[int]  # how many ranks each machine has, by node rank

    @property
    def restarts(self) -> int: ...
    def check_others(self) -> None: ...
    def all_finished(self) -> bool: ...


class Agent(LocalElasticAgent):
    """torchrun's agent, except that all machines share restarts and failures, and that it ends ranks within seconds.

    - torchrun counts the failures of its own machine. Here the rendezvous counts the starts of all ranks, so that all
      machines and all ranks see the same number (TORCHELASTIC_RESTART_COUNT).
    - The agent does not restart after a failure whose error file says `recurs_on_restart`.
    - A failure on another machine ends the ranks here; ranks that have finished are restarted if a rank on another
      machine fails later. torchrun's wait at the end (`_exit_barrier`) does not detect such a failure.
    - No call to the store waits forever; torchrun's own calls can, when it numbers the ranks and at the end.
    - Running ranks get `seconds_to_end` seconds before SIGKILL; torchrun has a fixed 30 seconds in two places.
    - With `forks`, ranks are forks of this process, which has imported torch, instead of new interpreters.
    """

    def __init__(self, spec: WorkerSpec, log_dir: str, seconds_to_end: int, forks: bool = False) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir))
        if forks:
            SubprocessHandler._popen = _fork  # type: ignore[assignment,method-assign]
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


def _fork(_: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]) -> ForkedScript:
    """In place of `Popen`: the command is that of the lab's launcher, (interpreter, "-u", script, arguments...)."""
    return ForkedScript(command[2:], environment)
