"""Two replicas whose layers are in two slices each: four ranks, in a grid of two rows and two columns.

    ./launch.sh museum/groups/groups.py

    rank 0: replica 0, slice 0    rank 1: replica 0, slice 1
    rank 2: replica 1, slice 0    rank 3: replica 1, slice 1

The slices of a replica work on the same sequences. The replicas average their gradients.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from distlab.parallel.tensor import shard
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.hybrid import ThreeAxesSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ThreeAxesSettings(
    dp=2, pp=1, tp=2, batch_size=2, micro_batches=1, steps=100, lr=2e-3, dmodel=64, num_heads=4, n_layers=2, seq_len=64
)


def train(run: TrainingRun[ThreeAxesSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    slices, replica = run.grid.axis("tp"), run.grid.axis("dp").rank
    run.grid.make_groups("tp")
    ranks = torch.arange(run.world_size).view(args.dp, args.tp)
    replicas, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    shard(net, axis=slices)  # each rank keeps its slices
    stories = TinyStories(tokenizer, **run.data_options(), rank=replica, num_replicas=args.dp)
    optimizer = run.optimizer(net)
    loss_of = partial(vocabulary_parallel_loss, vocab_size=tokenizer.vocab_size, axis=slices)
    run.track(net, optimizer, loss_of)

    for step, ids in run.steps(stories):
        optimizer.zero_grad()
        loss = loss_of(net(ids), ids)
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, ReduceOp.AVG, replicas)
        run.log(step, [loss])
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
