"""The exception for errors that the user can correct."""

import errno


class InputError(ValueError):
    """A value that the user gave cannot work.

    The message is one sentence that names the flag or file, the value, and what would be right; scripts print it
    without a traceback. Any other exception is a bug of the lab and keeps its traceback.
    """


def require(condition: bool, sentence: str) -> None:
    """Raise `InputError` with the sentence unless the condition holds."""
    if not condition:
        raise InputError(sentence)


def is_full_disk(error: OSError) -> bool:
    """Whether something could not be written because the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_text(text: str, flag: str) -> None:
    """Raise `InputError` for the value of a flag that is not text in the terminal's encoding."""
    is_text = not any("\ud800" <= character <= "\udfff" for character in text)  # what Python has for other bytes
    require(is_text, f"{flag} is no valid text in the terminal's encoding; give UTF-8")
