"""Ring attention: keys and values travel around the ranks that share a sequence, and meet each rank's queries there.

In each step a rank passes on the block that it has, and computes with it at the same time. The sums of the exponentials
combine the results of the blocks (`simplellm.attention_blocks`). The backward pass sends the blocks around once more,
with the final output and sums, so that each block's gradients need no other block. The gradients of keys and values
travel behind their block, add up on the way, and are home after the last step.
(Liu et al., arXiv 2310.01889; the zigzag order of `distlab.parallel.context_parallel` keeps all ranks equally busy.)
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from distlab.axes.grid import Axis
from distlab.comm.context import context_of
from distlab.comm.group import open_queues, starting_together
from distlab.comm.names import named
from distlab.comm.recorder import PART, RING_STEP
from simplellm.attention_blocks import Mask, attention_block, attention_block_backward, merge

BLOCKS, GRADIENTS = "keys and values", "gradients of keys and values"  # the ledger's columns


class KeyBlock(NamedTuple):
    """The keys and values of one rank, and the part of them that another rank's queries see."""

    source: int  # the rank along the axis
    seen: tuple[slice, slice] | None  # queries, and the keys that they see; None if there are none
    mask: Mask = None  # of these queries and keys


@dataclass(frozen=True)
class Ring:
    """The ranks along an axis that share sequences, each of which sends to the next.

    `blocks` are those of each step of the ring; first, this rank's own keys.
    """

    axis: Axis
    blocks: Sequence[KeyBlock]

    def open(self, like: Tensor) -> None:
        """Make queues for messages of the size of `like`, where neighbors share memory; all ranks call it together."""
        row = [*self.axis.ranks, self.axis.ranks[0]]
        open_queues(row, like.nbytes, like, self.axis.group, slots=2)

    def send(self, x: Tensor, what: str, kind: str) -> dist.Work:
        with named(what, kind):
            work = dist.isend(x, self._neighbor(1), self.axis.group)
        assert work is not None
        return work

    def receive(self, like: Tensor, what: str, kind: str) -> tuple[Tensor, dist.Work]:
        received = torch.empty_like(like)
        with named(what, kind):
            work = dist.irecv(received, self._neighbor(-1), self.axis.group)
        assert work is not None
        return received, work

    def _neighbor(self, distance: int) -> int:
        return self.axis.ranks[(self.axis.rank + distance) % self.axis.size]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Compute the attention of this rank's queries to the keys and values of all ranks that they see.

    q is (batch, heads, positions, head_dim), k and v (batch, key heads, positions, head_dim), of this rank's positions.
    All ranks of the ring call it together.
    """
    mixed: Tensor = _RingAttention.apply(q, k, v, ring)
    return mixed


def attend_around(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Compute the attention of this rank's queries to all blocks that they see, and the log of the sum of exponentials.

    Shapes as in `ring_attention`; results as in `attention_block`, for all queries of this rank.
    """
    out, total = torch.empty(0), torch.empty(0)
    for step, block, visiting in around(ring, torch.stack([k, v])):
        if block.seen is None:
            continue
        queries, keys = block.seen
        with _span(ring, f"{RING_STEP}{step}"):
            k_seen, v_seen = visiting[..., keys, :]
            taken = attention_block(q[:, :, queries], k_seen, v_seen, block.mask)
            if step == 0:  # each query sees at least one of its own rank's keys
                out, total = taken
            else:
                merge(out[:, :, queries], total[:, :, queries], *taken)
    return out, total


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out, total = attend_around(q, k, v, ring)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad_q = torch.zeros_like(out)
        own_grads = torch.zeros_like(torch.stack([k, v]), dtype=out.dtype)
        sent: list[dist.Work] = []
        arriving: tuple[Tensor, dist.Work] | None = None
        for step, block, visiting in around(ring, torch.stack([k, v])):
            grads = torch.zeros_like(own_grads) if step else own_grads
            if block.seen is not None:
                queries, keys = block.seen
                with _span(ring, f"{RING_STEP}{step}, backward"):
                    k_seen, v_seen = visiting[..., keys, :]
                    of_q, of_k, of_v = attention_block_backward(
                        grad[:, :, queries].contiguous(),
                        q[:, :, queries],
                        k_seen,
                        v_seen,
                        out[:, :, queries],
                        total[:, :, queries],
                        block.mask,
                    )
                    grad_q[:, :, queries] += of_q
                    grads[0][..., keys, :] += of_k
                    grads[1][..., keys, :] += of_v
            if arriving is not None:  # the sum over the ranks that the block has visited before
                arriving[1].wait()
                grads += arriving[0]
            if step:  # the first rank visited starts the sum; messages of a link arrive in the order of sending
                source = (block.source - 1) % ring.axis.size
                with starting_together(ring.axis.group):
                    sent.append(ring.send(grads, f"the gradients of rank {block.source}'s keys", GRADIENTS))
                    arriving = ring.receive(grads, f"the gradients of rank {source}'s keys", GRADIENTS)
        if arriving is not None:
            arriving[1].wait()
            own_grads += arriving[0]
        for work in sent:
            work.wait()
        return grad_q.to(q.dtype), own_grads[0].to(k.dtype), own_grads[1].to(v.dtype), None


def around(ring: Ring, own: Tensor) -> Iterator[tuple[int, KeyBlock, Tensor]]:
    """Yield each step of the ring: its number, its block, and the keys and values of that block.

    They are (2, batch, key heads, positions, head_dim). The next ones travel at the same time.
    """
    visiting, last = own, len(ring.blocks) - 1
    if last:
        ring.open(own.to(torch.promote_types(own.dtype, torch.float32)))
    for step, block in enumerate(ring.blocks):
        if step == last:
            yield step, block, visiting
            return
        source = ring.blocks[step + 1].source
        with starting_together(ring.axis.group):
            sent = ring.send(visiting, f"the keys and values of rank {block.source}", BLOCKS)
            following, arriving = ring.receive(visiting, f"the keys and values of rank {source}", BLOCKS)
        yield step, block, visiting
        arriving.wait()
        sent.wait()
        visiting = following


def _span(ring: Ring, name: str) -> contextlib.AbstractContextManager[None]:
    return context_of(ring.axis.group).recorder.span(PART, name)
