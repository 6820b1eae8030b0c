"""Pipeline parallelism: the batch is split into micro-batches, so that the stages compute at the same time.

    python PP/microbatches/intro_PP_microbatches.py <rank> --schedule gpipe      in three terminals, ranks 0, 1 and 2
    ./launch.sh pp-gpipe --micro-batches 6 --batch-size 6                        all ranks at once
    ./launch.sh pp-dapple --micro-batches 6 --batch-size 6 --trace               and draw a timeline of all stages

While stage 1 computes micro-batch 0, stage 0 already computes micro-batch 1. The schedule is the order in which a stage
runs its forward and backward passes: a list, which a function in distlab.pipeline.schedules returns and the executor
follows. `python -m distlab.show_schedule dapple --stages 3 --micro-batches 6` shows it.
"""

from functools import partial

from distlab.pipeline.actions import stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.stages import build_stages
from distlab.run.auto_schedule import find_schedule
from distlab.run.main import main
from distlab.run.stage_settings import ScheduledPipelineSettings
from distlab.run.training import TrainingRun
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ScheduledPipelineSettings(batch_size=3)


def train(run: TrainingRun[ScheduledPipelineSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    again = args.recompute == "all"
    programs = all_stages(args.schedule, run.world_size, args.micro_batches, args.chunks_per_stage, recompute=again)
    program = programs[run.rank]  # this rank's actions, for example [F0, F1, F2, B0, B1, B2]
    split = args.split(tokenizer.vocab_size)
    options = {"padding_idx": tokenizer.pad_id, **run.model_options()}
    nets = build_stages(stages_of(program), split, tokenizer.vocab_size, **options)  # one stage in most schedules
    stories = TinyStories(tokenizer, **run.data_options())  # inputs of the first stage, targets of the last
    optimizer = run.optimizer(nets)

    loss = partial(causalLLMLoss, vocab_size=tokenizer.vocab_size)
    if args.schedule == "auto":  # the order depends on what the passes take here
        programs = find_schedule(run, nets, loss)
    costs = args.pass_costs(tokenizer.vocab_size)  # by which an action uses the cores of idle stages
    pipeline = Pipeline(
        nets, programs, run.grid, loss, args.dmodel, cores=run.shared_cores, costs=costs, run_on=args.run_on
    )
    run.track(nets, optimizer, owners=pipeline.owners)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = pipeline.step(batch.chunk(args.micro_batches))
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
