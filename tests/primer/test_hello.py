"""The first program: started in each way, and its deadlock."""

import pytest
from support.terminals import fork_launcher, fork_python

SCRIPT = "primer/hello.py"


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_send_receive_and_add_up(ranks: int) -> None:
    ended = fork_launcher("hello", "--world-size", ranks).finish()
    assert ended.status == 0, ended.err
    total = [float(sum(number + 10 * rank for rank in range(ranks))) for number in range(3)]
    for rank in range(ranks):
        before = (rank - 1) % ranks
        sent = [10.0 * before + number for number in range(3)]
        assert f"rank {rank} received {sent} from rank {before}\n" in ended.out
        assert f"rank {rank} has the sum {total}\n" in ended.out
    assert "rank 0 sent 12 B of send in 1 message" in ended.out


def test_sends_that_wait_for_each_other_are_told_with_their_lines() -> None:
    ended = fork_launcher("hello", "--deadlock").finish()
    assert ended.status == 1
    assert "cycle: rank 0 -> rank 1 -> rank 0" in ended.out + ended.err
    assert (ended.out + ended.err).count("(hello.py line ") == 2


def test_a_missing_rank_is_asked_for() -> None:
    ended = fork_python(SCRIPT).finish()
    assert ended.status == 2
    assert "give the rank" in ended.err
