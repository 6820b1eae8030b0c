"""Data parallelism with torch's DistributedDataParallel: the same run, with the averaging inside the library.

    python DP/ddp/intro_DP_DDP.py <rank>              in three terminals, with the ranks 0, 1 and 2
    ./launch.sh ddp --world-size 4                    all ranks at once

The wrapper does what `intro_DP_overlap.py` spells out: it collects gradients in buckets, and starts the all-reduce of
each bucket when it is full (Li et al., arXiv 2006.15704). Over gloo or NCCL, that goes on during the backward pass; in
shared memory, the ranks average the buckets at its end. The loop is that of one process.
"""

from torch.nn.parallel import DistributedDataParallel

from distlab.comm.names import named
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import WrappedSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = WrappedSettings(batch_size=1)


def train(run: TrainingRun[WrappedSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    model = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    # This compares parameters' shapes, and copies rank 0's values.
    with named("all ranks to wrap the model", "weights at the start"):
        net = DistributedDataParallel(model)
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            with named("the gradients of a bucket", "gradients"):
                loss.backward()  # returns with averaged gradients
            losses.append(loss)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
