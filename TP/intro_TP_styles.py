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

from distlab.comm.context import context_of
from distlab.parallel.division import Style, check_division
from distlab.parallel.tensor import bytes_per_layer, shard
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
