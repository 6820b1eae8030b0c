"""What stands around every script: from the command line to the exit status.

def train(run: TrainingRun[DataParallelSettings]) -> None: ...

if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
"""

import argparse
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from distlab.checkpoints.format import has_checkpoints
from distlab.comm.processes import end_with_parent, leave
from distlab.comm.torch_patches import silence_torch_warnings
from distlab.comm.traffic import TrafficError, rank, traffic
from distlab.rendezvous import ranks as meeting
from distlab.rendezvous.notices import notices
from distlab.run.logs import RankOutput, human_bytes, say
from distlab.run.not_finite import NotFiniteError
from distlab.run.resumable import ResumableRun
from distlab.run.run import Run
from distlab.run.settings import ResumableSettings, RunSettings, TrainSettings, WorldSize, parse
from distlab.run.training import TrainingRun
from simplellm.errors import InputError

SettingsT = TypeVar("SettingsT", bound=RunSettings)


def main(work: Callable[[Any], None], defaults: RunSettings, description: str | None) -> NoReturn:
    """Run a script from its command line to its exit status.

    Args:
        work: takes the `TrainingRun`, `ResumableRun` or `Run`, as its settings are of the same kind.
        defaults: the script's settings, which the command line changes.
        description: the script's docstring.

    The exit status is 0 if all went well, 2 for what the user can mend, 130 for Ctrl-C, else 1.
    """
    script = Path(sys.argv[0])
    run: Run[Any] | None = None
    try:
        end_with_launcher()
        silence_torch_warnings()
        args = [*sys.argv[1:], *flags_to_go_on()]
        settings = parse(with_torchrun_world(defaults), description or script.stem, args)
        run = kind_of_run(settings)(settings, script)
        work(run)
        run.close()
    except InputError as error:
        notices.report_exit(str(error))
        notices.keep_store_open()
        fail(str(error), 2)
    except TrafficError as error:
        fail_waiting(error)
    except NotFiniteError as error:
        fail(str(error), 1, grace_period=True, names_rank=True, recurs_on_restart=True)
    except KeyboardInterrupt:
        notices.report_exit("interrupted")
        if run is not None:
            run.summarize()
        notices.keep_store_open()
        fail("interrupted", 130)
    except BrokenPipeError:
        leave(1)  # the reader of this output has gone, as `head` does
    except Exception as error:
        failed_wait = traffic.failure_of(error)  # of a library that talks to other ranks itself
        if failed_wait is not None:
            fail_waiting(failed_wait)
        cause = out_of_memory(error)
        if cause is None:
            traceback.print_exc()
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
        notices.report_exit(cause)
        notices.keep_store_open()
        fail(f"{traffic.describe(rank())} failed: {cause}", 1, names_rank=True)
    leave(0)


def kind_of_run(settings: RunSettings) -> type[Run[Any]]:
    """Which run has settings of this kind."""
    if isinstance(settings, TrainSettings):
        return TrainingRun
    return ResumableRun if isinstance(settings, ResumableSettings) else Run


def fail_waiting(error: TrafficError) -> NoReturn:
    """End this process because a wait for other ranks has failed: say so, draw who waits for whom, name the cause."""
    found = notices.explain(error)
    if found is None:
        fail(str(error), 1, error.lost_a_peer, grace_period=True)
    print(f"# {error}", file=sys.stderr)
    if found.picture and (not meeting.started_by_torchrun() or notices.may_draw()):
        for line in found.picture:
            say(line)
    notices.publish_diagnosis(found)
    notices.keep_store_open()
    fail(found.sentence, 1, error.lost_a_peer or found.is_partial, grace_period=True, names_rank=True)


def out_of_memory(error: Exception) -> str | None:
    """What an error says if memory ran out, in Python, in torch on the CPU, or on a GPU; else None."""
    told = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory on the GPU: {told}"
    asked = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
    if asked:
        return f"out of memory: it asked for {human_bytes(int(asked[1]))} more"
    return f"out of memory{told and ': '}{told}" if isinstance(error, MemoryError) else None


def fail(
    sentence: str,
    status: int,
    lost_a_peer: bool = False,
    grace_period: bool = False,
    names_rank: bool = False,
    recurs_on_restart: bool = False,
) -> NoReturn:
    """End this process, and leave a sentence where it is looked for: on the terminal and in torchrun's error file.

    Args:
        sentence: what went wrong.
        status: the exit status; what the user can mend (2) is often seen by all ranks, and launch.sh prints it once.
        lost_a_peer: this is the consequence of another rank's end.
        grace_period: give the other ranks a second for their own words, since torchrun ends all when one has failed.
        names_rank: the sentence says which rank failed, and launch.sh prints it last, once for all ranks.
        recurs_on_restart: it would, in the same step of a restarted run, so launch.sh does not restart it; nor where
             the user can mend it.
    """
    recurs_on_restart = recurs_on_restart or status == 2
    restarts, allowed = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    starts_again = restarts != allowed and not recurs_on_restart
    is_printed_last = "LAB_LAUNCHER" in os.environ and not starts_again and (names_rank or status == 2)
    if is_printed_last and isinstance(sys.stderr, RankOutput):
        sys.stderr.keep(f"# {sentence}\n")
    else:
        print(f"# {sentence}", file=sys.stderr)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        record = {"message": sentence, "timestamp": int(time.time()), "lost_a_peer": lost_a_peer, "status": status}
        record |= {"names_rank": names_rank, "recurs_on_restart": recurs_on_restart}
        Path(error_file).write_text(json.dumps(record))
    if grace_period and meeting.started_by_torchrun():
        time.sleep(1)
    leave(status)


def with_torchrun_world(defaults: SettingsT) -> SettingsT:
    """`defaults` with the world size that torchrun's environment gives, where the script has that flag."""
    if meeting.started_by_torchrun() and isinstance(defaults, WorldSize):
        defaults.world_size = int(os.environ["WORLD_SIZE"])
    return defaults


def flags_to_go_on() -> list[str]:
    """`--resume` with the run's own folder, if torchrun has started the ranks again and there is something to resume.

    torchrun, or `launch.sh --max-restarts`, does so when a rank has failed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    out = parser.parse_known_args()[0].out
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return ["--resume", str(out)] if restarts and out is not None and has_checkpoints(out) else []


def end_with_launcher() -> None:
    """Have Linux end this rank when the launcher that started it dies, even by SIGKILL: no orphans."""
    if meeting.started_by_torchrun() and sys.platform == "linux":
        end_with_parent(signal.SIGKILL)  # a rank that is stopped would not hear SIGTERM
        if os.environ.get("LAB_LAUNCHER", str(os.getppid())) != str(os.getppid()):
            leave(1)  # it died while this rank was starting
