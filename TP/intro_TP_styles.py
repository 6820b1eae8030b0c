"""Three ways to split the layers over ranks, and the bytes that each sends beside its formula.

    python TP/intro_TP_styles.py <rank>               in three terminals, with the ranks 0, 1 and 2
    ./launch.sh tp-styles                             layers split in pairs, as in TP/intro_TP.py
    ./launch.sh tp-styles --tp-style naive            every layer split separately
    ./launch.sh tp-styles --sequence-parallel         norms and residuals on slices of the sequence

`shard` in src/distlab/parallel/tensor.py splits the layers of any model that is made of the lab's.
"""

from dataclasses import dataclass
from functools import partial

import torch

from distlab.axes.layout import equal_parts
from distlab.comm.context import context_of
from distlab.parallel.options import Style, check_division
from distlab.parallel.tensor import shard
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from distlab.run.main import main
from distlab.run.terminal import say
from distlab.run.training import TrainingRun
from distlab.settings.slices import SlicesPerRank
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class StylesSettings(SlicesPerRank):
    tp_style: Style = "megatron"
    """megatron: layers split in pairs, one sum for each pair; naive: every layer split by its outputs and gathered"""
    sequence_parallel: bool = False
    """give each rank a slice of the sequence for norms and residuals"""

    def check(self) -> None:
        super().check()
        if self.tp_style == "megatron":
            check_division(self.num_heads, self.num_kv_heads, self.world_size)
        elif self.sequence_parallel:
            raise InputError("--sequence-parallel with --tp-style naive: only --tp-style megatron has layers in pairs")


DEFAULTS = StylesSettings(batch_size=3)


def train(run: TrainingRun[StylesSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    options = {"padding_idx": tokenizer.pad_id, "without_weights": True, **run.model_options()}
    net = LLama(CausalLLama, tokenizer.vocab_size, **options)
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


def compare_with_formula(run: TrainingRun[StylesSettings]) -> None:
    """Print what this rank sent per layer and step, and what the formula gives."""
    args, sent_bytes = run.settings, context_of().ledger.sent_bytes
    for kind, expected in zip(("layer activations", "layer gradients"), bytes_per_layer(args), strict=True):
        sent = sent_bytes[kind] / max(1, (args.steps - run.first_step) * args.n_layers)
        if run.rank == 0:
            say(f"{kind}: {sent:,.0f} bytes per layer and step; the formula gives {args.micro_batches * expected:,}")


def bytes_per_layer(args: StylesSettings) -> tuple[int, int]:
    """Return the bytes that a rank sends in rings for a layer and micro-batch, in the forward and the backward pass."""
    ranks, rows, seq, dmodel = args.world_size, args.batch_size // args.micro_batches, args.seq_len, args.dmodel
    number_bytes = getattr(torch, args.dtype).itemsize
    keys, hidden = (args.num_kv_heads or args.num_heads) * (dmodel // args.num_heads), args.hidden_dim or 4 * dmodel

    def all_reduce(width: int) -> int:
        return 2 * (ranks - 1) * rows * seq * width * number_bytes // ranks

    def gather_or_scatter(length: int, others: int) -> int:  # slices are sent as long as the longest
        return (ranks - 1) * equal_parts(length, ranks)[0] * others * number_bytes

    if args.tp_style == "naive":  # q, k, v, o, gate, up, down: outputs are gathered, gradients of inputs added up
        widths = [(dmodel, dmodel), *2 * [(dmodel, keys)], (dmodel, dmodel), *2 * [(dmodel, hidden)], (hidden, dmodel)]
        forward = [gather_or_scatter(outputs, rows * seq) for _, outputs in widths]
        backward = [all_reduce(inputs) for inputs, _ in widths]
    elif args.sequence_parallel:
        forward = backward = 4 * [gather_or_scatter(seq, rows * dmodel)]
    else:
        forward = backward = 2 * [all_reduce(dmodel)]
    again = forward[:-1] if args.recompute != "none" else []  # only the output needs the last
    return sum(forward) + sum(again), sum(backward)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
