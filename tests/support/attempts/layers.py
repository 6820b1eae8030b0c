"""Attempts at the exercises on matrices and layers, whole and in slices."""

from support.exercises_attempts import Attempt

LINEAR = "self.linear(pcomm.Duplication.apply(x))"
ALL_REDUCED = "        grad = grad.contiguous().clone()\n        dist.all_reduce(grad)\n"


def left_out(what: str) -> dict[str, str]:
    """A change of the lesson: one of its two sums is missing."""
    sends = f'        with named("the {what} of a layer", "layer {what}"):\n            dist.all_reduce(total)\n'
    return {sends: ""}


ATTEMPTS = {
    "tp": [
        Attempt("g-adds-again", "(g)", changes={"        return grad\n": f"{ALL_REDUCED}        return grad\n"}),
        Attempt(
            "g-missing",
            "forward: the result is the rank's own: the ranks' were not added up (g)",
            changes=left_out("activations"),
        ),
        Attempt(
            "g-averages",
            "forward: the result is the mean of the ranks', not their sum (g)",
            changes={
                'layer activations"):\n            dist.all_reduce(total)\n': (
                    'layer activations"):\n            dist.all_reduce(total)\n        total /= dist.get_world_size()\n'
                )
            },
        ),
        Attempt(
            "in-place",
            "CopyTo changes what it is given",
            changes={"total = grad.clone(memory_format=torch.contiguous_format)": "total = grad"},
        ),
        Attempt(
            "g-wrong",
            "forward: the result is not the sum of the ranks' (g)",
            changes={
                'layer activations"):\n            dist.all_reduce(total)': (
                    'layer activations"):\n            dist.all_reduce(total, dist.ReduceOp.MAX)'
                )
            },
        ),
        Attempt("forward", "something else than its input", changes={"x.view_as(x)": "2 * x"}),
        Attempt("g-backward", "not passed on as it is", changes={"        return grad\n": "        return grad / 2\n"}),
        Attempt("f-missing", "(f)", changes=left_out("gradients")),
    ],
    "tp-layers": [
        Attempt(
            "weight-gradient",
            "the gradient of linear.weight is not that of its slice",
            changes={LINEAR: f"3 * {LINEAR} - 2 * {LINEAR}.detach()"},
            only="ColWiseLinear",
        ),
        Attempt(
            "g-adds-again",
            "the gradient of linear.weight is 2 times too large",
            changes={LINEAR: f"2 * {LINEAR} - {LINEAR}.detach()"},
            only="ColWiseLinear",
        ),
        Attempt(
            "no-gradient",
            "linear.weight gets no gradient",
            changes={LINEAR: "nn.functional.linear(pcomm.Duplication.apply(x), self.linear.weight.detach())"},
            only="ColWiseLinear",
        ),
        Attempt(
            "other-weights",
            "linear.weight is not this rank's slice of the weight that one process draws",
            changes={
                "keep_shard(self.linear, 0)\n": ("keep_shard(self.linear, 0)\n        self.linear.weight.data *= 2\n")
            },
            only="ColWiseLinear",
        ),
        Attempt(
            "no-gradient",
            "the input gets no gradient",
            changes={LINEAR: "self.linear(x.detach())"},
            only="ColWiseLinear",
        ),
        Attempt(
            "wrong-slice",
            "rank 0: linear.weight is the slice of rank 1",
            changes={"chunk(pcomm.tp_degree, dim)[pcomm.tp_rank]": "chunk(pcomm.tp_degree, dim)[-1 - pcomm.tp_rank]"},
            only="ColWiseLinear",
        ),
        Attempt(
            "slice-drawn",
            "rank 1: linear.weight was drawn as a slice: ranks with one seed draw the same slice",
            changes={
                "nn.Linear(in_dim, out_dim, bias=False)": "nn.Linear(in_dim, out_dim // pcomm.tp_degree, bias=False)",
                "        keep_shard(self.linear, 0)\n": "",
            },
            only="ColWiseLinear",
        ),
        Attempt(
            "dropout",
            "drops other numbers than in one process: for_shards(module) prepares what is between them",
            changes={"self.between[number] = for_shards(module)": "self.between[number] = module"},
            only="ColRowLinearPair",
        ),
        Attempt(
            "f-missing",
            "the gradient of the input is not the sum",
            changes={LINEAR: "self.linear(x)"},
            only="ColWiseLinear",
        ),
        Attempt(
            "output",
            "the output is not the sum of the ranks' terms (g)",
            changes={
                "pcomm.AllReduce.apply(super().forward(pcomm.Duplication.apply(x)))\n        return y\n\n\nFeed": (
                    "super().forward(pcomm.Duplication.apply(x))\n        return y\n\n\nFeed"
                )
            },
            only="ColRowLinearPair",
        ),
        Attempt(
            "shape",
            "mod.weight is (5, 4), and its slice is (10, 2)",
            changes={"keep_shard(self.mod, 1)": "keep_shard(self.mod, 0)"},
            only="Embedding",
        ),
        Attempt(
            "parameters",
            "the layer's parameters are linear.weight, linear.bias; it should have one, its weight, and no biases",
            changes={"nn.Linear(in_dim, out_dim, bias=False)": "nn.Linear(in_dim, out_dim)"},
            only="ColWiseLinear",
        ),
        Attempt(
            "output",
            "the output has the ranks' slices in the wrong order",
            changes={"(self.mod(tokens))": "(self.mod(tokens)).roll(self.mod.weight.shape[1], -1)"},
            only="Embedding",
        ),
    ],
    "mlp": [
        Attempt(
            "loss",
            "its loss is not the mean cross-entropy of the logits",
            changes={
                "return logits, None if targets is None else F.": (
                    "return logits, targets if targets is None else 2 * F."
                )
            },
            only="MLP",
        ),
        Attempt(
            "loss",
            "without targets, the loss should be None",
            changes={"return logits, None if": "return logits, logits.sum() if"},
            only="MLP",
        ),
        Attempt(
            "logits",
            "its logits lack the tanh between the layers",
            changes={"data = torch.tanh(layer(data))": "data = layer(data)"},
            only="MLP",
        ),
        Attempt(
            "steps",
            "the weights were updated 6 times in 3 steps",
            changes={"    optimizer.step()\n": "    optimizer.step()\n    optimizer.step()\n"},
            only="train_step",
        ),
        Attempt(
            "not-cleared",
            "step 1: the gradient of weight 0 still contains the gradient of the step before: it was not set to zero",
            changes={"    optimizer.zero_grad()\n": ""},
            only="train_step",
        ),
        Attempt(
            "logits",
            "tanh after the last layer",
            changes={"logits = last(data)": "logits = torch.tanh(last(data))"},
            only="MLP",
        ),
        Attempt(
            "",
            "in each step, the gradient of this batch",
            changes={"_, loss = model(points, labels)\n    opt": "_, loss = model(points, targets=labels)\n    opt"},
            only="train_step",
        ),
        Attempt(
            "",
            "in each step, the gradient of this batch",
            changes={
                "_, loss = model(points, labels)\n    opt": (
                    "logits, _ = model(points)\n    loss = F.cross_entropy(logits, labels)\n    opt"
                )
            },
            only="train_step",
        ),
        Attempt(
            "layers", "its parameters are [(40, 24)", changes={"(config.n_layers - 1)": "config.n_layers"}, only="MLP"
        ),
        Attempt(
            "first-weights",
            "layer 0: its",
            changes={
                '  nn.init.kaiming_uniform_(parameter, nonlinearity="tanh")': ("  nn.init.kaiming_uniform_(parameter)")
            },
            only="MLP",
        ),
        Attempt(
            "bias",
            "it has biases",
            changes={"bias=False": "bias=True", "in self.parameters():": "in [layer.weight for layer in self.layers]:"},
            only="MLP",
        ),
        Attempt(
            "update",
            "step 0: the weights were not updated by -lr times their gradients",
            changes={"    optimizer.step()\n": "    optimizer.step()\n    model.layers[0].weight.data *= 1.1\n"},
            only="train_step",
        ),
    ],
    "matmul": [
        Attempt(  # a rank that has no columns of A sends nothing
            "",
            "the product of one process",
            changes={
                "        dist.all_reduce(C)\n": (
                    "        some = dist.new_group(range(min(A.shape[1], dist.get_world_size())))\n"
                    "        dist.reduce(C, 0, group=some)\n        dist.broadcast(C, 0)\n"
                )
            },
            only="by_reduction",
        ),
        Attempt("no-product", "rank 0 returned no matrix", changes={"    return gather_rows": "    gather_rows"}),
        Attempt(
            "wrong-product",
            "and should have the sum of all",
            changes={"C = scatter(A": "C = 2 * scatter(A"},
            only="by_reduction",
        ),
        Attempt(
            "wrong-product",
            "rank 2 has something else than a sum of the ranks' products",  # the other ranks have the right one
            changes={"    return C\n": "    return C + (dist.get_rank() == 2)\n"},
            only="by_reduction",
        ),
        Attempt(
            "no-share",
            "rank 1 sends 0 bytes, and its product, a term of the sum, has 120",
            changes={
                '    C = scatter(A, 1, "A") @ scatter(B, 0, "B")': (
                    "    C = A @ B\n    dist.broadcast(C, 0)\n    return C\n   "
                )
            },
            only="by_reduction",
        ),
        Attempt(
            "wrong-rows",
            "has other rows from row 2 on, which rank 1 computes",
            changes={"gather_rows(rows_of_A @ B,": "gather_rows((dist.get_rank() + 1) * rows_of_A @ B,"},
            only="by_row",
        ),
        Attempt(
            "no-share",
            "rank 2 sends 0 bytes, and its rows of the product has 40",  # the others do their share
            changes={
                '    return gather_rows(rows_of_A @ B, len(A), "C")': (
                    "    if dist.get_rank() == 1:\n        dist.send(rows_of_A @ B, 0)\n"
                    "    if dist.get_rank() == 0:\n"
                    "        dist.recv(torch.empty(-(-(len(A) - 1) // 3), B.shape[1]), 1)\n"
                    "    return A @ B if dist.get_rank() == 0 else None"
                )
            },
            only="by_row",
        ),
    ],
    "tp-loss": [
        Attempt(
            "logits-sent",
            "numbers of each token; 3 are enough",
            changes={
                '    tp_group = TPGroup("the loss", VOCABULARY, axis)\n': (
                    '    tp_group = TPGroup("the loss", VOCABULARY, axis)\n'
                    "    tp_group.all_gather(logits.detach(), FORWARD, 2, vocab_size)\n"
                )
            },
        ),
    ],
}
