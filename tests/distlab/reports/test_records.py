"""Which of several runs is the newest."""

import os
from pathlib import Path

import pytest

from distlab.reports.records import newest_run

pytestmark = pytest.mark.quick


def test_the_newest_run_is_the_one_that_began_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path) == tmp_path
    for name, seconds in (("a", 5), ("b", 9), ("c", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
        os.utime(tmp_path / name / "config.json", (0, seconds))
        os.utime(tmp_path / name, (0, 10 - seconds))  # something was written there, or deleted
    assert newest_run(tmp_path) == tmp_path / "b"
    (tmp_path / "config.json").touch()
    assert newest_run(tmp_path) == tmp_path, "a run, whatever is in its folder"
