"""With `--spares`: the state that a newcomer gets from a rank with the same weights."""

import json
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from distlab.comm.names import named
from distlab.run.state_copy import parameters_of, tensors_of


class StateError(RuntimeError):
    """The weights of a rank are not those of its replicas, or no rank is left that has them."""


def send_state(optimizer: Optimizer, record: dict[str, Any], to: int) -> None:
    """Send the weights of an optimizer, its state of them, and a record to a rank of the process group."""
    state = tensors_of(optimizer)
    states = [optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)]
    kinds = [{key: [[*value.shape], str(value.dtype)] for key, value in state.items()} for state in states]
    record = {**record, "optimizer": kinds, "checksum": checksum_of(optimizer)}
    text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    with named("the state of a rank", "repair"):
        for tensor in (torch.tensor(len(text)), text, *state):
            dist.send(tensor.detach(), to)


def receive_state(optimizer: Optimizer, source: int) -> dict[str, Any]:
    """Receive the weights of an optimizer and its state from a rank of the process group, and return the record.

    Raises:
        StateError: they have changed on their way.
    """
    length = torch.zeros((), dtype=torch.int64)
    with named("the state of a rank", "repair"):
        dist.recv(length, source)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source)
        record: dict[str, Any] = json.loads(text.numpy().tobytes())
        optimizer.state.clear()  # of an earlier attempt
        for parameter, kinds in zip(parameters_of(optimizer), record["optimizer"], strict=True):
            for key, (shape, dtype) in kinds.items():
                kept = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                optimizer.state[parameter][key] = kept
        for tensor in tensors_of(optimizer):
            dist.recv(tensor.detach(), source)
    if checksum_of(optimizer) != record["checksum"]:
        raise StateError("the state that a peer has sent has another checksum than it had there")
    return record


def checksum_of(optimizer: Optimizer) -> int:
    """Return the checksum of the weights of an optimizer and of its state of them."""
    found = 0
    for tensor in tensors_of(optimizer):
        found = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found
