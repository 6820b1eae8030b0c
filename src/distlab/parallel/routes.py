"""Routes on disk: the experts that each token of a run had, to be forced in another run.

A choice of experts is a step function: in another layout, a difference in the last digit of a score can change it. With
the same routes, two runs have the same losses up to rounding, so that whatever else differs is a fault.

A folder of routes has a file of int16 for each layer and replica, (steps, tokens of a replica, experts per token), and
`routes.json` with these sizes. The tokens of all replicas together are those of the global batch, in its order, so a
run with another number of replicas can read them.
"""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.grid import Axis
from distlab.comm.group import device_of
from distlab.comm.names import named
from distlab.parallel.expert_parallel import ChoicesOfSequences
from simplellm.errors import InputError, require
from simplellm.experts import MixtureOfExperts

SIZES, BYTES = "routes.json", 2


class Routes:
    """Records the routes of this rank's layers, or forces those that another run has recorded.

    Args:
        nets: this rank's stages; the names of their modules are those in the whole model.
        way: whether to record or to replay.
        folder: of the routes.
        replicas: one rank of each replica; the sequences of all replicas together are the global batch.
        slices: the ranks that have the same routes; the first one writes them.
        choices: of the ranks that share the replica's sequences.
        tokens: tokens of a replica in a step, in all parts of its sequences.
        seq: tokens of a sequence.

    Raises:
        InputError: the folder does not have the routes of such a run.
    """

    def __init__(
        self,
        nets: Iterable[nn.Module],
        way: Literal["record", "replay"],
        folder: Path,
        replicas: Axis,
        slices: Axis,
        choices: ChoicesOfSequences,
        tokens: int,
        seq: int,
    ) -> None:
        self._way, self._folder, self._replicas, self._copies = way, folder, replicas, slices.size
        self._choices, self._tokens, self._seq = choices, tokens, seq
        self._own_seq = seq // choices.axis.size  # tokens of a sequence on this rank
        self._writes = slices.rank == choices.axis.rank == 0
        self._step = self._others = 0
        self._seen: dict[str, list[Tensor]] = {}  # by layer, the routes of this step so far, (tokens, per token) each
        self._wanted: dict[str, Tensor] = {}  # by layer, the recorded routes of this step
        self.parted: str | None = None  # the first route that a replay has changed, in words
        mixtures = {
            name: module for net in nets for name, module in net.named_modules() if isinstance(module, MixtureOfExperts)
        }
        self._k = max((mixture.sizes.per_token for mixture in mixtures.values()), default=0)
        self._sizes = {"tokens": tokens, "replicas": replicas.size, "experts_per_token": self._k}
        if way == "record":
            self._start()
        else:
            self._sizes = self._read_sizes()
        for name, mixture in mixtures.items():
            mixture.routes = partial(self._record if way == "record" else self._replay, name)

    def step(self) -> dict[str, float]:
        """End a step; return values for its record: with a replay, the tokens of all ranks with other experts.

        With a replay, all ranks call it together.
        """
        for name, parts in self._seen.items() if self._writes and self._way == "record" else ():
            with self._file(name, self._replicas.rank).open("ab") as file:
                file.write(torch.cat(parts).to("cpu", torch.int16).numpy().tobytes())
        values: dict[str, float] = {}
        if self._way == "replay":
            others = torch.tensor(self._others, device=device_of() if dist.is_initialized() else None)
            if dist.is_initialized():
                with named("the number of other routes", "other routes"):
                    dist.all_reduce(others)
            values["other_routes"] = int(others) // self._copies
        self._seen, self._wanted, self._others, self._step = {}, {}, 0, self._step + 1
        return values

    def _start(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(f"*.{self._replicas.rank}") if self._writes else ():
                path.unlink(missing_ok=True)  # a rank with other layers may have been faster
            if self._writes:
                (self._folder / SIZES).write_text(json.dumps(self._sizes))
        except OSError as error:
            raise InputError(f"--record-routes {self._folder}: cannot write there ({error.strerror})") from None

    def _read_sizes(self) -> dict[str, Any]:
        given = f"--replay-routes {self._folder}"
        try:
            sizes: dict[str, Any] = json.loads((self._folder / SIZES).read_text())
            own = self._sizes["tokens"] * self._sizes["replicas"]
            its = sizes["tokens"] * sizes["replicas"]
            require(own == its, f"{given}: a step had {its} tokens, and has {own}; give the same global batch")
            k = self._sizes["experts_per_token"]
            require(k in (0, sizes["experts_per_token"]), f"{given}: a token had {sizes['experts_per_token']} experts")
        except (OSError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{given}: has no {SIZES} that can be read; --record-routes writes it") from None
        return sizes

    def _file(self, layer: str, replica: int) -> Path:
        return self._folder / f"{layer}.{replica}"

    def _record(self, layer: str, ids: Tensor, gaps: Tensor) -> Tensor:
        whole, _ = self._choices.gather(ids.unflatten(0, (-1, self._own_seq)))
        self._seen.setdefault(layer, []).append(whole.flatten(0, 1))
        return ids

    def _replay(self, layer: str, ids: Tensor, gaps: Tensor) -> Tensor:
        if layer not in self._wanted:
            self._wanted[layer] = self._read_step(layer)
        seen = self._seen.setdefault(layer, [])
        start, count = sum(map(len, seen)), len(ids) * self._choices.axis.size
        places = torch.arange(start, start + count).view(-1, self._seq)
        places = places[:, self._choices.positions(self._own_seq)].flatten()  # in the replica's tokens
        forced = self._wanted[layer][places].to(ids)
        seen.append(self._wanted[layer][start : start + count])
        # The order in which a token's experts were chosen changes only the order of a sum.
        others = (forced.sort(dim=1).values != ids.sort(dim=1).values).any(dim=1).nonzero().flatten()
        self._others += len(others)
        if len(others) and self.parted is None:
            at = int(others[0])
            token = self._replicas.rank * self._tokens + int(places[at])
            self.parted = f"step {self._step}, {layer}, token {token}: gap {gaps[at].item():.1e}"
        return forced

    def _read_step(self, layer: str) -> Tensor:
        """Return this replica's routes of the step, (tokens, per token)."""
        tokens, k = self._sizes["tokens"], self._k
        parts, length = [], tokens * k * BYTES
        for replica in range(self._sizes["replicas"]):
            path = self._file(layer, replica)
            try:
                with path.open("rb") as file:
                    file.seek(self._step * length)
                    content = bytearray(file.read(length))
            except OSError as error:
                raise InputError(f"--replay-routes: {path} cannot be read ({error.strerror})") from None
            require(len(content) == length, f"--replay-routes: {path} has no routes of step {self._step}")
            parts.append(torch.frombuffer(content, dtype=torch.int16).view(tokens, k))
        return torch.cat(parts).split(self._tokens)[self._replicas.rank]
