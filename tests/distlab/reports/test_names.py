"""Names of runs in figures, as their users wrote them."""

import json
from pathlib import Path
from typing import Any

import pytest

from distlab.reports import style
from distlab_figures.runs import losses

NAMES = ["_baseline", "$5 a day", "a$b$c", "_$x_1$", "plain"]


def test_names_are_drawn_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for number, name in enumerate(NAMES):
        (tmp_path / str(number)).mkdir()
        records = [{"step": step, "loss": 1.0, "tokens": step, "seconds": 1.0} for step in range(3)]
        (tmp_path / str(number) / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        runs.append(f"{name}={tmp_path / str(number)}")
    drawn: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, _: drawn.append(figure))
    losses(tmp_path / "figure.png", runs, title="_$ and $")
    (axes,) = drawn[0].axes
    texts = [*axes.get_legend().get_texts(), axes.title]
    assert [text.get_text().strip().replace("\\$", "$") for text in texts] == [*NAMES, "_$ and $"]
    for text in texts:  # dollars that are escaped are no math
        assert text.get_text().count("$") == text.get_text().count("\\$")
