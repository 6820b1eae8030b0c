"""Several machines, each with a launcher: how the launchers find each other and report how they exit.

The launcher of node 0 holds a key-value store that listens only at the given address. All launchers join there, with
the node ranks given to them. They also report failures of their ranks there, because the ranks of other machines notice
at most that a connection was closed. (torchrun's own rendezvous listen on all interfaces; the static one does not
restart, and the c10d one assigns the node ranks itself.)
"""

import contextlib
import json
import os
import time

from distlab.launching.launcher_flags import Nodes
from distlab.rendezvous.store import SharedStore, StoreError, open_bound_store
from simplellm.errors import require, say

SECONDS_FOR_THE_CAUSE = 6.0  # wait of a launcher whose ranks have only lost a peer for a report of the cause
SECONDS_OF_SILENCE = 10.0  # after which node 0's launcher counts as lost: it, or its machine, is stopped
SECONDS_FOR_READERS = 8.0  # wait of node 0, whose launcher holds the store, until the others have read it
LOST_NODE_0 = "the launcher of another machine, node 0, has exited or can no longer be reached"


class ElsewhereError(RuntimeError):
    """The run ended on another machine; the message says why."""


class NodeRendezvous:
    """A rendezvous of launchers with fixed node ranks, which opens ports only at node 0's address.

    For each round, which is one start of all ranks, the ranks get a new store in node 0's launcher. The launchers' own
    store exists for the whole run: each launcher reports there how it ended, and reads how the others ended. So no
    machine depends on what its ranks notice, which may be nothing until their timeout.

    Node 0 listens at `address` and `port`; if there is only one machine, port 0 chooses a free one.

    Raises:
        InputError: node 0 cannot listen or be reached, the node rank is taken, or flags differ between machines.
        StoreError: node 0's launcher has exited or does not answer. All methods may raise it.
    """

    def __init__(self, nodes: Nodes, address: str, port: int, timeout_seconds: float, max_restarts: int) -> None:
        self._shared = SharedStore("node 0", timeout_seconds, silence_seconds=SECONDS_OF_SILENCE)
        if nodes.rank == 0:
            self._shared.store, port = open_bound_store(address, port, timeout_seconds)
        else:
            self._shared.find(address, port)
        self.address, self.port = address, port
        self.rank, self._ranks_of = nodes.rank, nodes.ranks_of
        self._others = [node for node in range(len(nodes.ranks_of)) if node != nodes.rank]
        self._timeout_seconds, self._max_restarts = timeout_seconds, max_restarts
        self._rounds = 0  # rounds started here; the same on all machines as soon as they have joined
        self._compare_flags()  # before it gets its node rank: a machine that is refused may try again with other flags
        is_first = self._shared.add(f"seat/{self.rank}") == 1
        require(is_first, f"--node-rank {self.rank} is taken: give each machine of the run its own")

    def _compare_flags(self) -> None:
        """Check, before ranks are numbered, that all machines agree on the division of ranks and on restarts."""
        own = {
            "--nnodes and --ranks-per-node: node 0 was started with each node's ranks as": [*self._ranks_of],
            "--max-restarts: node 0 was started with it as": self._max_restarts,
        }
        if self.rank == 0:
            self._shared.set("flags", json.dumps(own))
        node_0s = json.loads(self._shared.wait("flags", "the flags of node 0"))
        for flag, value in own.items():
            sentence = f"{flag} {node_0s[flag]}, node {self.rank} as {value}; start all machines with the same flags"
            require(value == node_0s[flag], sentence)

    @property
    def ranks_store(self) -> SharedStore:
        """The store of the ranks of this round, on node 0."""
        return SharedStore("this launcher", self._timeout_seconds, store=self._ranks_store)

    @property
    def restarts(self) -> int:
        """Number of restarts of all ranks."""
        return max(0, self._rounds - 1)

    def next_round(self) -> list[dict[str, str]]:
        """Wait until all machines start their ranks; return the environment of each of this machine's, like torchrun.

        The ranks' store is in node 0's launcher.
        """
        prefix, self._rounds = f"round/{self._rounds}", self._rounds + 1
        assert self.restarts <= self._max_restarts, "launchers restart their ranks by this count"
        if self.rank == 0:
            self._ranks_store, port = open_bound_store(self.address, 0, self._timeout_seconds)  # until the next
            self._shared.set(f"{prefix}/port", str(port))
        self._shared.set(f"{prefix}/node/{self.rank}")
        for node in self._others:
            hint = f"is ./launch.sh running there, with --node-rank {node}?"
            self._shared.wait(f"{prefix}/node/{node}", f"node {node}", hint, self.check_others)
        if self.restarts:
            say(f"a rank has failed: starting all ranks again, {self.restarts} of {self._max_restarts} times")
        (port_of_ranks,) = self._shared.read(f"{prefix}/port").values()
        first, local_size = sum(self._ranks_of[: self.rank]), self._ranks_of[self.rank]
        shared = {
            "GROUP_RANK": self.rank,
            "GROUP_WORLD_SIZE": len(self._ranks_of),
            "WORLD_SIZE": sum(self._ranks_of),
            "LOCAL_WORLD_SIZE": local_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": port_of_ranks,
            "TORCHELASTIC_RUN_ID": "lab",
            "TORCHELASTIC_RESTART_COUNT": self.restarts,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        ranks = [shared | {"LOCAL_RANK": local, "RANK": first + local} for local in range(local_size)]
        return [{name: str(value) for name, value in rank.items()} for rank in ranks]

    def allow_restart(self) -> None:
        """Allow one restart more; there is a single machine."""
        self._max_restarts += 1

    def has_next_round(self) -> bool:
        """Return whether a machine has started the next round after a failure of its ranks; the others follow."""
        return bool(self._shared.read(*(f"round/{self._rounds}/node/{node}" for node in self._others)))

    def all_finished(self) -> bool:
        """Report that this machine's ranks have finished; return whether all other machines have reported it."""
        key = f"round/{self._rounds - 1}/finished"
        self._shared.set(f"{key}/{self.rank}")
        return self._shared.has(*(f"{key}/{node}" for node in self._others))

    def check_others(self) -> None:
        """Raise `ElsewhereError` if the run ended on another machine."""
        for key, cause in self._shared.read(*(f"failed/{node}" for node in self._others)).items():
            raise ElsewhereError(f"on another machine, node {key.partition('/')[2]}, {cause}")

    def await_cause(self) -> None:
        """Wait a few seconds for another machine to report why its ranks exited, and raise `ElsewhereError` with it."""
        deadline = time.monotonic() + SECONDS_FOR_THE_CAUSE
        while time.monotonic() < deadline:
            self.check_others()
            time.sleep(0.1)

    def leave(self, cause: str) -> None:
        """Report why this launcher exits, unless `cause` is ""; on node 0, wait for the others to read the store."""
        with contextlib.suppress(StoreError):
            if cause:
                self._shared.set(f"failed/{self.rank}", cause)
            self._shared.set(f"left/{self.rank}")
            if self.rank == 0:
                joined = [node for node in self._others if self._shared.has(f"seat/{node}")]
                self._shared.keep_open([f"left/{node}" for node in joined], SECONDS_FOR_READERS)
