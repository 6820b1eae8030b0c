"""A pipeline of two stages, and a batch in three micro-batches, whose mean loss is the loss of the step.

    ./launch.sh museum/micro_batches/micro_batches.py

The loss is computed on the last stage, and each micro-batch's backward pass starts there.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.pipeline.stages import build_stage
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.stages import PipelineSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = PipelineSettings(
    world_size=2, batch_size=6, micro_batches=3, steps=100, lr=2e-3, dmodel=64, num_heads=4, n_layers=2, seq_len=64
)


def pass_through(net: nn.Module, ids: Tensor, width: int, micro_batches: int) -> list[Tensor]:
    """Pass a micro-batch through this stage, forward and back, with messages from and to its neighbors.

    Args:
        net: this stage's layers.
        ids: token ids (batch, seq): the input of the first stage, the targets of the last.
        width: width of the activations between stages, (batch, seq, width).
        micro_batches: number of micro-batches in the step.

    Returns:
        On the last stage, the micro-batch's share of the loss; on other stages, nothing.
    """
    stage, last = dist.get_rank(), dist.get_world_size() - 1
    inputs = ids
    if stage > 0:
        inputs = torch.empty(*ids.shape, width, device=ids.device)
        dist.recv(inputs, stage - 1)
        inputs.requires_grad_()  # the previous stage waits for its gradient
    outputs = net(inputs)

    losses: list[Tensor] = []
    if stage == last:
        loss = causalLLMLoss(outputs, ids, outputs.shape[-1])
        loss.backward()
        losses.append(loss / micro_batches)
    else:
        dist.send(outputs.detach(), stage + 1)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, stage + 1)
        outputs.backward(gradient)
    if stage > 0:
        assert inputs.grad is not None
        dist.send(inputs.grad, stage - 1)
    return losses


def train(run: TrainingRun[PipelineSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    split = args.split(tokenizer.vocab_size)
    net = build_stage(run.rank, split, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options())  # inputs of the first stage, targets of the last
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for ids in batch.chunk(args.micro_batches):
            losses += pass_through(net, ids, args.dmodel, args.micro_batches)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
