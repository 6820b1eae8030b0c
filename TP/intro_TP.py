"""Tensor parallelism: every rank holds a slice of each layer, and all of them work on the same batch.

    python TP/intro_TP.py <rank>           in three terminals, with the ranks 0, 1 and 2, or all at once: ./launch.sh tp

In attention and in the MLP, the first matrices are split by their outputs and the last one by its inputs. So heads, or
hidden units, stay on one rank, and one sum completes each of the two. TP/intro_TP_styles.py takes over for other ways.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.names import named
from distlab.parallel.tp_group import place_slice
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.slices import TensorParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = TensorParallelSettings(batch_size=3)
MORE = "intro_TP_styles.py"  # has other ways to split


class CopyTo(torch.autograd.Function):
    """Megatron's f: give the input to all ranks' slices. Its gradient is the sum of the slices' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        with named("the gradients of a layer", "layer gradients"):
            dist.all_reduce(total)
        return total


class ReduceFrom(torch.autograd.Function):
    """Megatron's g: add up the outputs of all ranks' slices. The gradient of a sum is the gradient of each term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        with named("the activations of a layer", "layer activations"):
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class SplitBlock(nn.Module):
    """A layer of the model with some of its attention heads, and some of the hidden units of its MLP."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        attention, mlp = whole.self_attn, whole.mlp
        self.input_layernorm, self.self_attn = whole.input_layernorm, attention
        self.post_attention_layernorm, self.mlp = whole.post_attention_layernorm, mlp
        first = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
        for linear in (*first, attention.o_proj, mlp.down_proj):
            dim = 0 if linear in first else 1  # of a weight (outputs, inputs): heads, or hidden units
            own = linear.weight.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()]
            linear.weight = place_slice(nn.Parameter(own.clone()), linear.weight, dim)  # its place, for checkpoints

    def forward(self, x: Tensor, *positions: Any, **others: Any) -> Tensor:
        term = self.self_attn(CopyTo.apply(self.input_layernorm(x)), *positions, **others)  # of this rank's heads
        x = x + ReduceFrom.apply(term)
        term = self.mlp(CopyTo.apply(self.post_attention_layernorm(x)))  # of this rank's hidden units
        return x + ReduceFrom.apply(term)


def train(run: TrainingRun[TensorParallelSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    for name, block in net.model.layers.items():
        net.model.layers[name] = SplitBlock(block)
    stories = TinyStories(tokenizer, **run.data_options())  # the same on all ranks
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
