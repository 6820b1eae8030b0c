"""All axes and options together: layouts of several kinds of parallelism, sharded replicas, outer steps, any schedule.

    python hybrid/intro_5d.py <rank>                                    in six terminals, with the ranks 0 to 5
    ./launch.sh 5d --shard optimizer                                    replicas shard the optimizer's state
    ./launch.sh 5d --dp 1 --cp 2 --tp 2 --pp 2                          ranks share sequences, too
    ./launch.sh 5d --dp 2 --ep 2 --pp 1 --experts 8                     ranks share experts
    ./launch.sh 5d --outer diloco --sync-every 50                       pipelines far apart
    ./launch.sh 5d --schedule auto --keep-at-most 200MB                 a schedule that is searched for
    ./launch.sh 5d --schedule zb-h2 --run-on                            no wait at the end of a step

The layout is that of hybrid/intro_hybrid.py, and without flags so is the run. With `--cp`, ranks share each sequence as
in CP/intro_CP_ring.py; they hold the same weights, and average their gradients as replicas do. With `--ep`, some of the
replicas share the experts of each layer, as in EP/intro_EP.py. With `--shard`, the replicas of a stage shard its
optimizer's state, and more. With `--outer diloco`, each pipeline trains on its own for many steps, and an outer
optimizer takes steps with the differences. Gradients are averaged bucket by bucket: a bucket starts during the backward
pass of the last micro-batch. Over gloo or NCCL it travels while that pass goes on; in shared memory nothing overlaps,
as a rank does its part of the average when it waits for it, after the pass.
"""

from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.parallel.context_parallel import ContextParallel, loss_of_part
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.parallel.expert_parallel import (
    ChoicesOfSequences,
    LoadBalance,
    corrections_in,
    limit_experts,
    own_experts,
    share_experts,
)
from distlab.parallel.flat import flatten_weights
from distlab.parallel.outer import FragmentSchedule, OuterOptimizer
from distlab.parallel.routes import Routes
from distlab.parallel.sharded import ShardedDP
from distlab.parallel.tensor import shard
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from distlab.pipeline.actions import describe_stages, stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.stages import build_stages
from distlab.run.auto_schedule import find_schedule
from distlab.run.main import main
from distlab.run.terminal import say
from distlab.run.training import TrainingRun
from distlab.settings.hybrid import HybridSettings
from simplellm.dataloaders import TinyStories
from simplellm.tokenizers import SPTokenizer

DEFAULTS = HybridSettings(batch_size=3)
MORE = "intro_hybrid_repair.py"  # goes on when a rank dies


def train(run: TrainingRun[HybridSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    # The layout. Ranks along `replicas` see other sequences, ranks along `same` other tokens, with the same weights.
    stages, sharing, parts, slices = (run.grid.axis(name) for name in ("pp", "ep", "cp", "tp"))
    replicas, same = run.grid.axis("dp", "ep"), run.grid.axis("dp", "ep", "cp")
    run.grid.make_groups("dp", "ep", "cp", ("dp", "ep"), ("dp", "cp"), ("dp", "ep", "cp"), "tp")
    stories = TinyStories(tokenizer, **run.data_options(), rank=replicas.rank, num_replicas=replicas.size)

    # This rank's stages, in slices (--pp, --tp), as in intro_hybrid.py.
    programs, split = args.programs(), args.split(tokenizer.vocab_size)
    program = programs[stages.rank]  # this rank's actions
    own = own_experts(args.experts, sharing)
    options = {"padding_idx": tokenizer.pad_id, "own_experts": own, "without_weights": True, **run.model_options()}
    nets = build_stages(stages_of(program), split, tokenizer.vocab_size, **options)
    # With --shard weights, `ShardedDP` draws each rank's shards; but --schedule auto measures passes before that.
    draws = args.shard != "weights" or args.schedule == "auto"
    for net in nets.values():
        shard(net, axis=slices, draw=draws)
    loss = loss_of_whole = partial(vocabulary_parallel_loss, vocab_size=tokenizer.vocab_size, axis=slices)

    # --cp, --document-mask: the part of a micro-batch that this rank sees; None for all of it.
    part_of = None
    if args.cp > 1 or args.document_mask:
        end = tokenizer.eos_id if args.document_mask else None
        part_of = ContextParallel(parts, args.cp_kind, args.cp_order, end).part
        loss = partial(loss_of_part, vocab_size=tokenizer.vocab_size, axis=slices)

    # --experts, --ep
    share_experts(nets.values(), sharing)
    choices = ChoicesOfSequences(parts, args.cp_order)
    limit_experts(nets.values(), args.capacity, choices)

    # --schedule auto: the order depends on what the passes take here.
    if args.schedule == "auto":
        programs = find_schedule(run, nets, loss, part_of)

    # --balance-rate, --record-routes: from here on, so not in the passes that --schedule auto has measured.
    balance = LoadBalance(nets.values(), args.balance_rate, same)
    routes: Routes | None = None
    if args.routes:
        tokens = args.batch_size * args.seq_len
        routes = Routes(nets.values(), *args.routes, replicas, slices, choices, tokens, args.seq_len)

    # --shard
    sharded: dict[int, ShardedDP] = {}
    if args.shard != "none":
        passes = args.micro_batches
        for s, net in nets.items():
            keep, rounded = corrections_in(net), net.rounded_parameters()
            sharded[s] = ShardedDP(net, args.shard, same, passes, keep=keep, rounded=rounded, initial=net.initial)
    optimizer = run.optimizer(sharded or nets)
    pipeline = Pipeline(sharded or nets, programs, run.grid, loss, part_of=part_of, **run.pipeline_options())

    # --outer diloco
    outer: OuterOptimizer | None = None
    if args.outer == "diloco":
        weights = flatten_weights(nn.ModuleList(nets.values()), replicas)
        rounds = FragmentSchedule(args.sync_every, args.fragments, args.overlap_steps)
        momentum, alpha = args.outer_momentum, args.merge_alpha
        outer = OuterOptimizer(weights, rounds, args.outer_lr, momentum, alpha, args.compress, replicas)
    run.track(sharded or nets, optimizer, loss_of_whole, owners=pipeline.owners, outer=outer)

    # Without --shard, gradients are averaged here; with --outer diloco, only over the ranks that share a sequence.
    over = parts if outer else same
    averaged = {} if sharded or (outer and over.size == 1) else nets
    parameters = [parameter for net in averaged.values() for parameter in net.parameters()]

    def average(bucket: Bucket) -> dist.Work | None:
        """Start to average gradients that are complete; the backward pass has yet to reach earlier layers."""
        with named(f"{bucket} of {describe_stages(program)}", "gradients"):
            return dist.all_reduce(bucket.flat, ReduceOp.AVG, bucket.axis.group, async_op=True)

    buckets = GradientBuckets(parameters, on_full=average, backward_passes=args.micro_batches, over=over)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = pipeline.step(batch.chunk(args.micro_batches))
        buckets.finish()
        for part in sharded.values():
            part.finish_gradients()
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()
        run.records.values.update(balance.step())
        if routes:
            run.records.values.update(routes.step())
        for part in sharded.values():
            part.gather_weights()
        if outer:
            outer.after(step)
    if outer:
        outer.wait()
    if routes and routes.parted:
        say(f"the first token that would have had other experts: {routes.parted}")


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
