"""Zero bubbles, and neighboring layers that share their MLP: the gradients of inputs first, those of weights later.

    ./launch.sh museum/shared_weight/shared_weight.py

The other stage waits for the gradient of this stage's input only, so it is computed at once (I). Weights can wait (W).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.pipeline.stages import build_stage
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.stages import PipelineSettings
from simplellm.blocks import Block
from simplellm.dataloaders import TinyStories
from simplellm.layers import rotary_tables
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = PipelineSettings(
    world_size=2, batch_size=4, steps=100, lr=2e-3, dmodel=48, n_layers=4, layers_per_stage="2,2", seq_len=64
)

Saved = list[tuple[nn.Module, Tensor, Tensor]]  # the layers of this stage, with their inputs and outputs


def forward(layers: list[nn.Module], x: Tensor, tables: list[Tensor]) -> Saved:
    saved: Saved = []
    for layer in layers:
        y = layer(x, *tables) if isinstance(layer, Block) else layer(x)
        saved.append((layer, x, y))
        x = y
    return saved


def backward_input(saved: Saved, gradient: Tensor) -> list[Tensor]:
    """I: return the gradients of the layers' outputs and, before them, of the input, if it is activations."""
    gradients = [gradient]
    for _, x, y in reversed(saved):
        if x.is_floating_point():
            gradients += torch.autograd.grad(y, x, gradients[-1], retain_graph=True)
    return gradients[::-1]


def backward_weights(saved: Saved, gradients: list[Tensor]) -> None:
    """W: add the gradients of each layer's weights to their `grad`, given the gradients of the layers' outputs."""
    for (layer, _, y), gradient in zip(saved, gradients[-len(saved) :], strict=True):
        weights = list(layer.parameters())
        for weight, own in zip(weights, torch.autograd.grad(y, weights, gradient, retain_graph=True), strict=True):
            weight.grad = own if weight.grad is None else weight.grad + own


def train(run: TrainingRun[PipelineSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    split = args.split(tokenizer.vocab_size)
    net = build_stage(run.rank, split, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    blocks: list[Any] = list(net.model.layers.values())
    for lower, upper in zip(blocks[::2], blocks[1::2], strict=True):
        upper.mlp = lower.mlp
    first, last = [net.model.embed_tokens], [net.model.norm, net.lm_head]
    layers = [layer for layer in (*first, *blocks, *last) if layer is not None]
    tables = [table[: args.seq_len] for table in rotary_tables(args.seq_len, net.head_dim, net.rope_theta, run.device)]
    stories = TinyStories(tokenizer, **run.data_options())  # inputs of the first stage, targets of the last
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, ids in run.steps(stories):
        optimizer.zero_grad()
        if run.rank == 0:
            saved, losses = forward(layers, ids, tables), []
            outputs = saved[-1][-1]
            dist.send(outputs.detach(), 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, 1)
            gradients = backward_input(saved, gradient)
        else:
            inputs = torch.empty(*ids.shape, args.dmodel, device=run.device)
            dist.recv(inputs, 0)
            saved = forward(layers, inputs.requires_grad_(), tables)
            logits = saved[-1][-1].detach().requires_grad_()
            losses = [causalLLMLoss(logits, ids, tokenizer.vocab_size)]
            gradients = backward_input(saved, *torch.autograd.grad(losses[0], logits))
            dist.send(gradients[0], 0)
        backward_weights(saved, gradients)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
