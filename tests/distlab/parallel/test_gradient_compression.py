"""PowerSGD beside torch's own hook, and the largest values alone: sums, bytes, and what is left out comes later."""

from typing import Any

import torch
from support.processes import run_group
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distlab.axes.grid import all_ranks
from distlab.comm.context import context_of
from distlab.parallel.data import Bucket
from distlab.parallel.gradient_compression import PowerSGD, TopK

SHAPES = [(12, 20), (7,), (16, 3, 2), (3, 5)]  # the factors of the last one would be larger
RANKS, STEPS, WIDTH = 3, 6, 2
LINE = torch.outer(torch.arange(12.0), torch.arange(20.0))  # a matrix of rank 1


def gradients(rank: int, step: int) -> Tensor:
    """A rank's gradients in a step, side by side: one direction that stays, and noise."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lasting = torch.randn(sum(torch.Size(s).numel() for s in SHAPES), generator=torch.Generator().manual_seed(7))
    return (lasting + torch.randn(lasting.shape, generator=generator)) / RANKS  # so that the sum is the mean


def new_bucket(flat: Tensor) -> Bucket:
    return Bucket(0, [torch.zeros(shape) for shape in SHAPES], flat, all_ranks("dp"))


class TorchBucket:
    """What torch's hook asks of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self._bucket.flat

    def gradients(self) -> list[Tensor]:
        return self._bucket.views


def compress(rank: int) -> dict[str, Any]:
    own, state = PowerSGD(WIDTH), PowerSGDState(None, WIDTH, start_powerSGD_iter=2, min_compression_rate=1)
    state.iter = 2  # it begins at once
    theirs = []
    for step in range(STEPS):
        flat = gradients(rank, step) * RANKS  # its hook divides by the number of ranks itself
        powerSGD_hook(state, TorchBucket(new_bucket(flat))).wait()  # type: ignore[arg-type]
        theirs.append(flat.clone())
        if step == 0:  # from here on the same: the second factors, and the errors in our scale
            start = new_bucket(gradients(rank, step))
            own.start(start).wait()
            views = new_bucket(state.error_dict[0] / RANKS).views
            left_out = iter(view.reshape(len(view), -1).clone() for view in views if view.dim() > 1)
            kept = own.state()
            qs = [name for name in kept if name.endswith(".q")]
            parts = state.q_memory_dict[0].split([kept[name].numel() for name in qs])
            kept |= {name: part.view_as(kept[name]).clone() for name, part in zip(qs, parts, strict=True)}
            kept |= {name: next(left_out) for name in kept if name.endswith(".error")}
            own.load_state(kept)
    ours, sent = [], []
    for step in range(1, STEPS):
        bucket, before = new_bucket(gradients(rank, step)), context_of().ledger.sent_bytes["gradients"]
        own.start(bucket).wait()
        ours.append(bucket.flat.clone())
        sent.append(context_of().ledger.sent_bytes["gradients"] - before)
    noise = (1, -1, 0)[rank] * torch.randn(LINE.shape, generator=torch.Generator().manual_seed(3))
    line = Bucket(1, [torch.zeros(LINE.shape)], (LINE + noise).flatten(), all_ranks("dp"))
    own.start(line).wait()  # nothing is left out of this bucket, though something is of the other
    largest, top, top_sent = TopK(0.1), torch.zeros_like(ours[0]), 0
    for step in range(STEPS):
        bucket, before = new_bucket(gradients(rank, step)), context_of().ledger.sent_bytes["gradients"]
        largest.start(bucket).wait()
        top += bucket.flat
        top_sent = context_of().ledger.sent_bytes["gradients"] - before
    whole = new_bucket(gradients(rank, 0))
    TopK(1).start(whole).wait()
    single = new_bucket(gradients(rank, 0))
    TopK(1e-6).start(single).wait()
    return {
        "theirs": theirs[1:],
        "ours": ours,
        "sent": sent,
        "line": line.views[0],
        "top": top,
        "top_sent": top_sent,
        "top_error": largest.state()[f"rank{rank}.topk.bucket0.error"],
        "whole": whole.flat,
        "single": single.flat,
    }


def test_powersgd_is_torchs_and_nothing_is_lost() -> None:
    ended = run_group(RANKS, compress)
    means = [torch.stack([gradients(rank, step) for rank in range(RANKS)]).sum(0) for step in range(STEPS)]
    for result in ended:
        for ours, theirs in zip(result["ours"], result["theirs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(result["ours"], ended[0]["ours"], strict=True))
        torch.testing.assert_close(result["line"], RANKS * LINE, rtol=0, atol=1e-3)
        assert torch.equal(result["top"], ended[0]["top"]), "all ranks have the same sums"
        torch.testing.assert_close(result["whole"], means[0], msg="with a share of 1, nothing is left out")
        assert 0 < result["single"].count_nonzero() <= RANKS, "at least one value of each rank"
    matrices = WIDTH * (12 + 20) + WIDTH * (16 + 6)
    first, second = WIDTH * (12 + 16) + 7 + 15, WIDTH * (20 + 6)  # P and what is sent as it is; Q
    assert first + second == matrices + 7 + 15
    assert ended[0]["sent"] == [sum(2 * (RANKS - 1) * 4 * n // RANKS for n in (first, second))] * (STEPS - 1)
    count = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert ended[0]["top_sent"] == (RANKS - 1) * 8 * int(0.1 * count)
    left_out = sum(result["top_error"] for result in ended)
    torch.testing.assert_close(ended[0]["top"] + left_out, sum(means), rtol=0, atol=1e-5)
    assert left_out.abs().max() > 0.1
    assert not torch.allclose(ended[0]["ours"][0], means[1], atol=1e-2), "the products are thin"
