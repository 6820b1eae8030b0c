"""What the benchmarks of training steps have in common: the model, its batches, and the plain step."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.run.model import build_optimizer
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB_SIZE = 4096
Step = Callable[[Tensor], Tensor]  # token ids (batch, seq) -> loss, after the backward pass and the update


def build(seq_len: int = 256) -> CausalLLama:
    """The default model."""
    return LLama(CausalLLama, VOCAB_SIZE, ctx_size=seq_len)


def tokens(turn: int, batch_size: int, seq_len: int) -> Tensor:
    """Token ids (batch, seq) of a turn, the same on all ranks."""
    return torch.randint(VOCAB_SIZE, (batch_size, seq_len), generator=torch.Generator().manual_seed(turn))


def loss_of(model: nn.Module) -> Step:
    """From token ids to the loss, without a backward pass."""
    return lambda ids: causalLLMLoss(model(ids), ids, VOCAB_SIZE)


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return build_optimizer("adam", parameters, lr=8e-4)


def training_step(
    loss: Step, optimizer: torch.optim.Optimizer, before_update: Callable[[], object] = lambda: None
) -> Step:
    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(ids)
        found.backward()
        before_update()
        optimizer.step()
        return found.detach()

    return step


def backward_step(model: nn.Module, loss: Step) -> Step:
    """A step without an update."""

    def step(ids: Tensor) -> Tensor:
        model.zero_grad()
        found = loss(ids)
        found.backward()
        return found.detach()

    return step


def averaged_buckets(model: nn.Module) -> GradientBuckets:
    """The gradients, averaged as in DP/buckets/intro_DP_buckets.py."""

    def average(bucket: Bucket) -> Pending:
        with named(str(bucket), "gradients"):
            return dist.all_reduce(bucket.flat, dist.ReduceOp.AVG, async_op=True)

    return GradientBuckets(model.parameters(), on_full=average)
