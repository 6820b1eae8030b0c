"""Data parallelism: each rank takes its own sequences, and the ranks average their gradients at every step.

    python DP/gradient_aggr/intro_DP_GA.py <rank>   or all ranks at once: ./launch.sh dp-ga --world-size 4

The training run is the same on one rank or many: the same weights, the same stories, the same losses.
"""

import torch.distributed as dist

from distlab.comm.names import named
from distlab.parallel.flat import flatten_gradients
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import GradientAverageSettings
from distlab.settings.training import TrainSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = GradientAverageSettings(batch_size=1)
MORE = "../buckets/intro_DP_buckets.py"  # sends gradients in buckets, or compressed


def train(run: TrainingRun[TrainSettings]) -> None:
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
        with named("the gradients", "gradients"):  # in messages, and in the table of bytes
            dist.all_reduce(gradients)
        gradients /= run.world_size
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
