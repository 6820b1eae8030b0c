"""Run benchmarks in a quick form, about ten minutes on two cores, and compare their ratios with bench/README.md.

    python bench                                    run all that have a quick form, and compare
    python bench pipeline tensor_parallel           only these
    python bench --write tensor_parallel            in full, as quoted in bench/README.md, and write its tables there

A ratio has moved if it is outside of the quartiles in bench/README.md, and the recorded ratio outside of the new
quartiles; then the exit status is 1. The quick form measures some of the rows, with fewer rounds. It leaves out
benchmarks that take long or have special needs: whole runs (`checkpoints`, `revisions`, `starting`), campaigns
(`kills`), simulated links (`network`, `slow_training`), a machine that has been measured (`planner`), a GPU (`gpu`).
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from turns import each

from simplellm import command_line
from simplellm.errors import InputError, require

LAB = Path(__file__).resolve().parents[1]
PAGE = LAB / "bench" / "README.md"
QUICK = {  # flags that are appended to the page's commands
    "single": "--steps 5",
    "heap": "--steps 5",
    "data_parallel": "--rounds 8",
    "pipeline": "--micro-batches 6 --rounds 4",
    "bubble": "--sizes 4x8 --schedules dapple zb-h2 zb-v",
    "messages": "--starts 3",
    "collectives": "--starts 2 --rounds 10",
    "tensor_parallel": "--rounds 8",
    "sharded": "--worlds 2 --rounds 6",
    "generation": "--stories 1",
}
NOT_QUICK = (  # commands on the page of these programs
    "python bench/single.py --profile --steps 8",  # shares, which are not ratios of two
    "python bench/collectives.py --worlds --starts 2",  # 64 predictions, which have no quartiles
)
NOISE = 0.05  # relative tolerance of a ratio without quartiles
NOISE_POINTS = 1.5  # tolerance of a percentage, in percentage points
RANGE = r"([\d.]+) to ([\d.]+)"
RATIO = re.compile(rf"([\d.]+)(?: \({RANGE}\))?")
MEASURED = re.compile(r"\b(ms|µs|MB|seconds|tokens/s|measured|in theory|theory)\b")  # in a column's heading

Ratios = dict[tuple[str, ...], tuple[float, float, float]]  # with the quartiles, by the labels of row and column


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

    def ratios(self) -> Ratios:
        """The ratios with their lower and upper quartiles."""
        measured = next(iter(i for i, heading in enumerate(self.headings) if MEASURED.search(heading)), None)
        found: Ratios = {}
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
    """Commands of the page, and the line numbers of the tables that they printed: first line, one after the last."""

    commands: list[str]
    tables: list[tuple[int, int]]

    @property
    def name(self) -> str:
        return Path(shlex.split(self.commands[0])[1]).stem

    @property
    def is_quick(self) -> bool:
        return self.name in QUICK and not set(self.commands) & set(NOT_QUICK)


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
    """The page's blocks of nothing but programs of bench/, each with the tables up to the next block or heading."""
    tables, open_section = read_tables(lines), None
    for number, line in enumerate(lines):
        if line.startswith(("#", "```sh")) and open_section is not None:
            yield open_section
            open_section = None
        if line == "```sh":
            commands = lines[number + 1 : lines.index("```", number)]
            if all(command.startswith("python bench/") for command in commands):
                open_section = Section(commands, [])
        if open_section is not None:
            open_section.tables += [span for span in tables if span[0] == number]
    if open_section is not None:
        yield open_section


def by_hand(lines: list[str]) -> list[str]:
    """The headings, below the page's own, of tables that no program of bench/ writes."""
    heading, found = "", dict[str, None]()
    others = set(read_tables(lines)).difference(*(section.tables for section in sections(lines)))
    for number, line in enumerate(lines):
        if line.startswith("##"):
            heading = line.lstrip("# ")
        if heading and any(first == number for first, _ in others):
            found[heading] = None
    return list(found)


def run(command: str) -> list[str]:
    """Run a benchmark, and return the lines that it prints."""
    print(f"# {command}", flush=True)
    ended = subprocess.run(shlex.split(command.replace("python", sys.executable, 1)), cwd=LAB, stdout=subprocess.PIPE)
    require(ended.returncode == 0, f"{command} ended with status {ended.returncode}")
    return ended.stdout.decode().splitlines()


def compare(name: str, recorded: Ratios, printed: Ratios) -> Iterator[tuple[str, bool]]:
    """A row for each ratio that is both recorded and printed, and whether it has moved."""
    for about in [about for about in printed if about in recorded]:
        (before, lower, upper), (now, low, high) = recorded[about], printed[about]
        has_moved = not lower <= now <= upper and not low <= before <= high
        yield (
            (
                f"| {name} | {', '.join(about)} | {before:.3g} ({lower:.3g} to {upper:.3g}) | "
                f"{now:.3g} ({low:.3g} to {high:.3g}) | {'moved' if has_moved else ''} |"
            ),
            has_moved,
        )


def joined(printed: Iterable[list[str]]) -> list[list[str]]:
    """The tables that several commands printed; what has the head of an earlier command's table goes on with it."""
    tables: list[list[str]] = []
    for lines in printed:
        earlier = {table[0]: table for table in tables}
        for first, end in read_tables(lines):
            if lines[first] in earlier:
                earlier[lines[first]] += lines[first + 2 : end]
            else:
                tables.append(lines[first:end])
    return tables


def replace(page: list[str], section: Section, new: list[list[str]]) -> list[str]:
    """The page, with the tables of a section replaced by new ones."""
    counts = f"{'; '.join(section.commands)} printed {len(new)} tables, but {PAGE.name} has {len(section.tables)}"
    require(len(new) == len(section.tables), f"{counts}; insert them by hand, once")
    for (first, end), table in reversed(list(zip(section.tables, new, strict=True))):
        page = page[:first] + table + page[end:]
    return page


def write(chosen: list[Section]) -> None:
    """Run the sections in full and write their tables; what cannot be written does not keep back the others.

    Raises:
        InputError: of some, nothing has been written.
    """
    failures = []
    for section in chosen:
        try:
            new, page = joined(map(run, section.commands)), PAGE.read_text().splitlines()
            current = next(other for other in sections(page) if other.commands == section.commands)  # lines have moved
            PAGE.write_text("\n".join(replace(page, current, new)) + "\n")
        except InputError as error:
            failures.append(str(error))
    print(f"# tables that no program of bench/ writes: {', '.join(by_hand(PAGE.read_text().splitlines()))}")
    require(not failures, f"not written: {'; '.join(failures)}")


def main(request: Request) -> None:
    found = list(sections(PAGE.read_text().splitlines()))
    known = {section.name for section in found if request.write or section.is_quick}
    for name in request.names:
        what = f"a command in {PAGE.relative_to(LAB)}" if request.write else "a quick form"
        require(name in known, f"{name}: no benchmark with {what}; there are {', '.join(sorted(known))}")
    require(bool(request.names) or not request.write, "--write: give the names of the benchmarks to run")
    chosen = [section for section in found if section.name in (request.names or known)]
    if request.write:
        write(chosen)
        return
    page, moved, rows, silent = PAGE.read_text().splitlines(), 0, list[str](), list[str]()
    for section in each([section for section in chosen if section.is_quick], "benchmarks"):
        tables = joined(run(f"{command} {QUICK[section.name]}") for command in section.commands)
        printed = {about: ratio for table in tables for about, ratio in parse(table).ratios().items()}
        for first, end in section.tables:
            compared = list(compare(section.name, parse(page[first:end]).ratios(), printed))
            rows += [row for row, _ in compared]
            moved += sum(has_moved for _, has_moved in compared)
            if not compared:
                silent.append(f"{section.name}: {page[first]}")
    print("| benchmark | ratio | recorded | now | |", "|---|---|---|---|---|", *rows, sep="\n")
    print(f"# {moved} of {len(rows)} ratios moved by more than noise")
    require(not silent, f"in {PAGE.name}, but no ratio of it is printed: {'; '.join(silent)}")
    if moved:
        print("# other load changes ratios too: run these benchmarks again while nothing else runs")
        raise SystemExit(1)


if __name__ == "__main__":
    command_line.run(main, Request, __doc__ or "")
