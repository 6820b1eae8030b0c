"""The key-value store through which ranks, or launchers, find each other: torch's, but listening at one address only.

The process that holds the store may stop or exit at any time. torch's own calls may then wait forever, because the
kernel accepts connections for a stopped process too, and signals do not interrupt the calls. All calls in this module
return or raise within a time limit.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from distlab.comm.waits import TrafficError
from distlab.machine.time_limits import SECONDS_OF_A_CALL, within
from distlab.rendezvous.addresses import is_loopback, listen_at, listens, resolve
from simplellm.errors import InputError, say

ResultT = TypeVar("ResultT")
SECONDS_BETWEEN_LOOKS = 0.01
OWNER = "owner"  # the key of the user who holds the store: on one machine, several may use the default port
BUSY = "busy"  # the key whose count grows while a process works, and others wait for it
SECONDS_OF_A_START = 5.0  # other processes usually join within this time; after it, print which one is missing


class StoreError(TrafficError):
    """The process that holds the store has exited (`lost_a_peer`), or does not answer."""


@dataclass
class SharedStore:
    """A store that another process may hold; no call waits for it forever.

    Every call may raise `StoreError`; after the first time, all calls raise it immediately.
    """

    holder: str  # name in messages of the process that holds the store, e.g. "rank 0"
    timeout_seconds: float  # how long to wait for other processes (`find`, `wait`): --timeout
    silence_seconds: float | None = None  # how long the holder may take to answer; by default `timeout_seconds`
    store: dist.Store = field(default_factory=dist.Store)  # torch's; by default a placeholder until `find`
    _lost: StoreError | None = None

    def ask(
        self, call: Callable[[], ResultT], what: str = "its answer", meanwhile: Callable[[], object] = lambda: None
    ) -> ResultT:
        """Return the result of `call()`, a call to the store. Errors name `what`; for `meanwhile` see `within`."""
        if self._lost is not None:
            raise self._lost
        seconds = self.silence_seconds or self.timeout_seconds
        try:
            answer = within(seconds, call, meanwhile)
            if answer.done():
                return answer.result()
        except (dist.DistError, ConnectionRefusedError) as error:
            sentence = f"{self.holder} exited while this process waited for {what}: see its last line"
            self._lost = StoreError(sentence, error)
            self._lost.lost_a_peer = True
            raise self._lost from error
        sentence = f"{self.holder} does not answer: it is stopped, or its machine or network is down"
        limit = "" if self.silence_seconds else ", which --timeout sets"
        self._lost = StoreError(f"{sentence}; waited {seconds:g} s{limit}", TimeoutError())
        raise self._lost

    def find(self, address: str, port: int) -> dist.Store:
        """Connect to the store at an address, waiting until its holder has opened it.

        Raises:
            InputError: there is no such host, no process listens there in time, or the one that does is not a store.
        """
        resolve(address, port)  # torch would retry an unknown host name until the timeout
        where, timeout = f"{address}:{port}", self.timeout_seconds

        def connect() -> dist.Store:
            try:
                return dist.TCPStore(address, port, timeout=timedelta(seconds=timeout))
            except dist.DistError as error:
                sentence = f"--master-port {port}: the process that listens at {where} is not {self.holder}"
                raise InputError(sentence) from error

        def check_that_it_listens() -> None:  # if no process listens any longer, torch would retry until its timeout
            if not listens(address, port, unless_refused=True):
                raise ConnectionRefusedError

        say(f"looking for {self.holder} at {where}")
        if not wait_until(lambda: listens(address, port), timeout):
            raise InputError(
                f"{self.holder} did not listen at {where} within {timeout:g} s: start it there, or give the "
                "--master-addr and --master-port at which this machine reaches it"
            )
        self.store = self.ask(connect, meanwhile=check_that_it_listens)
        if is_loopback(address):
            self._check_owner(where, port)
        return self.store

    def _check_owner(self, where: str, port: int) -> None:
        """Raise `InputError` if the store is another user's, before this process has written anything to it."""
        sentence = f"--master-port {port}: the process that listens at {where} is not {self.holder} of this run"
        advice = "give all ranks of yours another port"
        if not wait_until(lambda: self.has(OWNER), min(SECONDS_OF_A_START, self.timeout_seconds)):
            raise InputError(f"{sentence}; {advice}")
        owner, own = self.read(OWNER)[OWNER], str(os.getuid())
        if owner != own:
            raise InputError(f"{sentence}, but of a run of the user {owner}, and you are {own}; {advice}")

    def set(self, key: str, value: str = "") -> None:
        text = value.encode(errors="backslashreplace").decode()  # the name of a file may have bytes that are not UTF-8
        self.ask(lambda: self.store.set(key, text))

    def add(self, key: str) -> int:
        """Increment a key's counter and return it: 1 for the first process that calls this."""
        return self.ask(lambda: self.store.add(key, 1))

    def has(self, *keys: str, what: str = "its answer") -> bool:
        """Return whether all keys are set."""
        return not keys or self.ask(lambda: self.store.check(list(keys)), what)

    def read(self, *keys: str) -> dict[str, str]:
        """Return the values of the keys that are set."""
        store = self.store
        return self.ask(lambda: {key: store.get(key).decode() for key in keys if store.check([key])}) if keys else {}

    def wait(self, key: str, what: str, hint: str = "", check: Callable[[], None] = lambda: None) -> str:
        """Wait until a key is set, and return its value; print what is awaited if it takes longer than a usual start.

        While any process works (`work`), the time starts again.

        Args:
            what: the event that the key stands for, e.g. "rank 2 to join".
            hint: advice for the `InputError` that is raised when the time is up.
            check: called repeatedly while waiting; an exception that it raises ends the wait.
        """
        started = deadline = time.monotonic()
        count, next_look, has_told = None, started, False
        while True:
            check()
            if self.has(key, what=what):
                return self.read(key)[key]
            now = time.monotonic()
            if now >= next_look:
                next_look, before = now + SECONDS_OF_A_CALL, count
                count = self.read(BUSY).get(BUSY)
                if count != before:
                    deadline = now
            if not has_told and now > started + min(SECONDS_OF_A_START, self.timeout_seconds):
                say(f"waiting for {what}")
                has_told = True
            if now > deadline + self.timeout_seconds:
                hint = hint or "is it running? --timeout sets how long"
                raise InputError(f"waited {self.timeout_seconds:g} s for {what}: {hint}")
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def work(self, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of `work()`, which may take longer than others wait for this process."""
        return within(math.inf, work, meanwhile=lambda: self.add(BUSY)).result()

    def keep_open(self, keys: Sequence[str], seconds: float) -> None:
        """Wait at most `seconds` for all keys to be set; the holder calls it so that the others can read the store."""
        with contextlib.suppress(StoreError):
            wait_until(lambda: self.has(*keys), seconds)


def open_bound_store(address: str, port: int, timeout_seconds: float) -> tuple[dist.Store, int]:
    """Open a store in this process; return it and its port. See `listen_at`: torch's would listen at all addresses."""
    listener = listen_at(address, port)
    try:  # torch would try until its timeout, in a call that no signal interrupts
        with socket.socket(listener.family) as probe:
            probe.settimeout(SECONDS_OF_A_START)
            probe.connect(listener.getsockname())
    except OSError as error:
        sentence = f"--master-addr {address}: this machine does not reach itself there ({error.strerror or error})"
        raise InputError(f"{sentence}; is the interface up? ip link set lo up starts loopback") from error
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_seconds)
    try:
        store = dist.TCPStore(address, port, is_master=True, timeout=timeout, master_listen_fd=listener.detach())
    except dist.DistError as error:
        told = f"{error}".partition("\n")[0]
        raise InputError(f"--master-port {port}: the store of the ranks cannot be opened there ({told})") from error
    store.set(OWNER, str(os.getuid()))
    return store, port


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition; return whether it became true in time. (torch's own waits cannot be interrupted.)"""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return True
