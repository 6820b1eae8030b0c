"""The frame of every single-process command: its flags, its error messages, its exit status.

if __name__ == "__main__":
    run(tell, Request, __doc__)
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tyro

from simplellm.errors import InputError, about_full_disk, tell

RequestT = TypeVar("RequestT")


def run(work: Callable[[RequestT], None], request: type[RequestT], description: str | None) -> NoReturn:
    """Read the command line as a `request`, do the work, and exit.

    The exit status is 0 for success, 2 for an error that the user can correct (the message says how), such as a full
    disk, 130 for Ctrl-C, and 1 if the reader of the output has exited, as `head` does.
    """
    guard(lambda: work(read(lambda: tyro.cli(request, description=description))))


def guard(command: Callable[[], object]) -> NoReturn:
    """Run a command, and exit as `run` does."""
    try:
        command()
        sys.stdout.flush()
    except InputError as error:
        tell(str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)  # so that the shell's prompt starts on a new line
        raise SystemExit(130) from None
    except OSError as error:
        told = about_full_disk(error)
        if told is None and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        if told is None:
            raise SystemExit(1) from None
        tell(told)
        raise SystemExit(2) from None
    raise SystemExit(0)


def read(cli: Callable[[], RequestT]) -> RequestT:
    """The command line as tyro parses it.

    Raises:
        InputError: the command line is not valid; the message is one sentence instead of tyro's panel.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return cli()
    except SystemExit as end:
        if end.code in (0, None):  # --help
            raise
        raise InputError(one_sentence(errors.getvalue())) from None


def one_sentence(panel: str) -> str:
    """The text of tyro's panel as one sentence, without title and frame (which is made of "-" in a plain terminal)."""
    lines = [line.strip("│╭╮╰╯─ ") for line in panel.splitlines()]
    text = " ".join([line for line in lines if line.strip("-")][1:])
    text = re.split(r" ?(?:For full helptext|Argument helptext:)", text)[0]
    if missing := re.fullmatch(r"Missing from [^:]*: (.*) \(required\)", text):
        entries = [re.fullmatch(r"(--\S+ [A-Z]+|[\w|-]+) (.*)", each) for each in missing[1].split(" (required) ")]
        named = [f"{entry[1]} ({entry[2]})" for entry in entries if entry]
        if len(named) == len(entries):
            text = f"missing: {', '.join(named)}"
    for of_python, plain in (
        (r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number"),
        (r"could not convert string to float: (.*)", r"\1 is no number"),
    ):
        text = re.sub(of_python, plain, text)
    return f"{text} (--help lists the flags)"
