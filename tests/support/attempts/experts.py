"""Attempts at the exercises on experts that ranks share."""

from support.exercises_attempts import Attempt

BACK = "Exchange.apply(grad, ctx.received, ctx.sent)"

ADD = "dist.all_reduce(parameter.grad)"
DIVIDED = "torch._foreach_div(torch._foreach_mul(norms, norms), counted)"

ATTEMPTS = [
    Attempt(
        "ep-exchange",
        "wrong-rows",
        "not in their order",
        changes=(("outputs[as_arrived]", "outputs"),),
    ),
    Attempt(
        "ep-exchange",
        "wrong-rows",
        "an expert that is not theirs",
        changes=(("compute(arrived[order],", "compute(arrived,"),),
    ),
    Attempt(
        "ep-exchange",
        "shape",
        "rank 1: the outputs are (1, 4), and should be (0, 4)",  # only on the rank that has no rows
        changes=(
            (
                "outputs[as_arrived], received, sent)",
                "outputs[as_arrived], received, sent) if len(rows) else rows.new_zeros(1, 4)",
            ),
        ),
    ),
    Attempt("ep-backward", "scaled", "9 times as large", changes=((BACK, f"dist.get_world_size() * {BACK}"),)),
    Attempt("ep-permutation", "", "also if there are none", body="return order.argsort()"),
    Attempt(
        "ep-permutation",
        "shape",
        "0 rows: it should be",
        body="return order.argsort() if len(order) else order.new_zeros(1)",
    ),
    Attempt("ep-permutation", "the-same", "once more", body="return order"),
    Attempt("ep-permutation", "the-same", "rank 0: here", body='print("here")\nreturn order'),
    Attempt("ep-permutation", "wrong-order", "not in their old order", body="return order.flip(0)"),
    Attempt("ep-scale", "not-added", "is 1, where", body="pass"),
    Attempt(
        "ep-scale", "averaged", "is 2, where", changes=((ADD, "dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)"),)
    ),
    Attempt("ep-scale", "experts-mixed", "other weights", changes=(('".experts." not in name and ', ""),)),
    Attempt(
        "ep-scale", "wrong-dense", "it should be 6", changes=((ADD, f"{ADD}\n                parameter.grad += 1"),)
    ),
    Attempt(
        "ep-scale",
        "expert-scaled",
        "which already is the sum, and is 90",
        changes=((f"{ADD}\n", f"{ADD}\n        elif parameter.grad is not None:\n            parameter.grad *= 3\n"),),
    ),
    Attempt("ep-norm", "wrong-norm", "the root of the sum", changes=((DIVIDED, "torch._foreach_div(norms, counted)"),)),
    Attempt("ep-backward", "no-gradient", "backward must return it", changes=((BACK, "None"),)),
    Attempt("ep-backward", "wrong-gradient", "are not theirs", changes=((BACK, f"{BACK} + 1"),)),
    Attempt(
        "ep-norm",
        "counted-again",
        "counts 3 times",
        changes=((DIVIDED, "torch._foreach_mul(norms, norms)"),),
    ),
    Attempt(
        "ep-norm",
        "own-norm",
        "the experts of other ranks are missing",
        body=(
            "grads = [parameter.grad for parameter in parameters if parameter.grad is not None]\n"
            "return NormSum(sum(grad.double().square().sum() for grad in grads), None)"
        ),
    ),
    Attempt(
        "ep-exchange",
        "wrong-counts",
        "the experts of rank 0 get [5, 3] rows each; it should be [3, 5]",
        changes=(("from_ranks.sum(dim=0).tolist())", "from_ranks.sum(dim=0).flip(0).tolist())"),),
    ),
]
