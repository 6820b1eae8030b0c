"""What the lab's three listings do with `simplellm`: train in one process, average gradients, pass activations on.

Written against torch.distributed alone, as a reader's own script is, and in processes of their own over gloo.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, run_ranks
from torch import Tensor, nn
from torch.optim import Adam

from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage, LLamaLastStage, LLamaStage
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

WORLD_SIZE, STEPS, BATCH_SIZE, SEQ_LEN, DMODEL = 3, 12, 3, 48, 48
LAYERS = 6


def stories(batch_size: int, skip: int = 0) -> Any:
    return iter(TinyStories(SPTokenizer(), batch_size=batch_size, seq_l=SEQ_LEN, skip=skip, data="sample"))


def sizes(n_layers: int) -> dict[str, Any]:
    return {"dmodel": DMODEL, "num_heads": 6, "device": "cpu", "n_layers": n_layers, "ctx_size": SEQ_LEN}


def whole_model() -> nn.Module:
    tokenizer = SPTokenizer()
    return LLama(CausalLLama, tokenizer.vocab_size, **sizes(LAYERS), padding_idx=tokenizer.pad_id)


def train_alone(sources: list[Any]) -> list[float]:
    """Train one model on the batches of all sources together.

    Returns:
        The mean loss of each step.
    """
    vocab_size = SPTokenizer().vocab_size
    model = whole_model()
    optimizer = Adam(model.parameters(), lr=8e-4)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = torch.cat([next(source) for source in sources])
        loss = causalLLMLoss(model(ids), ids.clone().detach(), vocab_size)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses


def rendezvous(rank: int, port: int, world_size: int = WORLD_SIZE) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)


def build_stage(number: int, **first_layer: int) -> nn.Module:
    """A third of the model, as the third listing builds it."""
    vocab_size, options = SPTokenizer().vocab_size, sizes(LAYERS // WORLD_SIZE) | first_layer
    if number == 0:
        return LLamaFirstStage(vocab_size, **options)
    return LLamaStage(**options) if number == 1 else LLamaLastStage(vocab_size, **options)


def average_gradients(rank: int, port: int) -> tuple[list[float], Tensor]:
    """The second listing: a model a rank, gradients summed over the ranks as one vector.

    Returns:
        This rank's losses, and its parameters at the end.
    """
    rendezvous(rank, port)
    model = whole_model()
    vocab_size = SPTokenizer().vocab_size
    optimizer = Adam(model.parameters(), lr=8e-4)
    source = stories(1, skip=rank * 3000)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = next(source)
        loss = causalLLMLoss(model(ids), ids, vocab_size)
        losses.append(loss.item())
        loss.backward()
        dist.barrier()
        parameters = list(model.parameters())
        total = torch.cat([parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None])
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        for parameter, grad in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view(parameter.shape) / WORLD_SIZE
        optimizer.step()
    return losses, torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


def pass_on(rank: int, port: int) -> list[float]:
    """The third listing: a stage a rank, its activations sent to the next and its input's gradient back.

    Returns:
        The losses, on the last rank.
    """
    rendezvous(rank, port)
    return train_stage(rank, rank, build_stage(rank), stories(BATCH_SIZE), lambda: None)


def train_stage(rank: int, number: int, stage: Any, source: Any, average: Callable[[], None]) -> list[float]:
    """Train stage `number` of a pipeline on consecutive ranks; `average` is called when its gradients are complete.

    Returns:
        The losses, on the last stage's rank.
    """
    optimizer = Adam(stage.parameters(), lr=8e-4)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = next(source)
        if number == 0:
            out = stage.embed(ids)
        else:
            inputs = torch.empty((len(ids), SEQ_LEN, DMODEL))
            dist.recv(inputs, rank - 1)
            inputs.requires_grad_()
            out = stage(inputs)
        if number < WORLD_SIZE - 1:
            dist.send(out.to("cpu"), rank + 1)
            grad = torch.empty((len(ids), SEQ_LEN, DMODEL))
            dist.recv(grad, rank + 1)
            out.backward(grad)
        else:
            loss = causalLLMLoss(out, ids, SPTokenizer().vocab_size)
            losses.append(loss.item())
            loss.backward()
        if number > 0:
            assert inputs.grad is not None
            dist.send(inputs.grad, rank - 1)
        average()
        optimizer.step()
    return losses


def two_pipelines(rank: int, port: int) -> tuple[str, list[float], dict[str, Tensor]]:
    """A reader's own step further: two of these pipelines, each stage's gradients averaged over both.

    Returns:
        Why the stage could not be built as the third listing does it, if so; this rank's losses and parameters from
        building it with `first_layer`.
    """
    rendezvous(rank, port, 2 * WORLD_SIZE)
    torch.manual_seed(0)
    pipeline, number = divmod(rank, WORLD_SIZE)
    refused = ""
    try:
        build_stage(number)
    except InputError as error:
        refused = str(error)
    stage = build_stage(number, first_layer=number * LAYERS // WORLD_SIZE)
    replicas = [dist.new_group([other, other + WORLD_SIZE]) for other in range(WORLD_SIZE)]

    def average() -> None:
        for parameter in stage.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=replicas[number])
            parameter.grad /= 2

    losses = train_stage(rank, number, stage, stories(BATCH_SIZE, skip=pipeline * 3000), average)
    return refused, losses, {name: parameter.detach() for name, parameter in stage.named_parameters()}


def assert_falling(losses: list[float]) -> None:
    assert len(losses) == STEPS
    assert max(losses[-3:]) < min(losses[:3]) - 0.1, losses


def test_one_process_trains() -> None:
    assert_falling(train_alone([stories(BATCH_SIZE)]))


def test_averaged_gradients_are_those_of_the_whole_batch() -> None:
    ranks = run_ranks(WORLD_SIZE, average_gradients, free_port(), deadline=60)
    for losses, parameters in ranks:
        assert_falling(losses)
        torch.testing.assert_close(parameters, ranks[0][1], rtol=0, atol=0)
    assert len({losses[0] for losses, _ in ranks}) == WORLD_SIZE  # each on stories of its own
    expected = train_alone([stories(1, skip=rank * 3000) for rank in range(WORLD_SIZE)])
    mean = [sum(losses) / WORLD_SIZE for losses in zip(*(losses for losses, _ in ranks), strict=True)]
    assert mean == pytest.approx(expected, abs=1e-4)


def test_a_pipeline_trains_as_one_process_does() -> None:
    losses = run_ranks(WORLD_SIZE, pass_on, free_port(), deadline=60)[-1]
    assert_falling(losses)
    assert losses == pytest.approx(train_alone([stories(BATCH_SIZE)]), abs=1e-4)


def test_in_two_pipelines_the_stages_ask_for_their_first_layer_and_then_are_replicas() -> None:
    """Stage r on rank r is right for one pipeline only: the fifth rank's layers would be 8 and 9 of 6."""
    ranks = run_ranks(2 * WORLD_SIZE, two_pipelines, free_port(), deadline=60)
    for rank, kind in ((2, "LLamaLastStage"), (3, "LLamaFirstStage")):
        assert ranks[rank][0].startswith(f"{kind} on rank {rank} of 6 without first_layer: only in a single pipeline")
    for number in range(WORLD_SIZE):
        parameters, replica = ranks[number][2], ranks[number + WORLD_SIZE][2]
        assert parameters.keys() == replica.keys()
        for name, parameter in parameters.items():
            torch.testing.assert_close(replica[name], parameter, rtol=0, atol=0)
    expected = train_alone([stories(BATCH_SIZE, skip=pipeline * 3000) for pipeline in range(2)])
    mean = [sum(losses) / 2 for losses in zip(ranks[2][1], ranks[5][1], strict=True)]
    assert mean == pytest.approx(expected, abs=1e-4)
