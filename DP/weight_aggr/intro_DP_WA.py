"""Data parallelism: the ranks average their weights, every step or every few steps.

    python DP/weight_aggr/intro_DP_WA.py <rank>       in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-wa --sync-every 16                 all ranks at once, an average after every 16 local steps

Each rank updates its own copy with its own gradients, and then all ranks average the copies. With plain SGD and an
average after every step, this equals the run that averages gradients: the mean of w - lr * g over the ranks is
w - lr * (mean of g), if all ranks start the step from the same w. With more steps in between it is local SGD, also
known as federated averaging (McMahan et al., arXiv 1602.05629): less traffic, but the copies drift apart in between.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.parallel.flat import flatten_weights
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import WeightAverageSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = WeightAverageSettings(batch_size=1)


def average_if_due(weights: Tensor, step: int, args: WeightAverageSettings) -> None:
    """Replace the weights, (elements,), by the ranks' mean after every `--sync-every` steps, and the last one."""
    if (step + 1) % args.sync_every == 0 or step + 1 == args.steps:
        with named(f"the weights after step {step}", "weights"):
            dist.all_reduce(weights, ReduceOp.AVG)


def train(run: TrainingRun[WeightAverageSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    weights = flatten_weights(net)  # the parameters are views of this buffer, so averaging it averages them
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        run.log(step, losses)
        optimizer.step()
        average_if_due(weights, step, args)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
