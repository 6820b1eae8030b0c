"""The output of a rank: its lines on a terminal and in its log, and a status line below them."""

import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from simplellm.errors import say as say  # scripts import it from here

ERASE_LINE = "\r\x1b[K"  # to the first column, and erase to the end of the line (ECMA-48)


def counted(number: int, things: str) -> str:
    """A number of things in words: "1 step", "1,000 steps"; `things` is a regular plural."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


def can_erase(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can erase a line, and so can have a status line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class StatusLine:
    """The last line of a terminal, below all output; not shown if the output is a file or a pipe.

    `RankOutput` prints above it.
    """

    def __init__(self, terminal: TextIO | None) -> None:
        self._terminal = terminal  # None: nothing is shown
        self.text = ""  # the text on the terminal now

    def show(self, text: str) -> None:
        """Show `text`, cut to the width of the terminal because only one line can be erased."""
        if self._terminal is not None:
            self.text = f"# {text}"[: shutil.get_terminal_size().columns - 1]
            self._write()

    def clear(self) -> None:
        """Erase the status line."""
        if self.text:
            self.text = ""
            self._write()

    @contextlib.contextmanager
    def instead(self, text: str) -> Iterator[None]:
        """Show `text` inside the context; then restore the previous text."""
        before = self.text
        self.show(text)
        yield
        if self.text:
            self.text = before
            self._write()

    def _write(self) -> None:
        assert self._terminal is not None
        self._terminal.write(f"{ERASE_LINE}{self.text}")
        self._terminal.flush()


class RankOutput(io.TextIOBase):
    """A rank's standard output or error, which writes to the terminal and to the rank's log.

    Only whole lines are written, each with `prefix`. `erase` erases the status line, of this rank or of another that
    shares the terminal, so that lines appear above it.
    """

    def __init__(self, terminal: TextIO, prefix: str = "", erase: str = "", status: StatusLine | None = None) -> None:
        self.terminal, self.prefix, self.status = terminal, prefix, status or StatusLine(None)
        self._file: TextIO = io.StringIO()  # until the run's folder is known
        self._keeps = True
        self._rest = ""  # the incomplete last line
        self._erase = self._erase_before_line = erase  # _erase is "" while the terminal shows an incomplete line

    def keep_in(self, file: TextIO) -> None:
        """Write to `file` from now on, starting with everything written so far."""
        assert isinstance(self._file, io.StringIO)
        earlier, self._file = self._file.getvalue(), file
        self.keep(earlier)

    def close_log(self) -> None:
        with contextlib.suppress(OSError):  # `keep` has reported it
            self._file.close()

    def keep(self, text: str) -> None:
        """Write to the log only. If that fails, report it on the terminal, which then gets the rest alone."""
        if not self._keeps:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._keeps = False
            what = f"{self._file.name}: cannot be written ({error.strerror}); what follows is on the terminal only"
            self._show(f"{self._erase}{self.prefix or '# '}{what}\n")

    def _show(self, text: str) -> None:
        """Write to the terminal. If it was closed, the run continues without it, and its log has the output."""
        try:
            self.terminal.write(text)
            self.terminal.flush()
        except OSError as error:
            if error.errno != errno.EIO:  # the reader of a pipe has exited, or the disk is full
                raise
            self.terminal = Path(os.devnull).open("w")  # noqa: SIM115

    def write(self, text: str) -> int:
        if text.startswith("\r"):  # a progress bar of a library, such as a download's; redrawn often, so not logged
            self._show(text)
            return len(text)
        self.keep(text)
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            if self.prefix:
                lines = [self._with_rank(line) for line in lines]
            status = self.status.text if self._erase_before_line else ""
            self._show(self._erase + "\n".join([*lines, status]))
            self._erase = self._erase_before_line
        return len(text)

    def _with_rank(self, line: str) -> str:
        """Say which rank a line comes from, unless the line itself begins with that."""
        is_said = line.startswith(f"{self.prefix.removesuffix(': ')} ")
        return line if is_said else f"{self.prefix}{line.removeprefix('# ')}"

    def flush(self) -> None:
        if self._rest and not self.prefix:  # an incomplete line, which may be a prompt
            self._show(f"{self._erase}{self._rest}")
            self._rest = self._erase = ""
        self._show("")

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()


class Terminal:
    """This process's standard output and error while it is a rank of a run.

    They go through `RankOutput`; ranks that share a terminal prefix their lines. Status lines and the progress bars of
    libraries are shown on terminals only, by one rank per terminal.
    """

    def __init__(self, rank: int, has_own: bool) -> None:
        self._streams = sys.stdout, sys.stderr
        has_status_line = can_erase(sys.stdout)
        self.status = StatusLine(sys.stdout if has_own and has_status_line else None)
        if not (has_own and has_status_line):
            for library in ("HF_HUB", "HF_DATASETS"):  # these libraries read it at import, which happens later
                os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
        prefix = "" if has_own else f"# rank {rank}: "
        self.out, self.err = (
            RankOutput(stream, prefix, ERASE_LINE if has_status_line and stream.isatty() else "", self.status)
            for stream in self._streams
        )
        sys.stdout, sys.stderr = self.out, self.err

    def keep_in(self, log: TextIO) -> None:
        """Also write to the rank's log from now on, starting with everything written so far."""
        self.out.keep_in(log)
        self.err.keep_in(log)

    def give_back(self) -> None:
        """Restore the streams of the process."""
        self.status.clear()
        for stream in (self.out, self.err):
            stream.flush()
        sys.stdout, sys.stderr = self._streams
        self.out.close_log()
