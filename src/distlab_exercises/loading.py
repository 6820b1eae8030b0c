"""A student's file as a module, and the settings with which a rank runs it."""

import functools
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from distlab.run import main
from distlab.run.run import Run
from distlab.settings.common import RunSettings
from distlab_exercises.ranks import Submission
from simplellm.errors import InputError, require

SettingsT = TypeVar("SettingsT", bound=RunSettings)


def load(script: Path) -> ModuleType:
    """Load a student's file as a module; `InputError` if it starts its run when it is loaded."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.argv = [str(script)]
    main.main = _refuse_to_start  # what the file imports; this process is a rank that tries it
    spec.loader.exec_module(module)
    return module


def _refuse_to_start(*_: Any, **__: Any) -> NoReturn:
    raise InputError('the file calls main(...) as it is loaded; put that below if __name__ == "__main__":')


class Solution:
    """A student's file, on a rank that tries one of its functions or classes.

    Attributes:
        name: the function's name.
        library: the module of the lab that has it; "" for a function of a chapter's script.
    """

    def __init__(self, rank: int, submission: Submission, taken: str) -> None:
        self.rank, self._submission = rank, submission
        self.library, _, self.name = taken.rpartition(":")

    @functools.cached_property
    def module(self) -> Any:
        """The file, which is loaded when it is first asked for."""
        return load(self._submission.script)

    @property
    def function(self) -> Any:
        return getattr(self.module, self.name)

    def join(self, ranks: int, defaults: object, kind: type[RunSettings] = RunSettings, **values: Any) -> Any:
        """Return this rank's run, which has met the others, computes on the CPU, and asks no hub for stories.

        Args:
            defaults: the file's, of the class `kind`.
            values: the other settings, without those of the world.
        """
        world = {"device": "cpu", "out": self._submission.folder / "run", "master_port": self._submission.port}
        if ranks > 1:
            world["world_size"] = ranks
        if hasattr(defaults, "data"):
            world["data"] = "sample"
        return Run(settings_for(self.rank, defaults, kind, world | values), self._submission.script)


def settings_for(rank: int, defaults: object, kind: type[SettingsT], values: dict[str, Any]) -> SettingsT:
    """Return the settings of a rank, as flags would give them: a command line takes a tenth of a second to be read.

    Raises:
        InputError: `defaults`, the file's, are not of this kind, or a value cannot work.
    """
    require(isinstance(defaults, kind), f"the file needs DEFAULTS, of the class {kind.__name__}, as in its chapter")
    assert isinstance(defaults, kind)
    settings = replace(defaults, rank=rank, **values)
    settings.check()
    return settings
