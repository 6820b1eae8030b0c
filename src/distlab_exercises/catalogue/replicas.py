"""The exercises on replicas: they average gradients or weights, and shard the state that they hold."""

from distlab_exercises.catalogue.exercise import Exercise, Trial

DP = "DP/README.md"

EXERCISES = [
    Exercise(
        name="dp-ga",
        title="data parallelism, averaging gradients",
        minutes=20,
        chapter=f"{DP}, chapter 2",
        task="""Each rank has the same weights and its own sequences. After the backward passes of all micro-batches,
        `gradients` holds the gradient of this rank's sequences: a flat tensor, of which every `parameter.grad` is a
        view, so what changes `gradients` in place changes them. Write `average`, so that every rank updates its weights
        with the gradient of the global batch, which is the mean of the ranks' gradients.

        Given: `dist.get_rank()` and `dist.get_world_size()`; `dist.all_reduce(tensor, op)`, which changes a tensor in
        place, with ReduceOp.SUM (the default) or ReduceOp.AVG.""",
        hints=(
            "The sum over the ranks of what, divided by what, is the gradient of the global batch? Each rank has the "
            "same number of sequences, so it is a plain mean.",
            "`average` is called after the last micro-batch's backward pass and before `optimizer.step()`: one "
            "all-reduce of `gradients` itself, not of a copy.",
            "All-reduce `gradients` with ReduceOp.SUM, and divide it by `dist.get_world_size()`, in place.",
        ),
        script="DP/gradient_aggr/intro_DP_GA.py",
        given=(
            (
                "import torch.distributed as dist\n",
                "import torch.distributed as dist\nfrom torch import Tensor\nfrom torch.distributed import ReduceOp\n",
            ),
            ("from distlab.comm.names import named\n", ""),
            (
                """        with named("the gradients", "gradients"):  # in messages, and in the table of bytes
            dist.all_reduce(gradients)
        gradients /= run.world_size
""",
                "        average(gradients)\n",
            ),
            (
                "def train(",
                """def average(gradients: Tensor) -> None:
    \"\"\"Replace this rank's gradients, (elements,), by their mean over the ranks.\"\"\"
    raise NotImplementedError("write average")


def train(""",
            ),
        ),
        trials=(Trial({"dp": 3}, 2, 2), Trial({"dp": 2}, 1, 1)),
    ),
    Exercise(
        name="dp-wa",
        title="data parallelism, averaging weights",
        minutes=10,
        chapter=f"{DP}, chapter 3",
        task="""Each rank has updated its own copy of the weights with the gradient of its own sequences. Write
        `average_if_due`, so that all ranks go on with the mean of the copies. With plain SGD and an average after every
        step, this is the run of one process: the mean of w - lr * g is w - lr * (mean of g).

        Given: `weights`, a flat tensor that holds all parameters; they are views of it, so what changes `weights`
        in place changes the model. `dist.all_reduce(tensor, ReduceOp.AVG)` takes the mean over the ranks, in place.
        `args.sync_every` says after how many steps to average; after the last step, average in any case.""",
        hints=(
            "Is it enough to compute the mean, or must the model hold it?",
            "One all-reduce of `weights` itself, not of a copy. The call stands after the update already.",
            "Average where (step + 1) % args.sync_every == 0, and after the last step, or the ranks end with "
            "different weights.",
        ),
        script="DP/weight_aggr/intro_DP_WA.py",
        takes=("average_if_due",),
        trials=(Trial({"dp": 3}, 2, 2), Trial({"dp": 2}, 1, settings={"sync_every": 2})),
        weights_only=True,
    ),
    Exercise(
        name="mydp",
        title="a wrapper that averages gradients in hooks of the backward pass",
        minutes=60,
        chapter=f"{DP}, chapter 7",
        task="""Write `MyDP`, a wrapper that makes the training loop of one process data-parallel, as torch's
        DistributedDataParallel does: after `loss.backward()`, every `parameter.grad` holds the mean over the ranks. All
        ranks start from rank 0's weights, whatever they had before.

        Given: `parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` when its gradient has been
        added to `parameter.grad`; `dist.all_reduce(tensor, ReduceOp.AVG)` takes the mean in place; with `async_op=True`
        it only starts, and returns a handle, whose `.wait()` waits for the end;
        `torch.autograd.Variable._execution_engine.queue_callback(function)`, called in a hook, calls a function at the
        end of the backward pass; `broadcast_weights(model)` and `GradientBuckets` are the lab's. All ranks must
        start their all-reduces in the same order.

        With several micro-batches there are several backward passes in a step. Averages of averages are no problem:
        the mean of what is the same on all ranks is the same again.""",
        hints=(
            "Start simple: a hook for each parameter, which averages `parameter.grad` and waits for it. Backward "
            "passes of the same model fill gradients in the same order on all ranks.",
            "Forward only calls the model. The constructor copies rank 0's weights to all ranks, and registers a hook "
            "with every parameter that requires a gradient.",
            "def average(parameter): dist.all_reduce(parameter.grad, ReduceOp.AVG). For overlap, with async_op=True, "
            "keep what it returns, and wait for all of it at the end of the backward pass.",
        ),
        script="DP/mydp/intro_DP_MyDP.py",
        takes=("distlab.parallel.data:MyDP",),
        imports=("import torch.distributed as dist", "from torch.distributed import ReduceOp"),
        trials=(Trial({"dp": 3}, 2, 2), Trial({"dp": 2}, 1, 1)),
        ranks_start_apart=True,
    ),
    Exercise(
        name="dp-zero",
        title="ZeRO 1: each replica updates its range of the weights",
        minutes=45,
        chapter=f"{DP}, chapter 14",
        task="""Adam keeps two numbers for each weight, the same on every replica. Instead, let rank r own the r-th of n
        equal ranges of the weights, and keep an optimizer for that range alone. So it needs the mean gradient of its
        own range only; and after the update, all ranks need all ranges. Write the three functions.

        Given: `weights` and `gradients`, flat tensors of all parameters and of their gradients, which are views of
        them; both are filled up with zeros, so that their length divides among the ranks. The optimizer updates what
        `own_range(weights)` returns, with the gradients in `own_range(gradients)`.
        `dist.reduce_scatter_tensor(own, parts, op)` combines the ranks' `parts` (elements,) and gives rank r the r-th
        range in `own` (elements / ranks,), which may be a view of `parts`;
        `dist.all_gather_into_tensor(parts, own)` collects every rank's `own` in `parts`.""",
        hints=(
            "What `own_range` returns must share the memory of the flat tensor: a slice of it, or one of its chunks.",
            "own_range: flat.chunk(ranks)[rank]. An all-gather may write into the tensor of which it sends a range.",
            "reduce_gradients: reduce-scatter `gradients` into its own range, with ReduceOp.AVG, or with SUM and a "
            "division. gather_weights: all-gather the own range of `weights` into `weights`.",
        ),
        script="DP/zero/intro_DP_ZeRO.py",
        takes=("own_range", "reduce_gradients", "gather_weights"),
        trials=(Trial({"dp": 2}, 2, 2), Trial({"dp": 3}, 1, 1)),
        weights_only=True,
        shares_out=True,
    ),
    Exercise(
        name="checkpoint",
        title="checkpoints by global names, which any layout can read",
        minutes=40,
        chapter="docs/checkpoints.md, chapter 16",
        task="""Ranks that hold different stages and slices write one checkpoint together, and ranks of any other layout
        read it. So each tensor in it needs a name and a place that do not depend on who holds it. Write `as_held`,
        which says where in the whole tensor this rank's slice lies, and `state_of`, which names all that a rank holds:
        its parameters, and what its optimizer keeps of them. The same two functions are used to read: what they
        return is overwritten in place, so it must be the memory of the model and the optimizer, not a copy.

        Given: `placement_of(parameter).slices` has (dim, start, length of the whole along dim, axes) for each dimension
        along which the parameter is a slice; here, at most one.
        `Slice(tensor, whole, [TensorBlock(offsets, sizes)])` is a tensor with its place in a whole of shape `whole`.
        `optimizer.state.get(parameter, {})` has the optimizer's tensors by name; those of Adam are `exp_avg` and
        `exp_avg_sq`, sliced like the parameter, and `step`, one number. The optimizer's names in a checkpoint are
        `optimizer.<parameter>.<name>`. The state of torch's generator, which `set_rng_state` gets, is
        `random.<rank>.cpu`. You may leave out `placement.flat` and `is_per_rank`, and GPUs.""",
        hints=(
            "optimizer.state_dict() numbers the parameters of one rank: number 0 of two stages are two parameters. "
            "Names must come from `parameters`.",
            "as_held: the whole has the parameter's shape, except along `dim`. A tensor of another shape than the "
            "parameter, such as `step`, has no slices.",
            "as_held: whole = list(tensor.shape); whole[dim] = length; offsets = [0] * tensor.dim(); offsets[dim] = "
            "start. state_of: tensors[name] = as_held(parameter.detach(), parameter), and the same for each value in "
            "the optimizer's state.",
        ),
        takes=("distlab.checkpoints.slices:as_held", "distlab.checkpoints.saving:state_of"),
        functions="checkpoint",
    ),
]
