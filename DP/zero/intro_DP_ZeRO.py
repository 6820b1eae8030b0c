"""Data parallelism: each rank keeps the optimizer's state of its own range of the weights, and updates that (ZeRO 1).

    python DP/zero/intro_DP_ZeRO.py <rank>            in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-zero --world-size 4                all ranks at once

Adam keeps two numbers for each weight, the same ones on every replica. Here rank r keeps those of the r-th of n equal
ranges (Rajbhandari et al., arXiv 1910.02054). So it needs the mean gradient of its own range only: a reduce-scatter.
After the update, an all-gather gives all ranks the new weights. Both together send what one all-reduce does.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.parallel.flat import flatten_gradients, flatten_weights
from distlab.parallel.flat_parameters import shards_of
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import ZeRO1Settings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ZeRO1Settings(batch_size=1)
MORE = "../fsdp/intro_DP_FSDP.py"  # shards gradients and weights, too


def own_range(flat: Tensor) -> Tensor:
    """Return this rank's range of a flat tensor, (elements / ranks,): a view."""
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def reduce_gradients(gradients: Tensor) -> None:
    """Replace this rank's range of the gradients, (elements,), by its mean over the ranks."""
    with named("the gradients", "gradients"):
        dist.reduce_scatter_tensor(own_range(gradients), gradients, ReduceOp.AVG)


def gather_weights(weights: Tensor) -> None:
    """Replace the other ranks' ranges of the weights, (elements,), by their updated values."""
    with named("the weights", "weights"):
        dist.all_gather_into_tensor(weights, own_range(weights))


def train(run: TrainingRun[ZeRO1Settings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    # The parameters, and their gradients, are views of these buffers, which are filled up to equal ranges.
    weights, gradients = flatten_weights(net, parts=run.world_size), flatten_gradients(net, parts=run.world_size)
    shards = shards_of(net, own_range(weights), own_range(gradients))  # by name, the parameters in this rank's range
    optimizer = run.optimizer(shards)
    run.track(net, optimizer, shards=shards, gather=partial(gather_weights, weights))

    for step, batch in run.steps(stories):
        gradients.zero_()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        reduce_gradients(gradients)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()  # of this rank's range
        gather_weights(weights)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
