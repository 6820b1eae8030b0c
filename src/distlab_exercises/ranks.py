"""Runs a student's code in forked ranks: whatever it does, they all end within seconds, and report where they were.

Each rank watches itself. If its main thread has stood still for some seconds, it reports the line at which it stands
and its wait. The waits of all ranks show who waits for whom.
"""

import faulthandler
import functools
import json
import linecache
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from distlab.comm.context import Context, context_of
from distlab.comm.waits import TrafficError
from distlab.rendezvous.diagnosis import Notice, diagnose
from distlab_exercises.forked import forked, leaving_no_process
from distlab_exercises.verdict import Wrong
from simplellm.errors import InputError

Facts = dict[str, Any]  # a rank's report on itself; JSON
SECONDS_FOR_CONSEQUENCES = 1.0  # time for other ranks to fail, or to move on, after a rank has failed or ended
LONGEST_SECONDS = 25.0  # of running ranks; right ones take a few on an idle processor
LONGEST_LINE, LAST_LINES = 200, 5  # of a rank's output
LONGEST_WORK_SECONDS = 10.0  # of the processor's time: an endless loop's
SECONDS_OF_A_WAIT = 0.1  # of the processor's time; a thread that waits takes less until it counts as standing still


@dataclass(frozen=True)
class Patience:
    """Time limits for ranks."""

    still: float = 8.0  # seconds that a rank may stand still
    longest: float = LONGEST_SECONDS
    work: float = LONGEST_WORK_SECONDS  # the processor's time that a rank may take


@dataclass
class Report:
    """The state of a rank; its end, unless it "runs" or is "stuck"."""

    rank: int
    state: str  # or "ended", "wrong", "failed", "missing" (not written), "lost" (another rank ended), "died"
    sentences: list[str] = field(default_factory=list)
    mistake: str = ""  # its name, of a rank that is wrong
    line: str = ""  # where in the student's file: "line 57: buckets.finish()"
    notice: str = ""  # of a rank that is stuck: `distlab.rendezvous.diagnosis.Notice`, as JSON
    facts: Facts = field(default_factory=dict)


def free_port() -> int:
    """Return a port at which nothing listens, below those that the kernel hands out."""
    while True:
        port = random.SystemRandom().randrange(10_000, 29_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port


@dataclass(frozen=True)
class Submission:
    """A student's file, the folder in which its ranks work and meet, and their time limits."""

    script: Path
    folder: Path
    patience: Patience = field(default_factory=Patience)
    port: int = field(default_factory=free_port)

    def run_ranks(self, world_size: int, work: "RankWork", *args: Any) -> list[Report]:
        """Run `work(rank, submission, *args)` in a fork for each rank (`forked`); all are gone when this returns.

        What the ranks print and write with relative paths is in `folder`. The reports name lines of `script`.
        """
        with leaving_no_process(), forked(world_size, functools.partial(_run_rank, self, work, args)) as pipes:
            reports = _collect(pipes, self.patience)
        for report in (report for report in reports if report.state == "died"):
            self._explain_crash(report)
        return reports

    def printed(self) -> list[str]:
        """Return the last lines that each rank printed, without the lab's."""
        found = []
        for file in sorted(self.folder.glob("printed*.txt")):
            lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
            own = [line[:LONGEST_LINE] for line in lines if not re.match(r"#|\d+ \d", line)]
            found += [f"rank {file.stem.removeprefix('printed')}: {line}" for line in own[-LAST_LINES:]]
        return found

    def _explain_crash(self, report: Report) -> None:
        """Give the report of a rank that died the place and the likely cause, if libraries ended it."""
        left = self.crash_file(report.rank)
        if told := left.read_text() if left.exists() else "":
            where = re.search(rf'File "{re.escape(str(self.script))}", line (\d+)', told)
            report.line = _line_at(str(self.script), int(where[1])) if where else ""
            cause = "as happens where ranks do not all call the same collectives, with tensors of the same size"
            report.sentences = [f"crashed, {cause}"]

    def crash_file(self, rank: int) -> Path:
        """Return the file for Python's stack of a rank that libraries end, e.g. gloo by SIGABRT."""
        return self.folder / f"crash{rank}.txt"


RankWork = Callable[..., Facts]  # (rank, submission, *args): what the rank does


def _collect(waiting: dict[Connection, int], patience: Patience) -> list[Report]:
    """Return the last word of each rank; ends early when nothing can change any more."""
    deadline = time.monotonic() + patience.longest + 3
    reports = {rank: Report(rank, "runs") for rank in sorted(waiting.values())}
    while waiting:
        left = deadline - time.monotonic()
        if all(reports[rank].state == "stuck" for rank in waiting.values()):
            left = min(left, SECONDS_FOR_CONSEQUENCES)  # the last that ended may let one move on
        ready = wait(list(waiting), timeout=max(0, left))
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting[receiver]
            try:
                report = Report(**json.loads(receiver.recv_bytes()))
            except (EOFError, OSError):
                report = Report(rank, "died", ["ended without a word: it was killed, or called os._exit"])
            reports[rank] = report
            if report.state not in ("runs", "stuck"):
                del waiting[receiver]
            if report.state in ("wrong", "failed", "died"):  # after a death, the waits of the others say more
                still = patience.still if report.state == "died" else 0
                deadline = min(deadline, time.monotonic() + still + SECONDS_FOR_CONSEQUENCES)
        if any(report.state == "missing" for report in reports.values()):
            break  # nothing else matters
    return [*reports.values()]


def _run_rank(submission: Submission, work: RankWork, args: tuple[Any, ...], rank: int, pipe: Connection) -> None:
    folder, script, patience = submission.folder, str(submission.script), submission.patience
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the checker, which ends the ranks
    sys.dont_write_bytecode = True  # in the student's folder
    sys.stdout = (folder / f"printed{rank}.txt").open("w", buffering=1)  # for the rest of the process
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), sys.stdout.fileno(), sys.stderr.fileno())):
        os.dup2(descriptor, stream)
    os.chdir(folder)
    faulthandler.enable(submission.crash_file(rank).open("w"))
    torch.manual_seed(1000 + rank)
    lock = threading.Lock()

    def tell(report: Report) -> None:
        """Send a report; after the last word, nobody reads those of the watch."""
        with lock:
            pipe.send_bytes(json.dumps(asdict(report)).encode())

    threading.Thread(target=_watch, args=(rank, script, patience, tell), daemon=True).start()
    try:
        report = Report(rank, "ended", facts=work(rank, submission, *args))
    except BaseException as error:
        report = _failed(rank, error, script)
    tell(report)
    time.sleep(patience.longest)  # until the checker has all reports: closed connections would disturb other ranks


def _failed(rank: int, error: BaseException, script: str) -> Report:
    """Return the report of a rank whose work raised an error."""
    line = _line_of(error, script)
    if isinstance(error, Wrong):
        return Report(rank, "wrong", list(error.sentences), error.mistake)
    if isinstance(error, NotImplementedError):
        what = str(error) or "a part"
        return Report(rank, "missing", [what], line=line.partition(":")[0] if what in line else line)
    wait = error if isinstance(error, TrafficError) else None
    if isinstance(error, Exception) and wait is None and (context := _context()) is not None:
        wait = context.waits.failure_of(error)
    if wait is not None and wait.lost_a_peer:
        return Report(rank, "lost", [str(wait)], line=line)
    return Report(rank, "failed", [_in_words(error, line)], line=line)


def _line_of(error: BaseException, script: str) -> str:
    """Return the innermost line of a file that raised an error, or the line that is not Python."""
    if isinstance(error, SyntaxError) and error.filename == script:
        return f"line {error.lineno}: {(error.text or '').strip()}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    return f"line {own[-1].lineno}: {own[-1].line}" if own else ""


def _in_words(error: BaseException, line: str) -> str:
    """Return an error in words, for the line that raised it."""
    if isinstance(error, SystemExit):
        return "the file called sys.exit() before its work was done"
    is_none = "NoneType" in str(error) or isinstance(error, AssertionError)
    if is_none and (gradient := re.search(r"\w+\.grad\b", line)):
        return f"{gradient[0]} is None: what requires no gradient (requires_grad_) gets none"
    told = (error.msg if isinstance(error, SyntaxError) else str(error)).partition("\n")[0]
    if isinstance(error, InputError | TrafficError):
        return told
    return f"{type(error).__name__}{': ' * bool(told)}{told}"


def _watch(rank: int, script: str, patience: Patience, tell: Callable[[Report], None]) -> None:
    """Report when the main thread stands still for too long, when it moves on, or when it has taken too long."""
    main = threading.main_thread().ident
    assert main is not None
    started = now = moved = time.monotonic()  # when it was last seen to move
    worked = worked_before = 0.0  # seconds that it has computed, and had when it was last seen to move
    place: list[tuple[int, int]] = []
    line, is_still = "", False
    while now - started < patience.longest and worked < patience.work:
        time.sleep(0.1)
        before, (place, line) = place, _place_of(main, script)
        now, worked = time.monotonic(), _seconds_computed_by(main)
        is_at_work = worked - worked_before > SECONDS_OF_A_WAIT  # a loop may be seen at one place all the time
        if place != before or is_at_work:
            moved, worked_before = now, worked
            if is_still:
                tell(Report(rank, "runs"))
                is_still = False
        if not is_still and now - moved > patience.still:
            is_still = True
            tell(Report(rank, "stuck", ["waits"], line=line, notice=_notice_of(rank).to_json()))
    after = f"had not finished after {now - started:.0f} s"
    tell(Report(rank, "stuck", [after], line=line, notice=Notice(rank, None).to_json()))


def _place_of(thread: int, script: str) -> tuple[list[tuple[int, int]], str]:
    """Return a thread's place in each function that it is in, and the innermost line of a file among them."""
    place: list[tuple[int, int]] = []
    frame, line = sys._current_frames().get(thread), ""
    while frame is not None:
        place.append((id(frame.f_code), frame.f_lasti))
        if not line and frame.f_code.co_filename == script:
            line = _line_at(script, frame.f_lineno)
        frame = frame.f_back
    return place, line


def _notice_of(rank: int) -> Notice:
    """Return what this rank waits for, and the collectives that it began."""
    context = _context()
    if context is None:
        return Notice(rank, None)
    return Notice(rank, context.waits.waits_for(), dict(context.begun), held_back=context.held_back())


def _context() -> Context | None:
    """Return the context of the lab's groups, which knows their waits; None if the file has made no such group."""
    try:
        return context_of()
    except ValueError:
        return None


def _seconds_computed_by(thread: int) -> float:
    """Return a thread's processor time; 0 where the system does not report it."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) if hasattr(time, "pthread_getcpuclockid") else 0.0


def _line_at(script: str, number: int) -> str:
    return f"line {number}: {linecache.getline(script, number).strip()}"  # in the encoding that the file declares


def raise_trouble(reports: list[Report], describe: Callable[[int], str] = "rank {}".format) -> None:
    """Raise `Wrong` with the reason why ranks did not end, unless all have ended.

    Of several reports, only those that are not consequences of others count.
    """
    first_with = {report.state: report for report in reversed(reports)}
    if first_with.keys() == {"ended"}:
        return
    first = next((first_with[state] for state in ("missing", "wrong", "failed", "died") if state in first_with), None)
    if first is None:
        raise Wrong("deadlock", *_who_waits(reports, describe))
    if first.state == "wrong":
        raise Wrong(first.mistake, *first.sentences)
    told = first.sentences[0] + f" ({first.line})" * bool(first.line)
    if first.state == "missing":
        raise Wrong("not-written", f"not written yet: {told}")
    who = f"{describe(first.rank)} " if len(reports) > 1 else ""
    if first.state == "failed":
        raise Wrong("exception", f"{who}failed: {told}")
    others = [report for state in ("lost", "stuck") for report in reports if report.state == state]
    meanwhile = [f"{describe(other.rank)} was in {other.line}" for other in others if other.line]
    raise Wrong("died", f"{who}{told}", *meanwhile)


def _who_waits(reports: list[Report], describe: Callable[[int], str]) -> Iterator[str]:
    """Yield sentences on who waits for whom, and at which lines."""
    notices = {report.rank: Notice.from_json(report.notice) for report in reports if report.notice}
    if any(notice.wait is not None for notice in notices.values()):
        found = diagnose(notices, {}, len(reports), describe, LONGEST_SECONDS).sentence
        if found.startswith("deadlock"):
            yield found
        elif len({report.line for report in reports}) == 1 and all(report.state == "stuck" for report in reports):
            yield "all ranks are in the same collective, and it cannot end: have their tensors different sizes?"
        else:
            yield "the ranks wait for each other, and none can go on"
    else:
        yield "the ranks do not come to an end"
    for report in reports:
        where = f", in {report.line}" if report.line else ""
        wait_of = notices[report.rank].wait if report.rank in notices else None
        if report.state == "ended":
            yield f"{describe(report.rank)} has finished"
        elif wait_of is not None:
            waits_for = wait_of._replace(line="").sentence(describe)  # the report has the line
            yield f"{describe(report.rank)} waits for {waits_for}{where}"
        else:
            yield f"{describe(report.rank)} {report.sentences[0] if report.sentences else 'did not answer'}{where}"
