"""Two ranks share each sequence: the first has its first half, the second the other half.

    ./launch.sh museum/labels/labels.py

Queries attend to the keys and values of all ranks, which are gathered. Each position predicts the next token.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.sequences import EqualPartsSettings
from simplellm.attention import SequencePart, attend_to_earlier
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import next_token_loss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = EqualPartsSettings(batch_size=4, steps=100, lr=2e-3, dmodel=64, num_heads=4, n_layers=2, seq_len=64)


class GatherAll(torch.autograd.Function):
    """Keys and values of all ranks, (ranks, …), from those of this one; their gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        gathered = own.new_empty(dist.get_world_size(), *own.shape)
        dist.all_gather(list(gathered.unbind()), own.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        own = torch.empty_like(grad[0])
        dist.reduce_scatter(own, list(grad.unbind()))
        return own


def attend_to_all_ranks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from own queries (batch, heads, own positions, head_dim) to the keys and values of all positions."""
    gathered = GatherAll.apply(torch.stack([k, v]))  # (ranks, 2, batch, heads, own positions, head_dim)
    k, v = torch.cat(gathered.unbind(), dim=-2)
    return attend_to_earlier(q, k, v, mask)


def train(run: TrainingRun[EqualPartsSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options())  # all ranks read the same sequences
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    everywhere = torch.arange(args.seq_len, device=run.device)
    own = everywhere.chunk(run.world_size)[run.rank]  # this rank's positions
    mask = (everywhere <= own.unsqueeze(-1)).view(1, 1, len(own), -1)  # which keys each query attends to
    part = SequencePart(own, partial(attend_to_all_ranks, mask=mask))
    predictions = args.batch_size * (args.seq_len - 1) / run.world_size  # so that the mean over the ranks is the loss

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        ids = batch[:, own]
        labels = ids.roll(-1, dims=1)
        is_last = (own == args.seq_len - 1).expand(len(ids), -1)  # it predicts nothing
        loss = next_token_loss(net(ids, part=part), labels, is_last, predictions)
        loss.backward()
        for parameter in net.parameters():  # each rank has the gradients of its own positions
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world_size
        run.log(step, [loss])
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
