"""torch's own wrappers, pipelines and checkpoints through the lab's backend: the results of one process."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.processes import free_port, process_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distlab.comm.context import Context, Options, TransportName
from distlab.comm.names import named
from distlab.comm.recorder import MESSAGE

STEPS, ROWS, LR = 3, 8, 0.1


class Net(nn.Module):
    """Two layers, large enough that their tensors go through shared memory."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(step))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def train(net: nn.Module, rows: slice = slice(None)) -> list[float]:
    """Train on some rows of each batch; the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step)[rows]
        with named("the weights", "weights"):
            y = net(x)
        loss = loss_of(y, x.flip(-1))
        with named("the gradients", "gradients"):
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def own_rows(rank: int) -> slice:
    return slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)


def trained_alone() -> dict[str, Tensor]:
    net = Net()
    train(net)
    assert not any(map(torch.equal, net.parameters(), Net().parameters()))
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def messages_of(context: Context) -> set[str]:
    """The names of the messages and collectives that were recorded."""
    return {event.name for event in context.recorder.events if event.kind == MESSAGE}


def assert_trained(net: nn.Module) -> None:
    for name, expected in trained_alone().items():
        own = net.get_parameter(name).detach()
        torch.testing.assert_close(own.full_tensor() if isinstance(own, DTensor) else own, expected)


WEIGHTS_BYTES = sum(parameter.nbytes for parameter in Net().parameters())
ACTIVATIONS_BYTES = ROWS * 32 * 4


def replicate(rank: int, context: Context, _: Path) -> None:
    net = Net()
    wrapped = DistributedDataParallel(net)
    train(wrapped, own_rows(rank))
    assert_trained(net)
    assert context.ledger.messages["gradients"] == STEPS
    assert context.ledger.sent_bytes["gradients"] == STEPS * WEIGHTS_BYTES
    assert f"the gradients from rank {1 - rank}" in messages_of(context)


def replicate_in_buckets(rank: int, context: Context, _: Path) -> None:
    """Several buckets, awaited at the end of the backward pass; with a static graph, DDP also starts them there."""
    for is_static in (False, True):
        net = Net()
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.001, static_graph=is_static)
        context.ledger.messages.clear()
        train(wrapped, own_rows(rank))
        assert_trained(net)
        assert context.ledger.messages["gradients"] > STEPS
    net = Net()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    with wrapped.join(divide_by_initial_world_size=False):
        if rank == 0:  # the other rank has no rows, and only takes part in the collectives
            train(wrapped)
    assert_trained(net)
    for hook in (average_at_once, average_then, average_in_two):
        outside: Any = SimpleNamespace(buffer=lambda: torch.full((1000,), float(rank)))  # of a backward pass
        assert set(hook(None, outside).wait().tolist()) == {0.5}
        net = Net()
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.001)
        wrapped.register_comm_hook(None, hook)
        train(wrapped, own_rows(rank))
        assert_trained(net)


def average_at_once(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that waits during the backward pass for futures that follow each other."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(average_then(None, bucket).wait())
    return future


def average_then(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that divides the sum after the all-reduce."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    first: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return first.then(lambda done: done.value().div_(2))


def average_in_two(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that waits for a second all-reduce when the first has ended, as PowerSGD's does."""

    def again(total: torch.futures.Future[list[Tensor]]) -> Tensor:
        work = dist.all_reduce(half := total.value()[0] / 4, async_op=True)
        assert work is not None
        work.get_future().wait()
        return half

    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(again)


def compile_calls(rank: int, context: Context, _: Path) -> None:
    """Compiled programs in which Python and C++ code (DDP's) call collectives that the compiler does not translate."""

    def double(x: Tensor) -> Tensor:
        y = x * 2
        dist.broadcast(y, 1)
        return y + 1

    assert set(torch.compile(double, backend="eager")(torch.full((1000,), float(rank))).tolist()) == {3.0}
    net = Net()
    compiled: Any = torch.compile(DistributedDataParallel(net), backend="eager")
    train(compiled, own_rows(rank))
    assert_trained(net)
    assert context.ledger.messages["gradients"] == STEPS


def shard(rank: int, context: Context, _: Path) -> None:
    net = Net()
    for layer in (net.up, net.down):
        fully_shard(layer)
    fully_shard(net)
    train(net, own_rows(rank))
    # Each rank sends its half of the weights before the forward and the backward pass, and half of the gradients.
    sent_bytes = context.ledger.sent_bytes
    assert sent_bytes["weights"] == STEPS * WEIGHTS_BYTES // 2
    assert sent_bytes["gradients"] == 2 * STEPS * WEIGHTS_BYTES // 2
    assert {f"the {what} from rank {1 - rank}" for what in ("weights", "gradients")} <= messages_of(context)
    assert_trained(net)


def split(rank: int, context: Context, _: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    context.ledger.messages.clear()
    train(net)
    assert context.ledger.messages == {"weights": STEPS}, "an all-reduce of activations in each forward pass"
    assert context.ledger.sent_bytes["weights"] == STEPS * ACTIVATIONS_BYTES
    assert f"the weights from rank {1 - rank}" in messages_of(context)
    assert_trained(net)


def pipe(rank: int, context: Context, _: Path) -> None:
    net, whole, micro_batches = Net(), Net(), 4
    part = nn.Sequential(net.up, nn.Tanh()) if rank == 0 else net.down
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), micro_batches, loss_of)
    for step in range(2):
        x, losses = batch(step), list[Tensor]()
        net.zero_grad()
        whole.zero_grad()
        context.ledger.sent_bytes.clear()
        with named("a result", "results"):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x.flip(-1), losses=losses)
        loss = loss_of(whole(x), x.flip(-1))
        loss.backward()
        if rank == 1:
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
        for name, parameter in whole.named_parameters():
            if name.startswith("up" if rank == 0 else "down"):
                torch.testing.assert_close(net.get_parameter(name).grad, parameter.grad)
    assert context.ledger.sent_bytes["results"] == ROWS * 64 * 4, "activations of the layer, or their gradients"
    assert f"a result from rank {1 - rank}" in messages_of(context)


def save_and_load(rank: int, context: Context, folder: Path) -> None:
    net, other = Net(), Net()
    fully_shard(net)
    train(net, own_rows(rank))
    with named("the checkpoint", "checkpoint"):
        dcp.save(net.state_dict(), checkpoint_id=folder)
        fully_shard(other)
        loaded = other.state_dict()
        dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded)
    assert context.ledger.messages["checkpoint"] > 0
    assert f"the checkpoint from rank {1 - rank}" in messages_of(context)
    assert_trained(other)


def work_with(rank: int, port: int, transport: TransportName, work: Callable[..., None], folder: Path) -> bool:
    with process_group(rank, 2, port, options=Options(transport=transport)) as context:
        context.recorder.enabled = True
        work(rank, context, folder)
        assert context.waits.waits_for() is None, "later failures are not of these waits"
        return context.shares_memory


@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("work", [replicate, replicate_in_buckets, compile_calls, shard, split, pipe, save_and_load])
def test_results_are_those_of_one_process(work: Callable[..., None], transport: TransportName, tmp_path: Path) -> None:
    shares_memory = run_ranks(2, work_with, free_port(), transport, work, tmp_path)
    assert shares_memory == [transport == "shared" and work is not pipe] * 2
