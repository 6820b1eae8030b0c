"""A lesson's script, and the script with the flags of later chapters that runs in its place."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from distlab.settings.common import RunSettings, parse
from simplellm.errors import FlagError, InputError


@dataclass(frozen=True)
class Script:
    """A script that ranks can run."""

    path: Path
    defaults: RunSettings
    description: str
    has_threads: bool  # its import has started threads, which forks of this process would lack
    more: Path | None = None  # the script that also has the flags of later chapters; see `distlab.run.main.main`

    def parse(self, args: list[str], prog: str | None = None) -> RunSettings:
        """Return the script's settings for `args`; `InputError` for a wrong flag."""
        return parse(self.defaults, self.description, args, prog, self.more)


def read_script(path: Path) -> Script:
    """Run a script as an imported module, for its `DEFAULTS` and anything else it registers, such as a schedule.

    Ranks that are forks of this process then have the script's imports.

    Raises:
        InputError: the script has no `DEFAULTS`, or they are not `RunSettings`.
    """
    module = ModuleType("launched_script")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # annotations of its settings are looked up there
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    threads = count_threads()
    exec(compile(path.read_bytes(), path, "exec"), module.__dict__)  # noqa: S102  # the user asks for it
    defaults = getattr(module, "DEFAULTS", None)
    if not isinstance(defaults, RunSettings):
        raise InputError(f"{path}: launch.sh needs a script with DEFAULTS, a distlab.settings.common.RunSettings")
    more = path.parent / module.MORE if hasattr(module, "MORE") else None
    return Script(path, defaults, module.__doc__ or path.stem, count_threads() > threads, more)


def read_script_for(path: Path, args: list[str], prog: str | None = None) -> tuple[Script, RunSettings]:
    """Return the script that accepts these flags, with its settings: the one at this path, or the one it names as more.

    Raises:
        InputError: as in `read_script`; or no script accepts the flags.
    """
    script, refusals = read_script(path), dict[Path, InputError]()
    while True:
        try:
            return script, script.parse(args, prog)
        except InputError as error:
            refusals[script.path.resolve()] = error
            more = script.more
            if more is None or not more.exists() or more.resolve() in refusals:
                on_values = (one for one in reversed(refusals.values()) if not isinstance(one, FlagError))
                raise next(on_values, error) from None  # the sentence on a value says more than one on flags
            script = read_script(more)


def count_threads() -> int:
    """Return the number of this process's threads, started by Python or not; 0 where the system does not report it."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
