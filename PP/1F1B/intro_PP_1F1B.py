"""Model parallelism: a batch passes through the stages of the model, all the way forward and all the way back.

    python PP/1F1B/intro_PP_1F1B.py <rank>            in three terminals, with the ranks 0, 1 and 2
    ./launch.sh pp-1f1b --layers-per-stage 3,2,1      all ranks at once

Each rank holds some of the layers. Forward, a stage receives activations from the previous stage, computes, and sends
its own to the next stage; backward, gradients travel the other way. All other stages wait in the meantime: here, "one
forward, one backward" means this strict alternation. (In the literature, 1F1B is the schedule that PP/microbatches
calls DAPPLE. There, `--schedule naive --trace` draws the order of this script.)
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.names import named
from distlab.pipeline.stages import build_stage
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.stages import PipelineSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = PipelineSettings(batch_size=3)


def pass_through(net: nn.Module, x: Tensor, width: int, share: float) -> list[Tensor]:
    """Pass a micro-batch through this stage, forward and back, with messages from and to its neighbors.

    Args:
        net: this stage's layers.
        x: token ids (batch, seq): the input of the first stage, the targets of the last.
        width: width of the activations between stages, (batch, seq, width).
        share: share of this micro-batch in the loss of the step.

    Returns:
        On the last stage, the micro-batch's share of the loss; on other stages, nothing.
    """
    stage, last = dist.get_rank(), dist.get_world_size() - 1
    # Forward: ids at the first stage, activations from there on.
    inputs = x
    if stage > 0:
        inputs = torch.empty(*x.shape, width, device=x.device)
        with named("the activations", "activations"):
            dist.recv(inputs, stage - 1)
        inputs.requires_grad_()  # the previous stage waits for its gradient
    outputs = net(inputs)
    if stage < last:
        with named("the activations", "activations"):
            dist.send(outputs.detach(), stage + 1)

    # Backward: it starts from the loss on the last stage, and from the gradient of the outputs on the others.
    losses = []
    if stage == last:
        losses.append(causalLLMLoss(outputs, x, outputs.shape[-1]) * share)
        losses[0].backward()
    else:
        gradient = torch.empty_like(outputs)
        with named("the gradients", "gradients of activations"):
            dist.recv(gradient, stage + 1)
        outputs.backward(gradient)
    if stage > 0:
        assert inputs.grad is not None
        with named("the gradients", "gradients of activations"):
            dist.send(inputs.grad, stage - 1)
    return losses


def train(run: TrainingRun[PipelineSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    split = args.split(tokenizer.vocab_size)  # how many layers each stage has
    net = build_stage(run.rank, split, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options())  # inputs of the first stage, targets of the last
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            losses += pass_through(net, x, args.dmodel, 1 / args.micro_batches)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
