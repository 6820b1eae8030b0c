"""The small GPT of gpt.py with ZeRO: replicas that shard the optimizer's state, the gradients, the weights.

./launch.sh examples/gpt_zero.py --world-size 2 --shard weights
"""

from dataclasses import dataclass

from gpt import ARCHITECTURE, GPT

from distlab.parallel.sharded import ShardedDP
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import ShardedSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class GPTSettings(ShardedSettings):
    architecture = ARCHITECTURE


DEFAULTS = GPTSettings(batch_size=3)


def train(run: TrainingRun[GPTSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    model = GPT(tokenizer.vocab_size, args).to(run.device)
    net = ShardedDP(model, args.shard, backward_passes=args.micro_batches)
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        net.finish_gradients()
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()
        net.gather_weights()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
