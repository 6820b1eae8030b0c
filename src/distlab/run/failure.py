"""One way to fail: an exception becomes a `Failure`, which tells the user, the other ranks and the launcher."""

import json
import os
import re
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from distlab.comm.processes import leave
from distlab.comm.traffic import rank, traffic
from distlab.comm.waits import TrafficError
from distlab.rendezvous.notices import notices
from distlab.rendezvous.torchrun import started_by_torchrun
from distlab.run.logs import RankOutput, human_bytes, say
from distlab.run.not_finite import NotFiniteError
from distlab.run.progress import status_line
from simplellm.errors import InputError


@dataclass(frozen=True)
class Failure:
    """Why a rank ends."""

    sentence: str  # what went wrong; it is printed, and goes to torchrun's error file
    status: int = 1  # what the user can mend (2) is often seen by all ranks, and launch.sh prints it once
    cause: str = ""  # what the other ranks, which may be waiting, are told; "" where they find out themselves
    names_rank: bool = False  # the sentence says which rank failed, and launch.sh prints it last, once for all ranks
    lost_a_peer: bool = False  # it is the consequence of another rank's end
    recurs_on_restart: bool = False  # in the same step, so launch.sh does not restart the ranks
    is_diagnosed: bool = False  # the ranks have found out together who waits for whom
    grace_period: bool = False  # give other ranks a second for their own sentences: torchrun ends all when one fails

    @classmethod
    def of(cls, error: Exception | KeyboardInterrupt) -> "Failure":
        """The table: which error becomes which failure. What is our fault prints its traceback."""
        if isinstance(error, InputError):
            return cls(str(error), status=2, cause=str(error), recurs_on_restart=True)
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", status=130, cause="interrupted")
        if isinstance(error, NotFiniteError):  # all ranks raise it
            return cls(str(error), names_rank=True, recurs_on_restart=True, grace_period=True)
        # A library that talks to other ranks itself raises other errors for a wait that failed.
        wait = error if isinstance(error, TrafficError) else traffic.failure_of(error)
        if wait is not None:
            return cls._of_wait(wait)
        cause = out_of_memory(error) or refused_by_gpu(error)
        if cause is None:
            traceback.print_exception(error)
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(f"{traffic.describe(rank())} failed: {cause}", cause=cause, names_rank=True)

    @classmethod
    def _of_wait(cls, error: TrafficError) -> "Failure":
        """A wait for other ranks has failed: find out with them who waits for whom, draw it, and name the cause."""
        found = notices.explain(error)
        if found is None:
            return cls(str(error), lost_a_peer=error.lost_a_peer, grace_period=True)
        print(f"# {error}", file=sys.stderr)
        if found.picture and (not started_by_torchrun() or notices.may_draw()):
            for line in found.picture:
                say(line)
        notices.publish_diagnosis(found)
        lost_a_peer = error.lost_a_peer or found.is_partial
        return cls(found.sentence, names_rank=True, lost_a_peer=lost_a_peer, is_diagnosed=True, grace_period=True)

    def end(self) -> NoReturn:
        """Leave the sentence where it is looked for, on the terminal and in torchrun's error file, and exit."""
        status_line.clear()
        if self.cause or self.is_diagnosed:
            notices.keep_store_open()
        restarts, allowed = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        is_restarted = restarts != allowed and not self.recurs_on_restart
        is_printed_last = "LAB_LAUNCHER" in os.environ and not is_restarted and (self.names_rank or self.status == 2)
        if is_printed_last and isinstance(sys.stderr, RankOutput):
            sys.stderr.keep(f"# {self.sentence}\n")
        else:
            print(f"# {self.sentence}", file=sys.stderr)
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            names = "status", "names_rank", "lost_a_peer", "recurs_on_restart"
            record = {"message": self.sentence, "timestamp": int(time.time())}
            Path(error_file).write_text(json.dumps(record | {name: getattr(self, name) for name in names}))
        if self.grace_period and started_by_torchrun():
            time.sleep(1)
        leave(self.status)


def refused_by_gpu(error: BaseException) -> str | None:
    """What an error says if a GPU takes no more processes; else None."""
    if re.search(r"CUDA-capable device.* busy or unavailable", str(error)) is None:
        return None
    advice = "`nvidia-smi -q -d COMPUTE` shows it; ranks that share a GPU need the mode Default"
    return f"the GPU is busy, or in a compute mode in which one process has it for itself: {advice}"


def out_of_memory(error: BaseException) -> str | None:
    """What an error says if memory ran out, in Python, in torch on the CPU, or on a GPU; else None."""
    told = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory on the GPU: {told}"
    if asked := re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error)):
        return f"out of memory: it asked for {human_bytes(int(asked[1]))} more"
    return f"out of memory{told and ': '}{told}" if isinstance(error, MemoryError) else None
