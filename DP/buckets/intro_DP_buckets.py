"""Data parallelism: gradients in the library's buckets, sent in fewer bytes, or by an all-reduce written by hand.

    python DP/buckets/intro_DP_buckets.py <rank>      in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-buckets --transport gloo           all ranks at once; gloo overlaps, shared memory does not
    ./launch.sh dp-buckets --all-reduce ring          with the lab's own all-reduce instead of the library's
    ./launch.sh dp-buckets --compress powersgd        with gradients in fewer bytes (PowerSGD: arXiv 1905.13727)

`GradientBuckets` does what `intro_DP_overlap.py` spells out. Over gloo or NCCL, the all-reduce of a full bucket runs
while the backward pass continues with earlier layers. In memory that the ranks of one machine share, nothing overlaps:
the buckets are added up when the ranks wait for them, after the pass.
"""

import torch.distributed as dist
from torch.distributed import ReduceOp

from distlab.collectives import ALL_REDUCES
from distlab.comm.names import named
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.parallel.gradient_compression import PowerSGD, TopK
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import BucketSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = BucketSettings(batch_size=1)
MORE = "../repair/intro_DP_repair.py"  # goes on when a rank dies


def train(run: TrainingRun[BucketSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    compressors: dict[str, PowerSGD | TopK]
    compressors = {"powersgd": PowerSGD(args.powersgd_rank, args.seed), "topk": TopK(args.topk_share)}
    compressor = compressors.get(args.compress)
    run.track(net, optimizer, compressor=compressor)
    by_hand = ALL_REDUCES.get(args.all_reduce)  # the lab's own; None for the library's

    def add_up(bucket: Bucket) -> dist.Work | None:
        """Start to add up the gradients of a bucket, which is full: called during the backward pass."""
        if compressor is not None:
            return compressor.start(bucket)
        with named(str(bucket), "gradients"):  # in messages, and in the table of bytes
            if by_hand is None:
                return dist.all_reduce(bucket.flat, ReduceOp.SUM, async_op=True)
            by_hand(bucket.flat, ReduceOp.SUM)
            return None  # already finished

    buckets = GradientBuckets(net.parameters(), on_full=add_up, backward_passes=args.micro_batches)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            (loss / run.world_size).backward()  # so that the sum over the ranks is the average
            losses.append(loss)
        buckets.finish()  # wait for all buckets
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
