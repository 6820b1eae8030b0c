"""Data parallelism: the ranks shard weights, gradients and the optimizer's state (ZeRO 3, FSDP), or some of them.

    python DP/fsdp/intro_DP_FSDP.py <rank>            in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-fsdp --shard gradients             all ranks at once: weights (the default), gradients, optimizer

As in `intro_DP_ZeRO.py`, each rank owns a part of the weights, its shard, and updates that. With `--shard gradients`, a
rank also keeps no other gradients (ZeRO 2). With `--shard weights`, it keeps no other weights either: a block's are
gathered before its forward and its backward pass, and freed after it (FSDP: Zhao et al., arXiv 2304.11277). Buckets of
weights, or blocks, take the place of the whole buffer. `ShardedDP` is in src/distlab/parallel/sharded.py.
"""

from distlab.parallel.sharded import ShardedDP
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import ShardedSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ShardedSettings(batch_size=1)


def train(run: TrainingRun[ShardedSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    options = {"padding_idx": tokenizer.pad_id, "without_weights": args.shard == "weights", **run.model_options()}
    model = LLama(CausalLLama, tokenizer.vocab_size, **options)
    # `initial` draws the weights of a shard. `rounded`: with --dtype bfloat16, these are gathered in 2 bytes each.
    rounded, initial = model.rounded_parameters(), model.initial
    net = ShardedDP(model, args.shard, backward_passes=args.micro_batches, rounded=rounded, initial=initial)
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)  # of this rank's shards
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()  # starts the reduce-scatter of each bucket that is full
            losses.append(loss)
        net.finish_gradients()  # now this rank has its shard of the mean gradient
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()  # of the shard
        net.gather_weights()  # with sharded weights, sends nothing: they are gathered when they are needed


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
