"""The benchmarks import each other by their names, as scripts of one folder do."""

from collections.abc import Iterator

import pytest
from support.processes import LAB


@pytest.fixture(autouse=True, scope="module")
def _finds_benchmarks() -> Iterator[None]:
    """Before any other folder: modules of `distlab` have the same names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(LAB / "bench")
        yield
