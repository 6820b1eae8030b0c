"""What tests of figures share."""

from typing import Any

import pytest


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures of a test, which are not written to files."""
    kept: list[Any] = []
    monkeypatch.setattr("distlab.reports.style.save", lambda figure, _: kept.append(figure))
    return kept
