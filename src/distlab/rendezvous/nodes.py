"""Several machines, each with a launcher of its own: how the launchers find each other, and hear how others end.

Node 0's launcher holds a key-value store, at the given address alone. There all launchers join under torchrun's agent,
with the node ranks that they were given; and there the one whose rank has failed reports it, since the ranks of the
other machines notice at most that a connection was closed. (torchrun's own rendezvous listen on all interfaces; the
static one does not restart, and the c10d one gives out node ranks as it likes.)
"""

import argparse
import contextlib
import json
import time
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from distlab.comm.grid import Layout, layout_flags, layout_size
from distlab.rendezvous.store import Say, SharedStore, StoreError, is_loopback, open_bound_store
from simplellm.errors import InputError

FLAGS = """
  --max-restarts N      how often to start all ranks again, from the last checkpoint, when one has failed (default: 0)
  --nnodes N            machines; the same command runs on each, with --master-addr (default: 1)
  --node-rank R         this machine's, from 0; node 0 is at --master-addr
  --ranks-per-node A,B  ranks of each machine, by node rank (default: the same number on each)
"""
SECONDS_FOR_THE_CAUSE = 6.0  # that a launcher whose ranks have only lost a peer waits for a report of the cause
SECONDS_OF_SILENCE = 10.0  # from node 0's launcher, after which it counts as lost: it is stopped, or its machine is
SECONDS_FOR_READERS = 8.0  # that node 0, with whose launcher the store ends, waits for the others to have read it
LOST_NODE_0 = "the launcher of another machine, node 0, has ended or is not reached any more"


class ElsewhereError(RuntimeError):
    """Another machine's part of the run has ended; the message says why."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Attributes:
        rank: of this machine.
        ranks_of: how many ranks each machine has, by node rank. Their ranks follow each other in that order, so that
            those that exchange most, which are neighbours in the grid of ranks, are on one machine where they can.
    """

    rank: int
    ranks_of: tuple[int, ...]


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


def assign_ranks(flags: argparse.Namespace, layout: Layout, master_addr: str) -> Nodes:
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


class NodeRendezvous(StaticTCPRendezvous):
    """torchrun's rendezvous with fixed node ranks and no open port but those at the given address.

    Each round, that is each start of all ranks, the ranks get a new store in node 0's launcher. The launchers' own
    store serves the whole run: there each launcher reports how it ended, and hears of the others' end, so that no
    machine depends on what its ranks notice, which may be nothing until their timeout.

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
        StoreError: node 0's launcher has ended, or does not answer. So do all methods.
    """

    def __init__(
        self, nodes: Nodes, address: str, port: int, timeout_seconds: float, max_restarts: int, say: Say
    ) -> None:
        self._shared = SharedStore("node 0", timeout_seconds, say, silence_seconds=SECONDS_OF_SILENCE)
        if nodes.rank == 0:
            self._shared.store, port = open_bound_store(address, port, timeout_seconds)
        else:
            self._shared.find(address, port)
        super().__init__(
            address, port, nodes.rank, len(nodes.ranks_of), "lab", timeout=0
        )  # it opens no store of its own
        self.ranks_of = nodes.ranks_of
        self._others = [node for node in range(self.world_size) if node != self.rank]
        self._timeout_seconds, self._max_restarts, self._say = timeout_seconds, max_restarts, say
        self._rounds = 0  # that have begun here, the same number on all machines as soon as they have joined
        self._ranks_store: dist.Store | None = None
        self._compare_flags()  # before it takes a seat: a machine that is refused may come again with other flags
        if self._shared.add(f"seat/{self.rank}") > 1:
            raise InputError(f"--node-rank {self.rank} is taken: give each machine of the run its own")

    def _compare_flags(self) -> None:
        """The machines must agree on how the ranks are shared and restarted, before any rank gets a number."""
        own = {
            "--nnodes and --ranks-per-node: node 0 was started with each node's ranks as": [*self.ranks_of],
            "--max-restarts: node 0 was started with it as": self._max_restarts,
        }
        if self.rank == 0:
            self._shared.set("flags", json.dumps([*own.values()]))
        agreed = json.loads(self._shared.wait("flags", "the flags of node 0"))
        for (sentence, value), node_0s in zip(own.items(), agreed, strict=True):
            if value != node_0s:
                raise InputError(
                    f"{sentence} {node_0s}, node {self.rank} as {value}; start all machines with the same flags"
                )

    @property
    def restarts(self) -> int:
        """How often all ranks have been started again."""
        return max(0, self._rounds - 1)

    def next_rendezvous(self) -> RendezvousInfo:
        prefix, self._rounds = f"round/{self._rounds}", self._rounds + 1
        assert self.restarts <= self._max_restarts, "the agent restarts by this count"
        if self.rank == 0:
            self._ranks_store, port = open_bound_store(self.master_addr, 0, self._timeout_seconds)
            self._shared.set(f"{prefix}/port", str(port))
        self._shared.set(f"{prefix}/node/{self.rank}")
        for node in self._others:
            hint = f"is ./launch.sh running there, with --node-rank {node}?"
            self._shared.wait(f"{prefix}/node/{node}", f"node {node}", hint, self.check_others)
        if self.restarts:
            self._say(f"a rank has failed: starting all ranks again, {self.restarts} of {self._max_restarts} times")
        (port_of_ranks,) = self._shared.read(f"{prefix}/port").values()
        where = RendezvousStoreInfo(self.master_addr, int(port_of_ranks))
        return RendezvousInfo(self._shared.store, self.rank, self.world_size, where)

    def num_nodes_waiting(self) -> int:
        """Machines that have begun the next round, because ranks of theirs have failed: the others follow."""
        return len(self._shared.read(*(f"round/{self._rounds}/node/{node}" for node in self._others)))

    def all_finished(self) -> bool:
        """Report that this machine's ranks have finished; whether those of the other machines have, too."""
        key = f"round/{self._rounds - 1}/finished"
        self._shared.set(f"{key}/{self.rank}")
        return self._shared.has(*(f"{key}/{node}" for node in self._others))

    def check_others(self) -> None:
        """Raise `ElsewhereError` if another machine has ended its part of the run."""
        for key, cause in self._shared.read(*(f"failed/{node}" for node in self._others)).items():
            raise ElsewhereError(f"on another machine, node {key.partition('/')[2]}, {cause}")

    def await_cause(self) -> None:
        """Wait a few seconds for another machine's report of why its ranks ended, and raise it."""
        deadline = time.monotonic() + SECONDS_FOR_THE_CAUSE
        while self._others and time.monotonic() < deadline:
            self.check_others()
            time.sleep(0.1)

    def leave(self, cause: str) -> None:
        """Return when this launcher may end: node 0's is the last, since the store ends with it.

        Args:
            cause: what to report to the other machines; "" if the run ended well, or a cause is reported already.
        """
        with contextlib.suppress(StoreError):
            if cause:
                self._shared.set(f"failed/{self.rank}", cause)
            self._shared.set(f"left/{self.rank}")
            if self.rank == 0:
                joined = [node for node in self._others if self._shared.has(f"seat/{node}")]
                self._shared.keep_open([f"left/{node}" for node in joined], SECONDS_FOR_READERS)
