"""A classifier of film reviews: its layers are split over ranks, and the batch over groups of such ranks.

    python TP/sentiment/tp_tensor_parallel.py <rank> --tp 2      in four terminals, with the ranks 0 to 3
    ./launch.sh sentiment --world-size 4 --tp 2 --epochs 3       all ranks at once

Groups of `--tp` neighboring ranks share the layers (tp_model.py) and work on the same rows. The groups divide the rows
of the batch and average their gradients. `--bsz` counts the rows of all groups, so every `--tp` gives the same run.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pcomm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from dataset import Reviews
from torch import nn
from torch.distributed import ReduceOp
from tp_model import Transformer

from distlab.axes.layout import Layout
from distlab.comm.names import named
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.run.main import main
from distlab.run.model import build_optimizer
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import ResumableSettings, WorldSize, require_positive
from distlab.settings.resume_policy import ResumePolicy
from distlab.settings.resuming import file_identity
from distlab.settings.training import MOST_LAYERS
from simplellm.errors import InputError
from simplellm.samplers import BatchSampler
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer


@dataclass
class SentimentSettings(WorldSize, ResumableSettings):
    """The classifier, its training, and its ranks."""

    architecture = "sentiment"

    seed: Annotated[int, ResumePolicy.FIXED] = 0
    """seed of the initial weights and of the data"""

    world_size: int = 2
    """ranks"""
    tp: int = 2
    """ranks that share the layers of one replica of the model"""
    epochs: int = 3
    """passes over the training reviews"""
    samples: Annotated[int, ResumePolicy.FIXED] = 2048
    """training reviews; a quarter as many further reviews are for validation"""
    layers: Annotated[int, ResumePolicy.MODEL] = 2
    """transformer blocks"""
    dim: Annotated[int, ResumePolicy.MODEL] = 64
    """width of the model"""
    heads: Annotated[int, ResumePolicy.MODEL] = 4
    """attention heads"""
    bsz: Annotated[int, ResumePolicy.FIXED] = 32
    """reviews per step, over all replicas"""
    seq_len: Annotated[int, ResumePolicy.FIXED] = 128
    """maximum tokens of a review; longer ones are truncated"""
    dropout: Annotated[float, ResumePolicy.DEFAULT] = 0.0
    """fraction of activations set to zero in training"""
    lr: Annotated[float, ResumePolicy.DEFAULT] = 1e-3
    """learning rate"""
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], ResumePolicy.FIXED] = "adam"
    """update rule"""
    dtype: Annotated[Literal["float32", "bfloat16"], ResumePolicy.DEFAULT] = "float32"
    """bfloat16 computes in mixed precision"""
    data: Annotated[str, tyro.conf.arg(metavar="sample|imdb|DIR")] = "sample"
    """reviews: the generator's (sample), the hub's (imdb), or a folder with a copy of the hub's"""

    @property
    def layout(self) -> Layout:
        return {"dp": self.world_size // max(1, self.tp), "tp": self.tp}

    @property
    def length(self) -> tuple[str, int]:
        return f"--epochs {self.epochs}", self.epochs * (self.samples // self.bsz)

    @property
    def tokenizer_model(self) -> Path:
        return SHIPPED_MODEL

    @property
    def data_identity(self) -> dict[str, Any]:
        if self.data == "sample":
            return {"source": self.data, "seed": self.seed}
        return {"source": self.data} if self.data == "imdb" else file_identity(self.data)

    def check(self) -> None:
        require_positive(self, *"world_size tp epochs samples layers dim heads bsz seq_len lr".split())
        if self.world_size % self.tp:
            raise InputError(f"--world-size {self.world_size} with --tp {self.tp}: give a multiple of {self.tp} ranks")
        super().check()
        if self.heads % self.tp:
            raise InputError(f"--heads {self.heads} with --tp {self.tp}: the heads must divide among {self.tp} ranks")
        if self.dim % self.heads:
            raise InputError(f"--dim {self.dim} with --heads {self.heads}: give a width that divides into the heads")
        if not self.world_size // self.tp <= self.bsz <= self.samples:
            raise InputError(
                f"--bsz {self.bsz}: give at least a review for each of {self.world_size // self.tp} replicas, and at "
                f"most the {self.samples} of --samples"
            )
        if self.layers > MOST_LAYERS:
            raise InputError(f"--layers {self.layers}: give at most {MOST_LAYERS:,}")
        if self.data not in ("sample", "imdb") and not os.path.isdir(self.data):
            raise InputError(f"--data {self.data}: give sample, imdb, or a folder with a copy of the hub's data set")
        if not 0 <= self.dropout < 1:
            raise InputError(f"--dropout {self.dropout}: give a number from 0 to less than 1")


DEFAULTS = SentimentSettings()


def train(run: Run[SentimentSettings]) -> None:
    args = run.settings
    pcomm.init(args.tp)
    tokenizer = SPTokenizer()
    reviews = Reviews(args.data, "train", args.samples, tokenizer, args.seq_len, args.seed)
    if len(reviews) < args.samples:
        raise InputError(f"--samples {args.samples}: {args.data} has {len(reviews)} to train on; give at most as many")
    held_out = Reviews(args.data, "validation", max(1, args.samples // 4), tokenizer, args.seq_len, args.seed)
    torch.manual_seed(args.seed)  # the slices are those of one matrix
    net = Transformer(tokenizer.vocab_size, args.dim, args.layers, args.heads, dropout_prob=args.dropout)
    net.to(run.device)
    torch.manual_seed(args.seed + pcomm.dp_rank)  # dropout: the same within a group, for it has the same activations
    optimizer = build_optimizer(args.optimizer, net.parameters(), args.lr)

    def add_up(bucket: Bucket) -> dist.Work | None:
        """Start to add up gradients that are complete, over the ranks that hold the same slices."""
        with named(str(bucket), "gradients"):
            return dist.all_reduce(bucket.flat, ReduceOp.SUM, pcomm.dp_grp, async_op=True)

    buckets = GradientBuckets(net.parameters(), on_full=add_up, over=pcomm.replicas)
    sampler = BatchSampler(len(reviews), args.bsz, args.seed)
    run.track(net, optimizer)
    steps_per_epoch = len(reviews) // args.bsz
    steps = args.epochs * steps_per_epoch

    def end_of_epoch(step: int) -> None:
        if (step + 1) % steps_per_epoch == 0:
            validate(run, net, held_out, (step + 1) // steps_per_epoch)

    for step, rows in run.count_steps(sampler, steps, args.bsz, "reviews", after_step=end_of_epoch):
        own = reviews.batch(rows).rows_of(pcomm.dp_rank, pcomm.dp_degree).to(run.device)
        optimizer.zero_grad()
        with mixed_precision(run):
            logits = net(own.tokens, own.is_padding)
        share = F.cross_entropy(logits.float(), own.labels, reduction="sum") / args.bsz  # of the batch's mean loss
        share.backward()
        buckets.finish()
        optimizer.step()
        loss = run.global_loss(step, [share * pcomm.dp_degree])  # which takes the mean over replicas
        if run.rank == 0:
            print(f"{step} {loss:.8f}", flush=True)


@torch.no_grad()
def validate(run: Run[SentimentSettings], net: nn.Module, reviews: Reviews, epoch: int) -> None:
    """Print the fraction of validation reviews that the model classifies correctly; each review counts once."""
    right = torch.zeros((), dtype=torch.int64, device=run.device)
    net.eval()
    for batch in reviews.evaluation_batches(run.settings.bsz, pcomm.dp_rank, pcomm.dp_degree):
        own = batch.to(run.device)
        with mixed_precision(run):
            right += (net(own.tokens, own.is_padding).argmax(dim=-1) == own.labels).sum()
    net.train()
    with named("the right answers", "check"):
        dist.all_reduce(right, ReduceOp.SUM, pcomm.dp_grp)
    if run.rank == 0:
        accuracy = right.item() / len(reviews)
        say(f"epoch {epoch}: validation accuracy {accuracy:.4f} ({right.item()} of {len(reviews)} reviews)")


def mixed_precision(run: Run[SentimentSettings]) -> torch.autocast:
    """Where `--dtype bfloat16` asks for it, matrix products in bfloat16; weights and sums of loss stay float32."""
    return torch.autocast(run.device.type, torch.bfloat16, enabled=run.settings.dtype == "bfloat16")


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
