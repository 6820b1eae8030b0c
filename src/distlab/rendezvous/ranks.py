"""How the ranks of a run find each other and agree before they train.

Each process of a run may be started by hand, in a separate terminal. Before training, all ranks compare their settings,
and rank 0 sends the others its decisions for all (the source of the stories, the folder of the run). So a mistake in
one terminal gives an error message, instead of a run that hangs or trains something else.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distlab.machine import network
from distlab.machine.devices import Place
from distlab.machine.processes import is_store_in_launcher, started_by_torchrun
from distlab.rendezvous.store import SharedStore, StoreError, open_bound_store
from simplellm.errors import InputError, require, say

SECONDS_FOR_READERS = 5.0  # wait of rank 0, whose process holds the store, for others to read why it exits


def open_store(rank: int, address: str, port: int, timeout_seconds: float) -> dist.Store:
    """Return the key-value store of the ranks: torchrun's if torchrun started this process, else rank 0's.

    Raises:
        InputError: the port is in use, or rank 0 does not listen within the timeout.
        StoreError: rank 0 listens but does not answer, or exits.
    """

    def connect() -> dist.Store:
        try:
            return next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))[0]
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise InputError(f"the rendezvous at {where} failed: {error}".splitlines()[0]) from error

    shared = ranks_store(timeout_seconds)
    if started_by_torchrun():
        return shared.ask(connect)
    if rank == 0:
        return open_bound_store(address, port, timeout_seconds)[0]
    return shared.find(address, port)


def ranks_store(timeout_seconds: float, store: dist.Store | None = None) -> SharedStore:
    """Return the ranks' store, whichever process holds it."""
    holder = "the launcher" if is_store_in_launcher() else "rank 0"
    return SharedStore(holder, timeout_seconds, store=store or dist.Store())


def agree(
    store: dist.Store,
    rank: int,
    size: int,
    place: Place,
    settings: Mapping[str, Any],
    decide: Callable[[], dict[str, Any]],
    timeout_seconds: float,
) -> dict[str, Any]:
    """Wait for all ranks, compare their settings, and return the result of rank 0's `decide()`.

    `place` is where this rank computes. `decide` can read the places of all ranks with `read_places`, and so can every
    rank afterwards. A value of `settings` may be the `place` of a file on this rank and the `sha256` of its content.

    Raises:
        InputError: two processes have the same rank, a rank was started with other settings, or one did not join
            within the timeout. All ranks raise it.
        StoreError: the process that holds the store has exited, or does not answer.
    """
    shared = ranks_store(timeout_seconds, store)
    require(
        shared.add(f"seat/{rank}") == 1,
        f"rank {rank} is taken: another process joined this run with it, and may have exited since; give each rank one "
        "process, and after a failure start all ranks again",
    )
    shared.ask(lambda: network.report_place(store, rank, place))  # first: rank 0 waits for the settings only
    shared.set(f"settings/{rank}", json.dumps(settings))
    if rank > 0:
        try:
            told = shared.wait("verdict", "rank 0 to confirm that all have joined")
            verdict = json.loads(told)
        finally:  # also if the wait has failed: rank 0 need not wait for this rank
            with contextlib.suppress(StoreError):
                replace(shared, silence_seconds=min(1, timeout_seconds)).set(f"heard/{rank}")
        _compare(verdict["settings"], settings, rank)  # rank 0 has not, if this rank is outside of its world
    else:
        verdict = {"settings": settings}
        try:
            for other in range(1, size):
                _compare(settings, json.loads(shared.wait(f"settings/{other}", f"rank {other} to join")), other)
            verdict["decided"] = shared.work(decide)
        except InputError as error:
            verdict["error"] = error.with_flags()
        shared.set("verdict", json.dumps(verdict))
        if "error" in verdict:
            joined = [other for other in range(1, size) if shared.has(f"settings/{other}")]
            shared.keep_open([f"heard/{other}" for other in joined], SECONDS_FOR_READERS)
    if "error" in verdict:
        raise InputError(verdict["error"])
    return verdict["decided"]


def read_places(store: dist.Store, size: int) -> list[Place]:
    """Return the hosts and GPUs of all ranks, by rank; call it once all have joined."""
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's annotations lack it
    return ranks_store(seconds, store).ask(lambda: network.read_places(store, size))


def say_hosts(places: Sequence[Place], tp: int) -> None:
    """Print which ranks are on which host if there are several hosts. `tp` consecutive ranks share a stage."""
    hosts, size = [place.host for place in places], len(places)
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


def _compare(rank_0: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    """Raise `InputError` that names the first setting in which a rank differs from rank 0."""
    for name in {**rank_0, **other}:
        one, two = rank_0.get(name), other.get(name)
        if isinstance(one, dict) and isinstance(two, dict):
            has = "rank {} has {place} (SHA-256 {sha256:.12}…)".format
            both = f"{has(0, **one)} and {has(rank, **two)}"
            require(one["sha256"] == two["sha256"], f"{name}: {both}; give all ranks the same")
            continue
        both = f"{name}: rank 0 was started with {one}, rank {rank} with {two}"
        require(one == two, f"{both}; start all ranks with the same flags")
