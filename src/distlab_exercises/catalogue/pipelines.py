"""The exercises on pipelines: stages, schedules, their executor, and what makes ranks wait for each other."""

from distlab_exercises.catalogue.exercise import Exercise, Trial

PP, MICRO_BATCHES = "PP/README.md", "PP/microbatches/intro_PP_microbatches.py"
NEWER = "PP/schedules/intro_PP_schedules.py"
SCHEDULES = "distlab.pipeline.schedules"

EXERCISES = [
    Exercise(
        name="pp-1f1b",
        title="a model in stages: activations forward, gradients back",
        minutes=40,
        chapter=f"{PP}, chapter 9",
        task="""Each rank is a stage: it holds some of the layers. Write `pass_through`, which does a stage's work on
        one micro-batch `x`: receive activations from the previous stage, compute, send its own activations on; then
        receive the gradient of the activations it sent, run the backward pass, and send the gradient of the activations
        it received. The first stage computes from token ids; the last has the loss.

        Given: `net`, this stage's layers; the stage's number is its rank, `dist.get_rank()`; activations are
        (*x.shape, width); `dist.recv(tensor, rank)` fills a tensor with what `dist.send(tensor, rank)` sends. The loss
        is `causalLLMLoss(outputs, x, vocabulary)`, times `share`; the logits are (batch, seq, vocabulary).""",
        hints=(
            "What is received is a new tensor without a history. Its gradient is only computed if it requires one.",
            "`outputs.backward(gradient)` runs the backward pass from a gradient that came from the next stage; the "
            "last stage calls `loss.backward()`.",
            "Send `outputs.detach()` forward; send `inputs.grad` back, after the backward pass. Call "
            "`inputs.requires_grad_()` after the receive and before the forward pass.",
        ),
        script="PP/1F1B/intro_PP_1F1B.py",
        takes=("pass_through",),
        trials=(Trial({"pp": 3}, 2, 2),),
    ),
    Exercise(
        name="pp-gpipe",
        title="the order of GPipe",
        minutes=15,
        chapter=f"{PP}, chapter 10",
        task="""A schedule is the list of what a stage computes, in order: `Forward(stage, k)` and `Backward(stage, k)`
        of each micro-batch k. Write `gpipe`, which returns the list of one stage: all forward passes, then all backward
        passes.

        Given: `run_program` in the script receives what an action needs and sends its results; you only decide the
        order. A stage can run `Forward(s, k)` when stage s - 1 has run `Forward(s - 1, k)`, and
        `Backward(s, k)` when stage s + 1 has run its own. Compare with
        `./launch.sh show-schedule gpipe --stages 3 --micro-batches 4`.""",
        hints=(
            "Write the list for 1 stage and 3 micro-batches on paper first. Does it depend on the stage?",
            "All stages have the same list, but for the number of the stage in each action.",
            "[Forward(stage, k) for k in range(micro_batches)] + the same with Backward.",
        ),
        script=MICRO_BATCHES,
        takes=(f"{SCHEDULES}:gpipe",),
        functions="schedule",
        trials=(Trial({"pp": 3}, 4, 4, {"schedule": "gpipe"}),),
    ),
    Exercise(
        name="pp-dapple",
        title="the order of DAPPLE (1F1B), which keeps fewer activations",
        minutes=30,
        chapter=f"{PP}, chapter 10",
        task="""GPipe keeps the activations of all micro-batches until the first backward pass. Write `dapple`, which
        takes as long as GPipe, but in which stage s of p keeps those of at most p - s micro-batches: a few forward
        passes, then one backward and one forward pass alternately, then the backward passes that are left.

        Given: `Forward(stage, k)` and `Backward(stage, k)`, as in the exercise pp-gpipe; micro-batches in order.
        There may be fewer micro-batches than stages. Compare with `./launch.sh show-schedule dapple --stages
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
        trials=(Trial({"pp": 3}, 4, 4, {"schedule": "dapple"}),),
    ),
    Exercise(
        name="pp-zb",
        title="a zero-bubble schedule, ZB-H1",
        minutes=45,
        chapter=f"{PP}, chapter 10",
        task="""A backward pass has two parts. The stage before waits for one, the gradient of the inputs:
        `BackwardInput(stage, k)`. Nobody waits for the other, the gradient of the weights: `BackwardWeight(stage, k)`,
        which may run at any time after it. Write `zb_h1`, which is DAPPLE with weight gradients where a stage would be
        idle. No stage keeps more than the first one of DAPPLE: `stages` micro-batches. There are at least as many
        micro-batches as stages.

        Compare with `./launch.sh show-schedule zb-h1 --stages 3 --micro-batches 6`.""",
        hints=(
            "Draw DAPPLE for 3 stages and 4 micro-batches with backward passes in two halves. Where is a stage idle?",
            "Stage r has r more I than W under way in the middle of its list; the W that are left come at the end.",
            "With p stages and m micro-batches, stage r runs: p-1-r times F; r times (F I); m-p+1 times (F I W); "
            "p-1-r times (I W); r times W.",
        ),
        script=NEWER,
        takes=(f"{SCHEDULES}:zb_h1",),
        imports=("from distlab.pipeline.actions import Action, BackwardInput, BackwardWeight, Forward",),
        functions="schedule",
        trials=(Trial({"pp": 3}, 4, 4, {"schedule": "zb-h1"}),),
    ),
    Exercise(
        name="pp-executor",
        title="the loop that follows a schedule",
        minutes=45,
        chapter=f"{PP}, chapter 10",
        task="""A program is the list of a stage's passes, for example [F0, F1, B0, F2, B1, B2]. Write `run_program`,
        which runs one, whatever its order. For a forward pass: take the token ids or receive activations, compute, send
        the result on, and keep what the backward pass needs. For a backward pass: receive the gradient of what was
        sent, run autograd, and send the gradient of what was received.

        Given: `action.micro_batch` is the number of an action's micro-batch, and `isinstance(action, Forward)` tells
        its kind; the stage's number is its rank. Activations are (*x.shape, width). `groups` has two groups: give the
        first to `dist.isend` and `dist.recv` for activations, the second for gradients, as in `dist.recv(tensor, rank,
        group)`. The loss of a micro-batch is `causalLLMLoss(outputs, x, vocabulary)`, divided by their number; return
        the list of them, on the last stage. In the schedule dapple, two neighbors send to each other at the same
        time.""",
        hints=(
            "`dist.send` waits until the other side receives. If both neighbors wait, neither receives: collect what "
            "`dist.isend` returns, and wait for all of it at the end. A receive may simply wait.",
            "Keep a micro-batch's inputs and outputs in a dictionary by its number; the backward pass pops them. "
            "Received activations need `requires_grad_()` before the forward pass.",
            "On the last stage, keep the loss as the outputs: `outputs.backward()` then needs no gradient. On others, "
            "receive into torch.empty_like(outputs), then outputs.backward(gradient). Send outputs.detach() on, and "
            "inputs.grad back.",
        ),
        script=MICRO_BATCHES,
        takes=("run_program",),
        trials=(Trial({"pp": 3}, 4, 4, {"schedule": "dapple"}), Trial({"pp": 2}, 3, 3, {"schedule": "gpipe"})),
    ),
    Exercise(
        name="hybrid",
        title="pipelines that average their gradients",
        minutes=15,
        chapter="hybrid/README.md, chapter 13",
        task="""Several pipelines work side by side, each with its own sequences. The ranks that hold the same stage of
        different pipelines must update it with the same gradient, the mean over the pipelines. Write `average`, which
        is called after the last backward pass of a step, and leaves that mean in `gradients`.

        Given: `gradients`, a flat tensor with the gradients of this rank's stages; every `parameter.grad` is a view of
        it. `dist.all_reduce(tensor, op, group)` combines the tensors of a group's ranks, in place; op is ReduceOp.SUM
        or ReduceOp.AVG, and an axis of the layout, such as `replicas`, has a `size` and a `group`.""",
        hints=(
            "Over which ranks? Those of one pipeline hold different parameters; an average over all ranks would mix "
            "them.",
            "Every rank of `replicas.group` calls `average` once in each step, with gradients of the same size.",
            "dist.all_reduce(gradients, ReduceOp.AVG, replicas.group)",
        ),
        script="hybrid/intro_hybrid.py",
        takes=("average",),
        trials=(Trial({"dp": 2, "pp": 2}, 3, 3),),
    ),
    Exercise(
        name="deadlock",
        title="three deadlocks, and how to get out of them",
        minutes=30,
        chapter=f"{PP}, chapter 17",
        task="""Each of the three functions ends in a deadlock. Change them so that with `--cure` all ranks finish, and
        still exchange all that they should. `./launch.sh check` says who waits for whom, and at which line.

        Given: a send completes only when the other side receives. A collective completes only when all ranks take
        part. `all_stages(name, stages, micro_batches)` returns an order in which a pipeline can run.""",
        hints=(
            "both_send: what if one of the two neighbors receives first? order: which stages use another order than "
            "the others? skipped: who waits for whom in the last step?",
            "both_send: let the higher rank of the two receive first, then send. order: all stages need lists of one "
            "schedule.",
            "skipped: a rank without data must still take part, with zeros, in every collective that the others start.",
        ),
        script="PP/deadlock/intro_deadlock.py",
        given=(
            (
                """            if run.settings.cure and run.rank > other:  # one of the two receives first
                dist.recv(theirs, other)
                dist.send(mine, other)
            else:
                dist.send(mine, other)
                dist.recv(theirs, other)
""",
                """            dist.send(mine, other)
            dist.recv(theirs, other)
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
    ),
]
