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
from distlab.machine.cores import cores
from distlab.parallel.flat import GradientRows
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


def add_up(gradients: Tensor, peers: Axis) -> None:
    """Replace the gradients, (1 or pipelines, elements), by their sum over the ranks with this stage, in the first row.

    With a row for each pipeline, one rank has it and the others have zeros; the rows are added in the order of the
    pipelines, whoever has computed them: bit for bit the same sum.
    """
    with named("the gradients of this stage", "gradients"):
        dist.all_reduce(gradients, group=peers.group)
    total, *others = gradients
    for row in others:
        total += row


def train(run: TrainingRun[HybridRepairSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    pipelines, parts, is_exact = args.dp, args.micro_batches, args.repair == "exact"
    programs, split = args.programs(), args.split(tokenizer.vocab_size)
    options = {"padding_idx": tokenizer.pad_id, "without_weights": True, **run.model_options()}
    slices, peers = run.grid.axis("tp"), run.grid.axis("dp")  # peers: the ranks that are left with this stage
    nets = build_stages(stages_of(programs[run.grid.axis("pp").rank]), split, tokenizer.vocab_size, **options)
    for net in nets.values():
        shard(net, axis=slices)
    loss = partial(vocabulary_parallel_loss, vocab_size=tokenizer.vocab_size, axis=slices)
    stories = TinyStories(tokenizer, **{**run.data_options(), "batch_size": pipelines * args.batch_size})
    optimizer = run.optimizer(nets)
    run.track(nets, optimizer, loss, owners=args.owners)
    sums = pipelines if is_exact else 1  # of gradients, on each rank
    options = run.pipeline_options() | {"pipelines": pipelines}
    costs, shared = options["costs"], options["cores"]
    # With `exact`, the number of threads stays the same: another one would round in another way.
    options["cores"] = None if is_exact or shared is None else shared * pipelines
    made_for: Sequence[int] = ()  # the ranks that follow the programs

    for step, batch in run.steps(stories):
        with run.surviving() as alive:  # if a rank dies in here, the others come back with the same step
            if alive is not made_for:
                made_for = alive
                run.grid.make_groups("dp", "tp")
                workers = sorted({rank // args.tp for rank in alive})
                detours = reroute(programs, pipelines, workers, costs, whole=is_exact, cores=cores() / args.tp)
                pipeline = Pipeline(nets, detours, run.grid, loss, **options)
                gradients = GradientRows(nn.ModuleList(nets.values()), sums, pipelines * parts // sums, peers)
            gradients.flat.zero_()
            losses = pipeline.step(batch.chunk(pipelines * parts), before=gradients.use)
            add_up(gradients.flat, peers)
            gradients.use(0)
            gradients.flat[0] /= pipelines
            run.log(step, losses)
            run.clip(optimizer)
            optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
