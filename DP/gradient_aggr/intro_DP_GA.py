"""Data parallelism: the ranks average their gradients at every step.

    python DP/gradient_aggr/intro_DP_GA.py <rank>     in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-ga --world-size 4                  all ranks at once
    ./launch.sh dp-ga --all-reduce ring               added up by our own all-reduce instead of the library's

Each rank holds the whole model and takes its own sequences of the global batch. The mean of the ranks' gradients is the
gradient of the whole batch; so after the same update every rank holds the same weights again, as one process would. The
mean is a sum of shares: dividing one loss by the world size divides all its gradients, and they need no division later.
"""

from dataclasses import dataclass
from typing import Literal

from torch.distributed import ReduceOp

from distlab.collectives.algorithms import ALL_REDUCES
from distlab.comm.traffic import traffic
from distlab.comm.transfer import Transfer
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.run.main import main
from distlab.run.settings import DataParallelSettings
from distlab.run.training import TrainingRun
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class GradientAggregationSettings(DataParallelSettings):
    all_reduce: Literal["library", "naive", "tree", "butterfly", "ring"] = "library"
    """who adds up the gradients: the library, or our own collective of this topology, over gloo"""

    def check(self) -> None:
        super().check()
        if self.all_reduce != "library":
            if self.backend == "nccl":
                raise InputError(f"--all-reduce {self.all_reduce} with --backend nccl: our own work over gloo only")
            self.backend = "gloo"


DEFAULTS = GradientAggregationSettings(batch_size=1)


def train(run: TrainingRun[GradientAggregationSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)
    by_hand = ALL_REDUCES.get(args.all_reduce)
    transfers: list[Transfer] = []

    def add_up(bucket: Bucket) -> None:
        """Start the all-reduce of gradients that are complete, while the backward pass goes on to earlier layers."""
        transfers.append(
            traffic.all_reduce(bucket.flat, str(bucket), kind="gradients", op=ReduceOp.SUM, by_hand=by_hand)
        )

    buckets = GradientBuckets(net.parameters(), on_full=add_up, backward_passes=args.micro_batches)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            (loss / run.world_size).backward()  # calls add_up() for one bucket after the other
            losses.append(loss)
        buckets.flush()
        for transfer in transfers:
            transfer.wait()
        transfers.clear()
        run.log(step, losses)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
