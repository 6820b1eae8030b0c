"""The exception for errors that the user can correct, the way in which they are reported, and the standard streams."""

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable
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
    print(f"# {text}", flush=True)


def tell(sentence: str) -> None:
    """Print the message of an error; ignore a failure to write it."""
    with contextlib.suppress(OSError):
        print(f"# {sentence}", file=sys.stderr, flush=True)


_REMEDIES = {  # by the error of the system, for a file
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a path that this user may use"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR), "give another path"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "its disk or its network does not work"),
}
_LIMITS = {  # by the resource of a process that is limited
    errno.EMFILE: "open files are at their limit: raise it (ulimit -n)",
    errno.ENFILE: "the open files of this machine are at their limit: close other programs",
}
TOO_MANY_PROCESSES = (
    "processes and threads are at their limit: raise it (ulimit -u, or the container's), or start fewer ranks"
)


def about_system(error: BaseException) -> str | None:
    """Return the message for an error caused by a file, a disk, or a limit of this machine or user; None for others."""
    if isinstance(error, RuntimeError):  # Python's, or a C++ library's
        if str(error) in ("can't start new thread", os.strerror(errno.EAGAIN)):
            return TOO_MANY_PROCESSES
        return _LIMITS[errno.EMFILE] if os.strerror(errno.EMFILE) in str(error) else None
    if not isinstance(error, OSError):
        return None
    if "No usable temporary directory" in str(error):
        return "no folder for temporary files can be written to: set TMPDIR to one that can"
    file = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {file or 'the output or a file'} ({error.strerror}); make room"
    if error.errno == errno.EFBIG:
        return f"cannot write {file or 'a file'}: it would exceed the limit on file sizes; raise it (ulimit -f)"
    if file and error.errno in _REMEDIES:
        return f"{file}: {error.strerror}; {_REMEDIES[error.errno]}"
    return _LIMITS.get(error.errno or 0)


def status_of(command: Callable[[], int | None]) -> int:
    """Run a command, and return its exit status: its result, 0 if it is None, or the status of the error that ended it.

    The status is 2 for an error that the user can correct (the message says how), such as a full disk, 130 for Ctrl-C,
    and 1 if the reader of the output has exited, as `head` does.
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
    except (OSError, RuntimeError) as error:
        told = about_system(error)
        if told is None and not isinstance(error, BrokenPipeError):
            raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
    if told is None:
        return 1
    tell(told)
    return 2


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
