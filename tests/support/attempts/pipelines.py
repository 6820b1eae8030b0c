"""Attempts at the exercises on pipelines, hybrids of them and deadlocks."""

from distlab_exercises.catalogue import Trial
from support.exercises_attempts import Attempt

DAPPLE = Trial({"pp": 3}, 4, 4, {"schedule": "dapple"})

BLOCKING = {
    f"sent.append(dist.isend({tensor}, {to}))": f"dist.send({tensor}, {to})"
    for tensor, to in (("outputs.detach()", "stage + 1, forward"), ("inputs.grad", "stage - 1, back"))
}

ATTEMPTS = {
    "hybrid": [
        Attempt(
            "rank-missing",
            "pipeline 1's share was lost",
            "gradients *= 1 - replicas.rank\ndist.all_reduce(gradients, ReduceOp.AVG, replicas.group)",
        ),
        Attempt(
            "not-waited-for",  # by those of stage 1
            "rank 1 (stage 1 of replica 0) did not wait for",
            "is_hasty = 0 not in dist.get_process_group_ranks(replicas.group)\n"
            "dist.all_reduce(gradients, ReduceOp.AVG, replicas.group, async_op=is_hasty)\n"
            "gradients /= replicas.size",
        ),
        Attempt(
            "deadlock",
            "all ranks are in the same collective, and it cannot end: have their tensors different sizes?",
            "largest = [len(gradients) for _ in range(dist.get_world_size())]\n"
            "dist.all_reduce(gradients[: largest[0] if dist.get_rank() else 10], ReduceOp.AVG)",
        ),
    ],
    "pp-1f1b": [
        Attempt(
            "wrong-start",
            "before step 0: the weights model.embed_tokens.weight on rank 0 (stage 0) are not those of one process",
            changes={
                "    optimizer = ": (
                    "    for parameter in net.parameters():\n        parameter.data *= 2\n    optimizer = "
                )
            },
        ),
        Attempt(
            "loss",
            "or a stage gets activations that are not final",
            changes={
                "    outputs = net(inputs)\n    if stage < last:\n"
                '        with named("the activations", "activations"):\n'
                "            dist.send(outputs.detach(),": (
                    "    ahead = torch.zeros(*x.shape, width)\n    outputs = net(inputs)\n"
                    "    if stage < last:\n"
                    '        with named("the activations", "activations"):\n'
                    "            dist.send(ahead,"
                )
            },
        ),
        Attempt(
            "no-loss",
            "step 0: no rank gave run.log a loss",
            changes={"        losses.append(": "        loss = (", "losses[0].backward()": "loss.backward()"},
        ),
        Attempt(
            "exception",
            "inputs.grad is None: what requires no gradient (requires_grad_) gets none",
            changes={
                "        inputs.requires_grad_()  # the previous stage waits for its gradient\n": "",
                "        assert inputs.grad is not None\n": "",
            },
        ),
        Attempt(
            "exception",
            "rank 2 (stage 2) failed: inputs.grad is None: what requires no gradient (requires_grad_) gets none",
            changes={"        inputs.requires_grad_()  # the previous stage waits for its gradient\n": ""},
        ),
        Attempt(
            "loss-not-divided",
            "2 times too large: divide each micro-batch's by their number, 2",
            changes={"outputs.shape[-1]) * share": "outputs.shape[-1])"},
        ),
    ],
    "pp-gpipe": [
        Attempt(
            "micro-batches",
            "stage 0 has a micro-batch 3, of 3",
            "return [kind(stage, k) for kind in (Forward, Backward) for k in range(micro_batches + 1)]",
        ),
        Attempt(
            "not-gpipe",
            "stage 0 runs B0 before F1",
            "return [kind(stage, k) for k in range(micro_batches) for kind in (Forward, Backward)]",
        ),
        Attempt(
            "deadlock",
            "2 stages, 2 micro-batches: ",
            "kinds, parts = (Forward, Backward), range(micro_batches)\n"
            "if stage == 0 < stages - 1:\n"
            "    return [kind(stage, k) for k in parts for kind in kinds]\n"
            "return [kind(stage, k) for kind in kinds for k in parts]",
        ),
        Attempt(
            "wrong-order",
            "stage 0: B0 B1 B2 F0 F1 F2",  # the lists, below the sentence
            "return [kind(stage, k) for kind in (Backward, Forward) for k in range(micro_batches)]",
        ),
        Attempt(
            "missing",
            "stage 1 lacks F1 and B1",
            "return [kind(stage, k) for kind in (Forward, Backward) for k in range(micro_batches - stage)]",
        ),
        Attempt(
            "wrong-stage",
            "stage 0 runs Forward of a stage 1, which does not exist",
            "return [kind(k, stage) for kind in (Forward, Backward) for k in range(micro_batches)]",
        ),
        Attempt("empty", "the lists are empty", "return []"),
        Attempt("no-list", "must return a list of actions", "return None"),
        Attempt("no-list", "must return a list of actions", 'return ["F0", "B0"]'),
        Attempt(
            "wrong-stage",
            "stage 1 runs Forward of a stage 0",
            "return [kind(0, k) for kind in (Forward, Backward) for k in range(micro_batches)]",
        ),
    ],
    "pp-executor": [
        Attempt(
            "not-waited-for",
            "rank 1 did not wait for 3 of its messages: call .wait() on what dist.isend returns",  # the others did
            changes={"    for work in sent:\n": "    for work in sent if stage != 1 else []:\n"},
        ),
        Attempt("deadlock", "waits for", changes=BLOCKING, trial=DAPPLE),
        Attempt(
            "last-micro-batch",
            "the last micro-batch alone",
            changes={
                "            inputs, outputs = kept.pop(k)\n": (
                    "            inputs, outputs = kept.pop(k)\n            net.zero_grad()\n"
                )
            },
        ),
    ],
    "pp-zb": [
        Attempt(
            "keeps-too-much",
            "keeps the activations of",
            "return [kind(stage, k) for kinds in ((Forward,), (BackwardInput, BackwardWeight)) for k in "
            "range(micro_batches) for kind in kinds]",
        ),
    ],
    "pp-dapple": [
        Attempt("wrong-order", "runs B0 before F0", changes={"min(stages - stage,": "min(stages - stage - 1,"}),
        Attempt("keeps-too-much", "needs to keep 1 at most", changes={"min(stages - stage,": "min(stages,"}),
        Attempt(
            "slow",
            "it takes 12 units of time (a forward pass is 1, a backward pass 2), and 9 are enough",
            changes={"min(stages - stage, micro_batches)": "1"},
        ),
        Attempt("missing", "stage 0 lacks B2", changes={" + backwards[micro_batches - ahead :]": ""}),
    ],
    "deadlock": [
        Attempt(
            "not-its-own",
            "rank 1 sends a tensor of 0",
            changes={
                "                dist.send(mine, other)\n            else:": (
                    "                dist.send(theirs, other)\n            else:"
                )
            },
        ),
        Attempt(  # a number of another rank's, as a sign that it may send
            "",
            "all ranks finish, and exchange all that they should",
            changes={
                "dist.recv(theirs, other)\n                dist.send(mine, other)": (
                    "dist.recv(theirs, other)\n                dist.send(torch.zeros(1), other)\n"
                    "                dist.send(mine, other)"
                ),
                "dist.send(mine, other)\n                dist.recv(theirs, other)": (
                    "dist.send(mine, other)\n                dist.recv(torch.zeros(1), other)\n"
                    "                dist.recv(theirs, other)"
                ),
            },
        ),
        Attempt(
            "left-out",
            "rank 1 sends 4,000 bytes instead of 8,000: a cure must not leave out",
            changes={"(run.rank - 1, run.rank + 1)": "((1,), (0,), ())[run.rank]"},
        ),
    ],
}
