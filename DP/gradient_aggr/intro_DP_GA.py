"""Data parallelism: the ranks average their gradients at every step.

    python DP/gradient_aggr/intro_DP_GA.py <rank>    in three terminals, or all ranks at once: ./launch.sh dp-ga
    ./launch.sh dp-ga --all-reduce ring              with the lab's own all-reduce instead of the library's
    ./launch.sh dp-ga --compress powersgd            with gradients in fewer bytes (PowerSGD: arXiv 1905.13727)

Each rank takes its own sequences; the mean of the ranks' gradients is that of the global batch, so all stay equal.
"""

import torch.distributed as dist
from torch.distributed import ReduceOp

from distlab.collectives import ALL_REDUCES
from distlab.comm.names import named
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.parallel.gradient_compression import PowerSGD, TopK
from distlab.run.main import main
from distlab.run.replica_settings import ByHandSettings
from distlab.run.training import TrainingRun
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ByHandSettings(batch_size=1)


def train(run: TrainingRun[ByHandSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    compressors: dict[str, PowerSGD | TopK]
    compressors = {"powersgd": PowerSGD(args.powersgd_rank, args.seed), "topk": TopK(args.topk_share)}
    compressor = compressors.get(args.compress)
    run.track(net, optimizer, compressor=compressor)

    # [dp-ga] Prepare the average of the gradients over the ranks, if your way needs it.
    by_hand = ALL_REDUCES.get(args.all_reduce)  # our own; None for the library's

    def add_up(bucket: Bucket) -> dist.Work | None:
        """Start to add up gradients that are complete, while the backward pass continues to earlier layers."""
        if compressor is not None:
            return compressor.start(bucket)
        with named(str(bucket), "gradients"):  # in messages, and in the ledger
            if by_hand is None:
                return dist.all_reduce(bucket.flat, ReduceOp.SUM, async_op=True)
            by_hand(bucket.flat, ReduceOp.SUM)
            return None  # it has ended

    buckets = GradientBuckets(net.parameters(), on_full=add_up, backward_passes=args.micro_batches)
    # [end]

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            (loss / run.world_size).backward()  # so that the sum over the ranks is the average
            losses.append(loss)
        # [dp-ga] Give every rank the mean of the ranks' gradients.
        buckets.finish()
        # [end]
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
