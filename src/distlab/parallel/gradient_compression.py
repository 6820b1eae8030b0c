"""Sums of gradients in fewer bytes, as hooks on buckets: PowerSGD, and only the largest values.

Both make an error, which each rank adds to its next gradients: error feedback (Karimireddy et al., arXiv 1901.09847).
All ranks get the same sums to the last bit.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.group import all_gather_single
from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.parallel.data import Bucket
from distlab.parallel.flat import elements_of, views_of


class Compressor:
    """The state that a hook keeps from one step to the next, by name: for checkpoints.

    Args:
        name: of the method, with the settings on which its tensors depend.
    """

    def __init__(self, name: str) -> None:
        self._common, self._own = f"{name}.", f"rank{dist.get_rank()}.{name}."  # prefixes: of all ranks, of this one
        self._kept: dict[str, Tensor] = {}

    def keep(self, name: str, start: Callable[[], Tensor], is_common: bool = False) -> Tensor:
        """Return the tensor kept under a name; `start()` at first. `is_common` if all ranks have the same tensor."""
        name = f"{self._common if is_common else self._own}{name}"
        if name not in self._kept:
            self._kept[name] = start()
        return self._kept[name]

    def held_bytes(self) -> int:
        """Return the bytes that this rank holds from one step to the next."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: the tensors that are kept, by name."""
        return dict(self._kept)

    def names_in(self, saved: Iterable[str]) -> list[str]:
        """Return the names of a checkpoint's tensors that `state` would have on this rank."""
        return [name for name in saved if name.startswith((self._common, self._own))]

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`, before the first step."""
        self._kept = dict(state)


class PowerSGD(Compressor):
    """Adds up the gradients of a bucket as products of two thin matrices (Vogels et al., arXiv 1905.13727).

    The sum M (n, m) of the ranks' matrices is approximated by P Qᵀ, with P (n, r) and Q (m, r), r the `width`: P = M Q
    for the Q of the step before, orthogonalized, and then Q = Mᵀ P. Both products are sums over the ranks, so two all-
    reduces of 4 r (n + m) bytes replace one of 4 n m. Tensors that are not worth it, such as vectors, are added up
    uncompressed. The first Q depends on `seed`, the same on all ranks.
    """

    def __init__(self, width: int, seed: int = 0) -> None:
        super().__init__(f"powersgd{width}")
        self._width, self._seed = width, seed

    def start(self, bucket: Bucket) -> Pending:
        """Start to add up a bucket over the ranks."""
        matrices = [view.view(len(view), -1) for view in bucket.views if self._is_worth_it(view)]
        others = [view for view in bucket.views if not self._is_worth_it(view)]
        generator = torch.Generator().manual_seed(self._seed * 1000 + bucket.index)

        def first_q(matrix: Tensor) -> Tensor:
            return torch.randn(matrix.shape[1], self._width, generator=generator).to(matrix)

        qs, errors = list[Tensor](), list[Tensor]()
        for number, matrix in enumerate(matrices):
            name = f"bucket{bucket.index}.matrix{number}"
            qs.append(self.keep(f"{name}.q", partial(first_q, matrix), is_common=True))
            errors.append(self.keep(f"{name}.error", partial(torch.zeros_like, matrix)))  # of this rank's earlier sums
        for matrix, error in zip(matrices, errors, strict=True):
            matrix.add_(error)
        products = [matrix @ q for matrix, q in zip(matrices, qs, strict=True)]
        parts = [*products, *others]
        first = torch.cat([part.flatten() for part in parts])
        second = first.new_empty(elements_of(qs))
        ps: list[Tensor] = []

        def start_second() -> Pending:
            sums = views_of(first, parts)
            ps.extend(torch.linalg.qr(part).Q for part in sums[: len(qs)])
            for view, part in zip(others, sums[len(qs) :], strict=True):
                view.copy_(part)
            for part, matrix, p in zip(views_of(second, qs), matrices, ps, strict=True):
                part.copy_(matrix.T @ p)
            return _sum(second, bucket, "second factors")

        def finish() -> None:
            for matrix, error, p, q, part in zip(matrices, errors, ps, qs, views_of(second, qs), strict=True):
                q.copy_(part)
                total = p @ q.T
                torch.sub(matrix, total, alpha=1 / bucket.axis.size, out=error)
                matrix.copy_(total)

        return _sum(first, bucket, "first factors").then(start_second).then(finish)

    def _is_worth_it(self, gradient: Tensor) -> bool:
        rows = len(gradient) if gradient.dim() else 1
        return self._width * (rows + gradient.numel() // rows) < gradient.numel()  # never of a vector


def _sum(tensor: Tensor, bucket: Bucket, what: str) -> Pending:
    with named(f"{bucket}, {what}", "gradients"):
        return dist.all_reduce(tensor, ReduceOp.SUM, bucket.axis.group, async_op=True)


class TopK(Compressor):
    """Adds up only the largest values of each rank's bucket (Lin et al., Deep Gradient Compression, arXiv 1712.01887).

    Each rank sends all others its values with their places, 8 bytes each: a `share` of its values, at least one.
    """

    def __init__(self, share: float) -> None:
        super().__init__("topk")
        self._share = share

    def start(self, bucket: Bucket) -> Pending:
        """Start to add up a bucket over the ranks."""
        flat = bucket.flat
        error = self.keep(f"bucket{bucket.index}.error", partial(torch.zeros_like, flat))
        error += flat
        places = error.abs().topk(max(1, int(self._share * len(flat)))).indices
        own = torch.stack([places.int().view(torch.float32), error[places]])  # (2, k); the bits of places
        parts = own.new_empty(bucket.axis.size, *own.shape)
        error[places] = 0
        with named(str(bucket), "gradients"):
            started = all_gather_single(parts, own, bucket.axis.group, async_op=True)
        return started.then(partial(self._add_up, flat, parts))

    @staticmethod
    def _add_up(flat: Tensor, parts: Tensor) -> None:
        flat.zero_()
        for places, values in parts:
            flat.index_add_(0, places.contiguous().view(torch.int32), values)
