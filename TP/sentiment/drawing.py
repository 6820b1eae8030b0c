"""Random numbers of the layers of tp_model.py, as one process draws them: whole weights, and dropout of shards.

Building a layer restores the state of torch's generator. Two layers built one after another are therefore equal,
unless they are parts of a larger one, like the blocks of a `Transformer`, or the generator is seeded in between.
"""

import contextlib
import copy
from collections.abc import Iterator

import pcomm
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from simplellm.errors import InputError

_building = False


@contextlib.contextmanager
def unmoved_generator() -> Iterator[None]:
    """Draw weights as one process does; restore the generator when the outermost layer has been built."""
    global _building
    if _building:
        yield
        return
    _building = True
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _building = False


def check_division(count: int, what: str) -> None:
    """Raise `InputError` unless `count` of something divides among the group's ranks."""
    if count % pcomm.tp_degree:
        raise InputError(
            f"{what} {count} does not divide among {pcomm.tp_degree} ranks of tensor parallelism; "
            f"give a multiple of {pcomm.tp_degree}"
        )


class ShardDropout(nn.Dropout):
    """Dropout of this rank's shard along `dim`, with the mask that one process draws for the whole tensor.

    Each rank draws the whole mask, so that the generators of a group stay equal; dropout after the layer needs that.
    """

    def __init__(self, p: float, dim: int) -> None:
        super().__init__(p)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        shape[self.dim] *= pcomm.tp_degree
        return x * functional.dropout(x.new_ones(shape), self.p).chunk(pcomm.tp_degree, self.dim)[pcomm.tp_rank]


def for_shards(module: nn.Module) -> nn.Module:
    """Return `module`, or a copy with sharded dropout, such that results for shards of the last dimension are the same.

    Raises:
        InputError: the module has weights, or uses random numbers in another way.
    """
    if next(module.parameters(), None) is not None:
        raise InputError(f"{module} between a pair of layers has weights: each rank would train its own; give it none")
    if isinstance(module, nn.Dropout):
        return ShardDropout(module.p, dim=-1)
    if isinstance(module, (_DropoutNd, nn.RReLU)):
        raise InputError(f"{module} between a pair of layers would draw otherwise than in one process; give nn.Dropout")
    changed = {name: for_shards(child) for name, child in module.named_children()}
    if any(child is not module.get_submodule(name) for name, child in changed.items()):
        module = copy.deepcopy(module)
        for name, child in changed.items():
            setattr(module, name, child)
    return module
