"""What the lab's three listings do with `simplellm`: train in one process, average gradients, pass activations on.

Written against torch.distributed alone, as a reader's own script is, and in processes of their own over gloo.
"""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, run_ranks
from torch import Tensor, nn
from torch.optim import Adam

from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage, LLamaLastStage, LLamaStage
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

WORLD_SIZE, STEPS, BATCH_SIZE, SEQ_LEN, DMODEL, LAYERS, LR = 3, 8, 3, 48, 48, 6, 2e-3


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
    optimizer = Adam(model.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = torch.cat([next(source) for source in sources])
        loss = causalLLMLoss(model(ids), ids.clone().detach(), vocab_size)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses


def rendezvous(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(rank)


def build_stage(number: int) -> nn.Module:
    """A third of the model, as the third listing builds it."""
    vocab_size, options = SPTokenizer().vocab_size, sizes(LAYERS // WORLD_SIZE)
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
    optimizer = Adam(model.parameters(), lr=LR)
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
    stage: Any = build_stage(rank)
    optimizer = Adam(stage.parameters(), lr=LR)
    source, losses = stories(BATCH_SIZE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = next(source)
        if rank == 0:
            out = stage.embed(ids)
        else:
            inputs = torch.empty((len(ids), SEQ_LEN, DMODEL))
            dist.recv(inputs, rank - 1)
            inputs.requires_grad_()
            out = stage(inputs)
        if rank < WORLD_SIZE - 1:
            dist.send(out.to("cpu"), rank + 1)
            grad = torch.empty((len(ids), SEQ_LEN, DMODEL))
            dist.recv(grad, rank + 1)
            out.backward(grad)
        else:
            loss = causalLLMLoss(out, ids, SPTokenizer().vocab_size)
            losses.append(loss.item())
            loss.backward()
        if rank > 0:
            assert inputs.grad is not None
            dist.send(inputs.grad, rank - 1)
        optimizer.step()
    return losses


def assert_falling(losses: list[float]) -> None:
    assert len(losses) == STEPS
    assert max(losses[-3:]) < min(losses[:3]) - 0.1, losses


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
