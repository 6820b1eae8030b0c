"""An MLP in slices that each rank initializes itself: each of two ranks has half of the hidden units.

    ./launch.sh museum/seeds/seeds.py

A large model does not fit into one process, so its matrices are never whole, not even at the start. All other weights
are the same on all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.parallel.tp_group import TPGroup, copy_to, place_slice, reduce_from
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.slices import TensorParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = TensorParallelSettings(
    world_size=2, batch_size=4, steps=100, lr=2e-3, dmodel=64, num_heads=4, n_layers=2, seq_len=64
)


class SplitMLP(nn.Module):
    """This rank's hidden units of an MLP: its first matrices are split by their outputs, the last one by its inputs."""

    def __init__(self, whole: Any, name: str, generator: torch.Generator) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = whole.gate_proj, whole.up_proj, whole.down_proj
        for dim, linear in ((0, self.gate_proj), (0, self.up_proj), (1, self.down_proj)):
            shape = list(linear.weight.shape)
            shape[dim] //= dist.get_world_size()
            own = nn.Parameter(torch.empty(shape).normal_(0, 0.02, generator=generator))
            linear.weight = place_slice(own, linear.weight, dim)  # its place in the whole matrix, for checkpoints
        self.whole, self.ranks = [whole], TPGroup(name, "layer")

    def forward(self, x: Tensor) -> Tensor:
        [mlp] = self.whole
        return reduce_from(mlp(copy_to(x, self.ranks)), self.ranks)


def train(run: TrainingRun[TensorParallelSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    generator = torch.Generator().manual_seed(args.seed)
    for name, block in net.model.layers.items():
        block.mlp = SplitMLP(block.mlp, f"layer {name}", generator)
    stories = TinyStories(tokenizer, **run.data_options())  # the same on all ranks
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, ids in run.steps(stories):
        optimizer.zero_grad()
        loss = causalLLMLoss(net(ids), ids, tokenizer.vocab_size)
        loss.backward()
        run.log(step, [loss])
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
