"""The group of a rank that is alone: what it would send to itself is copied when the call starts."""

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.transports.transport import Carried, Op, Transport
from distlab.machine.torch_patches import group_of_one


class Alone(Transport):
    """Takes the place of `Library` in a group of one rank."""

    kind, devices = dist.ProcessGroup.BackendType.CUSTOM, ("cpu", "cuda")

    def __init__(self) -> None:
        self.group = group_of_one()

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried:
        return Carried()

    def broadcast(self, tensor: Tensor, source: int) -> Carried:
        return Carried()

    def reduce(self, tensor: Tensor, root: int, op: Op) -> Carried:
        return Carried()

    def all_gather(self, output: Tensor, own: Tensor) -> Carried:
        return _copied(output, own)

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried:
        return _copied(rows[0], own)

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried:
        return _copied(own, parts)

    def all_to_all(self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]) -> Carried:
        return _copied(output, own)

    def gather(self, output: Sequence[Sequence[Tensor]], own: Tensor, root: int) -> Carried:
        return _copied(output[0][0], own)

    def scatter(self, own: Tensor, input: Sequence[Sequence[Tensor]], root: int) -> Carried:
        return _copied(own, input[0][0])

    def send(self, tensor: Tensor, to: int, tag: int) -> Carried:
        raise ValueError("a message to or from oneself: this group has one rank")

    def recv(self, tensor: Tensor, source: int, tag: int) -> Carried:
        return self.send(tensor, source, tag)

    def recv_anysource(self, tensor: Tensor, tag: int) -> Carried:
        return self.send(tensor, 0, tag)

    def received_bytes(self, parts: Tensor) -> int:
        return 0

    def starting_together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@torch.inference_mode()  # as in torch's own groups
def _copied(output: Tensor, input: Tensor) -> Carried:
    """Copy a tensor; the two may be one, as in a reduce-scatter in place."""
    if output.data_ptr() != input.data_ptr():
        output.view_as(input).copy_(input)
    return Carried()
