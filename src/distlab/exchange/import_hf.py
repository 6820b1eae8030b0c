"""Turn a Llama in Hugging Face's format into a run from which every script resumes (see `simplellm.import_hf`).

python -m simplellm.import_hf DIR OUT
./launch.sh hybrid --resume OUT
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from distlab.checkpoints.models import write_model
from distlab.run.terminal import say
from distlab.settings.folders import is_run
from simplellm import command_line
from simplellm.errors import require
from simplellm.export import check_free
from simplellm.import_hf import read_llama, remarks


@dataclass
class Request:
    """The model to import, and the folder for it."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """folder with config.json, model.safetensors and tokenizer.model or tokenizer.json"""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """folder to create for the run"""


def main(request: Request) -> None:
    name = shlex.quote(f"{request.folder}")
    require(not is_run(request.folder), f"{name} is a run, which needs no import: resume it with --resume {name}")
    check_free(request.out)
    model = read_llama(request.folder)
    say(f"{request.folder}: {model.parameter_count:,} parameters; writing them to {request.out}")
    for remark in remarks(request.folder):
        say(f"{request.folder}: {remark}")
    write_model(request.out, model)
    say(f"{request.out}: {model.parameter_count:,} parameters; resume it with --resume {shlex.quote(str(request.out))}")


command: Callable[..., int | None] = command_line.as_command(main, Request, __doc__)

if __name__ == "__main__":
    command_line.run(main, Request, __doc__)
