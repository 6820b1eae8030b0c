"""What a rank prints, where ranks share a terminal."""

import io
from pathlib import Path

import pytest

from distlab.logs import RankOutput, human_bytes


def test_a_prefixed_rank_writes_whole_lines_and_says_whose_they_are() -> None:
    terminal = io.StringIO()
    output = RankOutput(terminal, "# rank 2: ")
    output.write("hel")
    assert terminal.getvalue() == ""
    output.write("lo\n# a remark\nres")
    assert terminal.getvalue() == "# rank 2: hello\n# rank 2: a remark\n"
    output.write("t\n")
    assert terminal.getvalue().endswith("# rank 2: rest\n")


def test_the_log_holds_everything_also_what_came_before_its_file(tmp_path: Path) -> None:
    terminal = io.StringIO()
    output = RankOutput(terminal)
    output.write("before\n")
    with (tmp_path / "rank0.log").open("w", buffering=1) as log:
        output.keep_in(log)
        output.write("after\n")
        output.keep("in the log alone\n")
        assert (tmp_path / "rank0.log").read_text() == "before\nafter\nin the log alone\n"
    assert terminal.getvalue() == "before\nafter\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (16_500_000_000, "16.5 GB"), (10**16, "1e+04 TB")]
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
