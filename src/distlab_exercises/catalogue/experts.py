"""The exercises on experts that ranks share."""

from distlab_exercises.catalogue.exercise import Exercise

CHAPTER = "EP/README.md, chapter 22"
EXERCISES = [
    Exercise(
        name="ep-permutation",
        title="the permutation that undoes a permutation",
        minutes=10,
        chapter=CHAPTER,
        task="""Rows are sorted by expert: `sorted_rows = rows[order]`. Afterwards, every output must return to where
        its row was. Return the permutation `inverse`, so that `sorted_rows[inverse]` are the rows in their old order.

        Given: `order`, (rows,), int64, in which each number from 0 to rows - 1 occurs once; there may be no rows.""",
        hints=(
            "Row order[i] went to place i. So where must place order[i] of the result be read from?",
            "inverse[order[i]] = i, for all i at once: torch.arange has the numbers i.",
        ),
        takes=("simplellm.experts:inverse_of",),
        functions="permutation",
    ),
    Exercise(
        name="ep-backward",
        title="the backward pass of an exchange of rows",
        minutes=15,
        chapter=CHAPTER,
        task="""`Exchange` sends the first `sent[0]` rows to rank 0, and so on, and returns the `received[r]` rows of
        each rank r. Write its backward pass: given the gradients of the rows that arrived, return those of the rows
        that were sent. The exchange computes nothing: it only moves rows.

        Given: `grad`, (rows that arrived, dmodel); `ctx.sent` and `ctx.received`, which forward has kept. Return a
        gradient for each argument of forward, with None for the lists.""",
        hints=(
            "The gradient of a row is on the rank to which the row went. Where must it be?",
            "An exchange of rows brings them back: who sends how many to whom now?",
            "Exchange.apply(grad, …) itself, with the two lists swapped.",
        ),
        script="EP/intro_EP.py",
        takes=("Exchange",),
        keeps=("forward",),
        cases=("through_ranks",),
        functions="dispatch",
    ),
    Exercise(
        name="ep-exchange",
        title="rows that travel to their experts and back",
        minutes=45,
        chapter=CHAPTER,
        task="""Each rank holds some of the experts. Bring every row to the rank of its expert, let the experts compute,
        and bring the outputs back to where the rows were. Gradients go the opposite way.

        Given: `rows`, (rows, dmodel), sorted by expert; `counts`, how many of them belong to each expert of all ranks,
        (experts,); and `compute(rows, counts)`, which applies the experts of this rank to rows that are sorted by
        expert, given how many belong to each. Rank r holds experts r * n to r * n + n - 1, n on each rank. Return the
        outputs in the order of `rows`. `Exchange.apply(rows, sent, received)` sends the first sent[0] rows to rank 0,
        and so on, and returns the received[r] rows of each rank r; its backward pass returns their gradients.""",
        hints=(
            "Nobody knows how many rows will come: exchange the counts first, (ranks, experts of a rank).",
            "dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes) takes a number of rows for "
            "each rank. The backward pass is the same exchange with the two lists swapped.",
            "Rows arrive by source, and from each source by expert. Repeat the experts' numbers for each source, each "
            "as often as its count says; a stable argsort of them is the order that `compute` needs, and the argsort "
            "of that order undoes it.",
        ),
        script="EP/intro_EP.py",
        takes=("through_ranks",),
        functions="dispatch",
    ),
    Exercise(
        name="ep-scale",
        title="the scale of the gradients of experts",
        minutes=15,
        chapter=CHAPTER,
        task="""Each rank divides its mean loss by the number of ranks, so that all losses add up to that of
        the whole batch. The backward passes have just ended. Make every gradient that of the whole batch's loss.

        Given: `parameters`, by name; those of experts have `.experts.` in their names, and this rank alone holds
        them. `parameter.grad` is to be changed in place, and is None where nothing was computed.
        `dist.all_reduce(tensor)` adds up over the ranks in place.""",
        hints=(
            "The rows of an expert come from all ranks. Whose losses is its gradient a sum of?",
            "A dense weight's gradient on a rank is that of the rank's share of the loss. What do the shares make?",
            "All-reduce the gradients of all other weights, and leave those of experts as they are.",
        ),
        script="EP/intro_EP.py",
        takes=("add_up",),
        functions="scale",
    ),
    Exercise(
        name="ep-norm",
        title="one norm of all gradients, on every rank",
        minutes=20,
        chapter=CHAPTER,
        task="""Gradients are clipped by the norm of the whole model's gradient. Some weights are on all ranks, others,
        such as those of experts, are on some or on one. Write `sum_norm`, so that each weight counts once, whoever
        holds it, and all ranks come to the same norm.

        Given: `parameters`, with their `.grad`, which may be None;
        `holders(parameter, grid.axis(*grid.layout)).size`, the number of ranks that hold a parameter;
        `dist.all_reduce(squared, async_op=True)`, which starts to add up a number over all ranks, and returns what
        `NormSum` will wait for. Return `NormSum(squared, transfer)`: its norm is the root of `squared` after the
        transfer.""",
        hints=(
            "Squares can be added up, norms cannot.",
            "If n ranks hold a weight, the sum over the ranks has its square n times; how much should each add?",
            "Add up parameter.grad.double().square().sum() / holders(…).size, and all-reduce the total. All ranks "
            "must call the all-reduce, also one without gradients.",
        ),
        takes=("distlab.parallel.clipping:sum_norm",),
        functions="norm",
    ),
]
