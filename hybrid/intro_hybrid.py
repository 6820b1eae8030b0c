"""Data, pipeline and tensor parallelism together: several pipelines of several stages, as large models are trained.

    python hybrid/intro_hybrid.py <rank>                                in six terminals, with the ranks 0 to 5
    ./launch.sh hybrid                                                  2 pipelines of 3 stages, 3 micro-batches
    ./launch.sh hybrid --dp 3 --pp 2 --micro-batches 4 --batch-size 4   any other layout
    ./launch.sh hybrid --dp 2 --pp 2 --tp 2                             each stage split over 2 ranks

Within a pipeline, neighboring stages exchange activations and gradients for each micro-batch. Across pipelines, the
ranks that hold the same stage average its gradients once per step. With `--tp`, neighboring ranks share a stage, and
exchange activations within every layer. hybrid/intro_5d.py takes over for flags that this script does not have.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from distlab.axes.grid import Axis
from distlab.comm.names import named
from distlab.parallel.flat import flatten_gradients
from distlab.parallel.tensor import shard
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from distlab.pipeline.actions import stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.stages import build_stages
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.hybrid import ThreeAxesSettings
from simplellm.dataloaders import TinyStories
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ThreeAxesSettings(batch_size=3)
MORE = "intro_5d.py"  # has all axes and options


def average(gradients: Tensor, replicas: Axis) -> None:
    """Give the ranks that hold the same stage, one in each pipeline, the mean of their gradients, (elements,)."""
    with named("the gradients of this stage", "gradients"):
        dist.all_reduce(gradients, ReduceOp.AVG, replicas.group)


def train(run: TrainingRun[ThreeAxesSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    stages, replicas, slices = (run.grid.axis(name) for name in ("pp", "dp", "tp"))
    run.grid.make_groups("dp", "tp")  # for collectives; the stages of a pipeline only send and receive
    programs = args.programs()  # the schedule: for each rank of a pipeline, a list of actions
    held = stages_of(programs[stages.rank])  # by this rank: one stage in most schedules, two in some
    split = args.split(tokenizer.vocab_size)  # how many layers each stage has
    options = {"padding_idx": tokenizer.pad_id, "without_weights": True, **run.model_options()}
    nets = build_stages(held, split, tokenizer.vocab_size, **options)
    for net in nets.values():
        shard(net, axis=slices)  # draws the weights of the slices; with --tp 1, a slice is the whole layer
    loss = partial(vocabulary_parallel_loss, vocab_size=tokenizer.vocab_size, axis=slices)  # of sliced logits
    # Runs this rank's program: receives, computes, sends.
    pipeline = Pipeline(nets, programs, run.grid, loss, **run.pipeline_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=replicas.rank, num_replicas=replicas.size)
    optimizer = run.optimizer(nets)
    run.track(nets, optimizer, loss, owners=pipeline.owners)  # owners: which rank holds each stage
    gradients = flatten_gradients(nn.ModuleList(nets.values()), replicas)  # every parameter.grad is a view of it

    for step, batch in run.steps(stories):
        gradients.zero_()
        losses = pipeline.step(batch.chunk(args.micro_batches))
        average(gradients, replicas)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
