"""The one exception for what the user can mend."""


class InputError(ValueError):
    """A value that the user gave cannot work.

    The message is one sentence that names the flag or file, the value, and what would be right; scripts print it
    without a traceback. Whatever else is raised is our fault and keeps its traceback.
    """
