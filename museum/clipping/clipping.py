"""Clipping where each rank has the gradients of its own range of the weights: ZeRO 1, with the norm of all ranges.

    ./launch.sh museum/clipping/clipping.py

After the reduce-scatter, no rank has all gradients. So the ranks combine the squares of their own ranges, and all scale
their range by the same factor.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.parallel.flat import flatten_gradients, flatten_weights
from distlab.parallel.flat_parameters import shards_of
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import ZeRO1Settings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ZeRO1Settings(
    batch_size=2, steps=100, optimizer="sgd", lr=2.0, clip_norm=0.5, dmodel=64, num_heads=4, n_layers=2, seq_len=64
)


def own_range(flat: Tensor) -> Tensor:
    """Return this rank's range of a flat tensor, (elements / ranks,): a view."""
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def clip(own: Tensor, limit: float) -> float:
    """Scale this rank's gradients, in place, so that the norm of all ranks' gradients is at most `limit`.

    Returns:
        The norm before, the same on all ranks.
    """
    square = own.square().sum()
    dist.all_reduce(square, ReduceOp.AVG)
    norm = float(square.sqrt())
    if norm > limit:
        own *= limit / norm
    return norm


def gather_weights(weights: Tensor) -> None:
    """Replace the other ranks' ranges of the weights, (elements,), by their updated values."""
    dist.all_gather_into_tensor(weights, own_range(weights))


def train(run: TrainingRun[ZeRO1Settings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    # The parameters, and their gradients, are views of these buffers, which are filled up to equal ranges.
    weights, gradients = flatten_weights(net, parts=run.world_size), flatten_gradients(net, parts=run.world_size)
    shards = shards_of(net, own_range(weights), own_range(gradients))  # by name, the parameters in this rank's range
    optimizer = run.optimizer(shards)
    run.track(net, optimizer, shards=shards, gather=partial(gather_weights, weights))

    for step, ids in run.steps(stories):
        gradients.zero_()
        loss = causalLLMLoss(net(ids), ids, tokenizer.vocab_size)
        loss.backward()
        dist.reduce_scatter_tensor(own_range(gradients), gradients, ReduceOp.AVG)
        run.log(step, [loss])
        if args.clip_norm is not None:
            run.records.values["grad_norm"] = clip(own_range(gradients), args.clip_norm)
        optimizer.step()  # of this rank's range
        gather_weights(weights)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
