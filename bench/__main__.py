"""Run all benchmarks in a quick form, about ten minutes on two cores, and compare their ratios with bench/README.md.

    python -m bench                                 run all, and compare
    python -m bench pipeline tensor_parallel        only these
    python -m bench --write tensor_parallel         in full, as quoted in bench/README.md, and write its tables there

A ratio has moved if it is outside of the quartiles in bench/README.md, and the recorded ratio outside of the new
quartiles; then the exit status is 1. The quick form measures some of the rows, with fewer rounds. It leaves out
benchmarks that take long or have special needs: whole runs (`checkpoints`, `revisions`), campaigns (`kills`), simulated
links (`network`, `slow_training`), a machine that has been measured (`planner`), a GPU (`gpu`).
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from distlab.run.progress import each
from simplellm import command_line
from simplellm.errors import require

LAB = Path(__file__).resolve().parents[1]
PAGE = LAB / "bench" / "README.md"
QUICK = {  # flags that are appended to the page's command
    "single": "--steps 5",
    "data_parallel": "--rounds 8",
    "pipeline": "--micro-batches 6 --rounds 4",
    "bubble": "--sizes 4x8 --schedules dapple zb-h2 zb-v",
    "messages": "--starts 3",
    "collectives": "--starts 2 --rounds 10",
    "tensor_parallel": "--rounds 8",
    "sharded": "--worlds 2 --rounds 6",
    "generation": "--stories 1",
}
NOISE = 0.05  # relative tolerance of a ratio without quartiles
NOISE_POINTS = 1.5  # tolerance of a percentage, in percentage points
RANGE = r"([\d.]+) to ([\d.]+)"
RATIO = re.compile(rf"([\d.]+)(?: \({RANGE}\))?")
MEASURED = re.compile(r"\b(ms|µs|MB|seconds|tokens/s|measured|in theory|theory)\b")  # in a column's heading


@dataclass
class Request:
    """What to run."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[BENCHMARK ...]")] = ()
    """programs of bench/, without .py; default: all that have a quick form"""
    write: bool = False
    """run the commands of bench/README.md in full, and replace their tables there"""


@dataclass
class Table:
    """A Markdown table: its headings, and the cells of its rows."""

    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def ratios(self) -> dict[tuple[str, ...], tuple[float, float, float]]:
        """The ratios with their lower and upper quartiles, by the labels of row and column."""
        measured = next(iter(i for i, heading in enumerate(self.headings) if MEASURED.search(heading)), None)
        found = {}
        for row in self.rows:
            for index, heading in enumerate(self.headings):
                # Two columns may have the same heading; the heading to their left distinguishes them.
                about = heading if self.headings.count(heading) == 1 else self.headings[index - 1]
                beside = row[index + 1] if index + 1 < len(row) else ""
                ratio = read_ratio(heading, row[index], beside)
                if ratio is not None:
                    key = (*row[: index if measured is None else measured], about)
                    found[key] = ratio
        return found


def read_ratio(heading: str, cell: str, beside: str) -> tuple[float, float, float] | None:
    """The ratio in a cell, and its quartiles, from this cell or the next one; None if the cell has no ratio."""
    if "measured" in heading and re.fullmatch(r"[\d.]+ ?%", cell):
        percent = float(cell.strip(" %"))
        return percent, percent - NOISE_POINTS, percent + NOISE_POINTS
    is_ratio = re.search(r"\(median\)|median \(", heading) and not re.search(r"\b(ms|µs|tokens/s)\b", heading)
    found = RATIO.fullmatch(cell) if is_ratio else None
    if found is None:
        return None
    middle, quartiles = float(found[1]), re.fullmatch(RANGE, beside)
    if found[2]:
        return middle, float(found[2]), float(found[3])
    if quartiles:
        return middle, float(quartiles[1]), float(quartiles[2])
    return middle, middle * (1 - NOISE), middle * (1 + NOISE)


@dataclass
class Section:
    """A command of the page, and the line numbers of the tables that it printed: first line, one after the last."""

    command: str
    tables: list[tuple[int, int]]

    @property
    def name(self) -> str:
        return Path(shlex.split(self.command)[1]).stem


def read_tables(lines: list[str]) -> list[tuple[int, int]]:
    """The line numbers of the tables: first line, and one after the last."""
    spans: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        if line.startswith("|"):
            if spans and spans[-1][1] == number:
                spans[-1] = spans[-1][0], number + 1
            else:
                spans.append((number, number + 1))
    return spans


def parse(lines: list[str]) -> Table:
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return Table(cells[0], cells[2:])


def sections(lines: list[str]) -> Iterator[Section]:
    """The page's commands that run one program of bench/, each with the tables up to the next command or heading."""
    tables, open_section = read_tables(lines), None
    for number, line in enumerate(lines):
        if line.startswith(("#", "```sh")) and open_section is not None:
            yield open_section
            open_section = None
        if line == "```sh" and lines[number + 2] == "```" and lines[number + 1].startswith("python bench/"):
            open_section = Section(lines[number + 1], [])
        if open_section is not None:
            open_section.tables += [span for span in tables if span[0] == number]
    if open_section is not None:
        yield open_section


def run(command: str) -> list[str]:
    """Run a benchmark, and return the lines that it prints."""
    print(f"# {command}", flush=True)
    ended = subprocess.run(shlex.split(command.replace("python", sys.executable, 1)), cwd=LAB, stdout=subprocess.PIPE)
    require(ended.returncode == 0, f"{command} ended with status {ended.returncode}")
    return ended.stdout.decode().splitlines()


def compare(section: Section, page: list[str], printed: list[str]) -> Iterator[tuple[str, bool]]:
    """A row for each ratio that is both recorded and printed, and whether it has moved."""
    recorded: dict[tuple[str, ...], tuple[float, float, float]] = {}
    for first, end in section.tables:
        recorded |= parse(page[first:end]).ratios()
    for first, end in read_tables(printed):
        for about, (now, low, high) in parse(printed[first:end]).ratios().items():
            if about in recorded:
                before, lower, upper = recorded[about]
                has_moved = not lower <= now <= upper and not low <= before <= high
                yield (
                    (
                        f"| {section.name} | {', '.join(about)} | {before:.3g} ({lower:.3g} to {upper:.3g}) | "
                        f"{now:.3g} ({low:.3g} to {high:.3g}) | {'moved' if has_moved else ''} |"
                    ),
                    has_moved,
                )


def replace(page: list[str], section: Section, printed: list[str]) -> list[str]:
    """The page, with the tables of a section replaced by the printed ones."""
    new = [printed[first:end] for first, end in read_tables(printed)]
    counts = f"{section.command} printed {len(new)} tables, but {PAGE.name} has {len(section.tables)}"
    require(len(new) == len(section.tables), f"{counts}; insert them by hand, once")
    for (first, end), table in reversed(list(zip(section.tables, new, strict=True))):
        page = page[:first] + table + page[end:]
    return page


def main(request: Request) -> None:
    found = list(sections(PAGE.read_text().splitlines()))
    known = {section.name for section in found} if request.write else QUICK.keys()
    for name in request.names:
        what = f"a command in {PAGE.relative_to(LAB)}" if request.write else "a quick form"
        require(name in known, f"{name}: no benchmark with {what}; there are {', '.join(sorted(known))}")
    require(bool(request.names) or not request.write, "--write: give the names of the benchmarks to run")
    chosen = [section for section in found if section.name in (request.names or known)]
    if request.write:
        for section in chosen:
            printed, page = run(section.command), PAGE.read_text().splitlines()
            current = next(other for other in sections(page) if other.command == section.command)  # lines have moved
            PAGE.write_text("\n".join(replace(page, current, printed)) + "\n")
        return
    page, moved, rows = PAGE.read_text().splitlines(), 0, list[str]()
    for section in each(chosen, "benchmarks"):
        for row, has_moved in compare(section, page, run(f"{section.command} {QUICK[section.name]}")):
            rows.append(row)
            moved += has_moved
    print("| benchmark | ratio | recorded | now | |", "|---|---|---|---|---|", *rows, sep="\n")
    print(f"# {moved} of {len(rows)} ratios moved by more than noise")
    if moved:
        print("# other load changes ratios too: run these benchmarks again while nothing else runs")
        raise SystemExit(1)


if __name__ == "__main__":
    command_line.run(main, Request, __doc__ or "")
