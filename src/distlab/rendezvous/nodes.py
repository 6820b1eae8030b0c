"""Several machines, each with its own launcher: how the launchers find each other, and learn how the others end.

Node 0's launcher holds a key-value store, at the given address alone. There all launchers join under torchrun's agent,
with the node ranks that they were given, and report the failures of their ranks, since the ranks of the other machines
notice at most that a connection was closed. (torchrun's own rendezvous listen on all interfaces; the static one does
not restart, and the c10d one chooses the node ranks.)
"""

import argparse
import contextlib
import json
import time
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from distlab.comm.grid import Layout, layout_flags, layout_size
from distlab.rendezvous.store import Say, SharedStore, StoreError, is_loopback, open_bound_store
from simplellm.errors import InputError, require

FLAGS = """
  --tell PROMPT         when the ranks have finished, the model, which is saved, tells a story that begins so
  --max-restarts N      how often to start all ranks again, from the last checkpoint, when one has failed (default: 0)
  --nnodes N            machines; the same command runs on each, with --master-addr (default: 1)
  --node-rank R         this machine's, from 0; node 0 is at --master-addr
  --ranks-per-node A,B  ranks of each machine, by node rank (default: the same number on each)
"""
SECONDS_FOR_THE_CAUSE = 6.0  # that a launcher whose ranks have only lost a peer waits for a report of the cause
SECONDS_OF_SILENCE = 10.0  # after which node 0's launcher counts as lost: it is stopped, or its machine is
SECONDS_FOR_READERS = 8.0  # that node 0, whose launcher holds the store, waits for the others to have read it
LOST_NODE_0 = "the launcher of another machine, node 0, has ended or is not reached any more"


class ElsewhereError(RuntimeError):
    """Another machine's part of the run has ended; the message says why."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Their ranks are numbered in the order of the machines. So ranks that exchange most, which are neighbours in the grid
    of ranks, are on one machine where possible.
    """

    rank: int  # of this machine
    ranks_of: tuple[int, ...]  # how many ranks each machine has, by node rank


def read_flags(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own flags, and the rest, which are the script's; `InputError` if a value is not a number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", "--node_rank", type=int)
    parser.add_argument("--ranks-per-node", "--ranks_per_node")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    parser.add_argument("--tell")
    try:
        flags, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    require(flags.max_restarts >= 0, f"--max-restarts {flags.max_restarts}: give 0 or more")
    return flags, rest


def assign_ranks(flags: argparse.Namespace, layout: Layout, master_addr: str) -> Nodes:
    """Share the ranks of a layout among the machines that the launcher's flags ask for.

    Raises:
        InputError: they cannot be shared so, or this machine has no place among them.
    """
    count, rank = flags.nnodes, flags.node_rank or 0
    machines = f"--nnodes {count}"
    require(count >= 1, f"{machines}: give the number of machines, at least 1")
    is_ranked = count == 1 or flags.node_rank is not None
    require(is_ranked, f"{machines}: give each machine its --node-rank, from 0 to {count - 1}")
    require(0 <= rank < count, f"--node-rank {rank}: {machines} has the node ranks 0 to {count - 1}")
    is_reachable = count == 1 or not is_loopback(master_addr)
    address = f"--master-addr {master_addr} with {machines}"
    require(is_reachable, f"{address}: give the address at which the others reach node 0")
    return Nodes(rank, _share(flags.ranks_per_node, count, layout))


def _share(given: str | None, count: int, layout: Layout) -> tuple[int, ...]:
    ranks, flags = layout_size(layout), layout_flags(layout)
    if given is None:
        even = tuple(ranks // count + (node < ranks % count) for node in range(count))
        example = f"; or give --ranks-per-node, as in {','.join(map(str, even))}" if ranks > count else ""
        sentence = f"{flags} with --nnodes {count}: {ranks} ranks do not divide among {count} machines"
        require(ranks % count == 0, f"{sentence}; take another number of either{example}")
        return even
    try:
        shares = tuple(map(int, given.split(",")))
    except ValueError:
        raise InputError(f"--ranks-per-node {given}: give a number for each machine, as in 4,2") from None
    require(
        len(shares) == count and min(shares) >= 1 and sum(shares) == ranks,
        f"--ranks-per-node {given}: --nnodes {count} and {flags} need {count} number{'s' * (count > 1)}, each at least "
        f"1, that add up to {ranks}",
    )
    return shares


class NodeRendezvous(StaticTCPRendezvous):
    """torchrun's rendezvous with fixed node ranks, and open ports only at node 0's address.

    In each round, that is each start of all ranks, the ranks get a new store in node 0's launcher. The launchers' own
    store serves the whole run: there each launcher reports how it ended, and learns how the others did. So no machine
    depends on what its ranks notice, which may be nothing until their timeout.

    Node 0 listens at `address` and `port`; 0 is a free one, if there is only one machine.

    Raises:
        InputError: node 0 cannot listen or is not reached; the node rank is taken, or flags differ between machines.
        StoreError: node 0's launcher has ended, or does not answer. All methods may raise it.
    """

    def __init__(
        self, nodes: Nodes, address: str, port: int, timeout_seconds: float, max_restarts: int, say: Say
    ) -> None:
        self._shared = SharedStore("node 0", timeout_seconds, say, silence_seconds=SECONDS_OF_SILENCE)
        if nodes.rank == 0:
            self._shared.store, port = open_bound_store(address, port, timeout_seconds)
        else:
            self._shared.find(address, port)
        super().__init__(address, port, nodes.rank, len(nodes.ranks_of), "lab", timeout=0)  # opens no store of its own
        self.ranks_of = nodes.ranks_of
        self._others = [node for node in range(self.world_size) if node != self.rank]
        self._timeout_seconds, self._max_restarts, self._say = timeout_seconds, max_restarts, say
        self._rounds = 0  # that have begun here, the same number on all machines as soon as they have joined
        self._compare_flags()  # before it takes a seat: a machine that is refused may try again with other flags
        is_first = self._shared.add(f"seat/{self.rank}") == 1
        require(is_first, f"--node-rank {self.rank} is taken: give each machine of the run its own")

    def _compare_flags(self) -> None:
        """The machines must agree on how the ranks are shared and restarted, before any rank gets a number."""
        own = {
            "--nnodes and --ranks-per-node: node 0 was started with each node's ranks as": [*self.ranks_of],
            "--max-restarts: node 0 was started with it as": self._max_restarts,
        }
        if self.rank == 0:
            self._shared.set("flags", json.dumps(own))
        node_0s = json.loads(self._shared.wait("flags", "the flags of node 0"))
        for flag, value in own.items():
            sentence = f"{flag} {node_0s[flag]}, node {self.rank} as {value}; start all machines with the same flags"
            require(value == node_0s[flag], sentence)

    @property
    def restarts(self) -> int:
        """How often all ranks have been started again."""
        return max(0, self._rounds - 1)

    def next_rendezvous(self) -> RendezvousInfo:
        prefix, self._rounds = f"round/{self._rounds}", self._rounds + 1
        assert self.restarts <= self._max_restarts, "the agent restarts by this count"
        if self.rank == 0:
            self._ranks_store, port = open_bound_store(self.master_addr, 0, self._timeout_seconds)  # until the next
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
        """How many machines have begun the next round, because a rank of theirs has failed; the others follow."""
        return len(self._shared.read(*(f"round/{self._rounds}/node/{node}" for node in self._others)))

    def all_finished(self) -> bool:
        """Report that this machine's ranks have finished; return whether those of the other machines have, too."""
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
        while time.monotonic() < deadline:
            self.check_others()
            time.sleep(0.1)

    def leave(self, cause: str) -> None:
        """Report why this launcher ends, unless `cause` is ""; on node 0, wait for the others to read the store."""
        with contextlib.suppress(StoreError):
            if cause:
                self._shared.set(f"failed/{self.rank}", cause)
            self._shared.set(f"left/{self.rank}")
            if self.rank == 0:
                joined = [node for node in self._others if self._shared.has(f"seat/{node}")]
                self._shared.keep_open([f"left/{node}" for node in joined], SECONDS_FOR_READERS)
