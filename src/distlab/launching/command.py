"""The command that starts another process of the lab."""

import sys
from pathlib import Path

# Like `python -m`, but does not import modules from the current folder, which may be a stranger's.
_RUN_MODULE = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def lab_command(*args: str) -> list[str]:
    """Return the command for another process of the lab: `./launch.sh` with these arguments."""
    beside_python = str(Path(sys.executable).parent)
    return [sys.executable, "-c", _RUN_MODULE, beside_python, "distlab.launch", *args]
