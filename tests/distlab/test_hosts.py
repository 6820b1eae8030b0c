"""A run on two hosts, which are network namespaces here: the training run of one machine, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, two_hosts, two_hosts_with_a_link, why_not
from processes import LAB, Ended, finish, run, start

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

# As SGD: Adam hides a wrong scale of the gradients.
TINY = "--dmodel 16 --num-heads 2 --n-layers 3 --seq-len 16 --data sample --device cpu --optimizer sgd --lr 0.5".split()
SECONDS_TO_END = 10


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


def launch(host: Host, node: int, *flags: str | Path, master: str, steps: int = 1_000_000) -> "subprocess.Popen[str]":
    """Node `node` of a hybrid run on two machines."""
    several = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", master]
    return start(*host.command(LAB / "launch.sh", "hybrid", *TINY, "--steps", str(steps), *several, *flags))


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def wait_for_steps(out: Path) -> None:
    deadline = time.monotonic() + 40
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        assert time.monotonic() < deadline, "no steps"
        time.sleep(0.05)


def pids(host: Host) -> list[int]:
    """The processes on a host."""
    listing = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listing.stdout.split()]


def rank_of(host: Host, rank: int) -> int:
    """The process of a rank."""
    (pid,) = [pid for pid in pids(host) if f"RANK={rank}".encode() in environment(pid)]
    return pid


def environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def kill_all(*hosts: Host) -> None:
    for host in hosts:
        for pid in pids(host):
            os.kill(pid, signal.SIGKILL)


def last_lines(nodes: "list[subprocess.Popen[str]]") -> tuple[list[str], list[Ended]]:
    ended = [finish(node, SECONDS_TO_END) for node in nodes]
    return [end.err.splitlines()[-1] for end in ended], ended


def test_two_hosts_give_the_losses_of_one_and_listen_on_their_link_alone(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    a, b = hosts
    steps = 6
    nodes = [
        launch(host, node, "--out", tmp_path / "two", master=a.address, steps=steps) for node, host in enumerate(hosts)
    ]
    listened_at: dict[Host, set[str]] = {a: set(), b: set()}
    while any(node.poll() is None for node in nodes):
        for host in hosts:
            listened_at[host] |= host.listening()
        time.sleep(0.01)
    ended = [finish(node) for node in nodes]
    assert [end.status for end in ended] == [0, 0], [end.err for end in ended]
    assert listened_at == {a: {a.address}, b: {b.address}}
    said = ended[0].out.splitlines()
    assert any(line.endswith(f"({a.address}): ranks 0, 1, 2") for line in said[:4])
    assert any(line.endswith(f"({b.address}): ranks 3, 4, 5") for line in said[:4])
    assert not any(line[:1].isdigit() for line in ended[1].out.splitlines()), "rank 0 prints the steps"
    assert "Traceback" not in ended[0].err + ended[1].err

    own = losses(tmp_path / "two")
    assert len(own) == steps
    for topology, flags, tolerance in (("hybrid", [], 1e-6), ("primer", ["--batch-size", "6"], 1e-5)):
        out = tmp_path / topology
        alone = run("./launch.sh", topology, *TINY, "--steps", str(steps), *flags, "--out", out)
        assert alone.status == 0, alone.err
        assert own == pytest.approx(losses(out), rel=tolerance)
    assert abs(own[-1] - own[0]) > 0.01, "training changed something"


def test_a_killed_rank_ends_both_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    rank = 4
    nodes = [launch(host, node, "--out", tmp_path, master=hosts[0].address) for node, host in enumerate(hosts)]
    try:
        wait_for_steps(tmp_path)
        there = rank // 3
        os.kill(rank_of(hosts[there], rank), signal.SIGKILL)
        sentences, ended = last_lines(nodes)
        cause = f"rank {rank} (stage 1 of replica {there}) failed: it was ended by SIGKILL"
        assert sentences[there] == f"# {cause}"
        assert sentences[1 - there] == f"# on another machine, node {there}, {cause}"
        assert all(end.status == 1 for end in ended)
        assert not pids(hosts[0]) + pids(hosts[1]), "no orphans"
    finally:
        kill_all(*hosts)


def test_a_killed_launcher_ends_both_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    nodes = [launch(host, node, "--out", tmp_path, master=hosts[0].address) for node, host in enumerate(hosts)]
    try:
        wait_for_steps(tmp_path)
        (launcher,) = [entry for entry in environment(rank_of(hosts[0], 0)) if entry.startswith(b"LAB_LAUNCHER=")]
        os.kill(int(launcher.partition(b"=")[2]), signal.SIGKILL)
        end = finish(nodes[1], SECONDS_TO_END)
        assert end.status == 1
        sentence = "# the launcher of another machine, node 0, has ended or is not reached any more"
        assert end.err.splitlines()[-1] == sentence
        finish(nodes[0], 5)
        assert not pids(hosts[0]) + pids(hosts[1]), "no orphans"
    finally:
        kill_all(*hosts)


def test_node_0_that_is_not_reached(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    a, b = hosts
    ended = finish(launch(b, 1, "--timeout", "1", "--out", tmp_path, master=a.address), 30)
    assert ended.status == 2
    sentence = f"# node 0 did not listen at {a.address}:29500 within 1 s: start it there, and see whether this machine"
    assert ended.err.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in ended.err


def test_a_wrong_node_rank(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    ended = finish(launch(hosts[1], 2, "--out", tmp_path, master=hosts[0].address), 30)
    assert ended.status == 2
    assert ended.err.splitlines() == ["# --node-rank 2: --nnodes 2 has the node ranks 0 to 1"]


SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
connection, _ = listener.accept()
received = 0
while chunk := connection.recv(1 << 20):
    received += len(chunk)
    if received in (1, 1_000_001):
        connection.send(b"!")
"""
CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 4000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for size in (1, 1_000_000):
    started = time.monotonic()
    connection.sendall(bytes(size))
    connection.recv(1)
    print(time.monotonic() - started)
"""


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no TUN devices here")
def test_a_shaped_link_has_its_latency_and_its_bandwidth() -> None:
    with two_hosts_with_a_link() as ((a, b), link):
        link.shape(mbit_per_second=20, one_way_ms=30)
        server = start(*a.command(sys.executable, "-c", SERVER, a.address))
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            round_trip, megabyte = map(float, b.run(sys.executable, "-c", CLIENT, a.address).split())
            assert 0.060 <= round_trip < 0.150
            assert 0.460 <= megabyte < 0.800, "0.4 s for the bits, and a round trip"
        finally:
            finish(server, 10)
    assert a.namespace not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
