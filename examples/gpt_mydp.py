"""The small GPT of gpt.py behind the wrapper MyDP, whose backward pass averages the gradients.

./launch.sh examples/gpt_mydp.py --world-size 2
"""

from dataclasses import dataclass

from gpt import ARCHITECTURE, GPT

from distlab.data_parallel import MyDP
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import DataParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class GPTSettings(DataParallelSettings):
    architecture = ARCHITECTURE


DEFAULTS = GPTSettings(batch_size=3)


def train(run: TrainingRun[GPTSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = MyDP(GPT(tokenizer.vocab_size, args).to(run.device))
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
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
