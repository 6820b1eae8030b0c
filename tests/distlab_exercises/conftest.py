"""The checker forks ranks from the tests' own process, as from a launcher's, which has no process group."""

from collections.abc import Iterator

import pytest
from support.processes import leave_group, make_group_of_one


@pytest.fixture(autouse=True)
def _is_no_rank() -> Iterator[None]:
    leave_group()
    yield
    make_group_of_one()
