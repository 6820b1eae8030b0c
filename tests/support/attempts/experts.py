"""Attempts at the exercises on experts that ranks share."""

from support.exercises_attempts import Attempt

BACK = "Exchange.apply(grad, ctx.received, ctx.sent)"

ADD = "dist.all_reduce(parameter.grad)"
DIVIDED = "torch._foreach_div(torch._foreach_mul(norms, norms), counted)"

ATTEMPTS = {
    "ep-exchange": [
        Attempt("wrong-rows", "not in their order", changes={"outputs[as_arrived]": "outputs"}),
        Attempt("wrong-rows", "an expert that is not theirs", changes={"compute(arrived[order],": "compute(arrived,"}),
        Attempt(
            "shape",
            "rank 1: the outputs are (1, 4), and should be (0, 4)",  # only on the rank that has no rows
            changes={
                "outputs[as_arrived], received, sent)": (
                    "outputs[as_arrived], received, sent) if len(rows) else rows.new_zeros(1, 4)"
                )
            },
        ),
        Attempt(
            "wrong-counts",
            "the experts of rank 0 get [5, 3] rows each; it should be [3, 5]",
            changes={"from_ranks.sum(dim=0).tolist())": "from_ranks.sum(dim=0).flip(0).tolist())"},
        ),
    ],
    "ep-backward": [
        Attempt(
            "scaled",
            "rank 0: the gradients of rows are 9 times as large",
            changes={BACK: f"dist.get_world_size() * {BACK}"},
        ),
        Attempt("no-gradient", "backward must return it", changes={BACK: "None"}),
        Attempt("wrong-gradient", "are not theirs", changes={BACK: f"{BACK} + 1"}),
    ],
    "ep-permutation": [
        Attempt("", "also if there are none", body="return order.argsort()"),
        Attempt("shape", "0 rows: it should be", body="return order.argsort() if len(order) else order.new_zeros(1)"),
        Attempt("the-same", "once more", body="return order"),
        Attempt("the-same", "rank 0: here", body='print("here")\nreturn order'),
        Attempt("wrong-order", "not in their old order", body="return order.flip(0)"),
    ],
    "ep-scale": [
        Attempt("not-added", "rank 0: a gradient of a dense weight is 1, where", body="pass"),
        Attempt("averaged", "is 2, where", changes={ADD: "dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)"}),
        Attempt("experts-mixed", "other weights", changes={'".experts." not in name and ': ""}),
        Attempt("wrong-dense", "it should be 6", changes={ADD: f"{ADD}\n                parameter.grad += 1"}),
        Attempt(
            "expert-scaled",
            "which already is the sum, and is 90",
            changes={
                f"{ADD}\n": (f"{ADD}\n        elif parameter.grad is not None:\n            parameter.grad *= 3\n")
            },
        ),
    ],
    "ep-norm": [
        Attempt("wrong-norm", "the root of the sum", changes={DIVIDED: "torch._foreach_div(norms, counted)"}),
        Attempt(
            "counted-again",
            "rank 0: the norm is 9.592, and should be 9.165: a weight that 3 ranks",
            changes={DIVIDED: "torch._foreach_mul(norms, norms)"},
        ),
        Attempt(
            "own-norm",
            "the experts of other ranks are missing",
            body=(
                "grads = [parameter.grad for parameter in parameters if parameter.grad is not None]\n"
                "return NormSum(sum(grad.double().square().sum() for grad in grads), None)"
            ),
        ),
    ],
}
