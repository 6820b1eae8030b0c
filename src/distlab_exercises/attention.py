"""Tries attention in blocks: what is put together, and the ring in which blocks travel."""

import math

import torch
from torch import Tensor

from distlab.parallel.context_parallel import ContextParallel, positions_of
from distlab.settings.sequences import ContextSettings
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect, where
from simplellm.attention_blocks import attention_block
from simplellm.documents import document_ids

PARTS, SEQ, END = 3, 24, 0
SHAPE = 2, 4, SEQ, 6  # (batch, heads, positions, head_dim)


def try_labels(solution: Solution) -> list[str]:
    """Look up the labels of each rank's positions with a student's function."""
    ids = torch.arange(2 * SEQ).view(2, SEQ) + 100
    for part, own in enumerate(torch.arange(SEQ).chunk(PARTS)):
        next_tokens, ignored = solution.function(ids, own)
        first, last, is_end = int(own[0]), int(own[-1]), part == PARTS - 1
        with where(f"positions {first} to {last} of {SEQ}"):
            for name, tensor in (("labels", next_tokens), ("what is ignored", ignored)):
                told = f"{name} should be (batch, own positions), {(2, len(own))}; it is {tuple(tensor.shape)}"
                expect(tensor.shape == (2, len(own)), "shape", told)
            told = "the label of position {} is this part's first token, and not the next part's: look it up in `ids`"
            expect(is_end or next_tokens[0, -1] != ids[0, first], "within-part", told.format(last))
            told = "position {} predicts its own token; a label is the token after it"
            expect(next_tokens[0, 0] != ids[0, first], "own-token", told.format(first))
            told = "position {} predicts nothing, but the sequence goes on"
            expect(is_end or not ignored.any(), "ignores", told.format(last))
            told = "position {} has no next token, and must be ignored"
            expect(not is_end or ignored[:, -1].all(), "counts-the-end", told.format(last))
            expect(not ignored[:, :-1].any(), "ignores", "positions predict nothing that have a next token")
            right = ids.roll(-1, dims=1)[:, own]
            is_right = torch.equal(next_tokens.masked_fill(ignored, 0), right.masked_fill(ignored, 0))
            expect(is_right, "wrong-labels", "labels are not the tokens that follow")
    return ["the token after each position, also where another rank has it"]


def try_merge(solution: Solution) -> list[str]:
    """Put two blocks together with a student's function."""
    merge, (q, k, v) = solution.function, _random()
    for scale, what in ((1.0, "two blocks"), (4e3, "two blocks with very large scores")):
        first, second = (
            attention_block(scale * q, k[:, :, part], v[:, :, part], None) for part in (slice(15), slice(15, SEQ))
        )
        right, right_total = attention_block(scale * q, k, v, None)
        out, total = (part.clone() for part in first)
        with where(what):
            merge(out, total, *(part.clone() for part in second))
            is_unchanged = torch.equal(out, first[0]) and torch.equal(total, first[1])
            expect(not is_unchanged, "unchanged", "`out` and `total` are as they were: change them in place")
            is_finite = out.isfinite().all() and total.isfinite().all()
            told = "a result is infinite or no number: exponentials of totals overflow, their difference is what counts"
            expect(is_finite, "overflows", told)
            told = "both blocks count alike, whatever their totals"
            expect(not _is_close(out, (first[0] + second[0]) / 2), "alike", told)
            late = torch.sigmoid(second[1] - right_total).unsqueeze(-1)
            told = "`out` was computed with the total that is already updated; its weight needs the old one"
            expect(not _is_close(out, first[0] - late * (first[0] - second[0])), "new-total", told)
            told = "`out` is not the mean over all keys, weighted by the softmax"
            expect(_is_close(out, right), "wrong-output", told)
            told = "`total` is not the logarithm of the sum of the exponentials of all keys"
            expect(_is_close(total, right_total), "wrong-total", told)
    out, total = (part.clone() for part in first)
    nothing = torch.zeros_like(out), torch.full_like(total, -math.inf)
    merge(out, total, *nothing)
    told = "a block that a query does not see (its total is -inf) changes what the query has"
    expect(_is_close(out, first[0]) and _is_close(total, first[1]), "unseen", told)
    return ["output and log-sum as of all keys at once"]


def try_ring(solution: Solution) -> list[str]:
    """Go around a ring with a student's function."""
    rank, run = solution.rank, solution.join(PARTS, ContextSettings())
    q, k, v = _random()
    ids = torch.randint(1, 9, SHAPE[::2], generator=torch.Generator().manual_seed(3))
    ids[:, 10] = END
    own = positions_of(rank, PARTS, SEQ, "zigzag")
    results = []
    for end in (None, END):
        ring = ContextParallel(run.grid.axis("cp"), document_end=end).ring(ids)
        results.append(solution.function(q[:, :, own], k[:, :, own], v[:, :, own], ring))
    run.close()
    seen = (torch.arange(SEQ) <= own.unsqueeze(-1)).expand(len(ids), 1, -1, -1)  # by each query, the keys before it
    documents = document_ids(ids, END)
    same = (documents[:, own].unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
    for found, mask, what in zip(results, (seen, seen & same), ("", ", with documents"), strict=True):
        told = "it should return two tensors: the output, and the logarithm of the sum of the exponentials"
        expect(isinstance(found, tuple) and len(found) == 2, "result", told)
        with where(f"rank {rank}{what}"):
            _expect_all_blocks(found, q[:, :, own], k, v, mask, rank)
    return ["what the queries take from all positions before them"]


def _expect_all_blocks(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rank: int) -> None:
    out, total = found

    def without(*ranks: int) -> Tensor:
        """Return the attention of the queries without the keys of some ranks."""
        seen = mask.clone()
        for other in ranks:
            seen[..., positions_of(other, PARTS, SEQ, "zigzag")] = False
        return attention_block(q, k, v, seen)[0]

    right, right_total = attention_block(q, k, v, mask)
    if _is_close(out, right) and _is_close(total, right_total):
        return
    told = f"the output is {tuple(out.shape)}, and should be {tuple(right.shape)}: all queries of the rank"
    expect(out.shape == right.shape, "shape", told)
    others = [other for other in range(PARTS) if other != rank]
    expect(not _is_close(out, without(*others)), "own-only", "the queries have met this rank's own keys only")
    for other in others:
        told = f"the keys and values of rank {other} are missing"
        expect(not _is_close(out, without(other)), "block-missing", told)
    expect(not _is_close(out, right), "wrong-total", "the output is right, but not the logarithm of the sum")
    raise Wrong("wrong-output", "the output is not that of attention to all positions before each query")


def _random() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def _is_close(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and torch.allclose(found, right, rtol=1e-9, atol=1e-9)
