"""The exercises on matrices and layers, whole and in slices."""

from distlab_exercises.catalogue.exercise import Exercise, Trial

EXERCISES = [
    Exercise(
        name="matmul",
        title="one matrix product on several ranks, by row and by reduction",
        minutes=30,
        chapter="primer/README.md, chapter 8",
        task="""Rank 0 has A (m, k) and B (k, n). Write two products. By row: each rank computes some rows of C = A B,
        from these rows of A and all of B, and rank 0 collects them. By reduction: each rank multiplies some columns of
        A by the same rows of B, and C is the sum of these products, which all ranks get.

        Given: `agree_on_shapes(A, B)` returns the matrices on rank 0, and on other ranks placeholders of the same
        shape; `scatter(matrix, dim, name)` returns this rank's piece of rank 0's matrix along a dimension;
        `gather_rows(rows, count, name)` collects rows on rank 0; `dist.broadcast(tensor, 0)` copies rank 0's tensor to
        all, in place, and `dist.all_reduce(tensor)` adds up.""",
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
        name="mlp",
        title="a classifier of linear layers, and the step that trains it",
        minutes=20,
        chapter="primer/README.md, chapter 8",
        task="""Write the classifier `MLP` and one step of its training, on one process. `DP/ddp/mlp_ddp.py` and
        `DP/mydp/mlp_mydp.py` make the same loop parallel.

        `config` has d_in, d_hidden, n_classes and n_layers: linear layers without biases, d_in wide at first, d_hidden
        between the layers, n_classes at the end. There is a tanh between two layers, none after the last one. Weights
        are kaiming-uniform for tanh: `nn.init.kaiming_uniform_(parameter, nonlinearity="tanh")`. The model returns
        (logits, loss); the loss is the mean cross-entropy, or None without targets.

        In `train_step`: compute the loss of this batch, from `points` and `labels`, and update the weights once.""",
        hints=(
            "n_layers layers have n_layers + 1 widths: d_in, n_layers - 1 times d_hidden, n_classes.",
            "Put the layers into an nn.ModuleList, so that their weights are parameters of the model. "
            "F.cross_entropy takes logits, not probabilities.",
            "The step: _, loss = model(points, labels); optimizer.zero_grad(); loss.backward(); optimizer.step().",
        ),
        script="primer/mlp.py",
        takes=("MLP", "train_step"),
        functions="classifier",
    ),
    Exercise(
        name="tp",
        title="layers in slices: Megatron's f and g",
        minutes=30,
        chapter="TP/README.md, chapter 11",
        task="""Each rank holds a slice of every layer: some columns of the first matrix of a pair, and the rows of the
        second that belong to them. Write the two functions at the ends of a pair, each with its forward and its
        backward pass. `CopyTo` (f in the paper) passes the input on to the slices; `ReduceFrom` (g) adds up the outputs
        of the slices.

        Given: `dist.all_reduce(tensor)` adds up the ranks' tensors, in place: give it a contiguous copy
        (`x.contiguous().clone()`), as others may still need the tensor. The docstrings say what each function does
        forward; which gradient follows from that?""",
        hints=(
            "The input goes to all ranks' slices. Its gradient is the sum of what comes back from all of them.",
            "The output is a sum. The gradient of a sum is the gradient of each of its terms.",
            "f: forward returns x.view_as(x), backward returns the all-reduced gradient. g is the other way round.",
        ),
        script="TP/intro_TP.py",
        takes=("CopyTo", "ReduceFrom"),
        functions="conjugate",
        trials=(Trial({"tp": 2}, 3, 3), Trial({"tp": 4}, 2, 1)),
    ),
    Exercise(
        name="tp-layers",
        title="layers in slices as modules: by columns, by width, in pairs",
        minutes=40,
        chapter="TP/README.md, chapter 12",
        task="""Write three modules that stand for whole ones, but of which each rank holds a slice: `ColWiseLinear`, a
        linear layer split by its outputs; `Embedding`, split by its width; and `ColRowLinearPair`, two linear layers
        with something between them, the first split by its outputs and the second by its inputs. Every rank has the
        whole input and gets the whole output. The docstrings have the shapes. There are no biases.

        Given: `pcomm.Duplication.apply(x)` (f), `pcomm.AllReduce.apply(x)` (g) and `pcomm.AllGather.apply(x)`, whose
        backward passes are in TP/sentiment/pcomm.py; `keep_shard(layer, dim)`, which replaces the weight of a layer by
        this rank's shard. All ranks draw the whole weights from the same seed: build whole layers of torch, inside
        `with unmoved_generator():`, then keep a shard.""",
        hints=(
            "A weight of nn.Linear is (outputs, inputs): its outputs are dimension 0. That of nn.Embedding is (vocab, "
            "width).",
            "What goes into slices that compute different things passes through f first. Terms of a sum are added up "
            "by g. Token ids have no gradient.",
            "AllGather(linear(f(x))); AllGather(embedding(tokens)); g(second(between(first(f(x))))). In the pair, "
            "`super().__init__` builds the whole layers, and for_shards(module) prepares what is between them.",
        ),
        script="TP/sentiment/tp_model.py",
        takes=("ColWiseLinear", "Embedding", "ColRowLinearPair"),
        functions="layer",
    ),
    Exercise(
        name="tp-loss",
        title="the loss from slices of the logits",
        minutes=60,
        chapter="TP/README.md, chapter 11",
        task="""Each rank has the logits of its own part of the vocabulary. Compute the mean cross-entropy without
        gathering them: for each token it is log(sum of exp(logits)) minus the logit of the next token. The sum needs
        one number a token of each rank, and a rank has the logit of the next token only if it is in its part.

        Given: `TPGroup("the loss", VOCABULARY, axis or all_ranks("tp"))`, whose `all_reduce(tensor, FORWARD, op)`
        returns the ranks' tensors added up (or with ReduceOp.MAX their maximum), outside of autograd.
        `own_rows(ids, vocab_size, tp_group)` returns the rows of tokens in this rank's part, and a mask of tokens that
        are elsewhere. The last position has no next token. The gradient of the logits is softmax - one_hot, this rank's
        part of both, divided by the number of targets: write a `torch.autograd.Function`.""",
        hints=(
            "Subtract the greatest logit first, over all ranks, so that exp cannot overflow.",
            "Two sums over the ranks: of exp(logits - greatest), and of the next token's logit, which is 0 where "
            "another rank has it.",
            "Save probabilities = exp(logits - greatest) / total for the backward pass. Its result is (probabilities "
            "- one_hot) * grad / number of targets, 0 in the last position; one_hot is only on the rank that has the "
            "token.",
        ),
        script="TP/intro_TP_styles.py",
        takes=("distlab.parallel.vocabulary:vocabulary_parallel_loss",),
        imports=(
            "from torch.distributed import ReduceOp",
            "from distlab.parallel.tp_group import FORWARD",
        ),
        trials=(Trial({"tp": 2}, 2, 2),),
        loss_numbers=3,
    ),
]
