"""The exercises on pipelines: stages, schedules, their executor, and what makes ranks wait for each other."""

from distlab_exercises.catalogue.exercise import Exercise, Trial

PP, MICRO_BATCHES = "PP/README.md", "PP/microbatches/intro_PP_microbatches.py"
SCHEDULES = "distlab.pipeline.schedules"


def _pipeline(schedule: str, stages: int, micro_batches: int, stages_of_each: int = 1) -> Trial:
    settings: dict[str, int | str] = {"world_size": stages, "schedule": schedule}
    return Trial({"pp": stages}, settings, micro_batches, micro_batches, stages_of_each)


EXERCISES = [
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
        (*x.shape, args.dmodel); `dist.recv(tensor, rank)` fills a tensor with what `dist.send(tensor, rank)` sends.
        Put the loss of each micro-batch, divided by `args.micro_batches`, into `losses`.""",
        hints=(
            "What is received is a new tensor without a history. Its gradient is only computed if it requires one.",
            "`outputs.backward(gradient)` runs the backward pass from a gradient that came from the next stage; the "
            "last stage calls `loss.backward()`.",
            "Send `outputs.detach()` forward; send `inputs.grad` back, after the backward pass. Call "
            "`inputs.requires_grad_()` after the receive and before the forward pass.",
        ),
        script="PP/1F1B/intro_PP_1F1B.py",
        trials=(Trial({"pp": 3}, {"world_size": 3}, 2, 2),),
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
        schedule. For each action, in order: receive what it needs from other workers, call
        `action.run(part, *received)`, and send what other workers need of the result.

        Given: `self.program`, this worker's actions in order. `action.needs(len(self.owners))` are the results that an
        action needs; those of other stages, in their order, are what `run` takes. `action.results` are those that it
        computes; those in `self._plan.takers` are needed by other stages, and `action.run` returns them by
        `result.kind`. `way = self.links.ways[result]` is how a result comes from another worker, or goes there: from
        the rank `way.sender` to the rank `way.receiver`, in `way.group`, so that messages of other kinds do not mix
        with it. A result that has no way is for another stage of this worker: hand the tensor over. What is received is
        (*micro_batch.shape, self.width). Keep what `dist.isend` returns, and wait for all of it before the step ends.

        A step begins with a part for each of this worker's stages and each micro-batch, in which actions keep what
        later ones need: part = MicroBatch(self._stages[stage], micro_batch, share), with share = 1 /
        len(micro_batches) if all are of one size. Then action.prepare(part) for each action.""",
        hints=(
            "A send must not wait for its receiver here: collect what `dist.isend` returns, and wait at the end. A "
            "receive may simply wait.",
            "For a result of another worker: tensor = torch.empty(*micro_batch.shape, self.width), then "
            "dist.recv(tensor, way.sender, way.group).",
            "Keep results for stages of this worker in a dictionary by result, and pop them when they are needed. At "
            "the end, wait for all sends, and return the losses: [part.loss for part in parts if part.loss is not "
            "None], in the order of the micro-batches.",
        ),
        script=MICRO_BATCHES,
        takes=("distlab.pipeline.executor:Pipeline",),
        keeps=("__init__", "follow", "_checked", "_use", "_warm_up"),
        imports=("import torch.distributed as dist", "from distlab.pipeline.activations import MicroBatch"),
        trials=(_pipeline("dapple", 3, 4), _pipeline("zb-v", 2, 3, stages_of_each=2)),
    ),
    Exercise(
        name="hybrid",
        title="pipelines that average their gradients",
        minutes=30,
        chapter="hybrid/README.md, chapter 8",
        task="""Several pipelines work side by side, each with its own sequences. The ranks that hold the same stage of
        different pipelines must update it with the same gradient, the mean over the pipelines. Average the gradients of
        `parameters` over the ranks of `replicas.group`, after the last backward pass of the step.

        Given: `dist.all_reduce(tensor, ReduceOp.AVG, replicas.group)` takes the mean over those ranks only, in place. A
        loop over the parameters is right. The chapter's own uses `GradientBuckets`, which starts to send while the last
        backward pass still runs.""",
        hints=(
            "Over which ranks? Those of one pipeline hold different parameters; an average over all ranks would mix "
            "them.",
            "`pipeline.step` runs all backward passes of the step. The average belongs between it and the update.",
            "for parameter in parameters: dist.all_reduce(parameter.grad, ReduceOp.AVG, replicas.group)",
        ),
        script="hybrid/intro_hybrid.py",
        trials=(Trial({"dp": 2, "pp": 2}, {"dp": 2, "pp": 2}, 3, 3),),
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
                """            if run.settings.cure and run.rank == lower + 1:  # one of the two receives first
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
        unsolved="deadlock",
    ),
]
