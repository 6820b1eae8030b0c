"""`--help` of a script."""

import runpy
import sys
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from simplellm import command_line
from simplellm.errors import as_flag


def show_help(defaults: Any, description: str, args: Sequence[str], prog: str | None, more: Path | None) -> None:
    """Print how a script is called, and exit, unless -h is the value of a flag.

    `more` is the script that runs instead if it has the flags.
    """
    shown: Any = defaults
    if prog is not None:  # launch.sh, which gives each rank its RANK itself
        kind = type(defaults)
        without: Any = make_dataclass(kind.__name__, [("rank", Annotated[int, tyro.conf.Suppress], -1)], bases=(kind,))
        shown = without(**{part.name: getattr(defaults, part.name) for part in fields(without)})
    description += more_flags(defaults, more)
    command_line.read(lambda: tyro.cli(type(shown), default=shown, args=args, prog=prog, description=description))


def more_flags(defaults: Any, more: Path | None) -> str:
    """Return a paragraph on each script that may run instead, from `more` on: its name, and the flags that it adds."""
    known, described, paragraphs = {part.name for part in fields(defaults)}, set[Path](), list[str]()
    while more is not None and more.exists() and more.resolve() not in described:
        described.add(more.resolve())
        sys.path.insert(0, str(more.parent))  # as Python does for a script
        names = runpy.run_path(str(more))
        if "DEFAULTS" not in names:
            break
        added = [part.name for part in fields(names["DEFAULTS"]) if part.name not in known]
        flags = f"{', '.join(map(as_flag, added))} (see --help of {more.name}), and with " if added else ""
        refused = f"values that {'these scripts refuse' if paragraphs else 'this script refuses'}"
        paragraphs.append(f"\n\n{more.name} runs instead with {flags}{refused}.")
        more = more.parent / names["MORE"] if "MORE" in names else None
    return "".join(paragraphs)
