"""The command line of a run."""

import pytest

from distlab.settings.common import parse
from distlab.settings.training import TrainSettings

pytestmark = pytest.mark.quick


def test_without_arguments_it_is_that_of_the_process_and_with_none_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["intro.py", "--steps", "7"])
    assert parse(TrainSettings(steps=3), "").steps == 7
    assert parse(TrainSettings(steps=3), "", []).steps == 3
