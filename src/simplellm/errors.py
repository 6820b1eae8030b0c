"""The one exception for what the user can mend."""


class InputError(ValueError):
    """A value that the user gave cannot work.

    The message is one sentence that names the flag or file, the value, and what would be right; scripts print it
    without a traceback. Whatever else is raised is our fault and keeps its traceback.
    """


def require(condition: bool, sentence: str) -> None:
    """Raise `InputError` with the sentence unless the condition holds."""
    if not condition:
        raise InputError(sentence)
