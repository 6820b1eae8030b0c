"""Tensor parallelism: every rank holds a slice of each layer, and all of them work on the same batch.

    python TP/intro_TP.py <rank>                      in three terminals, with the ranks 0, 1 and 2
    ./launch.sh tp --world-size 2                     all ranks at once
    ./launch.sh tp --tp-style naive                   every layer split separately
    ./launch.sh tp --sequence-parallel                norms and residuals on slices of the sequence

The first matrix of a pair is split by its outputs, the second by its inputs. So attention heads, or hidden units, stay
on one rank between the two, and a single sum over the ranks completes the pair. `shard` in
src/distlab/parallel/tensor.py does this to the ordinary model. The loss is computed from slices too. It is the same on
every rank, and so are the gradients of the replicated parameters (the gains of the norms), so nothing has to be
averaged before the update.
"""

from dataclasses import dataclass
from functools import partial

import torch

from distlab.comm.context import context_of
from distlab.comm.layout import Layout
from distlab.parallel.division import Style, check_division
from distlab.parallel.tensor import bytes_per_layer, shard
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from distlab.run.main import main
from distlab.run.settings import WorldSize
from distlab.run.terminal import say
from distlab.run.train_settings import TrainSettings
from distlab.run.training import TrainingRun
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class TensorParallelSettings(WorldSize, TrainSettings):
    world_size: int = 3
    """ranks, each with a slice of every layer"""
    tp_style: Style = "megatron"
    """megatron: layers split in pairs, one sum for each pair; naive: every layer split by its outputs and gathered"""
    sequence_parallel: bool = False
    """give each rank a slice of the sequence for norms and residuals"""

    @property
    def layout(self) -> Layout:
        return {"tp": self.world_size}

    def check(self) -> None:
        super().check()
        if self.tp_style == "megatron":
            check_division(self.num_heads, self.num_kv_heads, self.world_size)
        elif self.sequence_parallel:
            raise InputError("--sequence-parallel with --tp-style naive: only --tp-style megatron has layers in pairs")


DEFAULTS = TensorParallelSettings(batch_size=3)


def train(run: TrainingRun[TensorParallelSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    shard(net, args.tp_style, sequence_parallel=args.sequence_parallel)
    loss_of = partial(
        causalLLMLoss if args.tp_style == "naive" else vocabulary_parallel_loss, vocab_size=tokenizer.vocab_size
    )
    stories = TinyStories(tokenizer, **run.data_options())  # the same on all ranks
    optimizer = run.optimizer(net)
    run.track(net, optimizer, loss_of)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = loss_of(net(x), x) / args.micro_batches
            loss.backward()
            losses.append(loss)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()
    compare_with_formula(run)


def compare_with_formula(run: TrainingRun[TensorParallelSettings]) -> None:
    """Print what this rank sent per layer and step, and what the formula gives."""
    args = run.settings
    shape = args.batch_size // args.micro_batches, args.seq_len, args.dmodel
    element_bytes = getattr(torch, args.dtype).itemsize
    widths = (args.num_kv_heads or args.num_heads) * (args.dmodel // args.num_heads), args.hidden_dim
    sizes = run.world_size, *shape, element_bytes, args.sequence_parallel, *widths
    formula = bytes_per_layer(args.tp_style, *sizes, recomputed=args.recompute != "none")
    ledger = context_of().ledger
    for kind, expected in zip(("layer activations", "layer gradients"), formula, strict=True):
        sent = ledger.sent_bytes[kind] / max(1, (args.steps - run.first_step) * args.n_layers)
        if run.rank == 0:
            say(f"{kind}: {sent:,.0f} bytes per layer and step; the formula gives {args.micro_batches * expected:,}")


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
