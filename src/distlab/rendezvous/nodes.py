"""Several machines, each with a launcher of its own: where a launcher meets the others, and how it hears of their end.

Node 0's launcher holds a key-value store, at the given address alone. There all launchers join under torchrun's agent,
with the node ranks that they were given; and there the one whose rank has failed says so, since the ranks of the other
machines notice at most that a connection was closed.
"""

import argparse
import contextlib
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from distlab.comm.grid import Layout, layout_flags, layout_size
from distlab.comm.processes import within
from distlab.rendezvous.ranks import Say, connect, listens, open_bound_store, wait_until
from simplellm.errors import InputError

BACKEND = "lab"  # this module's rendezvous, among torchrun's
FLAGS = """
  --max-restarts N      how often to start all ranks again, from the last checkpoint, when one has failed (default: 0)
  --nnodes N            machines; the same command runs on each, with --master-addr (default: 1)
  --node-rank R         this machine's, from 0; node 0 is at --master-addr
  --ranks-per-node A,B  ranks of each machine, by node rank (default: the same number on each)
"""
SECONDS_TO_HEAR = 6.0  # that a launcher whose ranks have only lost a peer waits for word of the cause
SECONDS_OF_SILENCE = 10.0  # from node 0's launcher, after which it counts as lost: it is stopped, or its machine is
SECONDS_TO_LEAVE = 8.0  # that node 0, with whose launcher the store ends, waits for the others to have read it

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Attributes:
        rank: of this machine.
        ranks_of: how many ranks each machine has, by node rank. Their ranks follow each other in that order, so that
            those who talk most, which are neighbours in the grid of ranks, are on one machine where they can.
    """

    rank: int
    ranks_of: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.ranks_of)

    @property
    def others(self) -> list[int]:
        return [node for node in range(self.count) if node != self.rank]


def read_flags(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of the launcher itself, and the rest, which is the script's.

    Raises:
        InputError: a value is no number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", "--node_rank", type=int)
    parser.add_argument("--ranks-per-node", "--ranks_per_node")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    try:
        flags, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    if flags.max_restarts < 0:
        raise InputError(f"--max-restarts {flags.max_restarts}: give 0 or more")
    return flags, rest


def place(flags: argparse.Namespace, layout: Layout, master_addr: str) -> Nodes:
    """Share the ranks of a layout among the machines that the launcher's flags ask for.

    Raises:
        InputError: they cannot be shared so, or this machine has no place among them.
    """
    count, ranks = flags.nnodes, layout_size(layout)
    if count < 1:
        raise InputError(f"--nnodes {count}: give the number of machines, at least 1")
    if count > 1 and flags.node_rank is None:
        raise InputError(f"--nnodes {count}: give each machine its --node-rank, from 0 to {count - 1}")
    rank = flags.node_rank or 0
    if not 0 <= rank < count:
        raise InputError(f"--node-rank {rank}: --nnodes {count} has the node ranks 0 to {count - 1}")
    if count > 1 and is_loopback(master_addr):
        raise InputError(
            f"--master-addr {master_addr} with --nnodes {count}: give the address at which the others reach node 0"
        )
    return Nodes(rank, _share(flags.ranks_per_node, count, ranks, layout))


def _share(given: str | None, count: int, ranks: int, layout: Layout) -> tuple[int, ...]:
    if given is None:
        if ranks % count:
            even = ",".join(str(ranks // count + (node < ranks % count)) for node in range(count))
            example = f"; or give --ranks-per-node, as in {even}" if ranks > count else ""
            raise InputError(
                f"{layout_flags(layout)} with --nnodes {count}: {ranks} ranks do not divide among {count} machines; "
                f"take another number of either{example}"
            )
        return (ranks // count,) * count
    try:
        shares = tuple(int(part) for part in given.split(","))
    except ValueError:
        raise InputError(f"--ranks-per-node {given}: give a number for each machine, as in 4,2") from None
    if len(shares) != count or min(shares) < 1 or sum(shares) != ranks:
        raise InputError(
            f"--ranks-per-node {given}: --nnodes {count} and {layout_flags(layout)} need {count} "
            f"number{'s' * (count > 1)}, each at least 1, that add up to {ranks}"
        )
    return shares


def is_loopback(address: str) -> bool:
    """True for an address that leads back to the machine that asks.

    Raises:
        InputError: there is no such host.
    """
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--master-addr {address}: no such host ({getattr(error, 'strerror', error)})") from error
    return all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)


def ask(call: Callable[[], ResultT]) -> ResultT:
    """What a call to node 0's store returns; torch's own calls wait without end where nobody answers.

    Raises:
        DistError: there was no answer, or the store has gone.
    """
    answer = within(SECONDS_OF_SILENCE, lambda: (call(),))
    if answer is None:
        raise dist.DistNetworkError(f"the launcher of node 0 has not answered for {SECONDS_OF_SILENCE:g} s")
    return answer[0]


class NodeRendezvous(RendezvousHandler):
    """torchrun's rendezvous with fixed node ranks and no open port but those at the given address.

    Each round, that is each start of all ranks, they get a new store to meet in, in node 0's launcher.

    Args:
        nodes: the machines.
        address: where node 0 listens.
        port: there; 0 for a free one, if there is one machine only.
        timeout_seconds: how long to wait for the other machines.
        max_restarts: how often the ranks may be started again.
        say: prints a remark.

    Raises:
        InputError: node 0 cannot listen there, or is not reached; this node rank is taken, or a machine was started
            with other flags.
    """

    def __init__(
        self, nodes: Nodes, address: str, port: int, timeout_seconds: float, max_restarts: int, say: Say
    ) -> None:
        self.nodes, self.address, self._timeout_seconds, self._say = nodes, address, timeout_seconds, say
        self._max_restarts = max_restarts
        self._rounds = 0  # that have begun here, the same number on all machines as soon as they have met
        self._ranks_store: dist.Store | None = None
        if nodes.rank == 0:
            self._store, self.port = open_bound_store(address, port, timeout_seconds)
        else:
            self.port = port
            self._await_node_0()
            self._store = self.connect()
        self._compare()  # before it takes a seat: a machine that is refused may come again with other flags
        if ask(lambda: self._store.add(f"seat/{nodes.rank}", 1)) > 1:
            raise InputError(f"--node-rank {nodes.rank} is taken: give each machine of the run its own")

    @property
    def restarts(self) -> int:
        """How often all ranks have been started again."""
        return max(0, self._rounds - 1)

    def connect(self) -> dist.Store:
        """A connection of one's own to node 0's store: what waits on another one cannot hold it up."""
        where = f"{self.address}:{self.port}"
        store = None
        try:
            with contextlib.suppress(dist.DistError):
                store = connect(self.address, self.port, self._timeout_seconds, SECONDS_OF_SILENCE)
        except ConnectionRefusedError as error:
            raise InputError(f"node 0 does not listen at {where} any more: see its last line") from error
        if store is None:
            sentence = f"--master-port {self.port}: what listens at {where} is not node 0's launcher, or it is stopped"
            raise InputError(sentence)
        return store

    def _await_node_0(self) -> None:
        self._say(f"looking for node 0 at {self.address}:{self.port}")
        wait_until(
            lambda: listens(self.address, self.port),
            self._timeout_seconds,
            f"node 0 did not listen at {self.address}:{self.port} within {self._timeout_seconds:g} s: start it there, "
            "and see whether this machine reaches that address and port",
        )

    def _compare(self) -> None:
        """The machines must agree on how the ranks are shared and restarted, before any rank gets a number."""
        own = {
            "--nnodes and --ranks-per-node: node 0 was started with each node's ranks as": self.nodes.ranks_of,
            "--max-restarts: node 0 was started with it as": self._max_restarts,
        }
        if self.nodes.rank == 0:
            self._store.set("flags", json.dumps([*own.values()]))
        wait_until(lambda: self._has("flags"), self._timeout_seconds, "node 0 did not say a word")
        agreed = json.loads(ask(lambda: self._store.get("flags")))
        for (sentence, value), node_0s in zip(own.items(), agreed, strict=True):
            if json.loads(json.dumps(value)) != node_0s:
                raise InputError(
                    f"{sentence} {node_0s}, node {self.nodes.rank} as {json.dumps(value)}; start all machines with the "
                    "same flags"
                )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        prefix, self._rounds = f"round/{self._rounds}", self._rounds + 1
        assert self.restarts <= self._max_restarts, "the agent restarts by this count"
        if self.nodes.rank == 0:
            self._ranks_store, port = open_bound_store(self.address, 0, self._timeout_seconds)
            self._store.set(f"{prefix}/port", str(port))
        ask(lambda: self._store.set(f"{prefix}/node/{self.nodes.rank}", ""))
        for node in self.nodes.others:
            self._await_node(f"{prefix}/node/{node}", node)
        if self.restarts:
            self._say(f"a rank has failed: starting all ranks again, {self.restarts} of {self._max_restarts} times")
        port = int(ask(lambda: self._store.get(f"{prefix}/port")))
        store = dist.PrefixStore(prefix, self._store)
        return RendezvousInfo(store, self.nodes.rank, self.nodes.count, RendezvousStoreInfo(self.address, port))

    def _has(self, key: str) -> bool:
        return ask(lambda: self._store.check([key]))

    def _await_node(self, key: str, node: int) -> None:
        seconds = f"{self._timeout_seconds:g} s"
        sentence = f"waited {seconds} for node {node}: is ./launch.sh running there, with --node-rank {node}?"
        try:
            wait_until(
                lambda: self._has(key),
                self._timeout_seconds,
                sentence,
                notice=lambda: self._say(f"waiting for node {node}"),
            )
        except dist.DistError as error:
            sentence = f"node 0 ended, or was stopped, while this machine waited for node {node}: see its last line"
            raise InputError(sentence) from error

    def num_nodes_waiting(self) -> int:
        """Machines that have begun the next round, because ranks of theirs have failed: the others follow."""
        if self._max_restarts == 0 or self.nodes.count == 1:
            return 0
        return sum(self._has(f"round/{self._rounds}/node/{node}") for node in self.nodes.others)

    def all_finished(self) -> bool:
        """Say that this machine's ranks have finished; whether those of the others have, too."""
        key = f"round/{self._rounds - 1}/finished"
        ask(lambda: self._store.set(f"{key}/{self.nodes.rank}", ""))
        return all(self._has(f"{key}/{node}") for node in self.nodes.others)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return "lab"

    def shutdown(self) -> bool:
        return True


class Watch:
    """Tells the other machines' launchers how this one ended, and hears of theirs.

    Word of a failure elsewhere ends this launcher's agent, and with it the ranks here, as SIGTERM does. That makes an
    end in bounded time of what the ranks themselves may wait for until their timeout.

    Args:
        meeting: where the launchers met.
        seconds_to_end: what the agent may take to end its ranks.
    """

    def __init__(self, meeting: NodeRendezvous, seconds_to_end: float) -> None:
        self._meeting, self._nodes, self._seconds_to_end = meeting, meeting.nodes, seconds_to_end
        self._lock = threading.Lock()
        self._agent_runs = True
        self._heard = threading.Event()
        self._lost_node_0 = False
        self.word = ""  # of the first failure elsewhere
        if self._nodes.count > 1:
            self._store = meeting.connect()
            threading.Thread(target=self._listen, daemon=True).start()

    def agent_ended(self) -> None:
        """From now on word from elsewhere interrupts nothing."""
        with self._lock:
            self._agent_runs = False

    def hear(self) -> str:
        """What ended another machine's ranks, "" if nothing is heard; waits for word a few seconds."""
        if self._nodes.count > 1:
            self._heard.wait(SECONDS_TO_HEAR)
        return self.word

    def tell(self, sentence: str) -> None:
        """Say why the ranks here ended."""
        with self._reaching() as store:
            if store is not None:
                ask(lambda: store.set(f"failed/{self._nodes.rank}", sentence))

    def leave(self) -> None:
        """Return when this launcher may end: node 0's is the last, since the store ends with it."""
        with self._reaching() as store:
            if store is None:
                return
            ask(lambda: store.set(f"left/{self._nodes.rank}", ""))
            if self._nodes.rank == 0:  # whose own store answers
                came = [node for node in self._nodes.others if store.check([f"seat/{node}"])]
                wait_until(lambda: store.check([f"left/{node}" for node in came]), SECONDS_TO_LEAVE, "")

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[dist.Store | None]:
        """A connection to the store; None, and no waiting, if it has gone, or there is one machine."""
        with contextlib.suppress(dist.DistError, InputError):
            expected = self._nodes.count > 1 and not self._lost_node_0
            reached = expected and listens(self._meeting.address, self._meeting.port)
            yield self._meeting.connect() if reached else None

    def _listen(self) -> None:
        while not self.word:
            time.sleep(0.3)
            try:
                self.word = ask(self._word_of_others)
            except dist.DistError:
                self._lost_node_0 = True
                self.word = "the launcher of another machine, node 0, has ended or is not reached any more"
        self._heard.set()
        with self._lock:
            if not self._agent_runs:
                return
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._seconds_to_end + 2)
        with self._lock:
            if self._agent_runs:  # it sits in a wait of torch's, which no signal interrupts
                print(f"# {self.word}", file=sys.stderr, flush=True)
                os._exit(1)  # the ranks end with their launcher

    def _word_of_others(self) -> str:
        for node in self._nodes.others:
            if self._store.check([f"failed/{node}"]):
                return f"on another machine, node {node}, {self._store.get(f'failed/{node}').decode()}"
        return ""


class Agent(LocalElasticAgent):
    """torchrun's agent, which counts restarts by rounds of `NodeRendezvous`, where its own counts local failures.

    So they are the same number on all machines, also for the ranks, in TORCHELASTIC_RESTART_COUNT. A failure that would
    come again, in the words of `distlab.run.main`, is none to start again for; and ranks that have finished are started
    again if one of another machine fails after them.
    """

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        meeting = worker_group.spec.rdzv_handler
        assert isinstance(meeting, NodeRendezvous)
        self._remaining_restarts = worker_group.spec.max_restarts - meeting.restarts
        return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._shutdown_timeout)  # torchrun's own takes 30 s here, whatever it was told

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        meeting = worker_group.spec.rdzv_handler
        assert isinstance(meeting, NodeRendezvous)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and not meeting.all_finished():
            # torchrun's own wait for the others neither hears of a failure there nor starts again with them.
            return RunResult(WorkerState.HEALTHY)
        if any(failure.error_file_data.get("recurs_on_restart") for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


rendezvous_handler_registry.register(BACKEND, lambda parameters: parameters.config["meeting"])
