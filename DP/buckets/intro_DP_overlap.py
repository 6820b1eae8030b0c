"""Data parallelism: gradients are sent in buckets while the backward pass still computes others.

    python DP/buckets/intro_DP_overlap.py <rank>      in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-overlap --transport gloo           all ranks at once; gloo overlaps, shared memory does not

The backward pass finishes the last layers first. So the one buffer of `intro_DP_GA.py` is cut into buckets from the end
of the model on. A hook on each parameter counts the gradients that its bucket still lacks, and starts the all-reduce of
a full bucket, which runs while the pass continues with earlier layers (Li et al., arXiv 2006.15704).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.names import named
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import GradientAverageSettings
from distlab.settings.training import TrainSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = GradientAverageSettings(batch_size=1)
MORE = "intro_DP_buckets.py"  # can compress the gradients
BUCKET_BYTES = 25_000_000


class Bucket:
    """The gradients of some parameters, side by side in one buffer, which is summed over the ranks when it is full."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), device=parameters[0].device)
        self.parameters = parameters
        for parameter, part in zip(parameters, self.flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self.count)

    def start_step(self, backward_passes: int) -> None:
        self.flat.zero_()
        self.missing = backward_passes * len(self.parameters)

    def count(self, _: Tensor) -> None:
        """Count a gradient that the backward pass has just added to the bucket; send the bucket if it was the last."""
        self.missing -= 1
        if self.missing == 0:
            with named("the gradients of a bucket", "gradients"):
                self.all_reduce = dist.all_reduce(self.flat, async_op=True)  # returns at once: it has only started


def split_into_buckets(model: nn.Module) -> list[Bucket]:
    """Return the buckets in the order in which the backward pass fills them: from the end of the model."""
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed([*model.parameters()]):
        if sum(p.nbytes for p in groups[-1]) >= BUCKET_BYTES:
            groups.append([])
        groups[-1].append(parameter)
    return [Bucket(group) for group in groups]


def train(run: TrainingRun[TrainSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    buckets = split_into_buckets(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        for bucket in buckets:
            bucket.start_step(args.micro_batches)
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()  # the last one starts the all-reduces
            losses.append(loss)
        for bucket in buckets:
            bucket.all_reduce.wait()
            bucket.flat /= run.world_size
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
