"""Several pipelines that go on when a rank dies: ranks with the same stage do its work, too, and repeat the step.

    ./launch.sh hybrid-repair                         2 pipelines of 3 stages; then, in another terminal:
    pkill -9 -n -x 'rank 4'                           the loss continues as if nothing had happened

A dead rank takes its stage of one pipeline with it, but the other pipelines have the same weights. So its micro-batches
make a detour: its neighbors send them to the ranks with that stage in other pipelines, and get the results from there
(ReCycle: Gandhi et al., arXiv 2405.14009). The detours are planned and simulated before anyone follows them. Every rank
reads the rows of all pipelines. Compare it with `intro_hybrid.py`, whose run ends, and with
`../DP/repair/intro_DP_repair.py`, which has no stages.
"""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.grid import Axis
from distlab.comm.names import named
from distlab.parallel.flat import GradientSums
from distlab.parallel.tensor import shard
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from distlab.pipeline.actions import stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.rerouting import reroute
from distlab.pipeline.stages import build_stages
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.hybrid import HybridRepairSettings
from simplellm.dataloaders import TinyStories
from simplellm.tokenizers import SPTokenizer

DEFAULTS = HybridRepairSettings(batch_size=3)


def add_up(gradients: GradientSums, peers: Axis) -> Tensor:
    """Add up the gradients over the ranks with this stage; every `parameter.grad` is a view of the result."""
    with named("the gradients of this stage", "gradients"):
        dist.all_reduce(gradients.flat, group=peers.group)
    return gradients.total()


def train(run: TrainingRun[HybridRepairSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    pipelines, micro_batches = args.dp, args.dp * args.micro_batches  # in all pipelines
    programs, split = args.programs(), args.split(tokenizer.vocab_size)
    options = {"padding_idx": tokenizer.pad_id, "without_weights": True, **run.model_options()}
    slices, peers = run.grid.axis("tp"), run.grid.axis("dp")  # peers: the living ranks that hold this stage
    nets = build_stages(stages_of(programs[run.grid.axis("pp").rank]), split, tokenizer.vocab_size, **options)
    for net in nets.values():
        shard(net, axis=slices)
    loss = partial(vocabulary_parallel_loss, vocab_size=tokenizer.vocab_size, axis=slices)
    stories = TinyStories(tokenizer, **{**run.data_options(), "batch_size": pipelines * args.batch_size})
    optimizer = run.optimizer(nets)
    run.track(nets, optimizer, loss, owners=args.owners)
    made_for: Sequence[int] = ()  # the ranks that the pipeline was made for

    for step, batch in run.steps(stories):
        with run.surviving() as alive:  # if a rank dies in here, the others come back with the same step
            if alive is not made_for:
                made_for = alive
                run.grid.make_groups("dp", "tp")
                workers = sorted({rank // args.tp for rank in alive})  # the slices of a stage are one worker
                detours = reroute(programs, pipelines, workers, **args.detour_options())
                pipeline = Pipeline(nets, detours, run.grid, loss, pipelines=pipelines, **run.pipeline_options())
                gradients = GradientSums(nn.ModuleList(nets.values()), args.gradient_sums, micro_batches, peers)
            gradients.flat.zero_()
            # `use`: with --repair exact, the gradients of each pipeline's micro-batches have a sum of their own.
            losses = pipeline.step(batch.chunk(micro_batches), before=gradients.use)
            total = add_up(gradients, peers)
            total /= pipelines
            run.log(step, losses)
            run.clip(optimizer)
            optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
