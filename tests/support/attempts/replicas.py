"""Attempts at the exercises on replicas of the whole model, and their checkpoints."""

from distlab_exercises.catalogue import EXERCISES
from support.exercises_attempts import AVERAGE, ONE_MICRO_BATCH, Attempt

IMPORTS = ("distributed as dist\n", "distributed as dist\nimport torch\nfrom torch import nn\n")
OWN_PART = """rows = -(-weights.numel() // run.world_size)
own = nn.Parameter(weights[run.rank * rows : (run.rank + 1) * rows])
optimizer = run.optimizer(nn.ParameterList([own]))"""
OWN_GRADIENT = """flat = torch.zeros(run.world_size * rows)
flat[: weights.numel()] = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
mine = torch.empty(rows)
dist.reduce_scatter(mine, list(flat.view(run.world_size, rows)))
own.grad = mine[: own.numel()] / run.world_size"""
ALL_PARTS = """mine[: own.numel()] = own.detach()
dist.all_gather(list(flat.view(run.world_size, rows)), mine)
weights.copy_(flat[: weights.numel()])"""
EVERY_SECOND_STEP = next(trial for trial in EXERCISES["dp-wa"].trials if trial.sync_every > 1)

ATTEMPTS = [
    Attempt("dp-ga", "divided-twice", "1/2 of what it should be", AVERAGE.replace("SUM", "AVG")),
    Attempt("dp-ga", "", "the run of one process", AVERAGE),
    Attempt("dp-ga", "summed", "added up over the 2 ranks, but not divided by 2", AVERAGE.rpartition("\n")[0]),
    Attempt(
        "dp-ga",
        "rank-missing",
        "rank 1's share was lost",
        f"if run.rank == 1:\n    net.zero_grad(set_to_none=False)\n{AVERAGE}",
    ),
    Attempt("dp-ga", "imprecise", "rounded", f"{AVERAGE}\n    parameter.grad.copy_(parameter.grad.bfloat16())"),
    Attempt(
        "dp-ga",
        "not-waited-for",  # and divided twice, so that it is wrong even where the transfers end in time
        "rank 0 did not wait for",
        AVERAGE.replace("ReduceOp.SUM", "ReduceOp.AVG, async_op=True"),
    ),
    Attempt(
        "dp-wa",
        "weights-summed",
        "added up over the ranks",
        changes=(("dist.all_reduce(weights, ReduceOp.AVG)", "dist.all_reduce(weights)"),),
    ),
    Attempt(
        "dp-wa",
        "weights-divided-twice",
        "divided by 2 twice",
        changes=(
            (
                "                dist.all_reduce(weights,",
                "                weights /= run.world_size\n                dist.all_reduce(weights,",
            ),
        ),
    ),
    Attempt(
        "dp-wa",
        "rank-missing",
        "rank 1's share was lost",
        changes=(
            (
                "        optimizer.step()\n",
                "        if run.rank == 1:\n            optimizer.zero_grad()\n        optimizer.step()\n",
            ),
        ),
    ),
    Attempt(
        "dp-wa",
        "sync-every",
        "after step 0 of 3: rank 0 sends weights",
        changes=(("if (step + 1) % args.sync_every == 0 or step + 1 == args.steps:", "if True:"),),
        trial=EVERY_SECOND_STEP,
    ),
    Attempt(
        "dp-wa",
        "sync-every",
        "after step 2 of 3: rank 0 sends nothing",
        changes=(("args.sync_every == 0 or step + 1 == args.steps:", "args.sync_every == 0:"),),
        trial=EVERY_SECOND_STEP,
    ),
    Attempt("dp-wa", "", "weights are averaged after every 2 steps", trial=EVERY_SECOND_STEP),
    Attempt(
        "mydp",
        "combined-again",
        "combined again",
        changes=(
            ("bucket.flat, ReduceOp.AVG,", "bucket.flat, ReduceOp.SUM,"),
            ("        self._buckets.finish()", "        self._buckets.finish()"),
        ),
    ),
    Attempt(
        "mydp",
        "not-averaged",
        "was not averaged",
        changes=(
            ("return dist.all_reduce(bucket.flat, ReduceOp.AVG, bucket.axis.group, async_op=True)", "return None"),
        ),
    ),
    Attempt(
        "mydp",
        "divided-twice",
        "divided by the 2 ranks twice",
        changes=(
            (
                "            return dist.all_reduce(bucket.flat,",
                "            bucket.flat /= 2\n            return dist.all_reduce(bucket.flat,",
            ),
        ),
        trial=ONE_MICRO_BATCH,
    ),
    Attempt(
        "dp-zero",
        "",
        "the run of one process: losses, weights of 3 steps",
        (OWN_PART, OWN_GRADIENT, ALL_PARTS),
        (IMPORTS,),
    ),
    Attempt(
        "dp-zero",
        "not-gathered",
        "are those before the update, or some of them are",
        (OWN_PART, OWN_GRADIENT, "pass"),
        (IMPORTS,),
    ),
    Attempt(
        "dp-zero",
        "not-shared-out",
        "its share is",
        ("optimizer = run.optimizer(net)", AVERAGE, "pass"),
        (("distributed as dist\n", "distributed as dist\nfrom torch.distributed import ReduceOp\n"),),
    ),
    Attempt(
        "dp-zero",
        "summed",
        "added up over the 2 ranks",
        (OWN_PART, OWN_GRADIENT.replace(" / run.world_size", ""), ALL_PARTS),
        (IMPORTS,),
    ),
    Attempt(
        "checkpoint",
        "collision",
        "optimizer.0.step is another tensor than what a rank before has written",
        changes=(('f"{prefix}{name}.{key}"', 'f"{prefix}{list(parameters).index(name)}.{key}"'),),
        only="state_of",
    ),
    Attempt(
        "checkpoint",
        "random",
        "random.0.cpu is not the state of torch's generator",
        changes=(("torch.get_rng_state()", "torch.zeros(1)"),),
        only="state_of",
    ),
    Attempt(
        "checkpoint",
        "wrong-place",
        "a slice (4, 4) at (1, 0) of (7, 4) is put in the place of another",
        changes=(("b.offsets[dim] + start", "b.offsets[dim] + start + 1"),),
        only="as_held",
    ),
    Attempt(
        "checkpoint",
        "not-read",
        "embed.weight does not get what was written",
        changes=(("as_held(parameter.detach(), parameter)", "as_held(parameter.detach().clone(), parameter)"),),
        only="state_of",
    ),
    Attempt(
        "dp-ga",
        "last-micro-batch",
        "the last micro-batch alone",
        AVERAGE,
        (("            loss.backward()\n", "            optimizer.zero_grad()\n            loss.backward()\n"),),
    ),
    Attempt(
        "dp-ga",
        "deadlock",
        "rank 0 waits for barrier from rank 1, in line 5",
        f"if run.rank == 0:\n    __import__('torch').distributed.barrier()\n{AVERAGE}",
    ),
    Attempt(
        "dp-wa",
        "not-averaged",
        "the average went elsewhere",
        changes=(("all_reduce(weights,", "all_reduce(weights.clone(),"),),
    ),
    Attempt(
        "mydp",
        "not-broadcast",
        "all ranks must start from rank 0's",
        changes=(("        broadcast_weights(model)\n", ""),),
    ),
]
