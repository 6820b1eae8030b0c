"""Ranks with the same model: they check that it is the same, start from the same weights, and compare these later."""

import itertools
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.placement import holders
from distlab.comm.names import named
from distlab.comm.together import texts_of_all
from simplellm.errors import InputError


def broadcast_weights(model: nn.Module, over: Axis | None = None) -> None:
    """Copy parameters and buffers from the first rank along `over` that holds the same part to the others.

    By default, `over` is all ranks.

    Raises:
        InputError: the ranks have built different models.
    """
    check_same_model(model, over)
    started = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own, group = tensor.detach(), holders(tensor, over or all_ranks("dp")).group
        received = own.contiguous()
        with named(f"the weights {name}", "weights at the start"):
            started.append((dist.broadcast(received, group=group, group_src=0, async_op=True), own, received))
    for work, own, received in started:
        work.wait()
        own.copy_(received)  # a no-op if both are the same tensor


def check_same_model(model: nn.Module, over: Axis | None = None) -> None:
    """Raise `InputError` on all ranks along `over`, by default all, unless their models have the same parameters.

    The comparison covers buffers, and the names, shapes, dtypes and `requires_grad` of parameters. Tensors that ranks
    along an axis hold in parts are not compared along that axis.
    """
    over, tensors = over or all_ranks("dp"), [*model.named_parameters(), *model.named_buffers()]
    described = {over.names: (over, list[str]())}  # by the axes of the ranks that hold the same part
    device = tensors[0][1].device if tensors else torch.device("cpu")
    for name, tensor in tensors:
        axis = holders(tensor, over)
        dtype, is_trained = str(tensor.dtype).removeprefix("torch."), "" if tensor.requires_grad else ", not trained"
        described.setdefault(axis.names, (axis, []))[1].append(f"{name} {dtype} {[*tensor.shape]}{is_trained}")
    for _, (axis, lines) in sorted(described.items()):
        if axis.size > 1:
            _require_same_lines(lines, axis, device)


def _require_same_lines(lines: list[str], axis: Axis, device: torch.device) -> None:
    """Raise `InputError` unless the ranks along an axis describe their parameters in the same lines."""
    if _is_same(zlib.crc32("\n".join(lines).encode()), device, axis.group):
        return
    told_by_all = texts_of_all("\n".join(lines), "the shapes of a model", axis.group)
    first, *others = (told.splitlines() for told in told_by_all)
    for number, told in enumerate(others, 1):
        for pair in itertools.zip_longest(first, told, fillvalue="nothing more"):
            if pair[0] != pair[1]:
                ranks = axis.ranks[0], axis.ranks[number]
                both = " and ".join(f"{line} on rank {rank}" for line, rank in zip(pair, ranks, strict=True))
                raise InputError(f"the ranks' models differ: {both}; build the same model on all ranks")


def _is_same(number: int, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks of a group have the same number; the answer is the same on each of them."""
    bounds = torch.tensor([number, -number], device=device)
    with named("the shapes of a model", "check"):
        dist.all_reduce(bounds, ReduceOp.MAX, group)
    return int(bounds.sum()) == 0  # the maximum less the minimum


def check_parameter_closeness(model: nn.Module) -> bool:
    """Return whether all ranks' parameters, also tied and frozen ones, are close to rank 0's; every rank agrees."""
    parameters = list(model.named_parameters())
    shapes = zlib.crc32(repr([(name, parameter.shape, parameter.dtype) for name, parameter in parameters]).encode())
    device = parameters[0][1].device
    if not _is_same(shapes, device):
        return False
    is_close = torch.ones((), dtype=torch.int64, device=device)
    for name, parameter in parameters:
        rank_0s = parameter.detach().clone(memory_format=torch.contiguous_format)
        with named(f"the weights {name}", "check"):
            dist.broadcast(rank_0s, src=0)
        is_close *= torch.allclose(parameter, rank_0s, equal_nan=True)
    with named("the results of the comparison", "check"):
        dist.all_reduce(is_close, ReduceOp.MIN)
    return bool(is_close)
