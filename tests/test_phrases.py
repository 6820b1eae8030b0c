"""Phrases that a native editor would replace: none in pages, docstrings and messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import LAB
from support.quoted_commands import FENCE

pytestmark = pytest.mark.quick

PHRASES = {  # what to write instead
    r"\banew\b": "again",
    r"\bso many\b": "the number",
    r"\bshar\w+ out\b": "shard, distribute",
    r"\bhas (ended|begun|come)\b": "the simple past: ended, began, came",
    r"\bbesides\b": "in addition to; or leave it out",
    r"\bmeanwhile\b": "while …",
    r"\bin 1 \w+s\b|\b1 steps\b": "the singular",
    r"\ba circle:": "a cycle",
    r"\b(has|have) word of\b|\bleaves? word\b": "publish, report",
}
OPENINGS = r"(What|Whether|Of|By|That|Have)\b"  # of docstrings: functions take the imperative, values a noun
CODE = "src", "primer", "DP", "PP", "TP", "CP", "hybrid", "museum", "collectives", "mpi", "examples"


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a page's lines outside of blocks and code spans, or a script's docstrings and other strings of words."""
    content = path.read_text()
    if path.suffix == ".md":
        blank = FENCE.sub(lambda block: "\n" * block[0].count("\n"), content)
        yield from enumerate(re.sub(r"`[^`\n]+`", "", blank).splitlines(), start=1)
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`\n]+`", "", node.value)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            found = re.match(OPENINGS, ast.get_docstring(node) or "")
            if found is not None:
                yield getattr(node, "lineno", 1), f"opening {found[0]}"


def problems(path: Path) -> Iterator[str]:
    for line, words in passages(path):
        if words.startswith("opening "):
            yield f"{path}:{line}: the docstring begins with {words.removeprefix('opening ')!r}"
        for phrase, instead in PHRASES.items():
            if re.search(phrase, words, re.IGNORECASE):
                yield f"{path}:{line}: {phrase}: write {instead}"


def test_pages_docstrings_and_messages_have_none_of_the_phrases() -> None:
    pages = [LAB / "README.md", LAB / "CONTRIBUTING.md", *LAB.glob("*/README.md"), *LAB.glob("docs/*.md")]
    scripts = [path for folder in CODE for path in (LAB / folder).rglob("*.py")]
    assert len(pages) > 15 < len(scripts)
    found = [problem for path in [*pages, *scripts] for problem in problems(path)]
    assert not found, "\n".join(found)


def test_a_phrase_is_found_where_people_read_it(tmp_path: Path) -> None:
    page, script = tmp_path / "a.md", tmp_path / "a.py"
    page.write_text("Rank 1 starts anew.\n\n```text\nanew\n```\n")
    script.write_text('def f() -> None:\n    """Whether it is."""\n    print("in 1 messages")\n    anew = 1  # anew\n')
    assert [problem.partition(": ")[0] for problem in problems(page)] == [f"{page}:1"]
    assert sorted(problem.partition(": ")[0] for problem in problems(script)) == [f"{script}:1", f"{script}:3"]
