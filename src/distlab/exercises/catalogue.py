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
    functions: str = ""  # how the functions in `takes` are tried one by one: "schedule", "collective"; "" for not
    trials: tuple[Trial, ...] = field(default_factory=tuple)
    averages_weights: bool = False  # the ranks' gradients are their own

    @property
    def file_name(self) -> str:
        return self.file or self.script.rpartition("/")[2]


def _data_parallel(replicas: int, micro_batches: int) -> Trial:
    return Trial(f"--world-size {replicas}", {"dp": replicas}, micro_batches, micro_batches)


def _pipeline(schedule: str, stages: int, micro_batches: int) -> Trial:
    return Trial(f"--world-size {stages} --schedule {schedule}", {"pp": stages}, micro_batches, micro_batches)


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
        op=ReduceOp.SUM).wait()`, which changes a tensor in place; `net.parameters()`. A loop over the parameters is a
        right solution. The chapter's own collects gradients in buckets and sends them during the backward pass, with
        `GradientBuckets`; you may use it, but need not.""",
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
        name="pp-gpipe",
        title="the order of GPipe",
        minutes=15,
        chapter=f"{PP}, chapter 7",
        task="""A schedule is the list of what a stage computes, in order: `Forward(stage, k)` and `Backward(stage, k)`
        of each micro-batch k. Write `gpipe`, which returns the list of one stage: all forward passes, then all backward
        passes.

        Given: the executor receives what an action needs and sends its results; you only decide the order. A stage can
        run `Forward(s, k)` when stage s - 1 has run `Forward(s - 1, k)`, and `Backward(s, k)` when stage s + 1 has run
        its own. Compare with `python -m distlab.show_schedule gpipe --stages 3 --micro-batches 4`.""",
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

        Given: `Forward(stage, k)` and `Backward(stage, k)`, as in the exercise pp-gpipe; micro-batches in order. There
        may be fewer micro-batches than stages. Compare with `python -m distlab.show_schedule dapple --stages 3
        --micro-batches 6`.""",
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
        name="all-reduce",
        title="all-reduce by hand: through one rank, a tree, a butterfly",
        minutes=45,
        chapter=f"{COLLECTIVES}, chapter 9",
        task="""Write three all-reduces. Each changes `tensor` in place on every rank, to the sum (or what `op` asks
        for) of all ranks' tensors, for any number of ranks. Messages are `endpoint.send(tensor, rank)` and
        `endpoint.recv(tensor, rank)`.

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`; `reduce_function(op, tensor.dtype)` returns a
        function `combine(a, b, out=c)`; `scratch_buffer(tensor)` is memory to receive into; `reduce_tree` and the other
        functions that are imported. A send may wait until its receiver receives: two ranks that both send first wait
        forever. You need not handle tensors that are not contiguous.""",
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
]

EXERCISES = {exercise.name: exercise for exercise in _ALL}
