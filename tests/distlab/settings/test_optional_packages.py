"""The packages that flags of a run need beside the lab."""

import pytest

from distlab.settings.optional_packages import page_writer
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


def test_without_plotly_there_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplellm.errors.find_spec", lambda name: None if name == "plotly" else name)
    with pytest.raises(InputError, match=r"^--page needs plotly: pip install plotly"):
        page_writer()
