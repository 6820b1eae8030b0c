"""Experts that two ranks share: each rank holds half of them, all other weights, and sequences of its own.

    ./launch.sh museum/experts/experts.py

The rows of tokens travel to the rank of their expert and back. After the backward pass, every gradient is averaged over
the ranks that hold its parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.axes.placement import Placement, place
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.experts import ExpertParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.experts import MixtureOfExperts
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ExpertParallelSettings(batch_size=2, steps=100, dmodel=64, num_heads=4, n_layers=2, seq_len=64, lr=2e-3)


class Exchange(torch.autograd.Function):
    """Send `sent[r]` rows to each rank r, and receive `received[r]`; their gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(grad, ctx.received, ctx.sent), None, None


def through_ranks(rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Sequence[int]], Tensor]) -> Tensor:
    """Return the experts' outputs for rows (rows, dmodel) sorted by expert; `counts` has the rows of each expert."""
    to_ranks = counts.view(dist.get_world_size(), -1)  # (ranks, experts of a rank)
    from_ranks = torch.empty_like(to_ranks)
    dist.all_to_all_single(from_ranks, to_ranks)
    sent, received = to_ranks.sum(dim=1).tolist(), from_ranks.sum(dim=1).tolist()
    arrived = Exchange.apply(rows, sent, received)  # by source, and from each source by expert
    expert = torch.arange(from_ranks.shape[1]).repeat(len(from_ranks)).repeat_interleave(from_ranks.flatten())
    order = expert.argsort(stable=True)  # by expert, and for each expert by source
    outputs = compute(arrived[order], from_ranks.sum(dim=0).tolist())
    return Exchange.apply(outputs[order.argsort()], received, sent)


def average(gradient: Tensor, holders: int) -> None:
    """Replace a gradient by its mean over the ranks that hold its parameter: all of them, or one."""
    if holders > 1:
        dist.all_reduce(gradient)
    gradient /= holders


def train(run: TrainingRun[ExpertParallelSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    own = torch.arange(args.experts).chunk(run.world_size)[run.rank].tolist()  # the experts of this rank
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options(), own_experts=own)
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    for mixture in (module for module in net.modules() if isinstance(module, MixtureOfExperts)):
        mixture.dispatch = through_ranks
        for parameter in mixture.experts.parameters():
            place(parameter, Placement(apart=("ep",)))  # no other rank holds it
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, ids in run.steps(stories):
        optimizer.zero_grad()
        loss = causalLLMLoss(net(ids), ids, tokenizer.vocab_size)
        loss.backward()
        for name, parameter in net.named_parameters():
            is_expert = ".experts." in name
            if parameter.grad is not None:
                average(parameter.grad, 1 if is_expert else run.world_size)
        run.log(step, [loss])
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
