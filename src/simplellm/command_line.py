"""The frame of every single-process command: its flags, its error messages, its exit status.

command = as_command(tell, Request, __doc__)  # called with the arguments, by a program with subcommands

if __name__ == "__main__":
    run(tell, Request, __doc__)
"""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

import tyro

from simplellm.errors import FlagError

RequestT = TypeVar("RequestT")
LEAST_COLUMNS = 40


def run(work: Callable[[RequestT], int | None], request: type[RequestT], description: str | None) -> NoReturn:
    """Read the command line as a `request`, do the work, and exit with the status from `status_of`."""
    from simplellm.exit_status import status_of

    raise SystemExit(status_of(as_command(work, request, description)))


def as_command(
    work: Callable[[RequestT], int | None], request: type[RequestT], description: str | None
) -> Callable[..., int | None]:
    """Return a function that reads arguments as a `request`, by default those of this process, and does the work."""

    def command(args: Sequence[str] | None = None, prog: str | None = None) -> int | None:
        asked = read(lambda: tyro.cli(request, args=args, prog=prog, description=description))
        for flag in sys.argv[1:] if args is None else args:
            # tyro reads a flag that is given without values as an empty list.
            if flag.startswith("--") and getattr(asked, flag[2:].replace("-", "_"), None) == ():
                raise FlagError(f"{flag}: give a value (--help lists the flags)")
        return work(asked)

    return command


def read(cli: Callable[[], RequestT]) -> RequestT:
    """Return the command line as tyro parses it.

    Raises:
        FlagError: the command line is not valid; the message is one sentence instead of tyro's panel.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _wide_enough():
            return cli()
    except SystemExit as end:
        if end.code in (0, None):  # --help
            raise
        from simplellm.usage_errors import one_sentence

        raise FlagError(one_sentence(errors.getvalue())) from None


@contextlib.contextmanager
def _wide_enough() -> Iterator[None]:
    """Set the terminal's width to at least 40 columns: in fewer, tyro's layout of `--help` does not end."""
    before = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns < LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(LEAST_COLUMNS)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before
