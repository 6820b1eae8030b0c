"""The small GPT of gpt.py with data parallelism: the ranks average their gradients.

    ./launch.sh examples/gpt_dp.py --world-size 2
    torchrun --nproc-per-node 2 examples/gpt_dp.py

Compare with DP/gradient_aggr/intro_DP_GA.py: only the model is another one.
"""

from dataclasses import dataclass

import torch.distributed as dist
from gpt import ARCHITECTURE, GPT
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.parallel.flat import flatten_gradients
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import DataParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class GPTSettings(DataParallelSettings):
    architecture = ARCHITECTURE


DEFAULTS = GPTSettings(batch_size=3)


def train(run: TrainingRun[GPTSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = GPT(tokenizer.vocab_size, args).to(run.device)
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
        with named("the gradients", "gradients"):
            dist.all_reduce(gradients, ReduceOp.AVG)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
