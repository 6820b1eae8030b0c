"""Newer pipeline schedules: several stages for each rank, backward passes in two parts, an order that is searched for.

    python PP/schedules/intro_PP_schedules.py <rank> --schedule zb-h1            in three terminals, ranks 0, 1 and 2
    ./launch.sh pp-interleaved                                                   two stages for each rank
    ./launch.sh pp-zbv --micro-batches 6 --batch-size 6 --trace                  and draw a timeline of all workers
    ./launch.sh pp-dapple --schedule auto --keep-at-most 200MB                   search a schedule that fits in memory

The executor in distlab.pipeline.executor runs any list of actions: it asks each action what it needs, runs it, and
sends the results that other workers need. Messages travel while it computes, or through memory that the ranks share.
"""

from functools import partial

from distlab.pipeline.actions import stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.stages import build_stages
from distlab.run.auto_schedule import find_schedule
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.stages import ScheduledPipelineSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ScheduledPipelineSettings(batch_size=3)


def train(run: TrainingRun[ScheduledPipelineSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    programs = args.programs()
    held = stages_of(programs[run.rank])  # by this rank: one stage in most schedules, two in some
    split = args.split(tokenizer.vocab_size)
    options = {"padding_idx": tokenizer.pad_id, **run.model_options()}
    nets = build_stages(held, split, tokenizer.vocab_size, **options)
    stories = TinyStories(tokenizer, **run.data_options())  # inputs of the first stage, targets of the last
    optimizer = run.optimizer(nets)

    loss = partial(causalLLMLoss, vocab_size=tokenizer.vocab_size)
    if args.schedule == "auto":  # the order depends on what the passes take here
        programs = find_schedule(run, nets, loss)
    pipeline = Pipeline(nets, programs, run.grid, loss, **run.pipeline_options())
    run.track(nets, optimizer, owners=pipeline.owners)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = pipeline.step(batch.chunk(args.micro_batches))
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
