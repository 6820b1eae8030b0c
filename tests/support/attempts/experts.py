"""Attempts at the exercises on experts that ranks share."""

from support.exercises_attempts import Attempt

BACK = "Exchange.apply(grad, ctx.received, ctx.sent)"

ATTEMPTS = [
    Attempt("ep-exchange", "", "also of a rank that has none"),
    Attempt(
        "ep-exchange",
        "wrong-rows",
        "not in their order",
        changes=(("outputs[order.argsort()]", "outputs"),),
    ),
    Attempt(
        "ep-exchange",
        "wrong-rows",
        "an expert that is not theirs",
        changes=(("compute(arrived[order],", "compute(arrived,"),),
    ),
    Attempt("ep-exchange", "scaled", "9 times as large", changes=((BACK, f"dist.get_world_size() * {BACK}"),)),
    Attempt(
        "ep-exchange",
        "wrong-counts",
        "rows each; it should be",
        changes=(("from_ranks.sum(dim=0).tolist())", "to_ranks.sum(dim=0).tolist())"),),
    ),
]
