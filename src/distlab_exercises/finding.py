"""The subcommand `find`: has a student found the fault of an exhibit? The line first, then the corrected script."""

import re
from collections.abc import Sequence
from pathlib import Path

from distlab_exercises.commands import parser_of, show
from distlab_exercises.exhibits import EXHIBITS, MUSEUM, Exhibit
from simplellm.errors import require

ANSWER = "answer.txt"


def find(args: Sequence[str], prog: str) -> int:
    """List the exhibits, or check the line and the corrected script; the exit status is 0 if both are right."""
    about = "Checks whether you have found the fault of an exhibit. The script runs as a program of yours."
    parser = parser_of(prog, about)
    parser.add_argument("folder", nargs="?", type=Path, help="your corrected copy of an exhibit (default: list them)")
    parser.add_argument("--line", type=int, help=f"line of the exhibit that is at fault (default: from {ANSWER})")
    given = parser.parse_args(args)
    if given.folder is None:
        print(f"{prog} FOLDER --line N   FOLDER is your copy of one of these, corrected; N is the line at fault\n")
        for each in EXHIBITS.values():
            print(f"  {MUSEUM.name}/{each.name:<14}  {each.title} ({each.source})")
        return 0
    exhibit = _exhibit_in(given.folder)
    if not _names_the_line(exhibit, given.folder, given.line):
        return 1
    from distlab_exercises.checker import prepare, verdict_of  # torch: seconds, after the arguments have been checked

    print("# trying it; this takes some seconds", flush=True)
    prepare([exhibit])
    verdict = verdict_of(exhibit, given.folder / exhibit.script.name)
    show(verdict)
    last = "found: it is the training run of one process"
    print(f"# {last if verdict.passed else f'not yet: {verdict.sentences[0]}'}", flush=True)
    return 0 if verdict.passed else 1


def _exhibit_in(folder: Path) -> Exhibit:
    advice = f"copy one first: cp -r {MUSEUM.name}/experts {folder}"
    require(folder.is_dir(), f"{folder}: is not a folder with a copy of an exhibit; {advice}")
    found = [exhibit for exhibit in EXHIBITS.values() if (folder / exhibit.script.name).is_file()]
    names = ", ".join(exhibit.script.name for exhibit in found)
    require(bool(found), f"{folder}: has no script of an exhibit; {advice}")
    require(len(found) == 1, f"{folder}: has the scripts of several exhibits ({names}); keep one")
    return found[0]


def _names_the_line(exhibit: Exhibit, folder: Path, line: int | None) -> bool:
    """Return whether the named line is at fault; if it is not, print a hint."""
    answer, given, lines = folder / ANSWER, f"--line {line}", exhibit.lines()
    if line is None:
        require(answer.is_file(), f"--line: name the line of {MUSEUM.name}/{exhibit.name} that is at fault")
        number = re.search(r"\d+", answer.read_text(errors="replace"))
        require(number is not None, f"{answer}: has no number; write the line that is at fault there")
        assert number is not None
        line, given = int(number[0]), f"{answer}: {number[0]}"
    where = f"{MUSEUM.name}/{exhibit.name}/{exhibit.script.name}"
    require(1 <= line <= len(lines), f"{given}: {where} has the lines 1 to {len(lines)}")
    text = lines[line - 1].strip().rstrip(".:")  # a colon follows
    if exhibit.is_at_fault(lines[line - 1]):
        print(f"# line {line}, {text}: that is where the fault is", flush=True)
        return True
    print(f"# line {line}, {text or 'which is empty'}: the fault is not in this line of {where}")
    print(f"# hint: {exhibit.hint}")
    return False
