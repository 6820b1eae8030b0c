"""Pipeline parallelism: the batch is split into micro-batches, so that the stages compute at the same time.

    python PP/microbatches/intro_PP_microbatches.py <rank> --schedule gpipe      in three terminals, ranks 0, 1 and 2
    ./launch.sh pp-dapple --micro-batches 6 --batch-size 6                       all ranks at once

While stage 1 computes micro-batch 0, stage 0 already computes micro-batch 1. The schedule is the order of a stage's
forward and backward passes: a list, which a function in distlab.pipeline.schedules returns and `run_program` follows.
PP/schedules/intro_PP_schedules.py takes over with --trace, and if --schedule has other actions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.names import named
from distlab.pipeline.actions import Action, Forward
from distlab.pipeline.stages import build_stage
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.stages import PlainPipelineSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = PlainPipelineSettings(batch_size=3)
MORE = "../schedules/intro_PP_schedules.py"  # has the other schedules


def run_program(
    program: Sequence[Action], net: nn.Module, parts: Sequence[Tensor], width: int, groups: Sequence[dist.ProcessGroup]
) -> list[Tensor]:
    """Run a stage's program, for example [F0, F1, B0, B1]; return the shares of the loss on the last stage.

    Args:
        parts: the micro-batches, token ids (batch, seq): the input of the first stage, the targets of the last.
        groups: one for activations (batch, seq, width) to the next stage, one for gradients to the previous stage.
    """
    stage, last, (forward, back) = dist.get_rank(), dist.get_world_size() - 1, groups
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # from a micro-batch's forward pass to its backward pass
    losses: list[Tensor] = []
    # In DAPPLE, neighbors send to each other at the same time. `dist.send` would wait until the other one receives, so
    # both would wait forever. `dist.isend` only starts to send; the loop at the end waits.
    sent: list[Any] = []
    for action in program:
        k = action.micro_batch
        if isinstance(action, Forward):
            inputs = parts[k]
            if stage > 0:
                inputs = torch.empty(*parts[k].shape, width, device=parts[k].device)
                with named(f"the activations of micro-batch {k}", "activations"):
                    dist.recv(inputs, stage - 1, forward)
                inputs.requires_grad_()  # the previous stage waits for its gradient
            outputs = net(inputs)
            if stage < last:
                with named(f"the activations of micro-batch {k}", "activations"):
                    sent.append(dist.isend(outputs.detach(), stage + 1, forward))
            else:
                outputs = causalLLMLoss(outputs, parts[k], outputs.shape[-1]) / len(parts)
                losses.append(outputs)
            kept[k] = inputs, outputs
        else:
            inputs, outputs = kept.pop(k)
            gradient = None  # not needed on the last stage, where `outputs` is the loss
            if stage < last:
                gradient = torch.empty_like(outputs)
                with named(f"the gradients of micro-batch {k}", "gradients of activations"):
                    dist.recv(gradient, stage + 1, back)
            outputs.backward(gradient)
            if stage > 0:
                assert inputs.grad is not None
                with named(f"the gradients of micro-batch {k}", "gradients of activations"):
                    sent.append(dist.isend(inputs.grad, stage - 1, back))
    for work in sent:
        work.wait()
    return losses


def train(run: TrainingRun[PlainPipelineSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    program = args.programs()[run.rank]  # this stage's list of actions
    split = args.split(tokenizer.vocab_size)  # how many layers each stage has
    net = build_stage(run.rank, split, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options())  # the same on all ranks
    optimizer = run.optimizer(net)
    run.track(net, optimizer)
    groups = dist.new_group(), dist.new_group()  # one for each direction: NCCL sends a group's messages in order

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = run_program(program, net, batch.chunk(args.micro_batches), args.dmodel, groups)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
