"""How the ranks of a run find each other, and agree before they train.

Each process of a run may be started by hand, in a terminal of its own. Before they train, all ranks compare the
settings that they were started with, and rank 0 tells what it decided for all (where the stories come from, where the
run keeps its files). So a mistake in one terminal ends with a sentence instead of a run that hangs or trains
something else.
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from distlab.comm.processes import within
from distlab.comm.waits import TrafficError
from simplellm.errors import InputError

Say = Callable[[str], None]
ResultT = TypeVar("ResultT")
ITS_ANSWER = "its answer"
SECONDS_OF_A_START = 5.0  # within which others usually come; after that one says for whom one waits


def open_store(rank: int, address: str, port: int, timeout_seconds: float, say: Say) -> dist.Store:
    """The key-value store where ranks meet: torchrun's if it started us, else one in rank 0's process.

    Raises:
        InputError: the port is in use, or rank 0 does not listen within the timeout.
        TrafficError: it listens, and does not answer, or ends.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if started_by_torchrun():
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            met = within(timeout_seconds, lambda: next(dist.rendezvous("env://", timeout=timeout)))
        except dist.DistError as error:
            raise InputError(f"the ranks cannot meet at {where}: {error}".splitlines()[0]) from error
        if met is None:
            raise _no_answer(timeout_seconds)
        return met[0]
    if rank == 0:
        return open_bound_store(address, port, timeout_seconds)[0]
    say(f"looking for rank 0 at {address}:{port}")
    wait_until(
        lambda: listens(address, port),
        timeout_seconds,
        f"rank 0 did not listen at {address}:{port} within {timeout_seconds:g} s: start it there, or give its "
        "--master-addr and --master-port",
    )
    try:
        store = connect(address, port, timeout_seconds, timeout_seconds)
    except dist.DistError as error:
        raise InputError(f"--master-port {port}: what listens at {address}:{port} is not rank 0") from error
    except ConnectionRefusedError as error:
        raise _ended_while(ITS_ANSWER, error) from error
    if store is None:
        raise _no_answer(timeout_seconds)
    return store


def connect(address: str, port: int, timeout_seconds: float, seconds: float) -> dist.Store | None:
    """A connection to a store in another process.

    Args:
        address, port: where it listens.
        timeout_seconds: the store's own, of waits.
        seconds: to connect.

    Returns:
        None if there was no answer.

    Raises:
        DistError: what answers is no store.
        ConnectionRefusedError: nobody listens there any more; torch would go on trying.
    """
    timeout = timedelta(seconds=timeout_seconds)

    def look() -> None:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except ConnectionRefusedError:
            raise
        except OSError:  # a network that loses a packet may deliver the next one
            pass

    return within(
        seconds,
        lambda: dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False),
        meanwhile=look,
    )


def open_bound_store(address: str, port: int, timeout_seconds: float) -> tuple[dist.Store, int]:
    """A key-value store in this process that listens at one address; left to itself, torch's listens at all.

    Args:
        address: of this machine, or a name for it.
        port: there; 0 for a free one.
        timeout_seconds: the store's own, of waits.

    Returns:
        the store, and its port.

    Raises:
        InputError: it cannot listen there.
    """
    listener = listen_at(address, port)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def listen_at(address: str, port: int) -> socket.socket:
    """A socket that listens at one address of this machine.

    Raises:
        InputError: the port is in use, or the address is not this machine's.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--master-addr {address}: no such host ({getattr(error, 'strerror', error)})") from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(
                f"--master-addr {address}: this machine does not have that address, and rank 0 runs where it is"
            ) from error
        raise InputError(
            f"--master-port {port}: cannot listen at {address}:{port} ({error.strerror}); most likely another run uses "
            "the port: give another one to all"
        ) from error
    return listener


def listens(address: str, port: int) -> bool:
    """True if somebody does."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def wait_until(
    condition: Callable[[], bool], seconds: float, sentence: str, notice: Callable[[], None] = lambda: None
) -> None:
    """Poll, because torch's own waits cannot be interrupted.

    Args:
        condition: what to wait for.
        seconds: how long.
        sentence: of the `InputError` when time is up.
        notice: called once, when it takes longer than a start takes, or time is up.
    """
    began, is_noticed = time.monotonic(), False
    while not condition():
        waited = time.monotonic() - began
        if waited > min(SECONDS_OF_A_START, seconds) and not is_noticed:
            notice()
            is_noticed = True
        if waited > seconds:
            raise InputError(sentence)
        time.sleep(0.05)


def started_by_torchrun() -> bool:
    """True in a process that torchrun (or launch.sh) started: its environment tells rank, world size and address."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def agree(
    store: dist.Store,
    rank: int,
    size: int,
    settings: dict[str, Any],
    decide: Callable[[], dict[str, Any]],
    timeout_seconds: float,
    say: Say,
) -> dict[str, Any]:
    """Wait for all ranks, compare their settings, and return what rank 0's `decide()` returned.

    Raises:
        InputError: two processes have the same rank, a rank was started with other settings, or one did not come
            within the timeout. All ranks raise it.
        TrafficError: the store where the ranks meet has ended, or does not answer.
    """
    if _ask(lambda: store.add(f"seat/{rank}", 1), timeout_seconds) > 1:
        raise InputError(
            f"rank {rank} is taken: another process joined this run with it, and may have ended since; give each rank "
            "one process, and after a failure start all ranks again"
        )
    _ask(lambda: store.set(f"settings/{rank}", json.dumps(settings)), timeout_seconds)
    if rank > 0:
        try:
            verdict = json.loads(_wait(store, "verdict", "rank 0's word that all have joined", timeout_seconds, say))
        finally:  # also where this rank ends without it: rank 0 need not stay for it
            with contextlib.suppress(TrafficError):
                _ask(lambda: store.set(f"heard/{rank}", ""), min(1, timeout_seconds))
        _compare(verdict["settings"], settings, rank)
    else:
        verdict = {"settings": settings}
        try:
            for other in range(1, size):
                answer = _wait(store, f"settings/{other}", f"rank {other} to join", timeout_seconds, say)
                _compare(settings, json.loads(answer), other)
            verdict["decided"] = decide()
        except InputError as error:
            verdict["error"] = str(error)
        _ask(lambda: store.set("verdict", json.dumps(verdict)), timeout_seconds)
        if "error" in verdict:
            _let_hear(store, size)
    if "error" in verdict:
        raise InputError(verdict["error"])
    return verdict["decided"]


def leave_host(store: dist.Store, rank: int, host: str) -> None:
    """Tell rank 0 on which host this rank is; before they agree."""
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's annotations lack it
    _ask(lambda: store.set(f"host/{rank}", host), seconds)


def say_hosts(store: dist.Store, size: int, tp: int, say: Say) -> None:
    """Say which ranks are on which host, where they are on several; after they have agreed.

    Args:
        store: where the ranks met.
        size: number of ranks.
        tp: that many ranks in a row share a stage.
        say: prints a remark.
    """
    hosts = [store.get(f"host/{rank}").decode() for rank in range(size)]
    if len(set(hosts)) == 1:
        return
    for host in dict.fromkeys(hosts):
        ranks = [str(rank) for rank in range(size) if hosts[rank] == host]
        say(f"on {host}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    split = next((first for first in range(0, size, tp) if len(set(hosts[first : first + tp])) > 1), None)
    if split is not None:
        say(
            f"warning: ranks {split} to {split + tp - 1} share the same layers and are on different hosts, so every "
            f"layer waits for the network; give each host a multiple of {tp} ranks"
        )


def _ask(call: Callable[[], ResultT], seconds: float, what: str = ITS_ANSWER) -> ResultT:
    """What a call to the store where the ranks meet returns.

    The kernel accepts connections also for a process that is stopped, and torch's calls wait there without end.

    Raises:
        TrafficError: the store ended meanwhile, while this rank waited for `what`; or there was no answer.
    """
    try:
        answer = within(seconds, lambda: (call(),))
    except dist.DistError as error:
        raise _ended_while(what, error) from error
    if answer is None:
        raise _no_answer(seconds)
    return answer[0]


def _holder() -> str:
    """Where the store is."""
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def _ended_while(what: str, error: Exception) -> TrafficError:
    ended = TrafficError(f"{_holder()} ended while this rank waited for {what}: see its last line", error)
    ended.lost_a_peer = True
    return ended


def _no_answer(seconds: float) -> TrafficError:
    sentence = f"{_holder()} does not answer: it is stopped, or its machine or network is gone"
    return TrafficError(f"{sentence}; waited {seconds:g} s, which --timeout sets", TimeoutError())


def _let_hear(store: dist.Store, size: int) -> None:
    """Give the ranks that have joined time to read the verdict: the store ends with rank 0's process."""
    seconds = 5.0
    with contextlib.suppress(InputError, TrafficError):
        came = [rank for rank in range(1, size) if _has(store, f"settings/{rank}", seconds)]
        wait_until(lambda: all(_has(store, f"heard/{rank}", seconds) for rank in came), seconds, "a rank has gone")


def _has(store: dist.Store, key: str, seconds: float, what: str = ITS_ANSWER) -> bool:
    return _ask(lambda: store.check([key]), seconds, what)


def _wait(store: dist.Store, key: str, what: str, timeout_seconds: float, say: Say) -> bytes:
    """The value of `key` once it is set; says for whom it waits when that takes longer than a start takes."""
    wait_until(
        lambda: _has(store, key, timeout_seconds, what),
        timeout_seconds,
        f"waited {timeout_seconds:g} s for {what}: is it running? --timeout sets how long",
        notice=lambda: say(f"waiting for {what}"),
    )
    return _ask(lambda: store.get(key), timeout_seconds, what)


def _compare(rank_0: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    """Raise `InputError` that names the first setting in which a rank's settings differ from rank 0's."""
    for name in {**rank_0, **other}:
        if rank_0.get(name) != other.get(name):
            raise InputError(
                f"{name}: rank 0 was started with {rank_0.get(name)}, rank {rank} with "
                f"{other.get(name)}; start all ranks with the same flags"
            )
