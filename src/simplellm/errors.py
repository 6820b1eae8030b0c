"""The exception for errors that the user can correct, and how they are told."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

from simplellm.streams import open_streams


class InputError(ValueError):
    """A value that the user gave cannot work.

    The message is one sentence that names the argument or file, the value, and what would be right; scripts print it
    without a traceback. Any other exception is a bug of the lab and keeps its traceback.

    Args:
        sentence: the message.
        arguments: names in it of arguments for which a program may have flags, as in "seq_len 1 is too short".
    """

    def __init__(self, sentence: str, *arguments: str) -> None:
        super().__init__(sentence)
        self.arguments = arguments

    def with_flags(self) -> str:
        """The message for a command line whose flags have the names of the arguments."""
        sentence = str(self)
        for name in self.arguments:
            sentence = sentence.replace(name, as_flag(name), 1)
        return sentence


def as_flag(name: str) -> str:
    """The flag of an argument or a setting."""
    return f"--{name.replace('_', '-')}"


def require(condition: bool, sentence: str, *arguments: str) -> None:
    """Raise `InputError` with the sentence unless the condition holds."""
    if not condition:
        raise InputError(sentence, *arguments)


def require_package(name: str, what: str, *arguments: str) -> None:
    """Raise `InputError`, which begins with `what` needs it, unless an optional package is installed."""
    require(find_spec(name) is not None, f"{what} needs {name}: pip install {name}", *arguments)


def tell(sentence: str) -> None:
    """Print the message of an error, unless that cannot be written either."""
    with contextlib.suppress(OSError):
        print(f"# {sentence}", file=sys.stderr, flush=True)


def about_full_disk(error: BaseException) -> str | None:
    """The message for a disk that is full, or of which the user has used up their share; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"cannot write {error.filename or 'the output or a file'} ({error.strerror}); make room"


def status_of(command: Callable[[], int | None]) -> int:
    """Run a command, and return its exit status: its own, 0 if it has none, or that of what has ended it.

    That is 2 for an error that the user can correct (the message says how), such as a full disk, 130 for Ctrl-C, and 1
    if the reader of the output has exited, as `head` does.
    """
    open_streams()
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except InputError as error:
        tell(error.with_flags())
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)  # so that the shell's prompt starts on a new line
        return 130
    except OSError as error:
        told = about_full_disk(error)
        if told is None and not isinstance(error, BrokenPipeError):
            raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
    if told is None:
        return 1
    tell(told)
    return 2


def require_text(text: str, argument: str) -> None:
    """Raise `InputError` for the value of an argument that is not text in the terminal's encoding."""
    is_text = not any("\ud800" <= character <= "\udfff" for character in text)  # what Python has for other bytes
    require(is_text, f"{argument} is no valid text in the terminal's encoding; give UTF-8", argument)
