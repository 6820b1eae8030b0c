"""The settings of a run, read from its folder."""

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from distlab.settings.folders import CONFIG
from distlab.settings.resuming import fits
from distlab.settings.training import TrainSettings
from simplellm.errors import require

IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


def read_config(folder: Path) -> dict[str, Any]:
    """Return a run's settings and layout; `InputError` if a setting was edited, and is not a number any more."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    for name, hint in get_type_hints(TrainSettings).items():
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if name in config["settings"] and {*kinds} <= {*IN_WORDS}:
            value, right = config["settings"][name], " or ".join(IN_WORDS[kind] for kind in kinds)
            told = f"{folder / CONFIG}: its setting {name} is {json.dumps(value):.50}, and must be {right}"
            require(fits(value, hint), told)
    return config
