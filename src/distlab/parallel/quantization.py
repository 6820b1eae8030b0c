"""Quantized vectors, which take fewer bytes: bfloat16, or integers of eight or four bits in blocks, each with a scale.

A block of integers has one float32 scale, its largest magnitude divided by the largest integer (block-wise
quantization: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861). The rounding error is
not lost if the sender adds it to its next message: error feedback (Seide et al., "1-Bit Stochastic Gradient Descent",
Interspeech 2014; Karimireddy et al., arXiv 1901.09847).
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.functional import pad

from distlab.axes.grid import Axis
from distlab.comm.group import all_gather_single
from distlab.comm.pending import Pending
from distlab.parallel.options import BLOCK, LARGEST, Compression


def encode(kind: Compression, values: Tensor) -> Tensor:
    """Return the message for `values` (elements,), float32: uint8 (encoded_bytes,), the scales, then the integers."""
    if kind == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / LARGEST[kind]
    integers = (blocks / scales.where(scales != 0, 1)).round_().to(torch.int8).view(-1)[: len(values)]
    if kind == "int4":  # two in a byte, as numbers from 1 to 15
        pairs = pad(integers + 8, (0, len(values) % 2)).view(-1, 2).view(torch.uint8)
        integers = pairs[:, 0] | pairs[:, 1] << 4
    return torch.cat([scales.view(-1).view(torch.uint8), integers.view(torch.uint8)])


def decode(kind: Compression, message: Tensor, elements: int) -> Tensor:
    """Return the values (elements,), float32, of a message of `encode`; non-finite where the encoded values were."""
    if kind == "bf16":
        return message.clone().view(torch.bfloat16).float()
    scale_bytes = 4 * -(-elements // BLOCK)
    scales, integers = message[:scale_bytes].clone().view(torch.float32), message[scale_bytes:]
    if kind == "int4":
        integers = torch.stack([integers & 15, integers >> 4], 1).view(-1)[:elements].view(torch.int8) - 8
    values = pad(integers.view(torch.int8).float(), (0, -elements % BLOCK)).view(-1, BLOCK)
    return (values * scales[:, None]).view(-1)[:elements]


def start_mean(result: Tensor, values: Tensor, kind: Compression, residual: Tensor | None, axis: Axis) -> Pending:
    """Start to average a vector over the ranks along an axis, sent compressed, with error feedback.

    Each rank sends its message to all others (an all-gather), and adds up the decoded vectors in float32 and in the
    order of ranks. So all ranks have the same mean to the last bit, and nothing is rounded twice. A rank sends
    (ranks - 1) * `options.encoded_bytes`. Without compression, an all-reduce averages the vectors.

    Args:
        result: (elements,), float32; holds the mean after the wait for the returned handle.
        values: this rank's vector, (elements,).
        kind: how the vectors are sent.
        residual: the error of this rank's earlier messages, (elements,); it is added to `values`, and the error of
            this message replaces it. None without compression.
        axis: the ranks.
    """
    if residual is None:
        return dist.all_reduce(result.copy_(values), ReduceOp.AVG, axis.group, async_op=True)
    wanted = values + residual
    message = encode(kind, wanted)
    torch.sub(wanted, decode(kind, message, len(values)), out=residual)
    messages = message.new_empty(axis.size, len(message))

    def add_up() -> None:
        result.zero_()
        for one in messages:
            result.add_(decode(kind, one, len(values)))
        result.div_(len(messages))

    return all_gather_single(messages, message, axis.group, async_op=True).then(add_up)
