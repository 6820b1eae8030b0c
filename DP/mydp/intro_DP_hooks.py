"""Data parallelism in hooks: each gradient is averaged as soon as the backward pass has computed it.

    python DP/mydp/intro_DP_hooks.py <rank>           in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-hooks --world-size 4               all ranks at once

`average_in_hooks` is the simplest data-parallel wrapper: a message for each parameter, and a wait for each.
`MyDP`, in `intro_DP_MyDP.py`, and torch's wrapper do the same in buckets.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import WrappedSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = WrappedSettings(batch_size=1)


def average_in_hooks(model: nn.Module) -> None:
    """Give all ranks the weights of rank 0, and make each backward pass average the gradients over the ranks."""

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with named("a gradient", "gradients"):
            dist.all_reduce(parameter.grad, ReduceOp.AVG)

    for parameter in model.parameters():
        with named("a weight", "weights at the start"):
            dist.broadcast(parameter.detach(), src=0)
        parameter.register_post_accumulate_grad_hook(average)


def train(run: TrainingRun[WrappedSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    average_in_hooks(net)
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()  # returns with averaged gradients
            losses.append(loss)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
