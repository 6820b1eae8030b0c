"""Attempts at the exercises on replicas of the whole model, and their checkpoints."""

from distlab_exercises.catalogue import EXERCISES
from support.exercises_attempts import ONE_MICRO_BATCH, Attempt

SUM = "dist.all_reduce(gradients, ReduceOp.SUM)"
MEAN = f"{SUM}\ngradients /= dist.get_world_size()"
OWN = "return flat.chunk(dist.get_world_size())[dist.get_rank()]"
REDUCED = "dist.reduce_scatter_tensor(own_range(gradients), gradients, ReduceOp.SUM)"
OWN_GRADIENT = f"{REDUCED}\ngradients /= dist.get_world_size()"
ALL_PARTS = "dist.all_gather_into_tensor(weights, own_range(weights))"
HELD, AS_IT_IS = "as_held(parameter.detach(), parameter)", "        return tensor\n"
EVERY_SECOND_STEP = next(trial for trial in EXERCISES["dp-wa"].trials if trial.sync_every > 1)

ATTEMPTS = {
    "dp-ga": [
        Attempt(  # right, and some averaged again
            "",
            "gradients and weights: 1.2 times the bytes that are needed",
            f"{MEAN}\ndist.all_reduce(gradients[: len(gradients) // 5], ReduceOp.AVG)",
        ),
        Attempt(
            "exception",
            "failed: the file calls main(...) as it is loaded; put that below",
            MEAN,
            changes={'if __name__ == "__main__":\n    main(': "main("},
        ),
        Attempt("exception", "failed: SyntaxError: invalid syntax (line ", "gradients +"),
        Attempt("exception", "the script must call run.track(", MEAN, changes={"    run.track(net, optimizer)\n": ""}),
        Attempt("exception", "failed: the file needs a function train", MEAN, changes={"def train(": "def training("}),
        Attempt("summed", "added up over the 2 ranks, but not divided by 2", SUM),
        Attempt("rank-missing", "rank 1's share was lost", f"if dist.get_rank() == 1:\n    gradients.zero_()\n{MEAN}"),
        Attempt(
            "weights-scaled",
            "after step 0: the weights model.embed_tokens.weight, like every other parameter, on rank 1 are "
            "3 times what they should be",
            MEAN,
            changes={
                "        optimizer.step()\n": (
                    "        optimizer.step()\n        for p in net.parameters():\n            p.data *= 3**run.rank\n"
                )
            },
        ),
        Attempt("imprecise", "rounded", f"{MEAN}\ngradients.copy_(gradients.bfloat16())"),
        Attempt(
            "loss",
            "the forward pass and the divisor (",  # nothing of stages
            MEAN,
            changes={"            loss.backward()\n": "            loss *= 1.37\n            loss.backward()\n"},
        ),
        Attempt(
            "loss",
            "the gradients are right, so only the loss that run.log prints is wrong",
            MEAN,
            changes={"losses.append(loss)": "losses.append(loss * 1.001)"},
        ),
        Attempt(
            "exception",
            "failed: the file needs DEFAULTS, of the class TrainSettings, as in its chapter",
            MEAN,
            changes={"DEFAULTS = Grad": "USUAL = Grad"},
        ),
        Attempt("steps", "was called in 0 of 3 steps", changes={"        run.log(step, losses)\n": ""}),
        Attempt(
            "parameters",
            "no rank holds the parameter model.embed_tokens.weight",
            changes={"run.track(net, optimizer)": "run.track(net.model, optimizer)"},
        ),
        Attempt(
            "zero",
            "no rank trains the parameter model.norm.weight",
            changes={"    run.track(": "    net.model.norm.weight.requires_grad_(False)\n    run.track("},
        ),
        Attempt(
            "changed-early",
            "step 0: something has changed the weights lm_head.weight on rank 1 before optimizer.step()",
            MEAN,
            changes={
                "            loss.backward()\n": (
                    "            loss.backward()\n            net.lm_head.weight.data *= 1 + run.rank\n"
                )
            },
        ),
        Attempt(
            "parameters",
            "rank 1 updated its weights 6 times in 3 steps",
            MEAN,
            changes={
                "        optimizer.step()\n": ("        for _ in range(1 + run.rank):\n            optimizer.step()\n")
            },
        ),
        Attempt(
            "deadlock",
            "rank 0 waits for barrier from rank 1, in line ",
            f"if dist.get_rank() == 0:\n    dist.barrier()\n{MEAN}",
        ),
    ],
    "dp-wa": [
        Attempt(
            "weights-summed",
            "added up over the ranks",
            changes={"dist.all_reduce(weights, ReduceOp.AVG)": "dist.all_reduce(weights)"},
        ),
        Attempt(
            "sync-every",
            "after step 0 of 3: rank 0 sends weights",
            changes={"if (step + 1) % args.sync_every == 0 or step + 1 == args.steps:": "if True:"},
            trial=EVERY_SECOND_STEP,
        ),
        Attempt(
            "sync-every",
            "after step 2 of 3: rank 0 sends nothing",
            changes={"args.sync_every == 0 or step + 1 == args.steps:": "args.sync_every == 0:"},
            trial=EVERY_SECOND_STEP,
        ),
        Attempt("", "weights are averaged after every 2 steps", trial=EVERY_SECOND_STEP),
        Attempt(
            "not-averaged", "the average went elsewhere", changes={"all_reduce(weights,": "all_reduce(weights.clone(),"}
        ),
    ],
    "mydp": [
        Attempt(
            "combined-again",
            "combined again",
            changes={"bucket.flat, ReduceOp.AVG,": "bucket.flat, ReduceOp.SUM,"},
        ),
        Attempt(
            "not-averaged",
            "on all ranks is that of this rank's own sequences: it was not averaged",
            changes={
                "return dist.all_reduce(bucket.flat, ReduceOp.AVG, bucket.axis.group, async_op=True)": "return None"
            },
        ),
        Attempt(
            "divided-twice",
            "divided by the 2 ranks twice",
            changes={
                "            return dist.all_reduce(bucket.flat,": (
                    "            bucket.flat /= 2\n            return dist.all_reduce(bucket.flat,"
                )
            },
            trial=ONE_MICRO_BATCH,
        ),
        Attempt(
            "not-broadcast", "all ranks must start from rank 0's", changes={"        broadcast_weights(model)\n": ""}
        ),
    ],
    "dp-zero": [
        Attempt("", "the run of one process: losses, weights of 3 steps", (OWN, OWN_GRADIENT, ALL_PARTS)),
        Attempt("not-gathered", "are those before the update, or some of them are", (OWN, OWN_GRADIENT, "pass")),
        Attempt(
            "not-shared-out",
            "its share is",
            (OWN, MEAN, "pass"),
            changes={
                "run.optimizer(shards)": "run.optimizer(net)",
                ", shards=shards, gather=partial(gather_weights, weights)": "",
            },
        ),
    ],
    "checkpoint": [
        Attempt(
            "collision",
            "optimizer.0.step is another tensor than what a rank before has written",
            changes={'f"{prefix}{name}.{key}"': 'f"{prefix}{list(parameters).index(name)}.{key}"'},
            only="state_of",
        ),
        Attempt(
            "missing",
            "2 stages of 2 slices: a part of embed.weight is not written by any rank",
            changes={
                "        tensors[name] = as_held(": ("        if rank % 2 == 0:\n            tensors[name] = as_held(")
            },
            only="state_of",
        ),
        Attempt(
            "missing",
            "rank 0 does not write the state of its random generator, random.0.cpu",
            changes={'{f"{RANDOM}{rank}.cpu": torch.get_rng_state()}': "{}"},
            only="state_of",
        ),
        Attempt(
            "missing",
            "no rank writes embed.weight; instead there is whole.embed.weight",  # not a generator's state
            changes={"tensors[name] = as_held(": 'tensors[f"whole.{name}"] = as_held('},
            only="state_of",
        ),
        Attempt(
            "shape",
            "the whole is said to be (8, 4), and is (7, 4)",
            changes={"whole[dim] = length": "whole[dim] = length + 1"},
            only="as_held",
        ),
        Attempt(
            "random",
            "random.0.cpu is not the state of torch's generator",
            changes={"torch.get_rng_state()": "torch.zeros_like(torch.get_rng_state())"},
            only="state_of",
        ),
        Attempt(
            "wrong-place",
            "a slice (2, 4) at (4, 0) of (6, 4) is put in the place of another",  # of three; two are in their places
            changes={"b.offsets[dim] + start": "b.offsets[dim] + start + 2 * (start == 2)"},
            only="as_held",
        ),
        Attempt(
            "not-read",
            "embed.weight does not get what was written",
            changes={HELD: HELD.replace("detach()", "detach().clone()")},
            only="state_of",
        ),
        Attempt(
            "no-dictionary",
            "returned list, and should return tensors by name",
            changes={"    return tensors\n": "    return list(tensors)\n"},
            only="state_of",
        ),
        Attempt("no-tensor", "is str, and", changes={HELD: "str(parameter)"}, only="state_of"),
        Attempt("outside", "lies outside of it", changes={"[dim] + start": "[dim] + length"}, only="as_held"),
        Attempt(
            "no-slice-needed", "is held whole", changes={AS_IT_IS: "        return tensor.clone()\n"}, only="as_held"
        ),
        Attempt(
            "step-in-slices",
            "belongs to the whole parameter",
            changes={
                "    placement, wh": (
                    "    if not tensor.dim():\n"
                    "        return Slice(tensor, (), [TensorBlock((), ())])\n"
                    "    placement, wh"
                )
            },
            only="as_held",
        ),
    ],
}
