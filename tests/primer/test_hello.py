"""The first program: started in each way, and its deadlock."""

import signal
import socket
from pathlib import Path

import pytest
from support.processes import LAB, free_port, wait_for
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


def test_sends_that_wait_for_each_other_are_told_with_their_lines(tmp_path: Path) -> None:
    """In 2 seconds, not in the script's 10."""
    text, timeout = (LAB / SCRIPT).read_text(), "seconds=10 if args.deadlock"
    assert timeout in text
    (tmp_path / "hello.py").write_text(text.replace(timeout, "seconds=2 if args.deadlock"))
    ended = fork_launcher(tmp_path / "hello.py", "--deadlock").finish()
    assert ended.status == 1
    assert "cycle: rank 0 -> rank 1 -> rank 0" in ended.out + ended.err
    assert (ended.out + ended.err).count("(hello.py line ") == 2


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [
        ("", "give the rank"),
        ("2", "argument rank: invalid choice: 2 (choose from 0, 1)"),
        ("0", "# the ranks could not meet at port abc ("),
    ],
)
def test_a_missing_or_wrong_rank_and_a_port_that_is_not_a_number_are_told(rank: str, sentence: str) -> None:
    ended = fork_python(SCRIPT, *rank.split(), MASTER_PORT="abc").finish()
    assert ended.status == 2
    assert sentence in ended.err


def test_one_rank_has_nobody_to_send_to() -> None:
    ended = fork_launcher("hello", "--world-size", 1).finish()
    assert ended.status == 2
    assert "# --world-size 1: a rank cannot send to itself; give at least 2" in ended.out + ended.err


def test_help_tells_what_the_program_shows() -> None:
    ended = fork_python(SCRIPT, "--help").finish()
    assert ended.status == 0
    assert "./launch.sh hello --deadlock " in ended.out


def test_rank_0_started_twice_is_told_in_a_sentence_and_ctrl_c_ends_the_one_that_waits() -> None:
    port = str(free_port())
    first = fork_python(SCRIPT, "0", MASTER_PORT=port)
    assert wait_for(lambda: is_taken(port))
    second = fork_python(SCRIPT, "0", MASTER_PORT=port).finish()
    assert second.status == 2
    assert f"# the ranks could not meet at port {port} (" in second.err.splitlines()[-1]
    assert "Traceback" not in second.err
    first.send_signal(signal.SIGINT)
    ended = first.finish(10)
    assert ended.status == -signal.SIGINT
    assert ended.out == "# rank 0 waits until rank 1 is there: start it in another terminal\n"


def is_taken(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", int(port))) == 0
