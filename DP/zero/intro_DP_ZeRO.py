"""Data parallelism: the ranks shard the optimizer's state, the gradients, or all they hold (ZeRO 1, 2, 3; FSDP).

    python DP/zero/intro_DP_ZeRO.py <rank>            in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dp-zero --shard weights               all ranks at once: optimizer (the default), gradients, weights

Each rank owns a part of every bucket of weights, its shard, and updates no others. So it needs the mean gradient of its
shard only: a reduce-scatter gives it that. After the update, an all-gather tells all ranks the new weights. The two
together send what the all-reduce of `intro_DP_GA.py` does. `ShardedDP` is in src/distlab/parallel/sharded.py.
"""

from distlab.parallel.sharded import ShardedDP
from distlab.run.main import main
from distlab.run.replica_settings import ShardedSettings
from distlab.run.training import TrainingRun
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ShardedSettings(batch_size=1)


def train(run: TrainingRun[ShardedSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    model = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    net = ShardedDP(model, args.shard, backward_passes=args.micro_batches)
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    # [dp-zero] Make the optimizer of the part of the weights that this rank owns.
    optimizer = run.optimizer(net)  # of this rank's shards
    # [end]
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()  # starts the reduce-scatter of each bucket that is full
            losses.append(loss)
        # [dp-zero] Give this rank the mean gradient of its own part.
        net.finish_gradients()  # now this rank has its shard of the mean gradient
        # [end]
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()  # of the shard
        # [dp-zero] Give all ranks the new weights of all parts.
        net.gather_weights()
        # [end]


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
