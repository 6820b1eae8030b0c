"""The exception for errors that the user can correct, the way in which it is reported, and the standard streams."""

import contextlib
import fcntl
import os
import sys
from importlib.util import find_spec


class InputError(ValueError):
    """A value from the user cannot work.

    The message is one sentence that names the argument or file, the value, and what would be right; scripts print it
    without a traceback. Any other exception is a bug of the lab and keeps its traceback.

    Args:
        sentence: the message.
        arguments: names of arguments in it for which a program may have flags, as in "seq_len 1 is too short".
    """

    def __init__(self, sentence: str, *arguments: str) -> None:
        super().__init__(sentence)
        self.arguments = arguments

    def with_flags(self) -> str:
        """Return the message for a command line whose flags have the names of the arguments."""
        sentence = str(self)
        for name in self.arguments:
            sentence = sentence.replace(name, as_flag(name), 1)
        return sentence


class FlagError(InputError):
    """A program does not have a flag, or the flag does not have such values."""


def as_flag(name: str) -> str:
    """Return the flag of an argument or a setting."""
    return f"--{name.replace('_', '-')}"


def require(condition: bool, sentence: str, *arguments: str) -> None:
    """Raise `InputError` with the sentence unless the condition holds."""
    if not condition:
        raise InputError(sentence, *arguments)


def require_package(name: str, what: str, *arguments: str) -> None:
    """Raise `InputError`, which begins with `what` needs it, unless an optional package is installed."""
    require(find_spec(name) is not None, f"{what} needs {name}: pip install {name}", *arguments)


def say(text: str) -> None:
    """Print a line that is not a step's; these begin with `#`."""
    print(f"# {text}\n", end="", flush=True)  # in one write, even where Python does not buffer it


def tell(sentence: str) -> None:
    """Print the message of an error; ignore a failure to write it."""
    try:
        print(f"# {sentence}\n", end="", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # Python flushes once more as it ends


def open_streams() -> None:
    """Make the standard streams usable; call it at the start of every program.

    A stream that is closed, or cannot be written to, becomes /dev/null: otherwise the next file that this process opens
    would get its number, and the output of C libraries would go into it. A character that the output's encoding lacks
    is printed as an escape sequence, so that a quotation mark in a story does not end a run.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        is_output = number > 0
        try:
            is_usable = not is_output or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            os.fstat(number)
        except OSError:
            is_usable = False
        if not is_usable:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if is_output else "r", closefd=False))
            setattr(sys, f"__{name}__", getattr(sys, name))
        if is_output:
            with contextlib.suppress(AttributeError, ValueError):  # tests and notebooks put other objects there
                getattr(sys, name).reconfigure(errors="backslashreplace")


def require_text(text: str, argument: str) -> None:
    """Raise `InputError` for the value of an argument that is not text in the terminal's encoding."""
    is_text = not any("\ud800" <= character <= "\udfff" for character in text)  # Python's characters for other bytes
    require(is_text, f"{argument} is not valid text in the terminal's encoding; give UTF-8", argument)
