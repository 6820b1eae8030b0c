"""Ranks compare what they were started with before any of them trains."""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.processes import LAB, alive, free_port, run_ranks, wait_for

from distlab.comm.waits import TrafficError
from distlab.machine.devices import Place
from distlab.rendezvous.addresses import listen_at
from distlab.rendezvous.ranks import agree, open_store, ranks_store, read_places
from distlab.rendezvous.store import BUSY, SharedStore, StoreError
from simplellm.errors import InputError

Settings = dict[str, Any]
ENDED = "rank 0 exited while this process waited for its answer: see its last line"


def join(rank: int, port: int, size: list[int], settings: list[Settings], seats: list[int]) -> str:
    """What one process learns: rank 0's decision, or the sentence that ended its run."""
    store = open_store(rank, "localhost", port, 20)
    try:
        place, decide = Place(f"host of process {rank}"), lambda: {"data": "sample"}
        decided = agree(store, seats[rank], size[rank], place, settings[rank], decide, 3)
        assert read_places(store, size[rank])[seats[rank]] == place, "not that of a process that was refused"
        outcome = f"agreed on {decided['data']}"
    except InputError as error:
        outcome = str(error)
    with contextlib.suppress(dist.DistError):
        store.set(f"done/{rank}", "")
        if rank == 0 and outcome.startswith("agreed"):  # training follows: the process that holds the store stays
            store.wait([f"done/{other}" for other in range(len(seats))], timedelta(seconds=15))
    return outcome


def join_all(settings: list[Settings], size: list[int], seats: list[int] | None = None) -> list[str]:
    count = len(settings)
    return run_ranks(count, join, free_port(), size, settings, seats or list(range(count)))


def test_a_short_wait_is_not_told(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    setter = threading.Timer(0.1, store.set, ["key", "value"])
    setter.start()
    assert SharedStore("rank 0", 60, store=store).wait("key", "rank 1 to join") == "value"
    setter.join(10)
    assert capfd.readouterr().out == ""


ADVICE = "start all ranks with the same flags"


@pytest.mark.parametrize(
    ("settings", "size", "told"),
    [
        ([{"steps": 3}] * 3, [3, 3, 3], ["agreed on sample"] * 3),
        # A setting that rank 0 does not have, as of another revision of a script.
        ([{}, {}, {"--width": 4}], [3, 3, 3], [f"--width: rank 0 was started with None, rank 2 with 4; {ADVICE}"] * 3),
        # The missing rank is not waited for.
        ([{"--size": 3}, {"--size": 2}], [3, 2], [f"--size: rank 0 was started with 3, rank 1 with 2; {ADVICE}"] * 2),
        # Rank 2 is outside of the world of rank 0.
        (
            [{"--size": 2}, {"--size": 2}, {"--size": 3}],
            [2, 2, 3],
            [*["agreed on sample"] * 2, f"--size: rank 0 was started with 2, rank 2 with 3; {ADVICE}"],
        ),
    ],
)
def test_ranks_with_equal_settings_agree_and_others_end_with_the_flag_and_both_values(
    settings: list[Settings], size: list[int], told: list[str]
) -> None:
    assert join_all(settings, size) == told


def test_two_processes_with_one_rank() -> None:
    outcomes = join_all([{"steps": 3}] * 3, size=[2, 2, 2], seats=[0, 1, 1])
    assert outcomes[0] == "agreed on sample"
    assert sorted(outcomes[1:]) == [
        "agreed on sample",
        "rank 1 is taken: another process joined this run with it, and may have exited since; give each rank "
        "one process, and after a failure start all ranks again",
    ]


def test_a_rank_that_never_comes_is_named(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.rendezvous.store.SECONDS_OF_A_START", 1)
    started = time.monotonic()
    outcomes = join_all([{"steps": 3}] * 2, size=[3, 3])
    assert outcomes[0] == "waited 3 s for rank 2 to join: is it running? --timeout sets how long"
    assert time.monotonic() - started < 7, "rank 0 does not wait for rank 1, which has waited for as long"
    assert capfd.readouterr().out.count("# waiting for rank 2 to join\n") == 1


def join_after_work(rank: int, port: int, work_seconds: float) -> str:
    """What a process learns if rank 1 works before it joins, and rank 0 before it decides."""
    store = open_store(rank, "localhost", port, 20)
    if rank == 1:
        ranks_store(20, store).work(lambda: time.sleep(work_seconds))

    def decide() -> dict[str, str]:
        time.sleep(work_seconds)
        return {"data": "sample"}

    decided = agree(store, rank, 3, Place("here"), {}, decide, timeout_seconds=2)
    with contextlib.suppress(dist.DistError):
        store.set(f"done/{rank}", "")
        if rank == 0:
            store.wait([f"done/{other}" for other in range(3)], timedelta(seconds=15))
    return f"agreed on {decided['data']}"


def test_a_rank_that_works_is_waited_for_also_by_those_that_wait_for_rank_0() -> None:
    """It works for longer than the timeout; each of the others looks for a sign every half second."""
    assert run_ranks(3, join_after_work, free_port(), 2.6) == ["agreed on sample"] * 3


@pytest.mark.parametrize(("is_its_store", "holder"), [("False", "rank 0"), ("True", "the launcher")])
def test_a_store_is_called_after_the_process_that_holds_it(
    is_its_store: str, holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", is_its_store)
    lost: Any = SimpleNamespace(check=lose)
    with pytest.raises(StoreError, match=f"^{holder} exited while this process waited for rank 1 to join: "):
        ranks_store(0.1, lost).wait("key", "rank 1 to join")


def lose(_: object) -> None:
    raise dist.DistError("Connection reset by peer")


@pytest.mark.parametrize("call", [lose, lambda _: time.sleep(0.5)])
def test_a_store_that_is_lost_is_not_asked_again(call: Callable[[object], None]) -> None:
    asked = list[object]()

    def ask(key: object) -> None:
        asked.append(key)
        call(key)

    store: Any = SimpleNamespace(check=ask)
    shared = SharedStore("rank 0", 0.1, store=store)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"^rank 0 (exited while|does not answer)"):
            shared.has("key")
    assert asked == [["key"]]


def test_a_rank_whose_work_does_not_go_on_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distlab.rendezvous.store.SECONDS_OF_A_CALL", 0.05)
    store, deadline = dist.HashStore(), time.monotonic() + 5
    store.set(BUSY, "1")

    def check() -> None:
        assert time.monotonic() < deadline

    with pytest.raises(InputError, match=r"^waited 0\.2 s for rank 1 to join: is it running"):
        SharedStore("rank 0", 0.2, store=store).wait("key", "rank 1 to join", check=check)
    assert capsys.readouterr().out == "# waiting for rank 1 to join\n", "though the timeout is shorter than most starts"


def test_a_cause_that_names_a_file_whose_name_is_not_utf8_is_told() -> None:
    store = SharedStore("rank 0", 5, store=dist.HashStore())
    store.set("ended/1", "/tmp/s\udcff is no file")  # as Python reads the name
    assert store.read("ended/1", "ended/2") == {"ended/1": r"/tmp/s\udcff is no file"}


@pytest.mark.parametrize("address", ["no.such.host.invalid", "", "a..b", "a" * 70])
def test_a_host_that_does_not_exist_is_not_waited_for(address: str) -> None:
    started = time.monotonic()
    with pytest.raises(InputError, match=f"^--master-addr {re.escape(address)}: no such host "):
        open_store(1, address, free_port(), 60)
    assert time.monotonic() - started < 30


# Forks itself for each line with a port and a user, who holds the store of a run there, and prints the fork's number.
HOLDERS = """
import encodings.idna, os, signal, sys, time
from distlab.rendezvous.ranks import open_store
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the forks
for line in sys.stdin:
    port, user = map(int, line.split())
    if (pid := os.fork()) == 0:
        os.setuid(user)
        store = open_store(0, "localhost", port, 10)
        time.sleep(120)
    print(pid, flush=True)
"""


@pytest.fixture(scope="module")
def holders() -> Iterator[Popen[str]]:
    """A process that imports torch once for all; a fork of this process may hang at its start."""
    environment = {**os.environ, "PYTHONPATH": str(LAB / "src")}
    with Popen([sys.executable, "-c", HOLDERS], stdin=PIPE, stdout=PIPE, text=True, env=environment) as process:
        yield process
        process.communicate()  # it reads to the end


@contextlib.contextmanager
def rank_0(holders: Popen[str], port: int, user: int = os.getuid()) -> Iterator[int]:
    """A process, of a user, that holds the store of a run; its number."""
    assert holders.stdin is not None
    assert holders.stdout is not None
    print(port, user, file=holders.stdin, flush=True)
    pid = int(holders.stdout.readline())
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not alive(pid))


def connect_to_one_that_is_stopped(_: int, holder: str) -> None:
    with listen_at("127.0.0.1", 0) as silent:  # accepts connections, as the kernel does for a process that is stopped
        port = silent.getsockname()[1]
        if holder == "the launcher":
            os.environ |= {"TORCHELASTIC_RUN_ID": "here", "TORCHELASTIC_USE_AGENT_STORE": "True"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
        sentence = rf"^{holder} does not answer: it is stopped, .*; waited 1 s, which --timeout sets"
        with pytest.raises(TrafficError, match=sentence):
            open_store(1, "127.0.0.1", port, 1)


@pytest.mark.parametrize("holder", ["rank 0", "the launcher"])
def test_a_process_that_is_stopped_is_not_waited_for_without_end(holder: str) -> None:
    run_ranks(1, connect_to_one_that_is_stopped, holder, deadline=10)  # a fork: a call in torch cannot be interrupted


def test_a_rank_0_that_stops_after_another_has_connected_is_not_waited_for(holders: Popen[str]) -> None:
    with rank_0(holders, port := free_port()) as pid:
        store = open_store(1, "localhost", port, 60)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TrafficError, match="rank 0 does not answer: it is stopped"):
            agree(store, 1, 2, Place("here"), {}, dict, 1)
        os.kill(pid, signal.SIGCONT)
        assert store.check(["seat/1"]), "the call that was left behind has ended"


def test_ctrl_c_ends_a_wait_for_a_rank_0_that_is_stopped(holders: Popen[str]) -> None:
    """Within seconds, whatever the timeout."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored if a shell runs pytest with &
    try:
        with rank_0(holders, port := free_port()) as pid:
            store = open_store(1, "localhost", port, 60)

            def stop_and_interrupt() -> None:
                os.kill(pid, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGINT)

            asked = threading.Timer(1.0, stop_and_interrupt)
            asked.start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                agree(store, 1, 2, Place("here"), {}, dict, 60)
            assert time.monotonic() - started < 10
            os.kill(pid, signal.SIGCONT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_0_that_ends_while_another_connects() -> None:
    run_ranks(1, connect_to_one_that_ends)  # a fork, because torch's thread tries again until its timeout


def connect_to_one_that_ends(rank: int) -> None:
    listener = listen_at("127.0.0.1", 0)
    port = listener.getsockname()[1]

    def be_seen_and_end() -> None:
        listener.accept()[0].close()
        listener.close()

    threading.Thread(target=be_seen_and_end, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(TrafficError, match=ENDED) as caught:
        open_store(1, "127.0.0.1", port, 20)
    assert caught.value.lost_a_peer, "so it is not the cause of the run's end"
    assert time.monotonic() - started < 15, "before the timeout"


def test_a_rank_0_that_ends_after_another_has_connected(holders: Popen[str]) -> None:
    with rank_0(holders, port := free_port()):
        store = open_store(1, "localhost", port, 60)
    with pytest.raises(TrafficError, match=ENDED):
        agree(store, 1, 2, Place("here"), {}, dict, 10)


@pytest.mark.parametrize(("most_seconds", "timeout"), [(0.5, 10), (10, 1)])
def test_a_rank_does_not_join_another_programs_store(
    most_seconds: float, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab.rendezvous.store.SECONDS_OF_A_START", most_seconds)
    store, started = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), time.monotonic()
    with pytest.raises(InputError, match=r"is not rank 0 of this run; give all ranks of yours another port$"):
        open_store(1, "localhost", store.port, timeout)
    assert time.monotonic() - started < 8


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_a_rank_does_not_join_another_users_run(holders: Popen[str]) -> None:
    other = 12345
    with (
        rank_0(holders, port := free_port(), user=other),
        pytest.raises(InputError, match=rf"^--master-port {port}: .* run of the user {other}, and you are 0; "),
    ):
        open_store(1, "localhost", port, 60)
