"""Context parallelism: every rank holds a part of each sequence, and the whole model.

    python CP/intro_CP.py <rank>                      in two terminals, with the ranks 0 and 1
    ./launch.sh cp --seq-len 1024 --batch-size 1      all ranks at once

All layers but attention treat each token alone. In attention, a query needs the keys and values of all tokens before
it: every rank collects those of all ranks (Llama 3: arXiv 2407.21783, section 3.3.2), and keeps its own queries. In the
backward pass the gradients of keys and values go back to where they came from, and are added up there.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.names import named
from distlab.parallel.flat import flatten_gradients
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.sequences import EqualPartsSettings
from simplellm.attention import SequencePart, attend_to_earlier
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import next_token_loss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = EqualPartsSettings(batch_size=1)


class GatherAll(torch.autograd.Function):
    """Keys and values of all ranks, (ranks, …), from those of this one; their gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        gathered = own.new_empty(dist.get_world_size(), *own.shape)
        with named("the keys and values", "keys and values"):  # in messages, and in the ledger
            dist.all_gather(list(gathered.unbind()), own.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        own = torch.empty_like(grad[0])
        with named("the gradients of keys and values", "gradients of keys and values"):
            dist.reduce_scatter(own, list(grad.unbind()))
        return own


def attend_to_all_ranks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from own queries (batch, heads, own positions, head_dim) to the keys and values of all positions."""
    gathered = GatherAll.apply(torch.stack([k, v]))  # (ranks, 2, batch, heads, own positions, head_dim)
    k, v = torch.cat(gathered.unbind(), dim=-2)
    return attend_to_earlier(q, k, v, mask)


def labels(ids: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels of this rank's positions, and which of them have none: (batch, own positions) each.

    `ids` are the whole sequences, (batch, seq), and `own` this rank's positions. The token after the last of them is on
    another rank, so labels are looked up in the whole sequences.
    """
    is_last = own == ids.shape[1] - 1
    return ids.roll(-1, dims=1)[:, own], is_last.expand(len(ids), -1)


def train(run: TrainingRun[EqualPartsSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options())  # all ranks read the same sequences
    optimizer = run.optimizer(net)
    gradients = flatten_gradients(net)  # every parameter.grad is a view of this buffer
    run.track(net, optimizer)

    everywhere = torch.arange(args.seq_len, device=run.device)
    own = everywhere.chunk(run.world_size)[run.rank]  # this rank's positions
    mask = (everywhere <= own.unsqueeze(-1)).view(1, 1, len(own), -1)  # which keys each query attends to
    part = SequencePart(own, partial(attend_to_all_ranks, mask=mask))  # for the model: positions, and how to attend

    for step, batch in run.steps(stories):
        gradients.zero_()
        losses = []
        for ids in batch.chunk(args.micro_batches):
            logits = net(ids[:, own], part=part)
            predictions = len(ids) * (args.seq_len - 1)  # of all ranks, so this loss is a share, and shares add up
            share = next_token_loss(logits, *labels(ids, own), predictions) / args.micro_batches
            share.backward()
            losses.append(share * run.world_size)  # the run prints the mean over the ranks
        with named("the gradients", "gradients"):
            dist.all_reduce(gradients)  # each rank has those of its own share
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
