"""`--help` of a script."""

import runpy
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from simplellm import command_line
from simplellm.errors import as_flag


def show_help(defaults: Any, description: str, args: Sequence[str], prog: str | None, more: Path | None) -> None:
    """Print how a script is called, and exit; `more` is the script that runs instead if it has the flags."""
    shown: Any = defaults
    if prog is not None:  # launch.sh, which gives each rank its RANK itself
        kind = type(defaults)
        without: Any = make_dataclass(kind.__name__, [("rank", Annotated[int, tyro.conf.Suppress], -1)], bases=(kind,))
        shown = without(**{part.name: getattr(defaults, part.name) for part in fields(without)})
    description += more_flags(defaults, more)
    command_line.read(lambda: tyro.cli(type(shown), default=shown, args=args, prog=prog, description=description))


def more_flags(defaults: Any, more: Path | None) -> str:
    """Return a paragraph on each script that may run instead, from `more` on: its name, and the flags that it adds."""
    known, paragraphs = {part.name for part in fields(defaults)}, []
    while more is not None and more.exists():
        names = runpy.run_path(str(more))
        added = [part.name for part in fields(names["DEFAULTS"]) if part.name not in known]
        known.update(added)
        flags = ", ".join(map(as_flag, added))
        paragraphs.append(f"\n\nWith one of these flags, {more.name} runs instead: {flags}.")
        more = more.parent / names["MORE"] if "MORE" in names else None
    return "".join(paragraphs)
