"""Data and pipeline parallelism together: several pipelines, which average the gradients of each stage.

    python hybrid/intro_hybrid_plain.py <rank>            in six terminals, with the ranks 0 to 5
    ./launch.sh hybrid-plain                              all ranks at once: 2 pipelines of 3 stages
    ./launch.sh hybrid-plain --dp 3 --pp 2                3 pipelines of 2 stages

Ranks 0, 1 and 2 are the stages of one pipeline, ranks 3, 4 and 5 those of another, which trains on other sequences.
Within a pipeline, neighbors exchange activations and their gradients. Once a step, ranks 0 and 3 average the gradients
of stage 0, ranks 1 and 4 those of stage 1, ranks 2 and 5 those of stage 2. hybrid/intro_hybrid.py takes over for flags
that this script does not have.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.names import named
from distlab.pipeline.stages import build_stage
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.hybrid import PlainHybridSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = PlainHybridSettings(batch_size=3)
MORE = "intro_hybrid.py"  # has tensor parallelism, other schedules, and faster messages


def pass_through(net: nn.Module, parts: Sequence[Tensor], width: int, stage: int, last: int) -> list[Tensor]:
    """Pass all micro-batches forward through this stage, and then all of them back (GPipe).

    Args:
        net: this stage's layers.
        parts: the micro-batches, token ids (batch, seq): the input of the first stage, the targets of the last.
        width: width of the activations between stages, (batch, seq, width).
        stage: this stage's number in its pipeline.
        last: number of the last stage.

    Returns:
        On the last stage, the shares of the loss; on other stages, nothing.
    """
    rank = dist.get_rank()  # the neighbors in the pipeline are rank - 1 and rank + 1
    passed, losses = [], []
    for x in parts:
        inputs = x
        if stage > 0:
            inputs = torch.empty(*x.shape, width, device=x.device)
            with named("the activations", "activations"):
                dist.recv(inputs, rank - 1)
            inputs.requires_grad_()  # the previous stage waits for its gradient
        outputs = net(inputs)
        if stage < last:
            with named("the activations", "activations"):
                dist.send(outputs.detach(), rank + 1)
        else:
            outputs = causalLLMLoss(outputs, x, outputs.shape[-1]) / len(parts)
            losses.append(outputs)
        passed.append((inputs, outputs))

    for inputs, outputs in passed:
        gradient = None  # not needed on the last stage, where `outputs` is the loss
        if stage < last:
            gradient = torch.empty_like(outputs)
            with named("the gradients", "gradients of activations"):
                dist.recv(gradient, rank + 1)
        outputs.backward(gradient)
        if stage > 0:
            assert inputs.grad is not None
            with named("the gradients", "gradients of activations"):
                dist.send(inputs.grad, rank - 1)
    return losses


def average_gradients(net: nn.Module, group: dist.ProcessGroup) -> None:
    """Give the ranks of a group, which hold the same layers, the mean of their gradients."""
    with named("the gradients of this stage", "gradients"):
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()


def train(run: TrainingRun[PlainHybridSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    replica, stage = divmod(run.rank, args.pp)  # which pipeline, and which of its stages
    # Each group has the ranks that hold one stage. Every rank has to make all groups, also those that it is not in.
    groups = [dist.new_group(list(range(first, run.world_size, args.pp))) for first in range(args.pp)]
    split = args.split(tokenizer.vocab_size)  # how many layers each stage has
    net = build_stage(stage, split, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=replica, num_replicas=args.dp)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = pass_through(net, batch.chunk(args.micro_batches), args.dmodel, stage, args.pp - 1)
        average_gradients(net, groups[stage])
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
