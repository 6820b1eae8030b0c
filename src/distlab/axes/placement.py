"""The placement of a parameter: the part that this rank holds, and the axes along which ranks hold other parts.

Each parameter has one placement, which `place` attaches and `placement_of` reads. Averaging, clipping, sharding and
checkpoints use it. Ranks that differ only along axes that a placement does not name hold the same values: a parameter
is replicated along all of these axes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.axes.grid import Axis
from distlab.axes.layout import STAGES


class DimSlice(NamedTuple):
    """A range of a parameter along one dimension; ranks along `axes` hold the other ranges."""

    dim: int
    start: int
    length: int  # of the whole parameter along `dim`
    axes: tuple[str, ...]


class FlatRange(NamedTuple):
    """Consecutive elements, in memory order, of a parameter or of its slice; ranks along `axes` hold the others.

    The tensor that holds them is (elements, 1, …), with as many dimensions as `shape`.
    """

    start: int
    shape: torch.Size  # of the parameter or slice
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """The part of a parameter that a rank holds; by default all of it.

    Attributes:
        slices: its ranges along dimensions.
        flat: the elements of the slices that it holds, if not all.
        apart: axes whose ranks hold other parameters, as the stages of a pipeline do.
    """

    slices: tuple[DimSlice, ...] = ()
    flat: FlatRange | None = None
    apart: tuple[str, ...] = (STAGES,)

    @property
    def axes(self) -> set[str]:
        """The axes along which ranks hold other parts, or other parameters."""
        of_slices = {name for one in self.slices for name in one.axes}
        return of_slices | {*self.apart, *(self.flat.axes if self.flat else ())}


WHOLE = Placement()


def place(parameter: Tensor, placement: Placement) -> None:
    """Attach a placement to a parameter, in place of any earlier one."""
    parameter.placement = placement  # type: ignore[attr-defined]


def placement_of(parameter: Tensor) -> Placement:
    """Return the placement of a parameter; a parameter without an attached placement is whole."""
    return getattr(parameter, "placement", WHOLE)


def own_slice(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's slice of `whole`, a view, by the placement of a parameter of the slice's shape."""
    for dim, start, _, _ in placement_of(parameter).slices:
        whole = whole.narrow(dim, start, parameter.shape[dim])
    return whole


def holders(parameter: Tensor, among: Axis) -> Axis:
    """Return the ranks along some axes that hold the same part of a parameter as this rank.

    Raises:
        ValueError: the parameter is divided along an axis that is not in the layout.
    """
    axes = placement_of(parameter).axes
    unknown = axes - {STAGES} - among.layout.keys()
    if unknown:
        raise ValueError(f"a parameter is divided along {', '.join(sorted(unknown))}, which the layout lacks")
    return among.without(*axes)
