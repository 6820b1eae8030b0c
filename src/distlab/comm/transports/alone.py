"""The transport of a group of one rank, which sends to itself."""

from collections.abc import Sequence

from torch import Tensor

from distlab.comm.transports.transport import Carried, Op, Transport


class Alone(Transport):
    """The transport of a rank that is alone in its group: copies."""

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried:
        return Carried()

    def broadcast(self, tensor: Tensor, source: int) -> Carried:
        return Carried()

    def all_gather(self, output: Tensor, own: Tensor) -> Carried:
        output.view(-1).copy_(own.view(-1))
        return Carried()

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried:
        rows[0].copy_(own)
        return Carried()

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried:
        own.view(-1).copy_(parts.view(-1))
        return Carried()

    def all_to_all(self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]) -> Carried:
        output.copy_(own)
        return Carried()

    def reduce(self, tensor: Tensor, root: int, op: Op) -> Carried:
        return Carried()

    def gather(self, output: Sequence[Sequence[Tensor]], own: Tensor, root: int) -> Carried:
        output[0][0].copy_(own)
        return Carried()

    def scatter(self, own: Tensor, input: Sequence[Sequence[Tensor]], root: int) -> Carried:
        own.copy_(input[0][0])
        return Carried()

    def received_bytes(self, parts: Tensor) -> int:
        return 0
