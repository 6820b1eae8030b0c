"""The exception for errors that the user can correct, and how they are told."""

import contextlib
import errno
import sys


class InputError(ValueError):
    """A value that the user gave cannot work.

    The message is one sentence that names the flag or file, the value, and what would be right; scripts print it
    without a traceback. Any other exception is a bug of the lab and keeps its traceback.
    """


def require(condition: bool, sentence: str) -> None:
    """Raise `InputError` with the sentence unless the condition holds."""
    if not condition:
        raise InputError(sentence)


def tell(sentence: str) -> None:
    """Print the message of an error, unless that cannot be written either."""
    with contextlib.suppress(OSError):
        print(f"# {sentence}", file=sys.stderr, flush=True)


def about_full_disk(error: BaseException) -> str | None:
    """The message for a disk that is full, or of which the user has used up their share; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"cannot write {error.filename or 'the output or a file'} ({error.strerror}); make room"


def require_text(text: str, flag: str) -> None:
    """Raise `InputError` for the value of a flag that is not text in the terminal's encoding."""
    is_text = not any("\ud800" <= character <= "\udfff" for character in text)  # what Python has for other bytes
    require(is_text, f"{flag} is no valid text in the terminal's encoding; give UTF-8")
