"""The packages that flags of a run need beside the lab."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.settings.optional_packages import page_writer
from simplellm.errors import InputError
from simplellm.sources.files import open_file
from simplellm.tokenizers import SPTokenizer

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("package", "needs", "use"),
    [
        ("plotly", "--page", lambda _: page_writer()),
        ("pyarrow", "data {file}", lambda file: open_file(str(file)).count()),
        ("tokenizers", "a tokenizer.json", SPTokenizer),
    ],
)
def test_what_needs_a_package_says_so_where_it_is_not_installed(
    package: str, needs: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplellm.errors.find_spec", lambda name: None if name == package else name)
    (file := tmp_path / "any.parquet").write_text('{"model": {}}')
    sentence = f"{needs.format(file=file)} needs {package}: pip install {package}"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        use(file)
