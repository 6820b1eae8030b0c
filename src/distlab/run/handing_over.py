"""With `--spares`: the state that a newcomer gets from a rank with the same weights."""

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from distlab.comm.names import named
from distlab.rendezvous.survivors import Position
from distlab.run.state_copy import parameters_of, tensors_of


class ChangedError(RuntimeError):
    """The weights of a rank are not those of its replicas."""


class LostError(RuntimeError):
    """No rank is left that has the weights that another one needs."""


class HandedOver:
    """The weights, the optimizer's state, and a record.

    Args:
        optimizer: of all parameters of this rank.
    """

    describe: Callable[[Position], dict[str, Any]]  # returns the record at a position of the run; set by the run

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def send(self, to: int, position: Position) -> None:
        """Send the state to a rank of the process group."""
        state = tensors_of(self._optimizer)
        states = [self._optimizer.state.get(parameter, {}) for parameter in parameters_of(self._optimizer)]
        kinds = [{key: [[*value.shape], str(value.dtype)] for key, value in state.items()} for state in states]
        record = {**self.describe(position), "optimizer": kinds, "checksum": checksum_of_tensors(state)}
        text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
        with named("the state of a rank", "repair"):
            for tensor in (torch.tensor(len(text)), text, *state):
                dist.send(tensor.detach(), to)

    def receive(self, source: int) -> dict[str, Any]:
        """Receive the state from a rank of the process group, and return the record.

        Raises:
            ChangedError: it has changed on its way.
        """
        length = torch.zeros((), dtype=torch.int64)
        with named("the state of a rank", "repair"):
            dist.recv(length, source)
            text = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(text, source)
            record: dict[str, Any] = json.loads(text.numpy().tobytes())
            self._optimizer.state.clear()  # of an earlier attempt
            for parameter, kinds in zip(parameters_of(self._optimizer), record["optimizer"], strict=True):
                for key, (shape, dtype) in kinds.items():
                    kept = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                    self._optimizer.state[parameter][key] = kept
            state = tensors_of(self._optimizer)
            for tensor in state:
                dist.recv(tensor.detach(), source)
        if checksum_of_tensors(state) != record["checksum"]:
            raise ChangedError("the state that a peer has sent has another checksum than it had there")
        return record

    def checksum(self) -> int:
        """Return the checksum of the weights and of the optimizer's state."""
        return checksum_of_tensors(tensors_of(self._optimizer))


def checksum_of_tensors(tensors: Iterable[Tensor]) -> int:
    """Return the checksum of the bytes of tensors."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found
