"""Where a loss that is infinite or no number comes from: looked for when it has happened, and only then."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.endpoint import rank, world_size
from distlab.comm.grid import Grid
from distlab.comm.traffic import traffic

NAME_BYTES = 200  # what a rank tells the others of its tensor


class NotFiniteError(RuntimeError):
    """A loss that is infinite or no number; all ranks raise it, with the same words."""


def find_cause(
    parameters: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    forward: Callable[[], object],
    grid: Grid,
    device: torch.device,
) -> str:
    """Name the first tensor that is not finite, in the same words on all ranks, which all must call it.

    A parameter comes first, since the update before made it so; then a module's output, in the order in which they are
    computed.

    Args:
        parameters, modules: of this rank, by their names in the whole model.
        forward: does the forward pass of this step again, on all ranks together.
        grid: where this rank stands.
        device: where the messages between the ranks are.
    """
    found = [name for name, parameter in parameters.items() if not is_finite(parameter)]
    outputs = outputs_not_finite(modules, forward)
    # The first of all ranks: any parameter before any output, then the earlier stage, then the smaller rank.
    size = world_size()
    order = (0 if found else 1 if outputs else 2) * size**2 + grid.stage * size + rank()
    first = torch.tensor(order, device=device)
    traffic.all_reduce(
        first, "the place of the first number that is not finite", kind="control", op=dist.ReduceOp.MIN
    ).wait()
    if first >= 2 * size**2:
        return "all parameters and activations are finite, so it arose in the loss itself"
    text = (
        f"first not finite is the parameter {found[0]}, since the update before"
        if found
        else f"first not finite is the {outputs[0]}"
        if outputs
        else ""
    )
    culprit = int(first) % size
    told = torch.zeros(NAME_BYTES, dtype=torch.uint8, device=device)
    if rank() == culprit:
        letters = text.encode()[:NAME_BYTES]
        told[: len(letters)] = torch.tensor(list(letters), dtype=torch.uint8)
    traffic.broadcast(told, "the name of the first tensor that is not finite", kind="control", src=culprit).wait()
    text = bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")
    return f"{text}, on {grid.describe(culprit)}" if size > 1 else text


def outputs_not_finite(modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> list[str]:
    """Those of the modules, by name, whose outputs are not finite in `forward()`, in the order of computation."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if isinstance(output, Tensor) and not is_finite(output):
                found.append(f"output of {name or 'the model'} ({type(module).__name__})")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in hooks:
            handle.remove()
    return found


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is a finite number."""
    return bool(torch.isfinite(tensor).all())
