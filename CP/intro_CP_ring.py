"""Context parallelism with a ring: keys and values travel from rank to rank, and meet each rank's queries there.

    ./launch.sh cp-ring --seq-len 2048 --batch-size 1                        the ring, with equal work for all ranks
    ./launch.sh cp-ring --seq-len 2048 --batch-size 1 --cp-order contiguous  the last rank has the most work
    ./launch.sh cp-ring --seq-len 2048 --batch-size 1 --cp-kind heads        all-to-all: whole sequences, some heads
    ./launch.sh cp-ring --seq-len 2048 --batch-size 1 --trace                who waits for whom

A rank never holds more keys and values than its own and those that visit it. It computes with a block while the next
one is on its way. The ring is in src/distlab/parallel/ring_attention.py, and the ways to share a sequence are in
src/distlab/parallel/context_parallel.py.
"""

import torch.distributed as dist
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.parallel.context_parallel import ContextParallel
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.sequences import RingSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SPTokenizer

DEFAULTS = RingSettings(batch_size=1)


def train(run: TrainingRun[RingSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options())  # all ranks read the same sequences
    optimizer = run.optimizer(net)
    run.track(net, optimizer)
    ranks = run.grid.axis("cp")
    context = ContextParallel(ranks, args.cp_kind, args.cp_order, net.document_end)

    def average(bucket: Bucket) -> dist.Work | None:
        with named(str(bucket), "gradients"):
            return dist.all_reduce(bucket.flat, ReduceOp.AVG, async_op=True)

    buckets = GradientBuckets(net.parameters(), on_full=average, backward_passes=args.micro_batches, over=ranks)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for ids in batch.chunk(args.micro_batches):
            part = context.part(ids)  # this rank's tokens, where they stand, and what each of them predicts
            loss = part.loss(net(part.ids, part=part.sequence)) / args.micro_batches
            loss.backward()
            losses.append(loss)
        buckets.finish()  # each rank has the gradients of its own positions
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
