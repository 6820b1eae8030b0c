"""Data parallelism: the ranks average their gradients at every step.

    python DP/gradient_aggr/intro_DP_GA.py <rank>     in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-ga --world-size 4                  all ranks at once

Each rank takes its own sequences. The mean of the ranks' gradients is the gradient of the global batch, so all ranks
take the step that one process would take, and their weights stay the same. Compare it with primer/intro.py. (With
`--compress` or `--all-reduce`, DP/buckets/intro_DP_buckets.py takes over.)
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.parallel.data import flatten_gradients
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import GradientAverageSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = GradientAverageSettings(batch_size=1)
MORE = "../buckets/intro_DP_buckets.py"  # sends them compressed, or in buckets


def average(gradients: Tensor) -> None:
    """Replace this rank's gradients, (elements,), by their mean over the ranks."""
    with named("the gradients", "gradients"):  # in messages, and in the table of bytes
        dist.all_reduce(gradients, ReduceOp.SUM)
    gradients /= dist.get_world_size()


def train(run: TrainingRun[GradientAverageSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    gradients = flatten_gradients(net)  # every parameter.grad is a view of this buffer
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        gradients.zero_()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        average(gradients)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__, MORE)
