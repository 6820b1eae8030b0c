"""The exercises on experts that ranks share."""

from distlab_exercises.catalogue.exercise import Exercise

EXERCISES = [
    Exercise(
        name="ep-exchange",
        title="rows that travel to their experts and back",
        minutes=45,
        chapter="EP/README.md, chapter 22",
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
        takes=("Exchange", "through_ranks"),
        cases=("through_ranks",),
        functions="passage",
    ),
]
