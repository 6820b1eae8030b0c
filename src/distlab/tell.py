"""`tell RUN`: a run's model tells a story, by the loop of primer/tell_story.py."""

import importlib
import sys
from collections.abc import Sequence

from distlab.run.commands import LAB
from simplellm import command_line
from simplellm.errors import require


def command(args: Sequence[str], prog: str) -> int | None:
    """Read the command line of the script, and tell a story."""
    folder = LAB / "primer"
    require((folder / "tell_story.py").exists(), f"tell: tell_story.py is not in {folder}; use the lab's checkout")
    sys.path.insert(0, str(folder))
    script = importlib.import_module("tell_story")
    return command_line.as_command(script.main, script.Settings, script.__doc__)(args, prog)
