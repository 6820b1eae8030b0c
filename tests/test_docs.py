"""What docs/troubleshooting.md quotes is what the lab says, word for word; and docs/trust.md right."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest
from support.processes import LAB

pytestmark = pytest.mark.quick

FOLDERS = ("src", "primer", "DP", "PP", "TP", "hybrid", "collectives", "mpi")
PAGE = LAB / "docs/troubleshooting.md"
VALUE = "\0"  # in a message of the source, in place of what differs from run to run


def quotes() -> list[str]:
    """The code spans in the first column of the page's tables."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@functools.cache
def messages() -> str:
    """All string literals of the source, a line each; and the lines of the shell scripts."""
    texts = [
        text
        for folder in FOLDERS
        for path in (LAB / folder).rglob("*.py")
        for text in strings(ast.parse(path.read_text()))
    ]
    shell = re.sub(r"\$\{[^}]*\}|\$\w+", VALUE, (LAB / "environment.sh").read_text())
    return "\n".join([*texts, shell])


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("\n", " ")


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_ours(quote: str) -> None:
    parts = re.split(r"<[^<>]+>|…", quote)
    if not any(is_in_order(parts, line) for line in messages().split("\n")):  # it may be put together from several
        assert all(is_said(part) for part in parts), quote


def is_in_order(parts: list[str], line: str) -> bool:
    """Whether a line has all parts, one after another."""
    place = 0
    for part in parts:
        place = line.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def is_said(part: str) -> bool:
    """Whether the source has these words, or has their beginning and, elsewhere, the rest."""
    cuts = [cut for cut in range(len(part)) if part[cut - 1 : cut] in ("", " ")]
    return any(part[:cut] in messages() and part[cut:] in messages() for cut in cuts or [0])


def test_nothing_in_the_source_runs_what_it_reads() -> None:
    for path in (path for folder in FOLDERS for path in (LAB / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                assert not {"pickle", "marshal", "shelve", "dill", "joblib"}.intersection(modules), path
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "torch.load"), (path, called)
                assert not called.endswith(("_object", "_object_list")), (path, called)
