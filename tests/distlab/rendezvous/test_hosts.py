"""A run on two hosts, which are network namespaces here: the training run of one machine, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from support.chapters import losses, records, train_on
from support.hosts import Host, two_hosts, two_hosts_with_a_link, why_no_tun, why_not
from support.processes import (
    Ended,
    Started,
    finish,
    meeting_of,
    parent,
    process_of,
    run_ranks,
    steps_taken,
    wait_for,
    wait_for_steps,
)
from support.terminals import Fork, enter, fork_launcher

from distlab.launching.nodes import LOST_NODE_0

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

# As SGD: Adam hides a wrong scale of the gradients.
MODEL = (
    "--dmodel 16 --num-heads 2 --n-layers 3 --seq-len 16 --data sample --device cpu --optimizer sgd --lr 0.5".split()
)
TINY = [*MODEL, *"--dp 2 --pp 2".split()]
ENDLESS = ["hybrid", *TINY, "--steps", "1000000"]
RANKS_OF_A_HOST = 2  # a replica
STEPS = 50
A_RANK_EACH = "--pp 1 --batch-size 1 --micro-batches 1".split()
# Word of a failure takes a second, the end of ranks that do not hear four; what more there is, is for machines whose
# few cores are shared. It is far below --timeout, and a run that hangs is found all the same.
SECONDS_TO_END = 30


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


def pids(host: Host) -> list[int]:
    """The processes on a host."""
    listing = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listing.stdout.split()]


def launcher_on(host: Host, rank: int) -> int:
    """The launcher that has started a rank."""
    return parent(process_of(rank, pids(host)))


@contextmanager
def launched(hosts: tuple[Host, Host], *command: object) -> Iterator[list[Fork]]:
    """The launchers of a run on two machines; at the end, no process is left there."""
    several = ["--nnodes", "2", "--master-addr", hosts[0].address, "--node-rank"]
    nodes = [fork_launcher(*command, *several, node, namespace=host.namespace) for node, host in enumerate(hosts)]
    try:
        yield nodes
    finally:
        for pid in [*pids(hosts[0]), *pids(hosts[1])]:
            os.kill(pid, signal.SIGKILL)


def last_lines(nodes: Sequence[Started]) -> tuple[list[str], list[Ended]]:
    ended = [finish(node, SECONDS_TO_END) for node in nodes]
    return [end.err.splitlines()[-1] for end in ended], ended


@pytest.mark.parametrize(
    ("name", "layout", "sent_as"),
    [
        ("hybrid", "--dp 2 --pp 3", "gradients"),  # of a stage's two replicas, one is on each host
        ("5d", "--dp 6 --pp 1 --batch-size 1 --micro-batches 1", "gradients between hosts"),  # three are
    ],
)
def test_two_hosts_give_the_losses_of_one_and_listen_on_their_link_alone(
    hosts: tuple[Host, Host], name: str, layout: str, sent_as: str, tmp_path: Path
) -> None:
    a, b = hosts
    model, shape = [*MODEL, "--steps", "6"], layout.split()
    listened_at: dict[Host, set[str]] = {a: set(), b: set()}
    with launched(hosts, name, *model, *shape, "--out", tmp_path / "two") as nodes:
        while any(node.poll() is None for node in nodes):
            for host in hosts:
                listened_at[host] |= host.listening()
            time.sleep(0.1)
        ended = [finish(node) for node in nodes]
    assert [end.status for end in ended] == [0, 0], [end.err for end in ended]
    assert listened_at == {a: {a.address}, b: {b.address}}
    said = ended[0].out.splitlines()
    assert any(line.endswith(f"({a.address}): ranks 0, 1, 2") for line in said[:4])
    assert any(line.endswith(f"({b.address}): ranks 3, 4, 5") for line in said[:4])
    assert not any(line[:1].isdigit() for line in ended[1].out.splitlines()), "rank 0 prints the steps"
    assert "Traceback" not in ended[0].err + ended[1].err

    own = losses(tmp_path / "two")
    assert len(own) == 6
    sent = records(tmp_path / "two")[-1]["sent_bytes"]
    assert sent[sent_as] > 250_000, "of the embedding: over gloo"
    one_host = train_on(6, f"hybrid/intro_{name}.py", tmp_path / "alone", *model, *shape)[-1]
    assert own == pytest.approx(one_host, rel=1e-6)
    one_process = train_on(1, "primer/intro.py", tmp_path / "one", *model, "--batch-size", "6")[-1]
    assert own == pytest.approx(one_process, rel=1e-5)
    assert abs(own[-1] - own[0]) > 0.01, "training changed something"


def test_a_killed_rank_ends_both_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    rank = 3
    with launched(hosts, *ENDLESS, "--out", tmp_path) as nodes:
        wait_for_steps(tmp_path, *nodes)
        there = rank // RANKS_OF_A_HOST
        os.kill(process_of(rank, pids(hosts[there])), signal.SIGKILL)
        sentences, ended = last_lines(nodes)
        cause = f"rank {rank} (stage 1 of replica {there}) was terminated by SIGKILL"
        assert sentences[there] == f"# {cause}"
        assert sentences[1 - there] == f"# on another machine, node {there}, {cause}"
        assert all(end.status == 1 for end in ended)
        assert not pids(hosts[0]) + pids(hosts[1]), "no orphans"


def test_a_killed_launcher_ends_both_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    with launched(hosts, *ENDLESS, "--out", tmp_path) as nodes:
        wait_for_steps(tmp_path, *nodes)
        os.kill(launcher_on(hosts[0], 0), signal.SIGKILL)
        end = finish(nodes[1], SECONDS_TO_END)
        assert end.status == 1
        assert end.err.splitlines()[-1] == f"# {LOST_NODE_0}"
        finish(nodes[0], 5)
        assert wait_for(lambda: not pids(hosts[0]) + pids(hosts[1]), 5), "no orphans"


def test_a_stopped_launcher_ends_the_other_host(
    hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped rank keeps the others from computing meanwhile."""
    monkeypatch.setattr("distlab.launching.nodes.SECONDS_OF_SILENCE", 2.5)
    monkeypatch.setattr("distlab.launching.processes.SECONDS_TO_END", 1)
    with launched(hosts, *ENDLESS, "--out", tmp_path) as nodes:
        wait_for_steps(tmp_path, *nodes)
        for stopped in (launcher_on(hosts[0], 0), process_of(3, pids(hosts[1]))):
            os.kill(stopped, signal.SIGSTOP)
        end = finish(nodes[1], SECONDS_TO_END)
        assert end.status == 1
        assert end.err.splitlines()[-1] == f"# {LOST_NODE_0}"
        assert not pids(hosts[1]), "no orphans"
    finish(nodes[0], 5)


def test_both_hosts_start_again_when_a_rank_was_killed(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Rank 0, which has the store; `test_restarts_that_are_used_up_end_both_hosts` kills one of the other host."""
    flags = [*A_RANK_EACH, "--out", tmp_path / "restarted", "--save-every", "15", "--max-restarts", "1"]
    with launched(hosts, "hybrid", *TINY, "--steps", STEPS, *flags) as nodes:
        wait_for_steps(tmp_path / "restarted", *nodes, steps=16)
        os.kill(process_of(0, pids(hosts[0])), signal.SIGKILL)
        ended = [finish(node, 90) for node in nodes]
        assert [end.status for end in ended] == [0, 0], [end.err for end in ended]
        for end in ended:
            assert end.out.count("# a rank has failed: starting all ranks again, 1 of 1 times\n") == 1
        resumed = re.search(rf"# resuming from {tmp_path}/restarted/\S+-0+(\d+), after (\d+) steps\n", ended[0].out)
        assert resumed, ended[0].out
        assert resumed[1] == resumed[2]
        assert int(resumed[1]) >= 15
    layout = [*TINY, *A_RANK_EACH, "--steps", str(STEPS)]
    expected = train_on(2, "hybrid/intro_hybrid.py", tmp_path / "alone", *layout)[-1]
    assert losses(tmp_path / "restarted") == pytest.approx(expected, rel=1e-6)


def test_restarts_that_are_used_up_end_both_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """One kill on each host: the restart after the first counts on both."""
    flags = [*A_RANK_EACH, "--out", tmp_path, "--max-restarts", "1"]
    with launched(hosts, *ENDLESS, *flags) as nodes:
        wait_for_steps(tmp_path, *nodes, steps=40)
        os.kill(process_of(1, pids(hosts[1])), signal.SIGKILL)
        assert wait_for(lambda: steps_taken(tmp_path) < 40), "it began again"
        wait_for_steps(tmp_path, *nodes)
        os.kill(process_of(0, pids(hosts[0])), signal.SIGKILL)
        sentences, ended = last_lines(nodes)
        assert [end.status for end in ended] == [1, 1]
        cause = "rank 0 was terminated by SIGKILL"
        assert sentences == [f"# {cause}", f"# on another machine, node 0, {cause}"]
        assert not any("2 of 1" in end.out for end in ended)


def send_to_the_other(rank: int, hosts: tuple[Host, Host], listening: Barrier) -> list[float]:
    """The seconds after which a byte, and then a megabyte, that rank 1 has sent to rank 0 is answered."""
    enter(hosts[rank].namespace)
    place, seconds = (hosts[0].address, 4000), []
    listener = socket.create_server(place) if rank == 0 else None
    listening.wait(20)
    connection = listener.accept()[0] if listener else socket.create_connection(place)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for size in (1, 1_000_000):
        started = time.monotonic()
        if listener:
            connection.recv(size, socket.MSG_WAITALL)
            connection.send(b"!")
        else:
            connection.sendall(bytes(size))
            connection.recv(1)
        seconds.append(time.monotonic() - started)
    return seconds


@pytest.mark.skipif(bool(why_no_tun()), reason=why_no_tun())
def test_a_shaped_link_has_its_latency_and_its_bandwidth() -> None:
    with two_hosts_with_a_link() as (hosts, link):
        link.shape(mbit_per_second=20, one_way_ms=30)
        _, (round_trip, megabyte) = run_ranks(2, send_to_the_other, hosts, meeting_of(2))
        # The link owes the lower bounds; above them is what the machine, with other work on few cores, adds.
        assert 0.060 <= round_trip < 1
        assert 0.460 <= megabyte < 3, "0.4 s for the bits, and a round trip"
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert hosts[0].namespace not in listing.stdout


# Both ranks take their last step together; then rank 0 has something left to do, at which it fails at first.
FAILS_LATE = """
import os, time
from distlab.run.main import main
from distlab.settings.replicas import DataParallelSettings

DEFAULTS = DataParallelSettings(world_size=2, device="cpu", data="sample")

def fail_late():
    time.sleep(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise OSError("no room for the figure")
    print("# drawn", flush=True)

def work(run):
    if run.rank == 0:
        run.summarize = fail_late

if __name__ == "__main__":
    main(work, DEFAULTS, "")
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_fails_when_the_other_hosts_have_finished(
    restarts: int, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    script = tmp_path / "late.py"
    script.write_text(FAILS_LATE)
    with launched(hosts, script, "--max-restarts", restarts, "--out", tmp_path / "run") as nodes:
        if restarts:
            ended = [finish(node, SECONDS_TO_END) for node in nodes]
            assert [end.status for end in ended] == [0, 0], [end.err for end in ended]
            assert "# drawn\n" in ended[0].out
        else:
            sentences, ended = last_lines(nodes)
            cause = "rank 0 failed: OSError: no room for the figure"
            assert sentences == [f"# {cause}", f"# on another machine, node 0, {cause}"]
            assert [end.status for end in ended] == [1, 1]
        assert not pids(hosts[0]) + pids(hosts[1]), "no orphans"
