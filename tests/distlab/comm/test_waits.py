"""What a rank's waits say: which one is under way, and why one failed."""

import time

import pytest

from distlab.comm.recorder import Ledger
from distlab.comm.waits import TrafficError, Wait, Waits, reason

pytestmark = pytest.mark.quick


def test_an_outer_wait_goes_on_after_an_inner_one() -> None:
    waits = Waits(0, 2, Ledger(), "rank {}".format)
    with waits.during("the checkpoint"):
        assert waits.waits_for() == Wait("the checkpoint", "other", (1,))
        assert waits.waits_for(at_least_seconds=10) is None, "it is told only after a while"

    def under_way() -> str:
        wait = waits.waits_for()
        return wait.what if wait else "nothing"

    for error, told in (
        (ValueError("no such operation"), "^no such operation$"),  # which is not about other ranks
        (RuntimeError("unsupported type int16"), "^unsupported type int16$"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "s for the barrier: no answer"),
        (RuntimeError("Connection closed by peer"), "s for the barrier: a rank has exited"),
    ):
        with pytest.raises(type(error), match=told) as caught, waits.during("the checkpoint"):
            try:
                with waits.during("the barrier"):
                    assert under_way() == "the barrier"
                    raise error
            finally:
                assert under_way() == "the checkpoint"
        assert isinstance(caught.value, TrafficError) == ("barrier" in told)
        assert under_way() == "nothing"
    for number, age in enumerate((3, 2)):  # the oldest of all counts, also of those in libraries
        waits.in_libraries[number] = Wait(f"bucket {number}", "collective", (1,)), time.perf_counter() - age
    with waits.during("the checkpoint"):
        assert under_way() == "bucket 0"


def test_an_error_without_words_is_named_by_its_kind() -> None:
    assert reason(RuntimeError()) == "RuntimeError"
    assert reason(RuntimeError("the first line\nthe second")) == "the first line"


@pytest.mark.parametrize(
    "why",
    [
        "Timed out waiting 100ms for recv operation to complete",
        "Connection closed by peer [127.0.0.1]:4222",
        "writev [127.0.0.1]:4222: Broken pipe",
        "recvmsg [10.0.0.2]:4222: No route to host",
        "connect [10.0.0.2]:4222: Network is unreachable",
    ],
)
def test_an_error_of_a_library_is_that_of_the_wait_which_the_library_has_begun(why: str) -> None:
    waits = Waits(0, 3, Ledger(), "rank {}".format)
    waits.in_libraries[7] = Wait("bucket 0", "collective", (1, 2)), time.perf_counter() - 3
    error = waits.failure_of(RuntimeError(why))
    assert str(error).startswith("rank 0 waited 3.0 s for bucket 0 from ranks 1 and 2: "), error
    assert waits.failure_of(RuntimeError("shapes differ")) is None
    assert waits.failure_of(TimeoutError("timed out")) is None, "of a socket of the script"
    waits.in_libraries.clear()
    error = waits.failure_of(RuntimeError(why))
    assert (error is None) == ("Timed out" in why), "a time-out of something else, such as of a socket of the script"
