"""Runs a student's code in forked ranks: whatever it does, they all end within seconds, and say where they were.

Each rank watches itself. If its main thread has stood still for some seconds, it reports the line at which it stands
and the wait that it is in. From the waits of all ranks follows who waits for whom.
"""

import faulthandler
import functools
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm.context import Context, context_of
from distlab.comm.forked import forked
from distlab.comm.processes import leaving_no_process
from distlab.comm.waits import TrafficError
from distlab.rendezvous.diagnosis import Notice, diagnose
from simplellm.errors import InputError

Facts = dict[str, Any]  # what a rank tells of itself; JSON
SECONDS_FOR_CONSEQUENCES = 1.0  # after a rank has failed, how long others may take to fail too
LONGEST_SECONDS = 25.0  # of ranks that go on; right ones take a few, where others do not take the processor
LONGEST_LINE = 200  # of what a rank has printed
LONGEST_WORK_SECONDS = 10.0  # of the processor's time: an endless loop's
SECONDS_OF_A_WAIT = 0.1  # of the processor's time; a thread that waits takes less until it counts as standing still


@dataclass(frozen=True)
class Patience:
    """How long ranks are waited for."""

    still: float = 8.0  # seconds that a rank may stand still
    longest: float = LONGEST_SECONDS
    work: float = LONGEST_WORK_SECONDS  # the processor's time that a rank may take


@dataclass
class Report:
    """How a rank ended."""

    rank: int
    state: str  # "ended", "failed", "missing" (a part is not written), "stuck", "lost" (another rank ended), "died"
    sentence: str = ""
    line: str = ""  # where in the student's file: "line 57: buckets.finish()"
    notice: str = ""  # of a rank that is stuck: `distlab.rendezvous.diagnosis.Notice`, as JSON
    printed: list[str] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)


def free_port() -> int:
    """A port at which nothing listens, below those that the kernel hands out."""
    while True:
        port = random.SystemRandom().randrange(10_000, 29_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port


RankWork = Callable[..., Facts]  # (rank, *args): what the rank does


@dataclass(frozen=True)
class Submission:
    """A student's file, the folder in which its ranks work, and how long they are waited for."""

    script: Path
    folder: Path
    patience: Patience

    def run_ranks(self, world_size: int, work: RankWork, *args: Any) -> list[Report]:
        """As the function `run_ranks`; `work` is called with (rank, script, *args)."""
        script, folder, patience = self.script, self.folder, self.patience
        return run_ranks(world_size, work, script, *args, script=script, folder=folder, patience=patience)


def run_ranks(
    world_size: int, work: RankWork, *args: Any, script: Path, folder: Path, patience: Patience
) -> list[Report]:
    """Run `work(rank, *args)` in a fork for each rank (`forked`); the processes are gone when this returns.

    Args:
        script: the student's file, whose lines the reports name.
        folder: where the ranks work; what they print and write with relative paths is there.
    """
    rank_of_script = functools.partial(_run_rank, script, folder, patience, work, args)
    with leaving_no_process(), forked(world_size, rank_of_script) as pipes:
        reports = _collect(pipes, patience)
    for report in reports:
        told = folder / f"printed{report.rank}.txt"
        lines = told.read_text(errors="replace").splitlines() if told.exists() else []
        report.printed = [line[:LONGEST_LINE] for line in lines if line.strip() and not re.match(r"#|\d+ \d", line)]
    return [_crashed(report, str(script), folder) if report.state == "died" else report for report in reports]


def _crashed(report: Report, script: str, folder: Path) -> Report:
    """The report of a rank that died, with the place and the likely cause if libraries ended it."""
    left = _crash_file(folder, report.rank)
    told = left.read_text() if left.exists() else ""
    if not told:
        return report
    where = re.search(rf'File "{re.escape(script)}", line (\d+)', told)
    line = _line_at(script, int(where[1])) if where else ""
    cause = "as happens where ranks do not all call the same collectives, with tensors of the same size"
    return replace(report, sentence=f"crashed, {cause}", line=line)


def _crash_file(folder: Path, rank: int) -> Path:
    """Where Python writes the stack of a rank that libraries end, e.g. gloo by SIGABRT."""
    return folder / f"crash{rank}.txt"


def _collect(waiting: dict[Connection, int], patience: Patience) -> list[Report]:
    """The last word of each rank; ends early when nothing can change any more."""
    deadline = time.monotonic() + patience.longest + 3
    reports: dict[int, Report] = {}
    everybody = sorted(waiting.values())
    while waiting:
        ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting[receiver]
            try:
                report = Report(**json.loads(receiver.recv_bytes()))
            except (EOFError, OSError):
                report = Report(rank, "died", "ended without a word: it was killed, or called os._exit")
            if report.state == "moves":
                reports.pop(rank, None)
                continue
            reports[rank] = report
            if report.state != "stuck":  # which may change
                del waiting[receiver]
            if report.state in ("failed", "died"):  # of a death, the others tell more: what they wait for
                still = patience.still if report.state == "died" else 0
                deadline = min(deadline, time.monotonic() + still + SECONDS_FOR_CONSEQUENCES)
        if any(report.state == "missing" for report in reports.values()):
            break  # nothing else matters
        if waiting and all(rank in reports for rank in waiting.values()):
            break  # all that have not ended are stuck
    return [reports.get(rank) or Report(rank, "silent", "did not answer") for rank in everybody]


def _run_rank(
    script: Path, folder: Path, patience: Patience, work: RankWork, args: tuple[Any, ...], rank: int, pipe: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the checker, which ends the ranks
    sys.dont_write_bytecode = True  # in the student's folder
    sys.stdout = (folder / f"printed{rank}.txt").open("w", buffering=1)  # for the rest of the process
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), sys.stdout.fileno(), sys.stderr.fileno())):
        os.dup2(descriptor, stream)
    os.chdir(folder)
    faulthandler.enable(_crash_file(folder, rank).open("w"))
    torch.manual_seed(1000 + rank)
    if dist.is_initialized():  # by the process that forked this one
        dist.destroy_process_group()
    has_ended, lock = threading.Event(), threading.Lock()

    def tell(report: Report) -> None:
        with lock:
            if not has_ended.is_set():
                pipe.send_bytes(json.dumps(asdict(report)).encode())
            if report.state not in ("stuck", "moves"):
                has_ended.set()

    threading.Thread(target=_watch, args=(rank, str(script), patience, tell), daemon=True).start()
    try:
        report = Report(rank, "ended", facts=work(rank, *args))
    except BaseException as error:
        report = _failed(rank, error, str(script))
    tell(report)
    time.sleep(patience.longest)  # until the checker has all reports: closed connections would disturb other ranks


def _failed(rank: int, error: BaseException, script: str) -> Report:
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    line = f"line {own[-1].lineno}: {own[-1].line}" if own else ""
    if isinstance(error, SyntaxError) and error.filename == script:
        line = f"line {error.lineno}: {(error.text or '').strip()}"
    if isinstance(error, NotImplementedError):
        what = str(error) or "a part"
        return Report(rank, "missing", what, line.partition(":")[0] if what in line else line)
    wait = error if isinstance(error, TrafficError) else None
    if isinstance(error, Exception) and wait is None:
        context = _context()
        wait = context.waits.failure_of(error) if context else None
    if wait is not None and wait.lost_a_peer:
        return Report(rank, "lost", str(wait), line)
    if isinstance(error, SystemExit):
        return Report(rank, "failed", "the file called sys.exit() before its work was done", line)
    told = (error.msg if isinstance(error, SyntaxError) else str(error)).partition("\n")[0]
    name = "" if isinstance(error, InputError | TrafficError) else f"{type(error).__name__}{': ' * bool(told)}"
    return Report(rank, "failed", f"{name}{told}", line)


def _watch(rank: int, script: str, patience: Patience, tell: Callable[[Report], None]) -> None:
    """Report when the main thread stands still for too long, when it moves on, or when it has taken too long."""
    main = threading.main_thread().ident
    assert main is not None
    started = since = time.monotonic()
    before: list[tuple[int, int]] = []
    is_still, worked, worked_before = False, 0.0, 0.0
    while time.monotonic() - started < patience.longest and worked < patience.work:
        time.sleep(0.1)
        frame, now, own = sys._current_frames().get(main), [], ""
        while frame is not None:
            now.append((id(frame.f_code), frame.f_lasti))
            own = own or _line_of(frame, script)
            frame = frame.f_back
        worked = _seconds_computed_by(main)  # a loop may be seen at one place again and again
        if now != before or worked - worked_before > SECONDS_OF_A_WAIT:
            before, since, worked_before = now, time.monotonic(), worked
            if is_still:
                tell(Report(rank, "moves"))
                is_still = False
        if not is_still and time.monotonic() - since > patience.still:
            is_still = True
            notice, context = Notice(rank, None), _context()
            if context is not None:
                notice = Notice(rank, context.waits.waits_for(), dict(context.begun), held_back=context.held_back())
            tell(Report(rank, "stuck", "waits", own, notice.to_json()))
    after = f"had not finished after {time.monotonic() - started:.0f} s"
    tell(Report(rank, "stuck", after, own, Notice(rank, None).to_json()))


def _context() -> Context | None:
    """What the lab's groups know of their waits; None where the file has made none of the lab's."""
    try:
        return context_of()
    except ValueError:
        return None


def _seconds_computed_by(thread: int) -> float:
    """Of the processor's time; 0 where the system does not tell."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) if hasattr(time, "pthread_getcpuclockid") else 0.0


def _line_of(frame: FrameType, script: str) -> str:
    if frame.f_code.co_filename != script:
        return ""
    return _line_at(script, frame.f_lineno)


def _line_at(script: str, number: int) -> str:
    return f"line {number}: {Path(script).read_text().splitlines()[number - 1].strip()}"


def trouble(reports: list[Report], describe: Callable[[int], str] = "rank {}".format) -> tuple[str, list[str]] | None:
    """What kept ranks from ending, as the name of the mistake, and sentences; None if all have ended.

    Of several reports, those count that are no consequence of others.
    """
    by_state: dict[str, list[Report]] = {}
    for report in reports:
        by_state.setdefault(report.state, []).append(report)
    for state, mistake in (("missing", "not-written"), ("failed", "exception"), ("died", "died")):
        if first := by_state.get(state, [None])[0]:
            where = f" ({first.line})" if first.line else ""
            if state == "missing":
                return mistake, [f"not written yet: {first.sentence}{where}"]
            who = f"{describe(first.rank)} " if len(reports) > 1 else ""
            others = [*by_state.get("lost", []), *by_state.get("stuck", [])] if state == "died" else []
            meanwhile = [f"{describe(other.rank)} was in {other.line}" for other in others if other.line]
            return mistake, [f"{who}{'failed: ' if state == 'failed' else ''}{first.sentence}{where}", *meanwhile]
    if len(by_state.get("ended", [])) == len(reports):
        return None
    return _hang(reports, describe)


def _hang(reports: list[Report], describe: Callable[[int], str]) -> tuple[str, list[str]]:
    """Who waits for whom, and at which lines."""
    notices = {report.rank: Notice.from_json(report.notice) for report in reports if report.notice}
    has_ended = [report.rank for report in reports if report.state == "ended"]
    sentences = []
    waits: Mapping[int, Notice] = {rank: notice for rank, notice in notices.items() if notice.wait is not None}
    if waits:
        found = diagnose(notices, {}, len(reports), describe, LONGEST_SECONDS)
        is_known = found.sentence.startswith("deadlock")
        sentences.append(found.sentence if is_known else "the ranks wait for each other, and none can go on")
    else:
        sentences.append("the ranks do not come to an end")
    for report in reports:
        where = f", in {report.line}" if report.line else ""
        wait_of = notices[report.rank].wait if report.rank in notices else None
        if report.rank in has_ended:
            sentences.append(f"{describe(report.rank)} has finished")
        elif wait_of is not None:
            waits_for = replace(wait_of, line="").sentence(describe)  # the report has the line
            sentences.append(f"{describe(report.rank)} waits for {waits_for}{where}")
        else:
            sentences.append(f"{describe(report.rank)} {report.sentence}{where}")
    return "deadlock", sentences
