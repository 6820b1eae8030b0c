"""Tensor parallelism beside torch's own: both split the same model; their steps alternate within one run.

python bench/tensor_parallel.py
python bench/tensor_parallel.py --ranks 3 --rounds 40
python bench/tensor_parallel.py --compile        torch's through `torch.compile`, beside the lab's --compile
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import group_over_gloo, run_ranks
from tables import milliseconds, per_second, print_head, print_row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from training import VOCAB_SIZE, Step, backward_step, build, loss_of, tokens
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn, through_lab

from distlab.parallel.tensor import shard
from distlab.parallel.tp_group import TPGroup
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from simplellm import command_line


@dataclass
class Settings:
    """What to measure."""

    ranks: int = 2
    """ranks that share the model"""
    batch_size: int = 3
    """sequences per step"""
    seq_len: int = 256
    """tokens per sequence"""
    rounds: int = 20
    """measured steps of each variant"""
    compile: bool = False
    """compare compiled steps"""
    port: int = 29557
    """where rank 0 listens"""


def ours() -> Step:
    net = build()
    shard(net, "megatron")
    return backward_step(net, lambda ids: vocabulary_parallel_loss(net(ids), ids, VOCAB_SIZE))


def no_communication() -> Step:
    """Ours, with each rank's own part in place of every sum: what it would take if messages took no time."""
    step = ours()

    def alone(ids: Tensor) -> Tensor:
        with patch.object(TPGroup, "all_reduce", lambda _, tensor, *__, **___: tensor):
            return step(ids)

    return alone


def by_torch(logits: ColwiseParallel, group: dist.ProcessGroup) -> nn.Module:
    """The lab's model, split by `parallelize_module` in the same pairs."""
    net = build()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": logits,
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(net, DeviceMesh.from_group(group, "cpu"), plan)


def torch_whole_logits(group_of: Callable[[], dist.ProcessGroup], compiled: bool = False) -> Step:
    net = by_torch(ColwiseParallel(output_layouts=Replicate()), group_of())
    if compiled:
        net.compile()
    return backward_step(net, loss_of(net))


def torch_loss_parallel(group_of: Callable[[], dist.ProcessGroup]) -> Step:
    """Also computes the loss from slices of the logits, with torch's own context."""
    net = by_torch(ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), group_of())

    def loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return loss_parallel()(backward_step(net, loss))


COMPILED: dict[str, Callable[[], Step]] = {
    "torch, whole logits": partial(torch_whole_logits, group_over_gloo, compiled=True),
    "torch, whole logits, not compiled": partial(torch_whole_logits, group_over_gloo),
    "ours": lambda: through_lab(ours()),
    "ours, not compiled": ours,
}
THROUGH_THE_LAB = "torch, loss_parallel, through the lab's backend"
VARIANTS: dict[str, Callable[[], Step]] = {
    "torch, whole logits": partial(torch_whole_logits, group_over_gloo),
    "torch, loss_parallel": partial(torch_loss_parallel, group_over_gloo),
    THROUGH_THE_LAB: partial(torch_loss_parallel, dist.new_group),
    "ours": ours,
    "no communication": no_communication,
}


def measure(settings: Settings) -> None:
    """One rank: the variants in turn; rank 0 prints the rows of the table."""
    variants = COMPILED if settings.compile else VARIANTS
    steps = {name: step_of() for name, step_of in variants.items()}
    batch_of = partial(tokens, batch_size=settings.batch_size, seq_len=settings.seq_len)
    compare_losses(steps, batch_of(0))
    seconds = seconds_in_turn(steps, batch_of, settings.rounds, meet=dist.barrier)
    torchs = [own for name, own in seconds.items() if name.startswith("torch") and name != THROUGH_THE_LAB]
    better = min(torchs, key=statistics.median)
    for name, own in seconds.items() if dist.get_rank() == 0 else ():
        speed = per_second(settings.batch_size * settings.seq_len, own)
        print_row(settings.ranks, name, milliseconds(own), speed, *quartiles_of_ratios(better, own).cells(3))


def compare_losses(steps: dict[str, Step], ids: Tensor) -> None:
    """Make sure that all variants compute the same loss, or their speeds could not be compared."""
    losses = {name: step(ids) for name, step in steps.items() if name != "no communication"}
    for name, loss in losses.items():
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        if not torch.isclose(whole, losses["ours"], rtol=1e-6, atol=0):
            raise AssertionError(f"{name}: a loss of {whole.item():.8f}, where ours is {losses['ours'].item():.8f}")


def main(settings: Settings) -> None:
    require_quartiles("--rounds", settings.rounds)
    print_head("ranks", "variant", "ms a step (median)", "tokens/s", "speed to the better torch (median)", "quartiles")
    run_ranks(measure, settings.ranks, settings.port, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
