"""The pages: links lead somewhere, commands parse, figures and paths exist, tables name the topologies and flags."""

import functools
import os
import re
from pathlib import Path

import pytest
from support.processes import LAB, run_ranks
from support.quoted_commands import FENCE, OURS, check, commands

from distlab.launch import TOPOLOGIES
from distlab.settings.common import WorldSize
from distlab.settings.hybrid import HybridSettings
from distlab.settings.training import TrainSettings
from distlab.show_schedule import Request, show
from simplellm.errors import InputError

HIDDEN = "runs", "build"
PAGES = sorted(
    page.relative_to(LAB)
    for pattern in ("*.md", "[!.]*/**/*.md")  # hidden folders, such as .venv/, have thousands of others
    for page in LAB.glob(pattern)
    if not any(part.startswith(".") or part in HIDDEN for part in page.relative_to(LAB).parts)
)
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")
each_page = pytest.mark.parametrize("page", PAGES, ids=str)


def text(page: Path) -> str:
    return (LAB / page).read_text()


def prose(page: Path) -> str:
    """A page without its blocks of code and code spans."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text(page)))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Where links into a page may lead: its headings, as GitHub names them."""
    names: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text(page)), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return set(names)


def target(page: Path, link: str) -> Path:
    """The file or folder that a link leads to, relative to the lab."""
    there = ((LAB / page).parent / link).resolve() if link else LAB / page
    assert there.exists(), f"{page}: {link} is not there"
    return there.relative_to(LAB)


@pytest.mark.quick
@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        there = target(page, path)
        assert not anchor or anchor in anchors(there), f"{page}: {there} has no heading #{anchor}"
    for name in re.findall(r"\]\[([\w-]+)\]", prose(page)):
        assert re.search(rf"^\[{name}\]:\s+\S+$", text(page), re.MULTILINE), f"{page}: [{name}] is not defined"


@pytest.mark.quick
@each_page
def test_every_path_that_is_named_exists(page: Path) -> None:
    folders = [path.name for path in LAB.iterdir() if path.is_dir()]
    for span in re.findall(r"`([\w./-]+)`", FENCE.sub("", text(page))):
        if span.partition("/")[0] in folders and "/" in span and span.partition("/")[0] not in (*HIDDEN, ".venv"):
            assert (LAB / span).exists(), f"{page}: {span} is not there"


@pytest.mark.quick
def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text(Path("docs/controls.md")))
    assert len(named) > 90
    for path, name in named:
        assert f"def {name}(" in text(Path(path)), f"{path}::{name}"


@pytest.mark.quick
def test_every_figure_is_shown_and_has_its_command() -> None:
    shown = {
        page: {target(page, "".join(match)) for match in IMAGE.findall(prose(page))}
        for page in PAGES
        if page.parent != Path("imgs")
    }
    there = {path.relative_to(LAB) for path in (LAB / "imgs").iterdir()} - {Path("imgs/README.md")}
    assert set().union(*shown.values()) == there
    index = text(Path("imgs/README.md"))
    for figure in there:
        assert re.search(rf"^## {re.escape(figure.name)}$", index, re.MULTILINE), figure
        assert any(f"{figure}" in command for command in commands(index)), figure
        row = next(line for line in index.splitlines() if line.startswith(f"| [{figure.name}]"))
        links = re.findall(r"\(([^)#]+)[^)]*\)", row)
        pages = {target(Path("imgs/README.md"), link) for link in links}
        assert pages == {page for page, figures in shown.items() if figure in figures}, figure


@pytest.mark.quick
@each_page
def test_every_block_says_what_it_is(page: Path) -> None:
    """So that no command hides in a block that is not parsed, or in one that is only indented."""
    for _, language, block in FENCE.findall(text(page)):
        assert language in ("sh", "console", "text", "python"), block
        assert language in ("sh", "console") or not OURS.search(block), block
    assert not re.search(r"^    \S", FENCE.sub("", text(page)), re.MULTILINE)


def test_every_command_is_one_that_a_script_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [(str(page), block) for page in PAGES for block in commands(text(page))]
    monkeypatch.chdir(tmp_path)  # a place to write to
    [refused] = run_ranks(1, refusals, blocks)
    assert not refused, "\n".join(refused)


def refusals(_: int, blocks: list[tuple[str, str]]) -> list[str]:
    """What is refused, of pages' blocks, each page in a folder of its own."""
    found, folder = [], Path.cwd()
    for number, (page, block) in enumerate(blocks):
        if number == 0 or page != blocks[number - 1][0]:
            (place := folder / str(number)).mkdir()
            os.chdir(place)
        try:
            check(block)
        except (InputError, AssertionError) as error:
            found.append(f"{page}: {block}: {error}")
    return found


WRONG = [
    ("./launch.sh dp-gaa", "no such topology"),
    ("./launch.sh dp-ga --stepz 3", "Unrecognized options: --stepz"),
    ("./launch.sh hybrid --batch-size 4", "equal micro-batches"),
    ("./launch.sh mpi --test_case all --worlds 3", "--worlds"),
    ("python primer/no_such.py", "no such script"),
    ("python primer/intro.py --steps many", "Error parsing --steps"),
    ("python primer/tell_story.py RUN --temperature -1", "must be 0 or more"),
    ("python bench/bubble.py --stage 4", "--stage"),
    ("python bench/single.py --stepz 4", "--stepz"),
    ("python -m distlab.figures loss x.png runs/a", "loss"),
    ("python -m distlab.show_schedule", "missing"),
    ("torchrun --nproc-per-node 3 DP/gradient_aggr/intro_DP_GA.py --stepz 3", "--stepz"),
    ("cd mpi; mpirun -n 8 python mpi-tests.py", "no such script"),
    ("./test.sh tests/none", "tests/none"),
    ("make", "not a program"),
]


@pytest.mark.quick
def test_a_wrong_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [refused] = run_ranks(1, refusals, [(reason, block) for block, reason in WRONG])
    for (block, reason), sentence in zip(WRONG, refused, strict=True):
        assert reason in sentence.partition(f": {block}: ")[2]


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table below a heading of a page, without its head."""
    section = text(page).partition(f" {heading}\n")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


@pytest.mark.quick
def test_the_table_of_chapters_has_all_topologies() -> None:
    names = [name for row in rows(Path("README.md"), "Chapters") for name in re.findall(r"`(\w[\w-]*)`", row[2])]
    assert sorted(names) == sorted(TOPOLOGIES.keys() - {"quickstart"})


@pytest.mark.quick
def test_the_table_of_flags_is_complete_and_its_defaults_are_right() -> None:
    values = vars(WorldSize()) | vars(HybridSettings())
    named = set()
    for flags, defaults, _ in rows(Path("docs/reference.md"), "Flags"):
        names = [flag.lstrip("-").replace("-", "_") for flag in flags.strip("`").split()]
        named.update(names)
        for name, default in zip(names, defaults.split(), strict=False):
            if default == "off":
                assert not values[name], name
            elif re.fullmatch(r"[\d.e-]+", default) and values[name] is not None:
                assert float(values[name]) == float(default), name
    assert named <= values.keys()
    assert named >= vars(TrainSettings()).keys() - {"rank"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("page", "flags", "asked"),
    [
        ("PP/README.md", "naive --micro-batches 1", Request("naive", micro_batches=1)),
        ("PP/README.md", "gpipe", Request("gpipe")),
        ("PP/README.md", "dapple", Request("dapple")),
        ("PP/README.md", "zb-h1", Request("zb-h1")),
        ("docs/schedules.md", "dapple --recompute", Request("dapple", recompute=True)),
    ],
)
def test_the_tables_of_ticks_are_those_of_the_schedules(page: str, flags: str, asked: Request) -> None:
    command = f"`./launch.sh show-schedule {flags}`"
    shown = text(Path(page)).partition(command)[2].partition("```text\n")[2].partition("\n```")[0]
    assert shown.splitlines() == [line for line in show(asked) if not line.startswith("#")]
