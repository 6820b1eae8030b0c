"""What stands around a command of one process: from its flags to its exit status.

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

from simplellm.errors import InputError

RequestT = TypeVar("RequestT")


def run(work: Callable[[RequestT], None], request: type[RequestT], description: str | None) -> NoReturn:
    """Read the command line as a `request`, do the work, and exit.

    The exit status is 0 if all went well, 2 for what the user can mend (a sentence says how), 130 for Ctrl-C, and 1 if
    the reader of the output has gone, as `head` does.
    """
    guard(lambda: work(read(lambda: tyro.cli(request, description=description))))


def guard(command: Callable[[], object]) -> NoReturn:
    """Run a command, and exit as `run` does."""
    try:
        command()
        sys.stdout.flush()
    except InputError as error:
        print(f"# {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell's next prompt gets a line of its own
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        raise SystemExit(1) from None
    raise SystemExit(0)


def read(cli: Callable[[], RequestT]) -> RequestT:
    """What tyro makes of the command line.

    Raises:
        InputError: with one sentence in place of tyro's panel of lines.
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
    """What tyro frames as a panel of lines, with a title and rules, which are of "-" in a plain terminal."""
    lines = [line.strip("│╭╮╰╯─ ") for line in panel.splitlines()]
    text = " ".join([line for line in lines if line.strip("-")][1:])
    return re.split(r" ?(?:For full helptext|Argument helptext:)", text)[0] + " (--help lists the flags)"
