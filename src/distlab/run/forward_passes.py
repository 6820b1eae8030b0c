"""Forward passes through the whole model, stage by stage, without a schedule: for validation and diagnosis."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.group import open_queues
from distlab.comm.names import named
from distlab.run.model import ModelParts
from simplellm.llama import LLamaPart


def queues_for_passes(parts: ModelParts, batches: Sequence[Tensor]) -> None:
    """Make queues for later `forward_passes` of batches of these sizes (`open_queues`)."""
    like = next(iter(parts.parameters().values())).detach().new_empty(0, dtype=torch.float32)
    most = max((ids.numel() for ids in batches), default=0) * parts.sizes["dmodel"] * like.itemsize
    open_queues([parts.grid.axis("pp").ranks[owner] for owner in parts.owners], most, like)


@torch.no_grad()
def forward_passes(parts: ModelParts, batches: Sequence[Tensor], what: Callable[[int], str], kind: str) -> Tensor:
    """Pass batches through the whole model, without gradients; all ranks of a replica call it with the same batches.

    Args:
        batches: token ids, each (batch, seq), on the model's device.
        what: name of a batch's activations in waits and errors, given the batch's number.
        kind: the ledger's column.

    Returns:
        On the rank of the last stage, the sum of the batches' losses, each weighted by its number of rows; on other
        ranks 0; float64.
    """
    own = parts.grid.axis("pp").rank
    device = next(iter(parts.parameters().values())).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    sent: list[dist.Work | None] = []
    for number, ids in enumerate(batches):
        x = ids
        for stage, owner in enumerate(parts.owners):
            before = parts.owners[stage - 1] if stage else owner
            if owner == own:
                if before != owner:
                    x = torch.empty(*ids.shape, parts.sizes["dmodel"], device=device)  # (batch, seq, dmodel)
                    with named(what(number), kind):
                        dist.recv(x, parts.grid.axis("pp").ranks[before])
                net = parts.stages[stage]
                x = net(x, part=net.part_of(ids)) if isinstance(net, LLamaPart) else net(x)
            elif before == own and stage:
                with named(what(number), kind):
                    sent.append(dist.isend(x, parts.grid.axis("pp").ranks[owner]))
        if parts.owners[-1] == own:
            total += parts.loss(x, ids).double() * len(ids)
    for work in sent:
        if work is not None:
            work.wait()
    return total
