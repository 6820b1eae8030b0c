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

    def fail(error: Exception) -> None:
        with waits.during("the checkpoint"):
            try:
                with waits.during("the barrier"):
                    assert under_way() == "the barrier"
                    raise error
            finally:
                assert under_way() == "the checkpoint"

    for error, told in (
        (ValueError("no such operation"), "^no such operation$"),  # which is not about other ranks
        (RuntimeError("unsupported type int16"), "^unsupported type int16$"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "s for the barrier: no answer"),
        (RuntimeError("Connection closed by peer"), "s for the barrier: a rank has exited"),
    ):
        with pytest.raises(TrafficError if "barrier" in told else type(error), match=told):
            fail(error)
        assert under_way() == "nothing"
    for number, age in enumerate((3, 2)):  # the oldest of all counts, also of those in libraries
        waits.in_libraries[number] = Wait(f"bucket {number}", "collective", (1,)), time.perf_counter() - age
    with waits.during("the checkpoint"):
        assert under_way() == "bucket 0"


def test_a_wait_is_named_by_its_ranks_and_the_line_of_the_script_if_that_is_known() -> None:
    at = "plain.py line 3"
    for wait, told in {
        Wait("send", "send", (2,), line=at): "send to rank 2 (stage 1), plain.py line 3",
        Wait("the activations", "send", (2,)): "rank 2 (stage 1) to receive the activations",
        Wait("recv", "receive", (2,), line=at): "recv from rank 2 (stage 1), plain.py line 3",
        Wait("all_reduce", "collective", (0, 2), line=at): "all_reduce from ranks 0 and 2, plain.py line 3",
        Wait("new_group", "other", (2,), line=at): "new_group, plain.py line 3",
    }.items():
        assert wait.sentence("rank {} (stage 1)".format) == told


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
