"""Failure handling: every exception becomes a `Failure`, which informs the user, the other ranks and the launcher."""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from distlab.comm.context import Context
from distlab.comm.waits import TrafficError
from distlab.machine.processes import leave, started_by_torchrun
from distlab.rendezvous.groups import world_group
from distlab.run.handing_over import StateError
from distlab.run.logs import human_bytes
from distlab.run.steps import NotFiniteError
from distlab.run.terminal import RankOutput, say
from simplellm.errors import InputError, tell
from simplellm.exit_status import READER_HAS_EXITED, about_system, lost_reader

if TYPE_CHECKING:
    from distlab.rendezvous.notices import NoticeBoard


@dataclass(frozen=True)
class Failure:
    """The reason why a rank ends."""

    sentence: str  # the error in words; printed, and written to torchrun's error file
    status: int = 1  # exit status; errors that the user can correct (2) often occur on all ranks: launch.sh prints one
    cause: str = ""  # the reason for the other ranks, which may be waiting; "" if they notice by themselves
    names_rank: bool = False  # the sentence names the failed rank; launch.sh prints it last, once for all ranks
    lost_a_peer: bool = False  # it is the consequence of another rank's exit
    recurs_on_restart: bool = False  # the same step would fail again, so launch.sh does not restart the ranks
    is_diagnosed: bool = False  # the ranks have found out together which rank waits for which

    @classmethod
    def of(cls, error: BaseException, rank: int = 0) -> "Failure":
        """Return the failure for an error. Only a bug of the lab prints a traceback.

        `rank` is the rank that fails.
        """
        if isinstance(error, InputError):
            return cls(error.with_flags(), status=2, cause=error.with_flags(), recurs_on_restart=True)
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", status=130, cause="interrupted")
        if lost_reader(error):
            why = "the reader of the output has exited"
            return cls(why, status=READER_HAS_EXITED, cause=why, names_rank=True, recurs_on_restart=True)
        if isinstance(error, NotFiniteError):  # all ranks raise it
            return cls(str(error), names_rank=True, recurs_on_restart=True)
        if told := about_system(error):
            return cls.of(InputError(told), rank)
        # A library that communicates with other ranks raises different errors when a wait fails.
        world = world_group()
        wait = error if isinstance(error, TrafficError) else None
        if wait is None and world is not None:
            wait = world.context.waits.failure_of(error)
        if wait is not None:
            return cls._of_wait(wait, world.notices if world else None)
        cause = str(error) if isinstance(error, StateError) else out_of_memory(error) or refused_by_gpu(error)
        if cause is None:
            with contextlib.suppress(OSError):  # the reader of the output may have exited
                traceback.print_exception(error)
            cause = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")  # an error without a text
        # After a repair, ranks have other numbers in the process group.
        who = world.context.describe(world.context.rank) if world else f"rank {rank}"
        return cls(f"{who} failed: {cause}", cause=cause, names_rank=True)

    @classmethod
    def _of_wait(cls, error: TrafficError, notices: "NoticeBoard | None") -> "Failure":
        """Find out, with the other ranks, which rank waits for which after a failed wait; print it, name the cause."""
        found = notices.explain(error) if notices else None
        if found is None or notices is None:
            return cls(str(error), lost_a_peer=error.lost_a_peer)
        tell(str(error))
        if found.picture and (not started_by_torchrun() or notices.may_draw()):
            with contextlib.suppress(OSError):
                for line in found.picture:
                    say(line)
        notices.publish_diagnosis(found)
        lost_a_peer = error.lost_a_peer or found.is_partial
        return cls(found.sentence, names_rank=True, lost_a_peer=lost_a_peer, is_diagnosed=True)

    def end(self) -> NoReturn:
        """Report the cause to the other ranks, write the sentence to the terminal and to the error file, and exit."""
        world = world_group()
        notices = world.notices if world else None
        if notices and self.cause:
            notices.report_exit(self.cause)
        if isinstance(sys.stdout, RankOutput):
            sys.stdout.status.clear()
        if notices and (self.cause or self.is_diagnosed):
            notices.keep_store_open()
        restarts, allowed = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        is_restarted = restarts != allowed and not self.recurs_on_restart
        is_printed_last = "LAB_LAUNCHER" in os.environ and not is_restarted and (self.names_rank or self.status == 2)
        if not is_printed_last:
            tell(self.sentence)
        elif isinstance(sys.stderr, RankOutput):
            sys.stderr.keep(f"# {self.sentence}\n")
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            names = "status", "names_rank", "lost_a_peer", "recurs_on_restart", "is_diagnosed"
            record = {"message": self.sentence, "timestamp": int(time.time())}
            Path(error_file).write_text(json.dumps(record | {name: getattr(self, name) for name in names}))
        if not self.cause and started_by_torchrun():  # which ends all ranks when one fails; others also have messages
            time.sleep(1)
        leave(self.status)


def watch_nccl(context: Context) -> None:
    """Over NCCL, end this rank as soon as a wait passes its deadline, whatever its main thread is doing then."""

    def end(error: TrafficError) -> NoReturn:
        try:
            Failure.of(error).end()
        finally:
            leave(1)

    if context.is_over_nccl and context.world_size > 1:
        context.waits.watch(end, context.device)


def refused_by_gpu(error: BaseException) -> str | None:
    """Return the message for an error of a GPU that accepts no more processes; None for other errors."""
    if re.search(r"CUDA-capable device.* busy or unavailable", str(error)) is None:
        return None
    advice = "`nvidia-smi -q -d COMPUTE` shows it; ranks that share a GPU need the mode Default"
    return f"the GPU is busy or in an exclusive compute mode: {advice}"


def out_of_memory(error: BaseException) -> str | None:
    """Return the message for exhausted memory (in Python, in torch on the CPU, on a GPU); None for other errors."""
    told = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError) or told == "CUDA error: out of memory":  # even for a process's context
        return f"out of memory on the GPU: {told}"
    if asked := re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error)):
        return f"out of memory: could not allocate {human_bytes(int(asked[1]))}"
    return f"out of memory{told and ': '}{told}" if isinstance(error, MemoryError) else None
