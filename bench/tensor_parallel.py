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
import torch.multiprocessing as mp
import torch.nn.functional as F
import tyro
from ranks import group_over_gloo, join
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from turns import quartiles_of_ratios, seconds_in_turn, through_lab

from distlab.machine.processes import leave
from distlab.parallel.tensor import shard
from distlab.parallel.tp_group import TPGroup
from distlab.parallel.vocabulary import vocabulary_parallel_loss
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB_SIZE = 4096
Step = Callable[[Tensor], Tensor]  # token ids (batch, seq) -> loss, after the backward pass


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


def build() -> CausalLLama:
    return LLama(CausalLLama, VOCAB_SIZE)


def backward(net: nn.Module, loss_of: Step) -> Step:
    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        loss = loss_of(x)
        loss.backward()
        return loss.detach()

    return step


def ours() -> Step:
    net = build()
    shard(net, "megatron")
    return backward(net, lambda x: vocabulary_parallel_loss(net(x), x, VOCAB_SIZE))


def no_communication() -> Step:
    """Ours, with each rank's own part in place of every sum: what it would take if messages took no time."""
    step = ours()

    def alone(x: Tensor) -> Tensor:
        with patch.object(TPGroup, "all_reduce", lambda _, tensor, *__, **___: tensor):
            return step(x)

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
    return backward(net, lambda x: causalLLMLoss(net(x), x, VOCAB_SIZE))


def torch_loss_parallel(group_of: Callable[[], dist.ProcessGroup]) -> Step:
    """Also computes the loss from slices of the logits, with torch's own context."""
    net = by_torch(ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), group_of())

    step = backward(net, lambda x: F.cross_entropy(net(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()))
    return loss_parallel()(step)


COMPILED: dict[str, Callable[[], Step]] = {
    "torch, whole logits": partial(torch_whole_logits, group_over_gloo, compiled=True),
    "torch, whole logits, not compiled": partial(torch_whole_logits, group_over_gloo),
    "ours": lambda: through_lab(ours()),
    "ours, not compiled": ours,
}
impatient = partial(group_over_gloo, patient=False)
VARIANTS: dict[str, Callable[[], Step]] = {
    "torch, whole logits": partial(torch_whole_logits, group_over_gloo),
    "torch, loss_parallel": partial(torch_loss_parallel, group_over_gloo),
    "torch, whole logits, without patient threads": partial(torch_whole_logits, impatient),
    "torch, loss_parallel, without patient threads": partial(torch_loss_parallel, impatient),
    "torch, loss_parallel, through the lab's backend": partial(torch_loss_parallel, dist.new_group),
    "ours": ours,
    "no communication": no_communication,
}


def measure(rank: int, settings: Settings) -> None:
    """One rank: the variants in turn."""
    join(rank, settings.ranks, settings.port)
    variants = COMPILED if settings.compile else VARIANTS
    steps = {name: build_step() for name, build_step in variants.items()}
    compare(steps, settings)
    seconds = seconds_in_turn(steps, partial(tokens, settings), settings.rounds, meet=dist.barrier)
    if rank == 0:
        report(settings, seconds)
    leave(0)


def tokens(settings: Settings, turn: int) -> Tensor:
    """Token ids (batch, seq), the same on all ranks."""
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(VOCAB_SIZE, (settings.batch_size, settings.seq_len), generator=generator)


def compare(steps: dict[str, Step], settings: Settings) -> None:
    """Make sure that all variants compute the same loss, or their speeds could not be compared."""
    losses = {name: step(tokens(settings, 0)) for name, step in steps.items() if name != "no communication"}
    for name, loss in losses.items():
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        if not torch.isclose(whole, losses["ours"], rtol=1e-6, atol=0):
            raise AssertionError(f"{name}: a loss of {whole.item():.8f}, where ours is {losses['ours'].item():.8f}")


def report(settings: Settings, seconds: dict[str, list[float]]) -> None:
    count = settings.batch_size * settings.seq_len
    torchs = [name for name in seconds if name.startswith("torch")]
    better = seconds[min(torchs, key=lambda name: statistics.median(seconds[name]))]
    for name, own in seconds.items():
        low, middle, high = quartiles_of_ratios(better, own)
        median = statistics.median(own)
        print(
            f"| {settings.ranks} | {name} | {median * 1e3:.0f} | {count / median:,.0f} "
            f"| {middle:.3f} | {low:.3f} to {high:.3f} |"
        )


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.rounds < 2:
        raise SystemExit(f"--rounds {settings.rounds}: quartiles need at least 2")
    print("| ranks | variant | ms a step (median) | tokens/s | speed to the better torch (median) | quartiles |")
    print("|---|---|---|---|---|---|", flush=True)
    mp.spawn(measure, args=(settings,), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
