"""launch.sh with the name or path of a script: its settings, the start of its ranks, a story at the end."""

import ast
import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from distlab.axes.layout import SLICES
from distlab.checkpoints.format import latest_valid
from distlab.launching.launcher_flags import assign_ranks, read_flags, read_known, refuse_to_tell
from distlab.launching.local_ranks import run_ranks
from distlab.launching.programs import ProgramSettings
from distlab.machine.memory_limits import memory_bytes
from distlab.run.commands import TEMPERATURE
from distlab.run.terminal import say
from distlab.settings.common import MOST_RANKS, RunSettings
from distlab.settings.folders import new_folder
from distlab.settings.replicas import RepairFlag
from distlab.settings.scripts import read_script_for
from distlab.settings.training import TrainSettings
from distlab.tell import command as tell
from simplellm.errors import InputError, require
from simplellm.generation import prompt_ids
from simplellm.tokenizers import SPTokenizer


def has_defaults(path: Path) -> bool:
    """Return whether a file defines `DEFAULTS`; otherwise it is a program that does not use the lab's runs."""
    tree = ast.parse(path.read_bytes())
    targets = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    return any(isinstance(target, ast.Name) and target.id == "DEFAULTS" for target in targets)


def read_program_flags(args: list[str]) -> tuple[ProgramSettings, list[str]]:
    """Return the settings for the ranks of such a program, and the arguments for the program itself."""
    own, rest = read_known(args, {"world-size": ProgramSettings.world_size})
    require(0 < own.world_size <= MOST_RANKS, f"--world-size {own.world_size}: give 1 to {MOST_RANKS:,} ranks")
    settings = ProgramSettings(world_size=own.world_size, device="cpu")
    settings.check()
    return settings, rest


def start(path: Path, args: list[str], prog: str) -> int:
    """Start all ranks of a script, wait until they end, and return the exit status.

    Raises:
        InputError: the script cannot be launched, or flags of the script or of launch.sh cannot work.
    """
    own, args = read_flags(args)
    if not has_defaults(path):
        if own.tell is not None:
            raise refuse_to_tell(path.name)
        if own.spares:
            raise InputError(f"--spares {own.spares}: {path.name} cannot go on when a rank dies; leave --spares out")
        program, args = read_program_flags(args)
        nodes = assign_ranks(own, program.layout, program.master_addr)
        return run_ranks(path, args, program, nodes, own.max_restarts)
    script, settings = read_script_for(path, args, prog)
    if script.path != path:
        say(f"these flags are those of {script.path.name}, which runs now")
    path = script.path
    if own.tell is not None:
        trained = check_story(own.tell, settings, path.name)
        if trained.save_every is None:
            args = [*args, "--save-every", str(trained.steps)]
            settings = script.parse(args, prog)
    require(settings.rank < 0, f"rank {settings.rank}: launch.sh starts all ranks; leave the rank out")
    nodes = assign_ranks(own, settings.layout, settings.master_addr)
    is_one = not settings.can_repair or len(nodes.ranks_of) == 1
    require(is_one, "--repair on several machines: one launcher must see all ranks; give --repair off")
    slices = settings.layout.get(SLICES, 1)
    few = f"--spares {own.spares} with --tp {slices}: slices are replaced together; give {slices} or more"
    require(own.spares == 0 or own.spares >= slices, few)
    is_repaired = own.spares == 0 or settings.can_repair
    require(is_repaired, f"--spares {own.spares}: a spare needs a run that goes on when a rank dies; add --repair")
    if isinstance(settings, RepairFlag) and settings.can_repair:
        settings.check_memory(memory_bytes())
    out = settings.out
    reader = "--max-restarts" if own.max_restarts else "--tell" if own.tell is not None else None
    if reader and out is None:  # restarted ranks and the story teller must find the checkpoints
        several = f"{reader} on several machines: give --out, a folder that all of them share"
        require(len(nodes.ranks_of) == 1, several)
        out = new_folder(Path("runs") / path.stem)
        args = [*args, "--out", str(out)]
    status = run_ranks(path, args, settings, nodes, own.max_restarts, not script.has_threads, own.spares)
    if status == 0 and own.tell is not None and nodes.rank == 0:
        assert out is not None
        return tell_story(out, own.tell, settings.device)
    return status


def check_story(prompt: str, settings: RunSettings, script: str) -> TrainSettings:
    """Return the settings of a run whose model can tell a story; `InputError` if it cannot, or not from this prompt."""
    if not isinstance(settings, TrainSettings):
        raise refuse_to_tell(script)
    most = settings.seq_len
    if settings.resume is not None:  # its model may read more tokens
        most = latest_valid(settings.resume, at_a_glance=True).record["model"]["ctx_size"]
    try:
        prompt_ids(prompt, SPTokenizer(settings.tokenizer), most)
    except InputError as error:
        raise InputError(str(error).replace("prompt", "--tell", 1)) from None
    return settings


def whole_sentences(lines: Iterable[str]) -> Iterator[str]:
    """Yield a story's lines; if it stopped at a limit within a sentence, the last line ends with the one before it."""
    held: str | None = None
    for line in map(str.rstrip, lines):
        if held is not None:
            yield re.sub(r'([.!?]"?)\s[^.!?]*$', r"\1 …", held) if line.startswith("# stopped") else held
        held = line
    if held is not None:
        yield held


def tell_story(run: Path, prompt: str, device: str) -> int:
    """Print a story told by a run's saved model, in lines that begin with `#`; return the exit status.

    This process tells it: another one would import torch again, which takes longer than most stories.
    """
    printed = io.StringIO()
    asked = [str(run), f"--prompt={prompt}", "--device", device, "--temperature", str(TEMPERATURE)]
    with contextlib.redirect_stdout(printed):
        status = tell(asked, "tell")
    for line in whole_sentences(printed.getvalue().splitlines()):
        print(line if line.startswith("#") else f"# {line}".rstrip(), flush=True)
    return status or 0
