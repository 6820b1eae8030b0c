"""The small GPT of gpt.py as a pipeline, with any schedule whose workers have one stage each.

    ./launch.sh examples/gpt_pp.py --world-size 2 --schedule gpipe
    ./launch.sh examples/gpt_pp.py --world-size 2 --schedule examples/own_schedule.py

The schedules zb-h1 and zb-h2 give the same gradients, but save no time: `nn.Linear` computes the gradient of its weight
together with that of its input. With `simplellm.layers.Linear` in its place, W has the work that these schedules move.
"""

from dataclasses import dataclass
from functools import partial

from gpt import ARCHITECTURE, GPT

from distlab.pipeline.executor import Pipeline
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.stages import ScheduledPipelineSettings
from simplellm.dataloaders import TinyStories
from simplellm.errors import require
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class GPTSettings(ScheduledPipelineSettings):
    architecture = ARCHITECTURE

    def check(self) -> None:
        super().check()
        sentence = "gpt.py keeps one stage a worker; give another schedule"
        require(self.stages == self.world_size, f"--schedule {self.schedule}: {sentence}")


DEFAULTS = GPTSettings(batch_size=3)


def train(run: TrainingRun[GPTSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = GPT(tokenizer.vocab_size, args).keep_stage(run.rank, args.split(tokenizer.vocab_size)).to(run.device)
    stories = TinyStories(tokenizer, **run.data_options())
    optimizer = run.optimizer(net)
    loss = partial(causalLLMLoss, vocab_size=tokenizer.vocab_size)
    pipeline = Pipeline(net, args.programs(), run.grid, loss, args.dmodel, run_on=args.run_on)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = pipeline.step(batch.chunk(args.micro_batches))
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
