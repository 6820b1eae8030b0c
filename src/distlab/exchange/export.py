"""Write a run's model as a folder that Hugging Face's transformers loads (see `simplellm.export`).

python -m simplellm.export RUN DIR
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from distlab.exchange import read_saved
from distlab.run.terminal import say
from simplellm import command_line
from simplellm.export import check_free, export


@dataclass
class Request:
    """The run to export, and the folder for it."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of a run with checkpoints, or of one checkpoint"""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """folder to create"""


def main(request: Request) -> None:
    check_free(request.folder)
    model = read_saved(request.run, say)
    size = f"{model.parameter_count:,} parameters{model.after_steps}"
    say(f"{request.run}: {size}; writing them to {request.folder}")
    export(model, request.folder)
    say(f"{request.folder}: {size}, config.json and the tokenizer, for transformers to load")


command: Callable[..., int | None] = command_line.as_command(main, Request, __doc__)

if __name__ == "__main__":
    command_line.run(main, Request, __doc__)
