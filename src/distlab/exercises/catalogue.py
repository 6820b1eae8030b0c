"""The exercises: what one learns, what is taken out of which script, hints, and how a solution is tried.

To add one, mark the part in the chapter's script (or name the function), and add it here; tests do the rest.
"""

from dataclasses import dataclass, field

from distlab.comm.layout import Layout

WORDS = {"dp": "replicas", "pp": "stages", "tp": "slices"}
GA, MICRO_BATCHES = "DP/gradient_aggr/intro_DP_GA.py", "PP/microbatches/intro_PP_microbatches.py"
DP, PP, COLLECTIVES = "DP/README.md", "PP/README.md", "collectives/README.md"
SCHEDULES, ALGORITHMS = "distlab.pipeline.schedules", "distlab.collectives.algorithms"


@dataclass(frozen=True)
class Trial:
    """A layout in which a training script is tried beside one process."""

    flags: str
    layout: Layout
    batch_size: int = 2  # sequences of each replica
    micro_batches: int = 1

    @property
    def replicas(self) -> int:
        return self.layout.get("dp", 1)

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{size} {WORDS[name] if size > 1 else WORDS[name][:-1]}" for name, size in self.layout.items()
        )
        return f"{sizes}, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"


@dataclass(frozen=True)
class Exercise:
    """An exercise, and how it is checked."""

    name: str
    title: str  # what one learns, after "Exercise dp-ga: "
    minutes: int  # how long it takes somebody who has read the chapter
    chapter: str  # the page to read first
    task: str  # paragraphs, divided by blank lines
    hints: tuple[str, ...]  # from a nudge to nearly the solution
    script: str = ""  # the chapter's script that it is made from; "" for functions alone
    file: str = ""  # the file's name if there is no script
    takes: tuple[str, ...] = ()  # functions and classes to write: of the script, or "module:name" of the library
    given: tuple[tuple[str, str], ...] = ()  # text that is replaced in the skeleton
    imports: tuple[str, ...] = ()  # that the solution needs, if the script does without
    keeps: tuple[str, ...] = ()  # methods of these classes that are given
    extra: str = ""  # a line after the definitions that are taken from the library
    functions: str = ""  # how those in `takes` are tried one by one: "schedule", "collective", "product", "case", "mpi"
    cases: tuple[str, ...] = ()  # functions that are tried, but not taken out
    unsolved: str = "not-written"  # the mistake of the skeleton
    trials: tuple[Trial, ...] = field(default_factory=tuple)
    averages_weights: bool = False  # the ranks' gradients are their own
    ranks_start_apart: bool = False  # try it with ranks whose weights differ from rank 0's at first

    @property
    def tried(self) -> tuple[str, ...]:
        """What is tried on its own before the script is trained."""
        return (self.cases or self.takes) if self.functions else ()

    @property
    def file_name(self) -> str:
        return self.file or self.script.rpartition("/")[2]


def _data_parallel(replicas: int, micro_batches: int) -> Trial:
    return Trial(f"--world-size {replicas}", {"dp": replicas}, micro_batches, micro_batches)


def _pipeline(schedule: str, stages: int, micro_batches: int) -> Trial:
    return Trial(f"--world-size {stages} --schedule {schedule}", {"pp": stages}, micro_batches, micro_batches)


MESSAGES = (
    "Messages are `endpoint.send(tensor, rank)` and `endpoint.recv(tensor, rank)`; a send may wait for its receiver."
)

_ALL = [
    Exercise(
        name="dp-ga",
        title="data parallelism, averaging gradients",
        minutes=20,
        chapter=f"{DP}, chapter 2",
        task="""Each rank has the same weights and its own sequences. After the backward passes of all micro-batches,
        `parameter.grad` holds the gradient of this rank's sequences. See to it that every rank updates its weights with
        the gradient of the global batch, which is the mean of the ranks' gradients.

        Given: `run.rank` and `run.world_size`; `traffic.all_reduce(tensor, "what it is", kind="gradients",
        op=ReduceOp.SUM).wait()`, which changes a tensor in place; `net.parameters()`. A loop over the parameters is
        a right solution. The chapter's own collects gradients in buckets and sends them during the backward pass,
        with `GradientBuckets`; you may use it, but need not.""",
        hints=(
            "The sum over the ranks of what, divided by what, is the gradient of the global batch? Each rank has the "
            "same number of sequences, so it is a plain mean.",
            "The average belongs after the last micro-batch's backward pass and before `optimizer.step()`: one "
            "all-reduce of each `parameter.grad` at that place.",
            "for parameter in net.parameters(): all-reduce `parameter.grad` with ReduceOp.SUM, and divide it by "
            "`run.world_size` (or divide the loss by it before the backward pass).",
        ),
        script=GA,
        given=(
            ("(loss / run.world_size).backward()  # so that the sum over the ranks is the average", "loss.backward()"),
        ),
        trials=(_data_parallel(3, 2), _data_parallel(2, 1)),
    ),
    Exercise(
        name="dp-wa",
        title="data parallelism, averaging weights",
        minutes=10,
        chapter=f"{DP}, chapter 3",
        task="""Each rank has updated its own copy of the weights with the gradient of its own sequences. See to it that
        all ranks go on with the mean of the copies. With plain SGD and an average after every step, this is the run of
        one process: the mean of w - lr * g is w - lr * (mean of g).

        Given: `weights`, a flat tensor that holds all parameters; they are views of it, so what changes `weights`
        in place changes the model. `traffic.all_reduce(tensor, "what it is", kind="weights")` starts an average
        over the ranks, in place; `.wait()` waits for it. `args.sync_every` says after how many steps to average.""",
        hints=(
            "Before or after `optimizer.step()`? And is it enough to compute the mean, or must the model hold it?",
            "One all-reduce of `weights` itself, not of a copy, after the update; and wait for it.",
            "Average where (step + 1) % args.sync_every == 0, and after the last step, or the ranks end with "
            "different weights.",
        ),
        script="DP/weight_aggr/intro_DP_WA.py",
        trials=(_data_parallel(3, 2),),
        averages_weights=True,
    ),
    Exercise(
        name="mydp",
        title="a wrapper that averages gradients in hooks of the backward pass",
        minutes=60,
        chapter=f"{DP}, chapter 4",
        task="""Write `MyDP`, a wrapper that makes the training loop of one process data-parallel, as torch's
        DistributedDataParallel does: after `loss.backward()`, every `parameter.grad` holds the mean over the ranks. All
        ranks start from rank 0's weights, whatever they had before.

        Given: `parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` when its gradient has been
        added to `parameter.grad`; `traffic.all_reduce(tensor, "what it is", kind="gradients")` starts an average in
        place, and `.wait()` waits for it; `torch.autograd.Variable._execution_engine.queue_callback(function)`, called
        in a hook, calls a function at the end of the backward pass; `broadcast_weights(model)` and `GradientBuckets`
        are the lab's. All ranks must start their all-reduces in the same order.

        With several micro-batches there are several backward passes in a step. Averages of averages are no problem:
        the mean of what is the same on all ranks is the same again.""",
        hints=(
            "Start simple: a hook for each parameter, which averages `parameter.grad` and waits for it. Backward "
            "passes of the same model fill gradients in the same order on all ranks.",
            "Forward only calls the model. The constructor copies rank 0's weights to all ranks, and registers a hook "
            "with every parameter that requires a gradient.",
            "def average(parameter): traffic.all_reduce(parameter.grad, 'a gradient', kind='gradients').wait(). For "
            "overlap, keep the transfers, and wait for them at the end of the backward pass.",
        ),
        script="DP/mydp/intro_DP_MyDP.py",
        takes=("distlab.parallel.data:MyDP",),
        trials=(_data_parallel(3, 2), _data_parallel(2, 1)),
        ranks_start_apart=True,
    ),
    Exercise(
        name="matmul",
        title="one matrix product on several ranks, by row and by reduction",
        minutes=30,
        chapter="primer/README.md, chapter 5",
        task="""Rank 0 has A (m, k) and B (k, n). Write two products. By row: each rank computes some rows of C = A B,
        from these rows of A and all of B, and rank 0 collects them. By reduction: each rank multiplies some columns of
        A by the same rows of B, and C is the sum of these products, which all ranks get.

        Given: `agree_on_shapes(A, B)` returns the matrices on rank 0, and on other ranks placeholders of the same
        shape; `scatter(matrix, dim, name)` returns this rank's piece of rank 0's matrix along a dimension;
        `gather_rows(rows, count, name)` collects rows on rank 0; `traffic.broadcast(tensor, "what", kind="B")`
        copies rank 0's tensor to all, in place, and `traffic.all_reduce(tensor, "what", kind="C",
        op=dist.ReduceOp.SUM)` adds up; `.wait()` waits for both. You need not handle whole numbers of 16 bits.""",
        hints=(
            "Both begin with `A, B = agree_on_shapes(A, B)`, on all ranks.",
            "By row: scatter A along dimension 0, broadcast B (into a contiguous clone, as the placeholder has no "
            "memory), multiply, gather the rows.",
            "By reduction: scatter A along dimension 1 and B along dimension 0, multiply, all-reduce the product.",
        ),
        script="primer/dist.py",
        takes=("par_matmul_by_row", "par_matmul_by_reduction"),
        functions="product",
    ),
    Exercise(
        name="pp-1f1b",
        title="a model in stages: activations forward, gradients back",
        minutes=40,
        chapter=f"{PP}, chapter 6",
        task="""Each rank is a stage: it holds some of the layers. Write what it does with one micro-batch `x`: receive
        activations from the stage before, compute, send its own on; then receive the gradient of what it has sent, run
        the backward pass, and send the gradient of what it had received. The first stage computes from token ids; the
        last has the loss.

        Given: `net`, this stage's layers; `stage` and `last`, its number and that of the last one; activations are
        (*x.shape, args.dmodel); `traffic.receive(tensor, "what", source=rank).wait()` fills a tensor;
        `traffic.send(tensor, "what", to=rank, kind="activations").wait()`. Put the loss of each micro-batch,
        divided by `args.micro_batches`, into `losses`.""",
        hints=(
            "What is received is a new tensor without a history. Its gradient is only computed if it requires one.",
            "`outputs.backward(gradient)` runs the backward pass from a gradient that came from the next stage; the "
            "last stage calls `loss.backward()`.",
            "Send `outputs.detach()` forward; send `inputs.grad` back, after the backward pass. Call "
            "`inputs.requires_grad_()` after the receive and before the forward pass.",
        ),
        script="PP/1F1B/intro_PP_1F1B.py",
        trials=(Trial("--world-size 3", {"pp": 3}, 2, 2),),
    ),
    Exercise(
        name="pp-gpipe",
        title="the order of GPipe",
        minutes=15,
        chapter=f"{PP}, chapter 7",
        task="""A schedule is the list of what a stage computes, in order: `Forward(stage, k)` and `Backward(stage, k)`
        of each micro-batch k. Write `gpipe`, which returns the list of one stage: all forward passes, then all backward
        passes.

        Given: the executor receives what an action needs and sends its results; you only decide the order. A stage
        can run `Forward(s, k)` when stage s - 1 has run `Forward(s - 1, k)`, and `Backward(s, k)` when stage s + 1
        has run its own. Compare with `python -m distlab.show_schedule gpipe --stages 3 --micro-batches 4`.""",
        hints=(
            "Write the list for 1 stage and 3 micro-batches on paper first. Does it depend on the stage?",
            "All stages have the same list, but for the number of the stage in each action.",
            "[Forward(stage, k) for k in range(micro_batches)] + the same with Backward.",
        ),
        script=MICRO_BATCHES,
        takes=(f"{SCHEDULES}:gpipe",),
        functions="schedule",
        trials=(_pipeline("gpipe", 3, 4),),
    ),
    Exercise(
        name="pp-dapple",
        title="the order of DAPPLE (1F1B), which keeps fewer activations",
        minutes=30,
        chapter=f"{PP}, chapter 7",
        task="""GPipe keeps the activations of all micro-batches until the first backward pass. Write `dapple`, which
        takes as long, but in which stage s of p keeps those of at most p - s micro-batches: a few forward passes, then
        one backward and one forward pass alternately, then the backward passes that are left.

        Given: `Forward(stage, k)` and `Backward(stage, k)`, as in the exercise pp-gpipe; micro-batches in order.
        There may be fewer micro-batches than stages. Compare with `python -m distlab.show_schedule dapple --stages
        3 --micro-batches 6`.""",
        hints=(
            "How many forward passes can the last stage run before it can run its first backward pass? And the one "
            "before it, if no stage is to be idle?",
            "Stage s of p runs min(p - s, m) forward passes ahead. From then on, each backward pass frees what the "
            "next forward pass keeps.",
            "ahead = min(stages - stage, micro_batches): F0 … F(ahead-1), then B0 F(ahead) B1 F(ahead+1) … until the "
            "forward passes are used up, then the remaining backward passes.",
        ),
        script=MICRO_BATCHES,
        takes=(f"{SCHEDULES}:dapple",),
        imports=("from distlab.pipeline.actions import Action, Backward, Forward",),
        functions="schedule",
        trials=(_pipeline("dapple", 3, 4),),
    ),
    Exercise(
        name="pp-zb",
        title="a zero-bubble schedule, ZB-H1",
        minutes=45,
        chapter=f"{PP}, chapter 7",
        task="""A backward pass has two parts. The stage before waits for one, the gradient of the inputs:
        `BackwardInput(stage, k)`. Nobody waits for the other, the gradient of the weights: `BackwardWeight(stage, k)`,
        which may run at any time after it. Write `zb_h1`, which is DAPPLE with weight gradients where a stage would be
        idle. No stage keeps more than the first one of DAPPLE: `stages` micro-batches. There are at least as many
        micro-batches as stages.

        Compare with `python -m distlab.show_schedule zb-h1 --stages 3 --micro-batches 6`.""",
        hints=(
            "Draw DAPPLE for 3 stages and 4 micro-batches with backward passes in two halves. Where is a stage idle?",
            "Stage r has r more I than W under way in the middle of its list; the W that are left come at the end.",
            "With p stages and m micro-batches, stage r runs: p-1-r times F; r times (F I); m-p+1 times (F I W); "
            "p-1-r times (I W); r times W.",
        ),
        script=MICRO_BATCHES,
        takes=(f"{SCHEDULES}:zb_h1",),
        imports=("from distlab.pipeline.actions import Action, BackwardInput, BackwardWeight, Forward",),
        functions="schedule",
        trials=(_pipeline("zb-h1", 3, 4),),
    ),
    Exercise(
        name="pp-executor",
        title="the executor that follows a schedule",
        minutes=90,
        chapter=f"{PP}, chapter 7",
        task="""Write `Pipeline.step`, which runs this worker's actions over the micro-batches of a step, whatever the
        schedule. For each action of `self.program`, in order: receive what it needs from other workers, call
        `action.run(stage, *received)`, and send what other workers need of the result.

        Given: `action.needs(len(self.owners))` lists the results that an action needs; those with another
        `result.stage` than `action.stage` come from that stage, in this order. `action.run` returns tensors by
        `result.kind`, for each `result` of `action.results`. `self._plan.takers[result]` is the action that needs a
        result; a result that is not in it stays. `self.owners[stage]` is the worker of a stage, `self._worker` this
        one, and `self.grid.rank_of(worker)` its rank. Two stages may be on one worker: hand the tensor over. Messages
        of one kind between two workers arrive in the order in which they were sent; give each its channel,
        `group=self._channels[sender, receiver, result.kind]`. What is received is (*micro_batch.shape, self.width).
        Keep the transfers of sends, and wait for them before the step ends.

        The lines that are given set up `self._stages`, by number: each action takes its stage.""",
        hints=(
            "A send must not wait for its receiver here: collect what `traffic.send` returns, and wait at the end. A "
            "receive may simply wait.",
            "For a result of another worker: tensor = torch.empty(*x.shape, self.width), then traffic.receive(tensor, "
            "str(result), source=self.grid.rank_of(owner), group=self._channels[owner, self._worker, "
            "result.kind]).wait()",
            "Keep results for stages of this worker in a dictionary by result, and pop them when they are needed. At "
            "the end, wait for all sends, and return the losses: [loss for stage in self._stages.values() for _, loss "
            "in sorted(stage.losses.items())].",
        ),
        script=MICRO_BATCHES,
        takes=("distlab.pipeline.executor:Pipeline",),
        keeps=("__init__", "_connect", "_warm_up"),
        trials=(_pipeline("dapple", 3, 4), _pipeline("zb-v", 2, 3)),
    ),
    Exercise(
        name="hybrid",
        title="pipelines that average their gradients",
        minutes=30,
        chapter="hybrid/README.md, chapter 8",
        task="""Several pipelines work side by side, each with its own sequences. The ranks that hold the same stage of
        different pipelines must update it with the same gradient, the mean over the pipelines. Average the gradients of
        `parameters` over the ranks of `dp_group`, after the last backward pass of the step.

        Given: `traffic.all_reduce(tensor, "what it is", kind="gradients", group=dp_group)` starts an average over
        those ranks only; `.wait()` waits for it. A loop over the parameters is right. The chapter's own uses
        `GradientBuckets`, which starts to send while the last backward pass still runs.""",
        hints=(
            "Over which ranks? Those of one pipeline hold different parameters; an average over all ranks would mix "
            "them.",
            "`pipeline.step` runs all backward passes of the step. The average belongs between it and the update.",
            "for parameter in parameters: traffic.all_reduce(parameter.grad, ..., group=dp_group).wait()",
        ),
        script="hybrid/intro_hybrid.py",
        trials=(Trial("--dp 2 --pp 2", {"dp": 2, "pp": 2}, 3, 3),),
    ),
    Exercise(
        name="deadlock",
        title="three deadlocks, and how to get out of them",
        minutes=30,
        chapter=f"{PP}, chapter 14",
        task="""Each of the three functions ends in a deadlock. Change them so that with `--cure` all ranks finish, and
        still exchange all that they should. `./launch.sh check` says who waits for whom, and at which line.

        Given: a send completes only when the other side receives. A collective completes only when all ranks take
        part. `all_stages(name, stages, micro_batches)` returns an order in which a pipeline can run.""",
        hints=(
            "both_send: what if one of the two neighbors receives first? order: which stages use another order than "
            "the others? skipped: who waits for whom in the last step?",
            "both_send: let the rank `lower + 1` receive first, then send. order: all stages need lists of one "
            "schedule.",
            "skipped: a rank without data must still take part, with zeros, in every collective that the others start.",
        ),
        script="PP/deadlock/intro_deadlock.py",
        given=(
            (
                """        if run.settings.cure and run.rank == lower + 1:  # one of the two receives first
            traffic.receive(theirs, "the tensor", source=other).wait()
            traffic.send(mine, "the tensor", to=other, kind="tensors").wait()
        else:
            traffic.send(mine, "the tensor", to=other, kind="tensors").wait()
            traffic.receive(theirs, "the tensor", source=other).wait()
""",
                """        traffic.send(mine, "the tensor", to=other, kind="tensors").wait()
        traffic.receive(theirs, "the tensor", source=other).wait()
""",
            ),
            (
                """    if not run.settings.cure:
        programs[0] =""",
                """    programs[0] =""",
            ),
            ("run.rank == last and not run.settings.cure:", "run.rank == last:"),
        ),
        cases=("both_send", "order", "skipped"),
        functions="case",
        unsolved="deadlock",
    ),
    Exercise(
        name="broadcast",
        title="broadcast by hand: from one rank, along a tree, along a chain",
        minutes=30,
        chapter=f"{COLLECTIVES}, chapter 9",
        task=f"""Write three broadcasts. Each copies the tensor of rank `src` into `tensor` on all other ranks, for any
        number of ranks. {MESSAGES}

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`. The tree takes as many rounds as log2 of the
        ranks, rounded up: in each round, every rank that has the tensor sends it to one that has not.""",
        hints=(
            "Number the ranks from the root: relative = (rank - src) % size. Then the root is always 0.",
            "The tree: after the round with distance d = 1, 2, 4, …, the relative ranks below 2d have the tensor.",
            "In the round with distance d, relative rank r < d sends to r + d if there is one; r with d <= r < 2d "
            "receives from r - d.",
        ),
        file="broadcast.py",
        takes=tuple(f"{ALGORITHMS}:broadcast_{name}" for name in ("naive", "tree", "ring")),
        functions="collective",
    ),
    Exercise(
        name="reduce",
        title="reduce by hand: to one rank, up a tree",
        minutes=30,
        chapter=f"{COLLECTIVES}, chapter 9",
        task=f"""Write two reduces. Each leaves the sum (or what `op` asks for) of all ranks' tensors in `tensor` on
        rank `dst`, and does not change the tensors of the other ranks. {MESSAGES}

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`; `reduce_function(op, tensor.dtype)` returns a
        function `combine(a, b, out=c)`; `scratch_buffer(tensor)` is memory to receive into.""",
        hints=(
            "The tree of a broadcast, from the leaves to the root: distances d = …, 4, 2, 1.",
            "In the round with distance d, relative rank r with d <= r < 2d sends what it has to r - d, and is done.",
            "A rank in the middle of the tree must not add to its own `tensor`, which belongs to the caller: it adds "
            "to a copy.",
        ),
        file="reduce.py",
        takes=tuple(f"{ALGORITHMS}:reduce_{name}" for name in ("naive", "tree")),
        functions="collective",
    ),
    Exercise(
        name="all-reduce",
        title="all-reduce by hand: through one rank, a tree, a butterfly",
        minutes=45,
        chapter=f"{COLLECTIVES}, chapter 9",
        task="""Write three all-reduces. Each changes `tensor` in place on every rank, to the sum (or what `op` asks
        for) of all ranks' tensors, for any number of ranks. Messages are `endpoint.send(tensor, rank)` and
        `endpoint.recv(tensor, rank)`.

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`; `reduce_function(op, tensor.dtype)` returns a
        function `combine(a, b, out=c)`; `scratch_buffer(tensor)` is memory to receive into; `reduce_tree` and the
        other functions that are imported. A send may wait until its receiver receives: two ranks that both send
        first wait forever. You need not handle tensors that are not contiguous.""",
        hints=(
            "Two of the three are a reduce to rank 0, followed by a broadcast from it.",
            "The butterfly, for 4 ranks: first 0 and 1, and 2 and 3, exchange what they have; then 0 and 2, and 1 and "
            "3. After each round, both have the same sum, of twice as many tensors.",
            "The butterfly: in round k, rank r and rank r XOR 2^k exchange what they have; the one with the smaller "
            "number sends first, the other receives first. If the world is not a power of two, the ranks beyond the "
            "largest one send their tensors to r - core before, and receive the result after.",
        ),
        file="all_reduce.py",
        takes=tuple(f"{ALGORITHMS}:allreduce_{name}" for name in ("naive", "tree", "butterfly")),
        functions="collective",
    ),
    Exercise(
        name="gather",
        title="gather by hand: to one rank, up a tree",
        minutes=40,
        chapter=f"{COLLECTIVES}, chapter 9",
        task=f"""Write two gathers. Each puts the tensor of every rank r into `gathered[r]` on rank `dst`; on other
        ranks `gathered` is None. {MESSAGES}

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`; `scratch_buffer(tensor, count=n)` is memory
        for n tensors, (n, *tensor.shape).""",
        hints=(
            "In a tree, a rank sends everything that it has collected in one message, to save latency.",
            "With relative = (rank - dst) % size: in the round with distance d = 1, 2, 4, …, relative ranks that are "
            "odd multiples of d send their d tensors (or fewer, at the end of the ranks) to relative - d.",
            "The root has the tensors in the order of relative numbers then: rotate them by `dst`.",
        ),
        file="gather.py",
        takes=tuple(f"{ALGORITHMS}:gather_{name}" for name in ("naive", "tree")),
        functions="collective",
    ),
    Exercise(
        name="ring",
        title="all-gather and reduce-scatter around a ring",
        minutes=45,
        chapter=f"{COLLECTIVES}, chapter 9",
        task="""Write two collectives in which every rank sends to the next one and receives from the one before, at the
        same time, size - 1 times. After `allgather_ring`, `gathered[r]` is rank r's tensor, on every rank. After
        `reducescatter_ring`, `scattered` on rank r is block r of the sum of all ranks' `tensor` (size, *shape of
        `scattered`), which does not change. One after the other, the two are the all-reduce with the fewest bytes.

        Given: `shift(data, received, endpoint)` sends `data` to the next rank and receives from the one before into
        `received`; `reduce_function(op, dtype)` returns a function `combine(a, b, out=c)`; `scratch_buffer(tensor,
        number)` is memory, another for each number.""",
        hints=(
            "All-gather: in each turn, pass on what you have just received. In turn t, whose tensor is that?",
            "Reduce-scatter: a partial sum of block b starts at rank b + 1, and ends at rank b. Each rank on its way "
            "adds its own block b.",
            "All-gather, turn t: send row (rank - t) % size, receive row (rank - t - 1) % size. Reduce-scatter, turn "
            "t: send the partial sum, receive one, and add the own block (rank - t - 2) % size to it.",
        ),
        file="ring.py",
        takes=tuple(f"{ALGORITHMS}:{name}_ring" for name in ("allgather", "reducescatter")),
        functions="collective",
    ),
    Exercise(
        name="mpi",
        title="what naive tensor parallelism exchanges, over MPI",
        minutes=40,
        chapter="mpi/README.md, chapter 10",
        task="""Ranks that share a model hold parts of each layer. Write who holds which part, and what the ranks
        gather, cut and add up around W_o, forward and backward. The docstrings say what each function returns.

        Given: `comm.Split(key=..., color=...)` returns the communicator of the ranks with the same color, in the
        order of their keys; `comm.Allgather(src, dst)` puts all ranks' arrays one after another into `dst`;
        `comm.Reduce_scatter(src, dst, op=MPI.SUM)` adds up all ranks' `src`, and gives rank r its r-th part. MPI
        sends memory, not elements: arrays must be contiguous (`np.ascontiguousarray`). Errors for wrong arguments
        are left out of the check. It needs no mpirun, but mpi4py.""",
        hints=(
            "In a grid, ranks that share a model follow each other: the place in it is rank % mp_size.",
            "Gathered parts lie one after another along a new first axis. Which axis must they be joined along?",
            "np.concatenate(parts, axis=-1) joins what Allgather has put into np.empty((mp_size, *part.shape)). For "
            "the backward pass, np.stack(np.split(grad, mp_size, axis=-1)) has one block for each rank.",
        ),
        script="mpi/model/func_impl.py",
        takes=(
            "get_info",
            "naive_collect_forward_input",
            "naive_collect_forward_output",
            "naive_collect_backward_output",
            "naive_collect_backward_x",
        ),
        functions="mpi",
    ),
    Exercise(
        name="tp",
        title="layers in slices: Megatron's f and g",
        minutes=30,
        chapter="TP/README.md, chapter 11",
        task="""Each rank holds a slice of every layer: some columns of the first matrix of a pair, and the rows of the
        second that belong to them. Write the two functions at the ends of a pair. `copy_to` (f in the paper) passes the
        input on to the slices; `reduce_from` (g) adds up what the slices give. Each is half of the work in the forward
        pass and half in the backward pass.

        Given: `tp_group.all_reduce(x, what)` returns the sum of the ranks' `x`; `what` is FORWARD or BACKWARD.
        `torch.autograd.Function` lets you write both passes. The docstrings say what each function does forward;
        which gradient follows from that?""",
        hints=(
            "The input goes to all ranks' slices. Its gradient is the sum of what comes back from all of them.",
            "The output is a sum. The gradient of a sum is the gradient of each of its terms.",
            "Write a torch.autograd.Function whose forward returns x.view_as(x) and whose backward returns the "
            "all-reduced gradient: that is f. The other way round it is g.",
        ),
        script="TP/intro_TP.py",
        takes=("distlab.parallel.tp_group:copy_to", "distlab.parallel.tp_group:reduce_from"),
        imports=(
            "from distlab.parallel import tp_group as library",
            "from distlab.parallel.tp_group import BACKWARD, FORWARD",
        ),
        extra="library.copy_to, library.reduce_from = copy_to, reduce_from  # the layers use yours",
        trials=(Trial("--world-size 2", {"tp": 2}, 3, 3), Trial("--world-size 4", {"tp": 4}, 2, 1)),
    ),
    Exercise(
        name="tp-loss",
        title="the loss from slices of the logits",
        minutes=60,
        chapter="TP/README.md, chapter 11",
        task="""Each rank has the logits of its own part of the vocabulary. Compute the mean cross-entropy without
        gathering them: for each token it is log(sum of exp(logits)) minus the logit of the next token. The sum needs
        one number a token of each rank, and a rank has the logit of the next token only if it is in its part.

        Given: `TPGroup("the loss", VOCABULARY, group).all_reduce(tensor, FORWARD, op)` returns the ranks' tensors
        added up (or with ReduceOp.MAX their maximum), outside of autograd. `own_rows(ids, vocab_size, tp_group)`
        returns the rows of tokens in this rank's part, and a mask of tokens that are elsewhere. The last position
        has no next token. The gradient of the logits is softmax - one_hot, this rank's part of both, divided by the
        number of targets: write a `torch.autograd.Function`.""",
        hints=(
            "Subtract the greatest logit first, over all ranks, so that exp cannot overflow.",
            "Two sums over the ranks: of exp(logits - greatest), and of the next token's logit, which is 0 where "
            "another rank has it.",
            "Save probabilities = exp(logits - greatest) / total for the backward pass. Its result is (probabilities "
            "- one_hot) * grad / number of targets, 0 in the last position; one_hot is only on the rank that has the "
            "token.",
        ),
        script="TP/intro_TP.py",
        takes=("distlab.parallel.vocabulary:vocabulary_parallel_loss",),
        imports=(
            "from torch.distributed import ReduceOp",
            "from distlab.parallel.tp_group import FORWARD",
        ),
        trials=(Trial("--world-size 2", {"tp": 2}, 2, 2),),
    ),
]

EXERCISES = {exercise.name: exercise for exercise in _ALL}
