"""How long work will take, by a clock of the test's own; and what a run shows of it, in a pipe and on a terminal."""

import fcntl
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from support.processes import LAB
from support.terminals import fork_command, fork_python

from distlab.run import failure
from distlab.run.progress import Progress, human_time
from distlab.run.terminal import RankOutput, StatusLine, Terminal

TINY = "--dmodel 16 --num-heads 2 --n-layers 1 --seq-len 16 --data sample --device cpu".split()
WIDTH = 60  # of the terminal
# In front of a script: it says how far it is as often as it can.
OFTEN = """
from distlab.run import progress

progress.SECONDS_TO_ESTIMATE = progress.SECONDS_BETWEEN_LINES = progress.SECONDS_BETWEEN_REDRAWS = 0

DEFAULTS ="""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "1 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (59.4 * 60, "59 min"),
        (59.6 * 60, "1 h 0 min"),
        (6720, "1 h 52 min"),
        (47 * 3600, "47 h 0 min"),
        (76.2 * 3600, "3 d 4 h"),
    ],
)
def test_human_time(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


class Steps:
    """Steps of a run whose clock shows what a test lets them take, and what was said after how many of them."""

    def __init__(self, total: int, done: int = 0, speed: Callable[[float], str] | None = None) -> None:
        self.now, self.done, self.taken, self.said = 1000.0, done, 0, dict[int, str]()
        self._progress = Progress(total, self._say, done=done, speed=speed, clock=lambda: self.now)

    def _say(self, text: str) -> None:
        assert self.taken not in self.said
        self.said[self.taken] = text

    def take(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.taken += 1
            self._progress.advance(self.done + self.taken)


def test_a_status_line_is_drawn_a_few_times_a_second() -> None:
    now, drawn = 1000.0, list[str]()
    status: Any = SimpleNamespace(show=drawn.append, clear=lambda: drawn.append(""))
    progress = Progress(501, print, status=status, clock=lambda: now)
    for done in range(1, 501):
        now += 0.002
        progress.advance(done)
    assert 5 <= len(drawn) <= 7
    assert drawn[0] == "0 of 501 steps"
    progress.advance(501)
    assert drawn[-1] == ""


def test_the_first_step_is_left_out_and_a_line_comes_every_minute() -> None:
    steps = Steps(5000, speed=lambda per_second: f"{100 * per_second:.0f} tokens/s")
    steps.take(1, seconds=30)
    steps.take(199, seconds=1.35)
    assert steps.said == {
        4: "about 1 h 52 min for the remaining 4,996 steps",
        49: "49 of 5,000 steps, 74 tokens/s, about 1 h 51 min left",
        94: "94 of 5,000 steps, 74 tokens/s, about 1 h 50 min left",
        139: "139 of 5,000 steps, 74 tokens/s, about 1 h 49 min left",
        184: "184 of 5,000 steps, 74 tokens/s, about 1 h 48 min left",
    }


@pytest.mark.parametrize(("seconds", "first"), [(0.001, 2001), (0.1, 21), (1, 4), (20, 2)])
def test_the_first_estimate_comes_soon_and_not_from_too_little(seconds: float, first: int) -> None:
    steps = Steps(100_000)
    steps.take(first + 1, seconds)
    assert list(steps.said) in ([first], [first + 1])  # by rounding


def test_validation_and_checkpoints_are_part_of_the_time() -> None:
    """A step takes a second and every tenth ten more, so the 100 that are left take 200."""
    steps = Steps(300)
    for _ in range(20):
        steps.take(9, seconds=1)
        steps.take(1, seconds=11)
    assert list(steps.said.values())[-1].endswith("about 4 min left")  # of 120 steps or so
    assert max(steps.said) > 170


def test_a_resumed_run_is_timed_by_its_own_steps() -> None:
    steps = Steps(5000, done=4900)
    steps.take(99, seconds=10)
    assert steps.said[2] == "about 16 min for the remaining 98 steps"
    assert steps.said[8] == "4,908 of 5,000 steps, about 15 min left"
    assert list(steps.said.values())[-1] == "4,998 of 5,000 steps, about 20 s left"


def test_a_change_of_speed_is_followed() -> None:
    steps = Steps(1000)
    steps.take(100, seconds=1)
    steps.take(300, seconds=10)
    assert steps.said[max(steps.said)] == "397 of 1,000 steps, about 1 h 40 min left"
    few = Steps(1000)
    few.take(5, seconds=1)
    few.take(3, seconds=20)
    assert few.said[8] == "8 of 1,000 steps, about 2 h 31 min left", "but not from a few: 64 s for seven of them"


# --------------------------------------------------------------------------------------------------------- a real run


def often(script: str, folder: Path) -> Path:
    """A copy of a script that says how far it is as often as it can."""
    text = (LAB / script).read_text()
    assert text.count("\nDEFAULTS =") == 1
    copy = folder / Path(script).name
    copy.write_text(text.replace("\nDEFAULTS =", OFTEN))
    return copy


def test_in_a_pipe_there_are_plain_lines(tmp_path: Path) -> None:
    """A run of six steps, resumed for four more."""
    script, speed = often("primer/intro.py", tmp_path), r"[\d,]+ tokens/s"
    flags = [*TINY, "--save-every", "6", "--out", tmp_path / "run"]
    for first, steps in ((0, 6), (6, 10)):
        resume = ["--resume", tmp_path / "run"] if first else []
        ended = fork_python(script, *flags, *resume, "--steps", str(steps), TERM="xterm").finish()
        assert ended.status == 0, ended.err
        assert not re.search(r"[\x1b\r]", ended.out + ended.err)
        assert ended.out == (tmp_path / "run/rank0.log").read_text()[-len(ended.out) :], "its log has the same lines"
        lines = ended.out.splitlines()
        begin = lines.index(
            f"# {steps - first} steps of 48 tokens each" + f"; {first} of {steps} are done" * bool(first)
        )
        end = next(number for number, line in enumerate(lines) if line.startswith("# memory"))
        expected = []
        for step in range(first, steps):
            expected.append(rf"{step} \d\.\d{{8}}" + rf"  {speed}" * (step > first))
            if step - first == 3 and step + 1 < steps:
                expected.append(rf"# about \d+ s for the remaining {steps - step - 1} steps")
            elif step - first > 3 and step + 1 < steps:
                expected.append(rf"# {step + 1} of {steps} steps, {speed}, about \d+ s left")
        for line, pattern in zip(lines[begin + 1 : end], expected, strict=True):
            assert re.fullmatch(pattern, line), (pattern, line)


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end; of escape sequences it knows the one that erases a line."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[K|[\r\n]|[^\x1b\r\n]+|\x1b", text):
        if part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        else:
            assert part != "\x1b", "no other sequence"
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines


def on_terminal(*command: object, printed: IO[bytes] | None = None, term: str = "xterm") -> tuple[int, str]:
    """Run a command on a terminal of its own: its exit status, and all that it wrote there.

    Its standard output may be another file, `printed`.
    """
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))

    def forget_size() -> None:
        for size in ("COLUMNS", "LINES"):
            os.environ.pop(size, None)

    with os.fdopen(its, "wb") as terminal:
        process = fork_command([*map(str, command)], forget_size, printed or terminal, terminal, TERM=term)
    killer = threading.Timer(180, os.killpg, (process.pid, signal.SIGKILL))
    killer.start()
    written = b""
    with suppress(OSError):  # EIO: all that had it open have ended
        while part := os.read(own, 65536):
            written += part
    os.close(own)
    status = process.wait()
    killer.cancel()
    return status, written.decode()


def test_a_terminal_has_a_status_line_below_the_losses_until_the_end(tmp_path: Path) -> None:
    """Of two ranks that share it: rank 1 prints lines of its own between those of rank 0."""
    script = often("DP/gradient_aggr/intro_DP_GA.py", tmp_path)
    text = script.read_text()
    assert "        run.log(step, losses)\n" in text
    speaks = "        if run.rank: print(f'# at {step}')\n        run.log(step, losses)\n"
    script.write_text(text.replace("        run.log(step, losses)\n", speaks))
    flags = [*TINY, "--world-size", "2", "--steps", "30", "--save-every", "20", "--out", tmp_path / "run"]
    status, written = on_terminal(LAB / "launch.sh", script, *flags)
    assert status == 0, written
    shown = re.findall(r"\x1b\[K(# [^\r\n]+)(?=\r(?!\n))", written)  # and erased: a status line
    assert {line.partition(" steps")[0] for line in shown} >= {f"# {done} of 30" for done in range(30)}, shown
    assert "# saving after 20 steps" in shown
    assert any(re.fullmatch(r"# 29 of 30 steps, [\d,]+ tokens/s, about \d+ s left", line) for line in shown), shown
    assert max(map(len, shown)) < WIDTH
    *lines, last = screen(written)
    assert last == "", "the cursor is where the shell's next line begins"
    own = [line for line in lines if not line.startswith("# rank 1: ")]
    assert own == (tmp_path / "run/rank0.log").read_text().splitlines()
    assert [line.split()[0] for line in own if not line.startswith("#")] == [str(step) for step in range(30)]
    assert [line for line in lines if line not in own] == [f"# rank 1: at {step}" for step in range(30)]


def test_a_status_line_is_cut_to_less_than_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    status = StatusLine(terminal := io.StringIO())
    status.show("3 of 30 steps")
    assert screen(terminal.getvalue()) == ["# 3 of 30 s"]
    with status.instead("saving after 3 steps"):
        assert screen(terminal.getvalue()) == ["# saving af"]
    assert screen(terminal.getvalue()) == ["# 3 of 30 s"]
    with status.instead("saving after 3 steps"):
        status.clear()
    assert screen(terminal.getvalue()) == [""]


def test_what_a_killed_rank_leaves_on_a_terminal_is_erased(tmp_path: Path) -> None:
    script = often("DP/gradient_aggr/intro_DP_GA.py", tmp_path)
    dies = "        if step == 3: import os; os.kill(os.getpid(), 9)\n        run.log(step, losses)\n"
    script.write_text(script.read_text().replace("        run.log(step, losses)\n", dies))
    flags = [*TINY, "--world-size", "1", "--steps", "30", "--out", tmp_path / "run"]
    status, written = on_terminal(LAB / "launch.sh", script, *flags)
    assert status not in (0, 2)
    assert "\x1b[K# 3 of 30 steps" in written
    assert screen(written)[-2:] == ["# rank 0 was terminated by SIGKILL", ""]


@pytest.mark.parametrize("how", ["a dumb terminal", "standard output in a pipe"])
def test_what_cannot_be_erased_is_not_drawn(how: str, tmp_path: Path) -> None:
    flags = [*TINY, "--steps", "3", "--out", tmp_path / "run"]
    command = [sys.executable, "primer/intro.py", *flags]
    if how == "a dumb terminal":
        status, written = on_terminal(*command, term="dumb")
    else:
        pipe, end = os.pipe()
        with os.fdopen(end, "wb") as into_pipe:
            status, shown = on_terminal(*command, printed=into_pipe)
        with os.fdopen(pipe) as out_of_pipe:
            written = out_of_pipe.read() + shown
    assert status == 0, written
    assert "\x1b" not in written
    lines = (tmp_path / "run/rank0.log").read_text().splitlines()
    assert written.splitlines() == lines


@pytest.mark.parametrize("has_own", [True, False])
def test_one_rank_of_a_terminal_leaves_the_bars_of_libraries_on(has_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And draws nothing where standard error is a file."""
    monkeypatch.setattr(sys, "stdout", terminal := io.StringIO())
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for name in (bars := ["HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"]):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ours = Terminal(0, has_own)
    print("a remark", file=sys.stderr)
    print("an end", end="")
    ours.give_back()
    assert terminal.getvalue().endswith("an end") == has_own, "without a rank before it"
    assert file.getvalue() == ("" if has_own else "# rank 0: ") + "a remark\n"
    assert [name in os.environ for name in bars] == 2 * [not has_own]


def test_a_failure_is_the_last_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal := io.StringIO(), "isatty", lambda: True)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setattr(failure, "leave", sys.exit)
    monkeypatch.setenv("TERM", "xterm")
    Terminal(0, has_own=True).status.show("3 of 30 steps")
    with pytest.raises(SystemExit, match=r"^7$"):
        failure.Failure("no more stories", status=7).end()
    assert screen(terminal.getvalue()) == ["# no more stories", ""]


def test_a_bar_of_a_library_is_for_the_terminal_and_not_for_the_log() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    output = RankOutput(terminal, erase="<erase>")
    output.keep_in(log)
    for text in ("\r 10%|#", "\r100%|##########", "\n", "done", "\n"):
        output.write(text)
    assert terminal.getvalue() == "\r 10%|#\r100%|##########<erase>\n<erase>done\n"
    assert log.getvalue() == "\ndone\n"


def test_a_line_that_is_shown_before_it_ends_is_not_erased() -> None:
    terminal = io.StringIO()
    output = RankOutput(terminal, erase="<erase>")
    print("sure?", end=" ", file=output)
    assert terminal.getvalue() == ""
    output.flush()
    print("yes", file=output)
    print("next", file=output)
    assert terminal.getvalue() == "<erase>sure? yes\n<erase>next\n"
