"""The exit status of a command, and the messages for errors of the operating system that end it."""

import errno
import os
import select
import signal
import sys
from collections.abc import Callable

from simplellm.errors import InputError, open_streams, tell

READER_HAS_EXITED = 128 + signal.SIGPIPE  # the status in a shell of a program that writes into such a pipe

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
    if error.errno == errno.ENOENT and (folder := os.path.dirname(file)) and not os.path.exists(folder):
        return f"cannot open {file}: there is no folder {folder}; has it been removed?"
    if file and error.errno in _REMEDIES:
        return f"{file}: {error.strerror}; {_REMEDIES[error.errno]}"
    return _LIMITS.get(error.errno or 0)


def lost_reader(error: BaseException) -> bool:
    """Return whether an error came about because the reader of the output has exited, as `head` does."""
    if not isinstance(error, BrokenPipeError):
        return False
    output = select.poll()  # a program may also write into other pipes
    for stream in (1, 2):
        output.register(stream, 0)  # reports only errors, such as a pipe without a reader
    return bool(output.poll(0))


def status_of(command: Callable[[], int | None]) -> int:
    """Run a command, and return its exit status: its result, 0 if it is None, or the status of the error that ended it.

    The status is 2 for an error that the user can correct (the message says how), such as a full disk, 130 for Ctrl-C,
    and `READER_HAS_EXITED` if the reader of the output has exited, as `head` does.
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
        if told is None and not lost_reader(error):
            raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
    if told is None:
        return READER_HAS_EXITED
    tell(told)
    return 2
