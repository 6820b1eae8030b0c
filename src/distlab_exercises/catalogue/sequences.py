"""The exercises on sequences that ranks share."""

from distlab_exercises.catalogue.exercise import Exercise, Trial

CHAPTER = "CP/README.md, chapter 21"

EXERCISES = [
    Exercise(
        name="cp-labels",
        title="the labels of a part of a sequence",
        minutes=15,
        chapter=CHAPTER,
        task="""Each rank holds some positions of every sequence, and has the whole sequences of token ids. Write which
        token each of its positions predicts, and which positions predict nothing.

        Given: `ids`, (batch, seq), and `own`, this rank's positions. Return two tensors (batch, own positions): token
        ids, and bool.""",
        hints=(
            "Position t predicts token t + 1. Where is the label of a rank's last position?",
            "Look the labels up in the whole sequence. Only the very last position of a sequence predicts nothing.",
            "ids.roll(-1, dims=1)[:, own], and own == ids.shape[1] - 1, expanded to the batch.",
        ),
        script="CP/intro_CP.py",
        takes=("labels",),
        functions="labels",
        trials=(Trial({"cp": 2}, 2, 1), Trial({"cp": 4}, 2, 2)),
    ),
    Exercise(
        name="cp-merge",
        title="attention to two blocks of keys, put together",
        minutes=30,
        chapter=CHAPTER,
        task="""A query attends to some keys, and has the softmax's mean of their values (`out`) and the logarithm of
        the sum of the exponentials (`total`). It also has both for another block of keys (`block` and `block_total`).
        Change `out` and `total`, in place, to those of all keys together.

        Given: `F.sigmoid`, `F.logsigmoid` and all of torch. Totals may be as large as 1,000, so that their exponentials
        are infinite; `block_total` is -inf where a query sees no key of the block. `out` is (batch, heads, queries,
        head_dim), `total` is (batch, heads, queries).""",
        hints=(
            "The weight of the block among all keys is exp(block_total) / (exp(total) + exp(block_total)).",
            "That weight is the sigmoid of block_total - total. The new total is log(exp(total) + exp(block_total)).",
            "out -= weight * (out - block), with one more dimension for the weight; total -= logsigmoid(total - "
            "block_total), in which both totals are the old ones.",
        ),
        takes=("simplellm.attention_blocks:merge",),
        imports=("import torch",),
        functions="merge",
    ),
    Exercise(
        name="cp-ring",
        title="the forward pass of a zigzag ring",
        minutes=45,
        chapter=CHAPTER,
        task="""Keys and values travel around the ranks. Compute what this rank's queries take from all blocks that they
        see, and the logarithm of the sum of the exponentials.

        Given: `around(ring, torch.stack([k, v]))` yields (step, block, visiting) for each step of the ring: `visiting`
        are the keys and values that are here, (2, batch, key heads, positions, head_dim), first the rank's own;
        `block.seen` are two slices, of the queries and of the keys that belong together, or None if no query sees the
        block; `block.mask` says which of these keys each query attends to. `attention_block(q, k, v, mask)` returns
        output and log-sum for some queries and keys; `merge(out, total, block, block_total)` puts two together, in
        place.""",
        hints=(
            "In step 0, every query sees at least one key: the result of `attention_block` is where you begin.",
            "Later, only some queries see a block: `out[:, :, queries]` is a view, which `merge` changes in place.",
            "Positions are the last dimension but one: k_seen, v_seen = visiting[..., keys, :]. Go around the whole "
            "ring also where block.seen is None: other ranks wait for what passes through here.",
        ),
        takes=("distlab.parallel.ring_attention:attend_around",),
        functions="ring",
    ),
]
