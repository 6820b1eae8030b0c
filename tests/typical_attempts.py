"""Attempts at each exercise: typical mistakes with what the checker calls them, and other right solutions."""

from exercises_attempts import AVERAGE, ONE_MICRO_BATCH, Attempt

from distlab.exercises.catalogue import EXERCISES

IMPORTS = ("import traffic\n", "import traffic\nimport torch\nfrom torch import nn\n")
PLAIN_EXECUTOR = """for stage in self._stages.values():
    stage.micro_batches, stage.losses = micro_batches, {}
    stage.shares = [1 / len(micro_batches)] * len(micro_batches)
for prepared in self._prepared:
    prepared.action.prepare(prepared.stage)
here, sent = {}, []
for action, stage, _, needs, gives, _ in self._prepared:
    received = []
    for result in needs:
        if (source := self.owners[result.stage]) == self._worker:
            received.append(here.pop(result))
            continue
        tensor = torch.empty(*micro_batches[result.micro_batch].shape, self.width)
        channel = self._channels[source, self._worker, result.kind]
        traffic.receive(tensor, str(result), source=self.grid.rank_of(source), group=channel).wait()
        received.append(tensor)
    computed = action.run(stage, *received)
    for result in gives:
        if (to := self.owners[self._plan.takers[result].stage]) == self._worker:
            here[result] = computed[result.kind]
            continue
        channel, told = self._channels[self._worker, to, result.kind], {"kind": result.kind}
        sent.append(traffic.send(computed[result.kind], str(result), to=self.grid.rank_of(to), group=channel, **told))
for transfer in sent:
    transfer.wait()
return [loss for stage in self._stages.values() for _, loss in sorted(stage.losses.items())]"""
OWN_PART = """rows = -(-weights.numel() // run.world_size)
own = nn.Parameter(weights[run.rank * rows : (run.rank + 1) * rows])
optimizer = run.optimizer(nn.ParameterList([own]))"""
OWN_GRADIENT = """flat = torch.zeros(run.world_size * rows)
flat[: weights.numel()] = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
mine = torch.empty(rows)
traffic.reduce_scatter(mine, flat.view(run.world_size, rows), "gradients", kind="gradients").wait()
own.grad = mine[: own.numel()] / run.world_size"""
ALL_PARTS = """mine[: own.numel()] = own.detach()
traffic.all_gather(flat.view(run.world_size, rows), mine, "weights", kind="weights").wait()
weights.copy_(flat[: weights.numel()])"""

EVERY_SECOND_STEP = next(trial for trial in EXERCISES["dp-wa"].trials if trial.sync_every > 1)

ATTEMPTS = [
    Attempt("dp-ga", "divided-twice", "1/2 of what it should be", AVERAGE.replace("op=ReduceOp.SUM", "")),
    Attempt(
        "hybrid",
        "summed",
        "added up over the 2 pipelines",
        changes=(
            ('kind="gradients", group=dp_group\n', 'kind="gradients", group=dp_group, op=traffic_sum\n'),
            ("DEFAULTS = ", "from torch.distributed import ReduceOp\n\ntraffic_sum = ReduceOp.SUM\nDEFAULTS = "),
        ),
    ),
    Attempt(
        "tp",
        "g-adds-again",
        "(g)",
        changes=(
            (
                "return _linear_map(x, partial(tp_group.all_reduce, what=FORWARD), _unchanged)",
                "return _linear_map(x, partial(tp_group.all_reduce, what=FORWARD), partial(tp_group.all_reduce, "
                "what=BACKWARD))",
            ),
        ),
    ),
    Attempt("dp-ga", "", "the run of one process", AVERAGE),
    Attempt("dp-ga", "summed", "added up over the 2 ranks, but not divided by 2", AVERAGE.rpartition("\n")[0]),
    Attempt(
        "dp-ga",
        "rank-missing",
        "rank 1's share was lost",
        f"if run.rank == 1:\n    net.zero_grad(set_to_none=False)\n{AVERAGE}",
    ),
    Attempt(
        "dp-ga",
        "not-waited-for",  # and divided twice, so that it is wrong even where the transfers end in time
        "rank 0 did not wait for",
        AVERAGE.replace("op=ReduceOp.SUM", "").replace(".wait()", ""),
    ),
    Attempt(
        "dp-wa",
        "weights-summed",
        "added up over the ranks",
        changes=(
            ('step}", kind="weights")', 'step}", kind="weights", op=traffic_sum)'),
            ("DEFAULTS = ", "from torch.distributed import ReduceOp\n\ntraffic_sum = ReduceOp.SUM\nDEFAULTS = "),
        ),
    ),
    Attempt(
        "dp-wa",
        "weights-divided-twice",
        "divided by 2 twice",
        changes=(
            (
                "            traffic.all_reduce(weights,",
                "            weights /= run.world_size\n            traffic.all_reduce(weights,",
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
            ('str(bucket), kind="gradients")', 'str(bucket), kind="gradients", op=torch.distributed.ReduceOp.SUM)'),
            ("        self._buckets.finish()", "        self._buckets.finish()"),
        ),
    ),
    Attempt(
        "mydp",
        "not-averaged",
        "was not averaged",
        changes=(('return traffic.all_reduce(bucket.flat, str(bucket), kind="gradients")', "return None"),),
    ),
    Attempt("hybrid", "not-waited-for", "finish()", changes=(("        buckets.finish()\n", ""),)),
    Attempt(
        "hybrid",
        "deadlock",
        "waits",
        "for parameter in parameters:\n    traffic.all_reduce(parameter.grad, 'a gradient', kind='gradients', "
        "group=dp_group if run.rank else None).wait()",
    ),
    Attempt(
        "hybrid",
        "rank-missing",
        "pipeline 1's share was lost",
        changes=(
            (
                "        buckets.finish()\n",
                "        for p in parameters * run.grid.replica:\n            p.grad.zero_()\n        "
                "buckets.finish()\n",
            ),
            ("on_full=average, backward", "on_full=lambda _: None, backward"),
            (
                "        run.log(step, losses)\n",
                "        for bucket in buckets:\n            average(bucket).wait()\n        run.log(step, losses)\n",
            ),
        ),
    ),
    Attempt(
        "pp-1f1b",
        "last-micro-batch",
        "the last micro-batch alone",
        changes=(("            inputs = x\n", "            optimizer.zero_grad()\n            inputs = x\n"),),
    ),
    Attempt(
        "tp",
        "loss",
        "the forward pass computes something else",
        changes=(("return _linear_map(x, partial(tp_group.all_reduce, what=FORWARD), _unchanged)", "return x"),),
    ),
    Attempt(
        "mydp",
        "divided-twice",
        "divided by the 2 ranks twice",
        changes=(
            (
                "        return traffic.all_reduce(bucket.flat,",
                "        bucket.flat /= 2\n        return traffic.all_reduce(bucket.flat,",
            ),
        ),
        trial=ONE_MICRO_BATCH,
    ),
    Attempt(
        "pp-1f1b",
        "loss",
        "or a stage gets activations that are not final",
        changes=(
            (
                "            outputs = net(inputs)\n            if stage < last:\n"
                "                traffic.send(outputs.detach(),",
                "            ahead = torch.zeros(*x.shape, args.dmodel)\n            outputs = net(inputs)\n"
                "            if stage < last:\n                traffic.send(ahead,",
            ),
        ),
    ),
    Attempt("pp-executor", "", "the run of one process", PLAIN_EXECUTOR),
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
        (("import traffic\n", "import traffic\nfrom torch.distributed import ReduceOp\n"),),
    ),
    Attempt(
        "dp-zero",
        "summed",
        "added up over the 2 ranks",
        (OWN_PART, OWN_GRADIENT.replace(" / run.world_size", ""), ALL_PARTS),
        (IMPORTS,),
    ),
    Attempt(
        "tp-layers",
        "wrong-slice",
        "rank 0: linear.weight is the slice of rank 1",
        changes=(("chunk(pcomm.tp_degree, dim)[pcomm.tp_rank]", "chunk(pcomm.tp_degree, dim)[-1 - pcomm.tp_rank]"),),
        only="ColWiseLinear",
    ),
    Attempt(
        "tp-layers",
        "f-missing",
        "the gradient of the input is not the sum",
        changes=(("self.linear(pcomm.Duplication.apply(x))", "self.linear(x)"),),
        only="ColWiseLinear",
    ),
    Attempt(
        "tp-layers",
        "output",
        "the output is not the sum of the ranks' terms (g)",
        changes=(
            (
                "pcomm.AllReduce.apply(super().forward(pcomm.Duplication.apply(x)))\n        return y\n\n\nFeed",
                "super().forward(pcomm.Duplication.apply(x))\n        return y\n\n\nFeed",
            ),
        ),
        only="ColRowLinearPair",
    ),
    Attempt(
        "tp-layers",
        "shape",
        "mod.weight is (5, 4), and its slice is (10, 2)",
        changes=(("keep_shard(self.mod, 1)", "keep_shard(self.mod, 0)"),),
        only="Embedding",
    ),
    Attempt(
        "mlp",
        "not-cleared",
        "step 1: the gradients of the steps before",
        changes=(("        optimizer.zero_grad()\n", ""),),
        only="train",
    ),
    Attempt(
        "mlp",
        "logits",
        "tanh after the last layer",
        changes=(("logits = last(data)", "logits = torch.tanh(last(data))"),),
        only="MLP",
    ),
    Attempt(
        "mlp",
        "",
        "in each step, the gradient of this batch",
        changes=(
            ("_, loss = model(points, labels)\n        opt", "_, loss = model(points, targets=labels)\n        opt"),
        ),
        only="train",
    ),
    Attempt(
        "mlp",
        "",
        "in each step, the gradient of this batch",
        changes=(
            (
                "_, loss = model(points, labels)\n        opt",
                "logits, _ = model(points)\n        loss = F.cross_entropy(logits, labels)\n        opt",
            ),
        ),
        only="train",
    ),
    Attempt(
        "matmul",
        "no-share",
        "rank 1 sends 0 bytes",
        changes=(
            (
                '    part = scatter(A, 1, "A") @ scatter(B, 0, "B")\n',
                '    C = A @ B\n    traffic.broadcast(C, "C", kind="C").wait()\n    return C\n    part = C\n',
            ),
        ),
        only="by_reduction",
    ),
    Attempt(
        "matmul",
        "no-share",
        "rank 1 sends 0 bytes",
        changes=(
            (
                '    return gather_rows(rows_of_A @ B, len(A), "C")',
                "    return A @ B if rank() == 0 else None",
            ),
        ),
        only="by_row",
    ),
    Attempt(
        "tp-loss",
        "logits-sent",
        "numbers of each token; 3 are enough",
        changes=(
            (
                '    tp_group = TPGroup("the loss", VOCABULARY, group)\n',
                '    tp_group = TPGroup("the loss", VOCABULARY, group)\n'
                "    tp_group.all_gather(logits.detach(), FORWARD, 2, vocab_size)\n",
            ),
        ),
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
        "rows 0 to 2 of (7, 4) are put elsewhere",
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
        "all-reduce-ring",
        "slow",
        "times as long",
        """from distlab.collectives.algorithms import allreduce_naive

allreduce_naive(tensor, op, endpoint)""",
    ),
    Attempt(
        "mpi-collectives",
        "deadlock",
        "rank 0 waits to send to rank 1",
        changes=(
            (
                "self.comm.Sendrecv(out, (rank + 1) % size, TAG, arriving, (rank - 1) % size, TAG)",
                "self.comm.Send(out, (rank + 1) % size, TAG); self.comm.Recv(arriving, (rank - 1) % size, TAG)",
            ),
        ),
        only="ringAllreduce",
    ),
    Attempt(
        "mpi-collectives",
        "count",
        "rank 0 counts 288 bytes, and has sent and received 192",
        changes=(
            (
                "self._count(2 * segment * src.itemsize)\n\n    def _segment",
                "self._count(3 * segment * src.itemsize)\n\n    def _segment",
            ),
        ),
        only="myAlltoall",
    ),
    Attempt(
        "mpi-collectives",
        "",
        "right on every rank",
        changes=(
            (
                "self.comm.Sendrecv(out, (rank + 1) % size, TAG, arriving, (rank - 1) % size, TAG)",
                "self.comm.Sendrecv(sendbuf=out, dest=(rank + 1) % size, recvbuf=arriving, source=(rank - 1) % size)",
            ),
        ),
        only="ringAllreduce",
    ),
    Attempt(
        "mpi-collectives",
        "",
        "right on every rank",
        changes=(
            ("self.comm.Irecv(into[other], other, TAG)", "self.comm.Irecv(buf=into[other], source=other, tag=TAG)"),
            ("self.comm.Isend(out[other], other, TAG)", "self.comm.Isend(buf=out[other], dest=other, tag=TAG)"),
        ),
        only="myAlltoall",
    ),
    Attempt(
        "mpi-collectives",
        "ignores-op",
        "2 ranks, 24 elements, MAX of int32: rank 0 has the sum of all ranks' arrays, and should have their maximum",
        changes=(
            (
                "        combine = reduce_function(op)\n        with buffers",
                "        combine = np.add\n        with buffers",
            ),
        ),
        only="myAllreduce",
    ),
    Attempt(
        "mpi",
        "wrong-result",
        "mp_size 2, dp_size 2: rank 0 returned other numbers than its own slice of the sum over the ranks",
        changes=(("    mp_comm.Reduce_scatter(terms, mine, op=MPI.SUM)\n", "    mine[...] = terms[0]\n"),),
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
        "rank 0 waits, in line 5",
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
    Attempt(
        "pp-zb",
        "keeps-too-much",
        "keeps the activations of",
        "return [kind(stage, k) for kinds in ((Forward,), (BackwardInput, BackwardWeight)) for k in "
        "range(micro_batches) for kind in kinds]",
    ),
    Attempt(
        "tp",
        "f-missing",
        "(f)",
        changes=(
            (
                "return _linear_map(x, _unchanged, partial(tp_group.all_reduce, what=BACKWARD))",
                "return _linear_map(x, _unchanged, _unchanged)",
            ),
        ),
    ),
    Attempt(
        "broadcast",
        "wrong-tensor",
        "has rank",
        changes=(
            (
                "elif distance <= relative_rank < 2 * distance:\n                endpoint.recv(data, "
                "rank_at(relative_rank - distance))",
                "elif distance <= relative_rank < 2 * distance:\n                endpoint.recv(data.clone(), "
                "rank_at(relative_rank - distance))",
            ),
        ),
        only="broadcast_tree",
    ),
    Attempt(
        "reduce",
        "changed",
        "no longer has its own tensor",
        changes=(
            ("torch.empty_like(data) if partial is data and relative_rank > 0 else partial", "partial"),
            (
                "in_place(tensor, is_changed=relative_rank == 0) as data:\n        partial = data",
                "in_place(tensor) as data:\n        partial = data",
            ),
        ),
        only="reduce_tree",
    ),
    Attempt(
        "reduce",
        "ignores-op",
        "2 ranks, root 1, MAX: rank 1 has the sum of rank 0's, rank 1's, and should have the maximum of all",
        changes=(("            combine(data, received, out=data)", "            data += received"),),
        only="reduce_naive",
    ),
    Attempt(
        "reduce",
        "changed",
        "2 ranks: rank 0 no longer has its own `tensor`",
        changes=(("scratch_buffer(tensor, 1).copy_(tensor) if rank == 0 else tensor", "tensor"),),
        only="reducescatter_naive",
    ),
    Attempt(
        "gather",
        "wrong-row",
        "where rank",
        changes=(
            (
                "            whole[dst:], whole[:dst] = parts[: size - dst], parts[size - dst :]",
                "            whole[:] = parts",
            ),
        ),
        only="gather_tree",
    ),
    Attempt(
        "ring", "wrong-sum", "rank", changes=(("tensor[(rank - turn - 2) % size]", "tensor[(rank - turn - 1) % size]"),)
    ),
    Attempt(
        "pp-gpipe",
        "not-gpipe",
        "stage 0 runs B0 before F1",
        "return [kind(stage, k) for k in range(micro_batches) for kind in (Forward, Backward)]",
    ),
    Attempt(
        "pp-gpipe",
        "wrong-order",
        "runs B0 before F0",
        "return [kind(stage, k) for kind in (Backward, Forward) for k in range(micro_batches)]",
    ),
    Attempt(
        "pp-gpipe",
        "wrong-order",
        "never computes",
        "return [kind(stage, k) for kind in (Forward, Backward) for k in range(micro_batches - stage)]",
    ),
    Attempt(
        "pp-gpipe",
        "wrong-stage",
        "stage 0 runs Forward of a stage 1, which does not exist",
        "return [kind(k, stage) for kind in (Forward, Backward) for k in range(micro_batches)]",
    ),
    Attempt("pp-gpipe", "no-list", "must return a list of actions", "return None"),
    Attempt(
        "pp-gpipe",
        "wrong-order",
        "is run by workers 0 and 1",
        "return [kind(0, k) for kind in (Forward, Backward) for k in range(micro_batches)]",
    ),
    Attempt(
        "pp-dapple",
        "keeps-too-much",
        "keeps the activations of 3 micro-batches at a time, and needs to keep 1",
        "return gpipe(stage, stages, micro_batches)",
    ),
    Attempt(
        "pp-dapple", "wrong-order", "runs B0 before F0", changes=(("min(stages - stage,", "min(stages - stage - 1,"),)
    ),
    Attempt(
        "pp-dapple", "keeps-too-much", "needs to keep 1 at most", changes=(("min(stages - stage,", "min(stages,"),)
    ),
    Attempt("pp-dapple", "slow", "is idle for too long", changes=(("min(stages - stage, micro_batches)", "1"),)),
    Attempt("pp-dapple", "wrong-order", "never computes", changes=((" + backwards[micro_batches - ahead :]", ""),)),
    Attempt("all-reduce", "deadlock", "rank 0 waits to send to rank 1", changes=(("if rank < partner:", "if True:"),)),
    Attempt(
        "all-reduce",
        "wrong-sum",
        "has rank 0's tensor, and should have the sum of all",
        changes=(("reduce_tree(tensor, 0, op, endpoint)", "pass"),),
    ),
    Attempt(
        "all-reduce",
        "slow",
        "times as long",
        changes=(("    broadcast_tree(tensor, 0, endpoint)", "    broadcast_naive(tensor, 0, endpoint)"),),
    ),
    Attempt(
        "deadlock",
        "not-its-own",
        "rank 1 sends a tensor of 0",
        changes=(
            (
                '            traffic.send(mine, "the tensor", to=other, kind="tensors").wait()\n        else:',
                '            traffic.send(theirs, "the tensor", to=other, kind="tensors").wait()\n        else:',
            ),
        ),
    ),
    Attempt(
        "deadlock",
        "left-out",
        "a cure must not leave out",
        changes=(("for lower in range(run.world_size - 1):", "for lower in range(0):"),),
    ),
]
