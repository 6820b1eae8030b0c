"""Commands that a page quotes: found in its Markdown, and given to the parser of the script that they start."""

import argparse
import ast
import contextlib
import functools
import io
import itertools
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch.distributed.run
import tyro

from distlab import launch
from distlab.checkpoints.models import write_model
from distlab.settings.scripts import read_script_for
from distlab.subcommands import FUNCTIONS
from distlab_exercises.verdict import Verdict
from distlab_figures import command as figures
from simplellm.errors import InputError, require
from simplellm.tokenizers import SHIPPED_MODEL
from support.chapters import load
from support.processes import LAB
from support.small_models import saved_model

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"(\w+=\S+ )*((\./launch\.sh|\./test\.sh|\.ci/run)( |$)|(distlab|python3?|torchrun|mpirun|sbatch) )")
VALUED = ("-k", "--minutes")  # flags of the tests
BY_ARGPARSE = {"exercise", "hint", "check", "find", "grade", "calibrate"}
PARSED_BY_TYRO = FUNCTIONS.keys() - BY_ARGPARSE  # and do their work in this process
OTHERS = ("cat", "git", "sed", "source", "tensorboard")  # programs that are not the lab's, and known as such


def commands(page: str) -> Iterator[str]:
    """All commands of a page: the blocks marked `sh`, the lines after a `$` in `console` blocks, and code spans.

    Those of a block are joined by newlines, since a `cd` holds to the end of the block.
    """
    for _, language, block in FENCE.findall(page):
        if language == "sh":
            yield block.replace("\\\n", " ")
        elif language == "console":
            yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", page)):
        if OURS.match(span) and "<" not in span:
            yield span


def check(block: str) -> None:
    """Parse each command of a block.

    Raises:
        InputError: the script refuses the command, or there is no such script.
        AssertionError: the program is unknown.
    """
    folder, variables = LAB, dict[str, str]()
    for words in split(block):
        while words and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):  # alone, or before a command
            variables[f"${assigned[1]}"] = assigned[2]
            words = words[1:]
        words = [part for word in words for part in (variables[word].split() if word in variables else [word])]
        if words[:1] == ["cd"]:
            folder = folder / words[1]
        elif words:
            check_one(words, folder)


def split(block: str) -> Iterator[list[str]]:
    """The words of each command, without comments; quotes may hold several lines."""
    line = ""
    for part in block.splitlines():
        line += part
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quote is open
            line += "\n"
            continue
        line = ""
        for is_separator, command in itertools.groupby(words, key=lambda word: word == ";"):
            if not is_separator:
                yield list(command)
    assert not line, f"a quote is never closed: {line}"


def check_one(words: list[str], folder: Path) -> None:
    program, *args = (str(LAB / word) if word.startswith("examples/") else word for word in words)
    if program in ("./launch.sh", "distlab"):
        launched(args)
    elif program in ("./test.sh", ".ci/run", "tests/gpu/everything.sh"):
        paths_exist(args, folder)
    elif program == "torchrun":
        options = torch.distributed.run.get_args_parser().parse_args(args)
        run_script(folder / options.training_script, options.training_script_args)
    elif program == "mpirun":
        assert args[0] == "-n"
        assert int(args[1]) > 0
        check_one(args[2:], folder)
    elif program == "timeout":
        assert float(args[0]) > 0
        check_one(args[1:], folder)
    elif program == "sbatch":
        assert (folder / args[0]).is_file()
        launched(["hybrid", *args[1:]])
    elif program == "cp":
        assert args[0] == "-r"
        assert not Path(args[2]).exists(), f"{args[2]}: exists, so that the copy would be a folder inside"
        shutil.copytree(folder / args[1], args[2])  # into the folder where commands write
    elif program in ("python", "python3"):
        if args[0] == "-c":
            ast.parse(args[1])
        elif args[:2] == ["-m", "pytest"]:
            paths_exist(args[2:], folder)
        elif args[:2] == ["-m", "distlab.launch"]:
            launched(args[2:])
        elif args[:2] == ["-m", "distlab.calibrate"]:
            launched(["calibrate", *args[2:]])
        elif args[0] == "-m":
            run_module(args[1], args[2:])
        else:
            run_script(folder / args[0], args[1:])
    else:
        assert program in OTHERS, f"{program}: not a program that the pages are known to quote"


def paths_exist(args: list[str], folder: Path) -> None:
    """Of pytest's arguments, those that are no flags, and no values of `VALUED`."""
    for before, arg in itertools.pairwise(["", *args]):
        assert arg.startswith("-") or before in VALUED or (folder / arg).exists(), arg


def launched(args: list[str]) -> None:
    """What `./launch.sh` does up to the start of the first rank."""

    def mpirun(script: Path, args: list[str]) -> NoReturn:
        run_script(script, re.sub(r"--world-size \d+", "", " ".join(args)).split())
        raise ParsedError

    if args and (LAB / args[0]).is_file():  # pages name scripts as seen from the lab's folder
        args = [str(LAB / args[0]), *args[1:]]
    resume = Path(args[args.index("--resume") + 1]) if "--resume" in args else None
    if resume is not None:
        write_model(resume, saved_model(n_layers=3))  # what the command resumes from
    try:
        with (
            contextlib.suppress(ParsedError),
            mock.patch("distlab.launching.start.run_ranks", return_value=0),
            mock.patch("distlab.launching.start.tell_story", return_value=0),
            mock.patch.object(launch, "become_mpirun", mpirun),
            mock.patch("distlab_exercises.checker.prepare"),
            mock.patch("distlab_exercises.commands._check", return_value=True),
            mock.patch("distlab_exercises.checker.verdict_of", return_value=Verdict("", passed=True)),
            mock.patch("distlab_exercises.grading.grade_course", return_value=True),
        ):
            if args and args[0] in PARSED_BY_TYRO:
                until_parsed(lambda: launch.launch(args), args)
            else:
                launch.launch(args)
    except SystemExit as end:
        require(end.code in (0, None), f"exit status {end.code}")  # 0 after --help
    finally:
        if args[:1] == ["calibrate"] and not args[1].startswith("-"):  # later commands may read it
            shutil.copy(LAB / "docs/machines/cluster.json", args[1])
        if args[:1] == ["tokenizer"]:
            model = Path(args[args.index("--out") + 1])
            model.parent.mkdir(exist_ok=True)
            shutil.copy(SHIPPED_MODEL, model)
        if resume is not None:
            shutil.rmtree(resume)


class ParsedError(BaseException):
    """The command line has been read, and nothing else is wanted of the script."""


def run_script(script: Path, args: list[str]) -> None:
    if script.is_dir():
        script /= "__main__.py"
    require(script.is_file(), f"{script}: no such script")
    source = script.read_text()
    if re.search("^DEFAULTS =", source, re.MULTILINE):
        read_script_for(script, args, script.name)
        return
    sys.path.insert(0, str(script.parent))
    if "mpi4py" in source:  # it asks MPI for its rank before it reads the command line
        import mpi4py

        mpi4py.rc.initialize = False
        with reporting(shlex.join(args)):
            tyro.cli(load(str(script)).Request, args=args)
    else:
        until_parsed(lambda: runpy.run_path(str(script), run_name="__main__"), [str(script), *args])


def run_module(module: str, args: list[str]) -> None:
    until_parsed(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), [module, *args])


def until_parsed(program: Callable[[], object], argv: list[str]) -> None:
    """Run a program until it has read its command line, and check what it has read.

    Raises:
        InputError: it refuses the command line.
    """

    def stopping(parse: Callable[..., Any]) -> Callable[..., NoReturn]:
        @functools.wraps(parse)
        def wrapped(*args: Any, **options: Any) -> NoReturn:
            settings = parse(*args, **options)
            if hasattr(settings, "check"):
                settings.check()
            raise ParsedError

        return wrapped

    def not_drawn(figure: Any) -> Callable[..., None]:
        return functools.wraps(figure)(lambda *_, **__: None)

    parser = argparse.ArgumentParser
    with (
        reporting(shlex.join(argv)),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(figures, "FIGURES", tuple(map(not_drawn, figures.FIGURES))),  # it draws while it parses
        mock.patch.object(tyro, "cli", stopping(tyro.cli)),
        mock.patch.object(tyro.extras, "subcommand_cli_from_dict", stopping(tyro.extras.subcommand_cli_from_dict)),
        mock.patch.object(parser, "parse_args", stopping(parser.parse_args)),
    ):
        try:
            program()
        except ParsedError:
            return
    raise AssertionError(f"{shlex.join(argv)}: reads no command line")


@contextlib.contextmanager
def reporting(command: str) -> Iterator[None]:
    """Turn a parser's exit into an `InputError` with what it says."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            yield
    except SystemExit:
        raise InputError(f"{command}: {errors.getvalue()}") from None
