"""A student's file as a module, and the settings with which a rank runs it."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from distlab.run.settings import RunSettings
from simplellm.errors import require

SettingsT = TypeVar("SettingsT", bound=RunSettings)


def load(script: Path) -> ModuleType:
    """A student's file as a module."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.argv = [str(script)]
    spec.loader.exec_module(module)
    return module


def settings_for(rank: int, defaults: object, kind: type[SettingsT], values: dict[str, Any]) -> SettingsT:
    """The settings of a rank, as flags would give them: a command line takes a tenth of a second to be read.

    Raises:
        InputError: `defaults`, which are the file's, are none of this kind, or a value cannot work.
    """
    require(isinstance(defaults, kind), f"the file needs DEFAULTS, of the class {kind.__name__}, as in its chapter")
    assert isinstance(defaults, kind)
    settings = replace(defaults, rank=rank, **values)
    settings.check()
    return settings
