"""Several machines: how ranks are shared among them, and what is refused before anything starts."""

import contextlib
import fcntl
import itertools
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch.distributed as dist
from support import processes
from support.processes import free_port, wait_for

from distlab.launching.launcher_flags import Nodes, assign_ranks, read_flags
from distlab.launching.local_ranks import run_ranks
from distlab.launching.nodes import SECONDS_FOR_READERS, ElsewhereError, NodeRendezvous
from distlab.launching.processes import RankFailure
from distlab.machine.devices import Place
from distlab.machine.network import interface_of, own_address
from distlab.rendezvous.addresses import listen_at, listens
from distlab.rendezvous.ranks import say_hosts
from distlab.rendezvous.store import StoreError
from distlab.settings.common import RunSettings
from simplellm.errors import InputError

LAYOUT = {"dp": 2, "pp": 3, "tp": 1}
ELSEWHERE = "192.0.2.7"  # reserved for documentation (RFC 5737)


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ("", Nodes(0, (6,))),
        ("--nnodes 2 --node-rank 1", Nodes(1, (3, 3))),
        ("--nnodes=3 --node_rank=0", Nodes(0, (2, 2, 2))),
        ("--nnodes 2 --node-rank 0 --ranks-per-node 4,2", Nodes(0, (4, 2))),
    ],
)
def test_ranks_are_shared_among_machines(flags: str, nodes: Nodes) -> None:
    """Flags of the script that are the beginning of one of the launcher's stay the script's."""
    of_script = "--steps 3 --node 3 --rank 1 --max=2 --tel me --n 5".split()
    own, rest = read_flags([*flags.split(), *of_script])
    assert rest == of_script
    assert assign_ranks(own, LAYOUT, ELSEWHERE) == nodes


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(InputError, match=f"--master-addr {ELSEWHERE}: this machine does not have that address"):
        listen_at(ELSEWHERE, 0)


def test_the_interface_is_that_of_the_way_to_the_master() -> None:
    assert own_address("localhost") in ("127.0.0.1", "::1")
    assert own_address("no.such.host.invalid") is None
    assert own_address("a" * 64) is None, "longer than any part of a host's name"
    assert interface_of(ELSEWHERE) is None
    if socket.has_ipv6:
        assert interface_of("::1") in ("lo", None)


def test_an_interface_is_found_by_its_address() -> None:
    """The kernel is asked the other way round. Several interfaces may have one address."""
    get_address, names = 0x8915, dict[str, list[str]]()  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, get_address, struct.pack("40s", name.encode()))
                names.setdefault(socket.inet_ntoa(answer[20:24]), []).append(name)
    assert names, "at least that of loopback"
    for address, own in names.items():
        assert interface_of(address) in own


def join(
    rank: int, ranks_of: tuple[int, ...], port: int, timeout_seconds: float = 5, max_restarts: int = 1
) -> NodeRendezvous:
    """A launcher's part, at loopback."""
    return NodeRendezvous(Nodes(rank, ranks_of), "127.0.0.1", port, timeout_seconds, max_restarts)


def test_machines_join_again_in_every_round() -> None:
    first = join(0, (4, 2), 0)
    second = join(1, (4, 2), first.port)
    for restarts in range(2):
        with ThreadPoolExecutor() as pool:
            environments = [*itertools.chain(*pool.map(NodeRendezvous.next_round, (first, second)))]
        for name, by_rank in {
            "RANK": "012345",
            "LOCAL_RANK": "012301",
            "WORLD_SIZE": "666666",
            "LOCAL_WORLD_SIZE": "444422",
            "GROUP_RANK": "000011",
            "GROUP_WORLD_SIZE": "222222",
            "TORCHELASTIC_RESTART_COUNT": str(restarts) * 6,
            "TORCHELASTIC_MAX_RESTARTS": "111111",
        }.items():
            assert "".join(environment[name] for environment in environments) == by_rank, name
        (port,) = {int(environment["MASTER_PORT"]) for environment in environments}
        ranks_store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        assert ranks_store.add("seat", 1) == 1, "the ranks of a round find nothing of the round before"
        assert (first.all_finished(), second.all_finished()) == (False, True)


def test_a_failed_machine_is_followed_into_the_next_round() -> None:
    """By both of the others, as soon as it is there."""
    first = join(0, (1, 1, 1), 0, max_restarts=2)
    second, third = (join(node, (1, 1, 1), first.port, max_restarts=2) for node in (1, 2))
    with ThreadPoolExecutor() as pool:
        list(pool.map(NodeRendezvous.next_round, (first, second, third)))
        assert not any(machine.has_next_round() for machine in (first, second, third))
        restarted = [pool.submit(second.next_round)]
        assert wait_for(lambda: first.has_next_round() and third.has_next_round(), 5)
        restarted.append(pool.submit(third.next_round))
        first.next_round()
        for each in restarted:
            each.result(5)
    assert first.restarts == second.restarts == third.restarts == 1
    second.leave("rank 1 failed")
    with pytest.raises(ElsewhereError, match="on another machine, node 1, rank 1 failed"):
        first.next_round()


def join_one_that_is_stopped(_: int) -> None:
    with listen_at("127.0.0.1", 0) as silent:  # accepts connections, as the kernel does for a process that is stopped
        port = silent.getsockname()[1]
        with pytest.raises(
            StoreError, match=r"node 0 does not answer: it is stopped, or its machine .*; waited 0\.5 s$"
        ):
            join(1, (3, 3), port)


def test_a_store_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.launching.nodes.SECONDS_OF_SILENCE", 0.5)
    # In a fork: torch's call goes on for ten seconds, and a fork during it may inherit a lock that nobody releases.
    processes.run_ranks(1, join_one_that_is_stopped, deadline=10)


def test_machines_that_do_not_fit_together() -> None:
    first = join(0, (3, 3), 0)
    for node, ranks_of in ((1, (4, 2)), (2, (2, 2, 2))):
        told = f"each node's ranks as [3, 3], node {node} as {[*ranks_of]}; start all machines with the same flags"
        with pytest.raises(InputError, match=re.escape(told)):
            join(node, ranks_of, first.port)
    with pytest.raises(InputError, match="--max-restarts: node 0 was started with it as 1, node 1 as 2"):
        join(1, (3, 3), first.port, max_restarts=2)
    join(1, (3, 3), first.port)  # with the flags mended
    with pytest.raises(InputError, match="--node-rank 1 is taken: give each machine of the run its own"):
        join(1, (3, 3), first.port)
    port = first.port
    with pytest.raises(InputError, match=f"--master-port {port}: cannot listen at 127.0.0.1:{port}"):
        join(0, (3, 3), port)


def test_a_machine_that_never_comes_is_named() -> None:
    first = join(0, (3, 3), 0, timeout_seconds=1)
    with pytest.raises(InputError, match=r"waited 1 s for node 1: is .* --node-rank 1"):
        first.next_round()
    started = time.monotonic()
    first.leave("node 1 did not come")
    assert time.monotonic() - started < SECONDS_FOR_READERS / 2, "the store is not kept open for it"
    with pytest.raises(InputError, match=r"node 0 did not listen at 127\.0\.0\.1:1 within 1 s: start it there"):
        join(1, (3, 3), 1, timeout_seconds=1)


@pytest.mark.parametrize(
    ("hosts", "tp", "said"),
    [
        ("aaa", 3, []),
        ("aabb", 2, ["on a: ranks 0, 1", "on b: ranks 2, 3"]),
        (
            "aaab",
            2,
            [
                "on a: ranks 0, 1, 2",
                "on b: rank 3",
                "warning: ranks 2 to 3 share the same layers and are on different hosts, so every layer waits for the "
                "network; give each host a multiple of 2 ranks",
            ],
        ),
    ],
)
def test_rank_0_says_who_is_where(hosts: str, tp: int, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    say_hosts([Place(host) for host in hosts], tp)
    assert capsys.readouterr().out.splitlines() == [f"# {line}" for line in said]


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize(("node", "sent"), [(0, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGHUP)])
def test_a_launcher_that_waits_for_the_others_ends_with_a_sentence(
    node: int, sent: signal.Signals, tmp_path: Path
) -> None:
    """Under nohup, not by a terminal that is closed."""
    port, out, has_nohup = free_port(), tmp_path / "out", sent is not signal.SIGHUP
    with launched(node, port, out, has_nohup) as launcher:
        looks = f"looking for node 0 at 127.0.0.1:{port}"
        assert wait_for(lambda: listens("127.0.0.1", port) if node == 0 else looks in written(out), 30)
        assert launcher.pid is not None
        if has_nohup:
            os.kill(launcher.pid, signal.SIGHUP)
            other = join(1, (1, 1), port, max_restarts=0)
            assert wait_for(other.has_next_round, 30), "node 0 waits for it"
        os.kill(launcher.pid, sent)
        if has_nohup:
            with pytest.raises(ElsewhereError, match=f"node 0, the launcher was terminated by {sent.name}"):
                other.await_cause()
            other.leave("")
        launcher.join(5)
        assert launcher.exitcode == 128 + sent
        assert [line for line in written(out).splitlines() if looks not in line] == [f"# terminated by {sent.name}"]


def test_a_launcher_says_that_no_other_machine_has_reported_why_its_ranks_lost_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "rank 0 has lost the connection to rank 1"
    lost = RankFailure(1, {"message": told, "status": 1, "lost_a_peer": True}, 5)
    monkeypatch.setattr("distlab.launching.local_ranks.supervise", lambda *_: {0: lost})
    monkeypatch.setattr("distlab.launching.nodes.SECONDS_FOR_THE_CAUSE", 0.1)
    with launched(0, free_port(), tmp_path / "out", True) as launcher:
        launcher.join(20)
        assert launcher.exitcode == 1
        assert written(tmp_path / "out") == f"# {told}; no report from the other machines\n"


@contextlib.contextmanager
def launched(*asked: object) -> Iterator[ForkProcess]:
    """A process that calls `wait_for_the_others`."""
    launcher = ForkProcess(target=wait_for_the_others, args=asked)
    launcher.start()
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.join()


def wait_for_the_others(node: int, port: int, out: Path, has_nohup: bool) -> None:
    """`./launch.sh` at loopback, which the command line refuses."""
    if has_nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with out.open("w", buffering=1) as sys.stdout, contextlib.redirect_stderr(sys.stdout):
        settings = RunSettings(master_addr="127.0.0.1", master_port=port)
        sys.exit(run_ranks(Path("never_started.py"), [], settings, Nodes(node, (1, 1)), max_restarts=0))


def written(out: Path) -> str:
    return out.read_text() if out.exists() else ""
