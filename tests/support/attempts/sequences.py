"""Attempts at the exercises on sequences that ranks share."""

from support.exercises_attempts import Attempt

MERGED = "merge(out[:, :, queries], total[:, :, queries], *taken)"
WEIGHT = "F.sigmoid(difference)"

ATTEMPTS = {
    "cp-labels": [
        Attempt(
            "within-part",
            "positions 0 to 7 of 24: the label of position 7 is this part's first token",
            changes={"ids.roll(-1, dims=1)[:, own]": "ids[:, own].roll(-1, dims=1)"},
        ),
        Attempt(
            "ignores",
            "position 7 predicts nothing, but the sequence goes on",
            changes={"own == ids.shape[1] - 1": "own == own[-1]"},
        ),
        Attempt("counts-the-end", "position 23 has no next token", changes={"own == ids.shape[1] - 1": "own < 0"}),
        Attempt(
            "counts-the-end",
            "position 23 has no next token",
            changes={"is_last.expand(len(ids), -1)": "torch.stack([is_last, *[own < 0] * (len(ids) - 1)])"},
        ),
        Attempt("ignores", "that have a next", changes={"own == ids.shape[1] - 1": "(own == 19) | (own == 23)"}),
        Attempt("own-token", "position 0 predicts its own", changes={"ids.roll(-1, dims=1)": "ids"}),
        Attempt("wrong-labels", "not the tokens that follow", changes={"roll(-1,": "roll(-2,"}),
    ],
    "cp-merge": [
        Attempt(
            "",
            "output and log-sum as of all keys at once",
            body=(
                "both = torch.logaddexp(total, block_total)\n"
                "out.copy_((total - both).exp()[..., None] * out + (block_total - both).exp()[..., None] * block)\n"
                "total.copy_(both)"
            ),
        ),
        Attempt("alike", "count alike", changes={WEIGHT: "torch.full_like(total, 0.5)"}),
        Attempt(
            "overflows",
            "their difference is what counts",
            body=(
                "both = total.exp() + block_total.exp()\n"
                "out.copy_((total.exp()[..., None] * out + block_total.exp()[..., None] * block) / both[..., None])\n"
                "total.copy_(both.log())"
            ),
        ),
        Attempt(
            "new-total",
            "its weight needs the old one",
            changes={
                "    difference = ": (
                    "    before = total.clone()\n"
                    "    total.copy_(torch.logaddexp(total, block_total))\n"
                    "    difference = "
                ),
                "total -= F.logsigmoid(-difference)": "total.copy_(torch.logaddexp(before, block_total))",
            },
        ),
        Attempt(
            "unseen",
            "changes what the query has",
            changes={WEIGHT: "F.sigmoid(difference.nan_to_num(neginf=0.0))"},  # `total` is right
        ),
        Attempt(
            "unseen",
            "changes what the query has",
            changes={
                "total -= F.logsigmoid(-difference)": ("total -= F.logsigmoid(-difference.nan_to_num(neginf=0.0))")
            },
        ),
        Attempt("unchanged", "change them in place", body="out = out + block"),
        Attempt(
            "wrong-output",
            "`out` is not the mean over all keys",  # it was forgotten
            body="total.copy_(torch.logaddexp(total, block_total))",
        ),
        Attempt(
            "wrong-total",
            "logarithm of the sum",
            changes={"total -= F.logsigmoid(-difference)": "total += block_total"},
        ),
    ],
    "cp-ring": [
        Attempt("own-only", "this rank's own keys only", changes={MERGED: "pass"}),
        Attempt(
            "block-missing",
            "rank 0: the keys and values of rank 2 are missing",
            changes={MERGED: f"{MERGED} if block.source != 2 else None"},
        ),
        Attempt(
            "wrong-output",
            "not that of attention to all positions before",
            changes={"visiting[..., keys, :]": "visiting.flip(-2)[..., keys, :]"},
        ),
        Attempt(
            "wrong-output",
            "rank 0, with documents: ",
            changes={
                "v_seen, block.mask)": (
                    'v_seen, "causal" if step == 0 else None if isinstance(block.mask, Tensor) else block.mask)'
                )
            },
        ),
        Attempt("wrong-total", "the output is right", changes={"return out, total": "return out, 2 * total"}),
        Attempt("result", "two tensors", changes={"return out, total": "return out"}),
    ],
}
