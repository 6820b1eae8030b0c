"""What a rank's waits say: which one is under way, and why one failed."""

import pytest

from distlab.comm.recorder import Ledger
from distlab.comm.waits import Waits, reason

pytestmark = pytest.mark.quick


def test_an_outer_wait_goes_on_after_an_inner_one() -> None:
    waits = Waits(0, 2, Ledger(), "rank {}".format)

    def under_way() -> str:
        wait = waits.waits_for()
        return wait.what if wait else "nothing"

    with waits.during("the checkpoint"):
        with waits.during("the barrier"):
            assert under_way() == "the barrier"
        assert under_way() == "the checkpoint"
    assert under_way() == "nothing"


def test_an_error_without_words_is_named_by_its_kind() -> None:
    assert reason(RuntimeError()) == "RuntimeError"
    assert reason(RuntimeError("the first line\nthe second")) == "the first line"
