"""The executor's messages: none is kept for longer than needed, and no stage waits for the one it sends to."""

import errno
import os
import time
from multiprocessing.synchronize import Barrier
from random import Random
from typing import Any

import pytest
import torch
from support.held import mappings
from support.pipeline_models import LOSS, OPTIONS, VOCAB, WIDTH, BesideWhole, batch, grad_of
from support.processes import meeting_of, run_group
from torch import Tensor, nn

from distlab.axes.grid import Grid
from distlab.comm.context import TransportName, context_of
from distlab.comm.lab_group import LabGroup
from distlab.comm.pending import Pending
from distlab.comm.transports.queues import QueuedMessage
from distlab.pipeline.actions import ACTIVATIONS, GRADIENTS, stages_of
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.links import group_numbers
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.stages import build_stage, build_stages


class CountedSends:
    """The sends that have been started and not been waited for: what the executor keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = self.total = 0
        send, wait = LabGroup.send, Pending.wait
        open_sends: set[int] = set()

        def counted_send(group: LabGroup, *args: Any) -> Pending:
            pending = send(group, *args)
            if not pending.was_waited_for():
                open_sends.add(id(pending))
            self.now, self.peak, self.total = len(open_sends), max(self.peak, len(open_sends)), self.total + 1
            return pending

        def counted_wait(pending: Pending, *args: Any) -> bool:
            wait(pending, *args)
            open_sends.discard(id(pending))
            self.now = len(open_sends)
            return True

        monkeypatch.setattr(LabGroup, "send", counted_send)
        monkeypatch.setattr(Pending, "wait", counted_wait)


def count_sends(rank: int, schedule: str) -> tuple[int, int, int]:
    """Sends of a stage's steps: at all, the most kept at a time, and kept after a step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        net = build_stage(rank, (1, 1, 1), VOCAB, **OPTIONS)
        pipeline = Pipeline(net, all_stages(schedule, 3, 12), Grid(rank, {"pp": 3}), LOSS, WIDTH)
        sends = CountedSends(monkeypatch)
        pipeline.step(batch(0, rows=12).chunk(12))
        return sends.total, sends.peak, sends.now


def losses_and_gradients(rank: int, dtype: torch.dtype) -> tuple[float, Any, int]:
    """The loss of a step, this rank's gradients, and the bytes that it has sent to other stages."""
    net = build_stage(rank, (1, 1, 1), VOCAB, **OPTIONS)
    programs = all_stages("zb-h1", 3, 6)
    pipeline, dtypes = Pipeline(net, programs, Grid(rank, {"pp": 3}), LOSS, WIDTH, dtype=dtype), set[torch.dtype]()
    net.register_forward_pre_hook(lambda _, args: dtypes.add(args[0].dtype))
    losses = pipeline.step(batch(0, rows=6).chunk(6))
    assert dtypes == {torch.float32 if rank else torch.int64}, "they have a module's own dtype when they have arrived"
    sent = context_of().ledger.sent_bytes
    sent_bytes = sent[ACTIVATIONS] + sent[GRADIENTS]
    return sum(loss.item() for loss in losses), {name: grad_of(p) for name, p in net.named_parameters()}, sent_bytes


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_messages_in_bfloat16_are_half_as_large_and_the_gradients_nearly_the_same(transport: TransportName) -> None:
    whole, half = (
        run_group(3, losses_and_gradients, dtype, transport=transport) for dtype in (torch.float32, torch.bfloat16)
    )
    assert half[2][0] == pytest.approx(whole[2][0], rel=2e-3)
    for (_, wanted, whole_bytes), (_, own, half_bytes) in zip(whole, half, strict=True):
        assert 2 * half_bytes == whole_bytes > 0
        for name, grad in wanted.items():
            assert 0 < (own[name] - grad).norm() < 0.02 * grad.norm(), name  # they were rounded


def test_what_passes_between_stages_of_one_worker_is_not_rounded() -> None:
    programs, gradients = all_stages("zb-v", 1, 3), []
    for dtype in (torch.float32, torch.bfloat16):
        nets = build_stages(stages_of(programs[0]), (1, 1), VOCAB, **OPTIONS)
        Pipeline(nets, programs, Grid(0, {}), LOSS, WIDTH, dtype=dtype).step(batch(0, rows=3).chunk(3))
        gradients.append([grad_of(p) for net in nets.values() for p in net.parameters()])
    assert all(map(torch.equal, *gradients))


def test_messages_are_let_go_as_soon_as_they_are_known_to_have_arrived() -> None:
    """A stage that runs a few micro-batches ahead keeps as many messages, not those of the whole step."""
    for stage, (total, peak, after) in enumerate(run_group(3, count_sends, "dapple", transport="gloo")):
        assert total == 12 * ((stage > 0) + (stage < 2))
        assert 0 < peak <= 5, f"stage {stage} kept {peak} of {total} messages"
        assert after == 0, "a step waits for its sends"
    for total, peak, after in run_group(3, count_sends, "naive", transport="gloo"):
        assert (total >= 12, peak <= 2, after) == (True, True, 0)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients, none of which is missing or zero."""
    found = {name: torch.as_tensor(parameter.grad).clone() for name, parameter in net.named_parameters()}
    assert all(grad.abs().max() > 0 for grad in found.values())
    return found


def leave_sends_open(rank: int) -> list[tuple[bool, bool]]:
    """Three steps that run on: are the gradients the usual ones, and is a send of the step still open?"""
    with pytest.MonkeyPatch.context() as monkeypatch:
        net = build_stage(rank, (1, 1), VOCAB, **OPTIONS)
        grid, sends = Grid(rank, {"pp": 2}), CountedSends(monkeypatch)
        pipeline = Pipeline(net, all_stages("zb-h2", 2, 4), grid, LOSS, WIDTH, run_on=True)
        usual = Pipeline(net, all_stages("zb-h2", 2, 4), grid, LOSS, WIDTH)
        found = []
        for step in range(3):
            net.zero_grad()
            pipeline.step(batch(step).chunk(4))
            left, own = sends.now, gradients(net)
            assert left <= 4, "those of the step before are settled"
            net.zero_grad()
            usual.step(batch(step).chunk(4))
            found.append((all(torch.equal(own[name], grad) for name, grad in gradients(net).items()), left > 0))
        pipeline.follow(all_stages("zb-h2", 2, 4))
        assert sends.now == 0, "of the steps before"
        return found


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_steps_that_run_on_leave_their_last_sends_to_the_next_one(transport: TransportName) -> None:
    """Stage 0 leaves none: each of its activations is known to have arrived when its gradient has come back.

    Nor does a stage that shares memory: a message is copied when it is sent.
    """
    found = run_group(2, leave_sends_open, transport=transport)
    assert found == [[(True, False)] * 3, [(True, transport == "gloo")] * 3]


def step_with_delays(rank: int, schedule: str) -> tuple[int, int]:
    """Steps that run on, in which workers are late at random: messages sent through queues, and waits for a slot."""
    waits, sent, random = 0, 0, Random(rank)
    advance = QueuedMessage.advance

    def counted_advance(message: QueuedMessage, deadline: float) -> None:
        nonlocal waits, sent
        if message.queue.is_sender:
            sent += 1
            try:
                advance(message, time.perf_counter())
            except RuntimeError:
                waits += 1
        advance(message, deadline)

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(random.choice([0, 0, 0, 0.03]))
            return self.weight.expand(*x.shape[:2], WIDTH) * 1.0 if x.dim() == 2 else x * self.weight

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(QueuedMessage, "advance", counted_advance)
        programs = all_stages(schedule, 3, 6)
        nets = {stage: Late() for stage in stages_of(programs[rank])}
        pipeline = Pipeline(nets, programs, Grid(rank, {"pp": 3}), lambda y, _: y.mean(), WIDTH, run_on=True)
        for step in range(4):
            time.sleep(0.1 * (step % 3 == rank))
            pipeline.step(batch(step, 12).chunk(6))
        torch.distributed.barrier()
    return sent, waits


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h2", "zb-v"])
def test_no_worker_waits_for_a_slot(schedule: str) -> None:
    for sent, waits in run_group(3, step_with_delays, schedule):
        assert sent >= 4 * 6
        assert waits == 0


def run_ahead(rank: int, transport: TransportName, ended: Barrier) -> None:
    """Stage 1 begins when stage 0 has ended its forward passes, of 8 MB of activations each."""
    width, micro_batches = 4096, 6

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))
            self.passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            if rank == 0 and self.passes == 2 * micro_batches:
                ended.wait(20)
            y = self.weight.expand(*x.shape[:2], width) if x.dim() == 2 else x * self.weight
            return y * 1.0

    net = Counted()
    programs = all_stages("gpipe", 2, micro_batches)
    pipeline = Pipeline(net, programs, Grid(rank, {"pp": 2}), lambda y, _: y.mean(), width)
    batch = torch.zeros(micro_batches, 512, dtype=torch.int64).chunk(micro_batches)
    pipeline.step(batch)  # in which the stages agree on the memory that they share
    assert context_of().shares_memory == (transport == "auto")
    if rank == 1:
        ended.wait(20)
    pipeline.step(batch)
    assert net.weight.grad is not None
    assert net.passes == 2 * micro_batches


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_sends_do_not_hold_up_the_stage_that_sends(transport: TransportName) -> None:
    run_group(2, run_ahead, transport, meeting_of(2), transport=transport)


def grow(rank: int) -> list[int]:
    """Steps with larger and larger micro-batches, then small ones: gradients of one process, and the number of queues.

    From the third step on, stage 0 is refused memory.
    """
    shared = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        net = build_stage(rank, (1, 1), VOCAB, **OPTIONS)
        beside = BesideWhole({rank: net}, 2)
        pipeline = Pipeline(net, all_stages("dapple", 2, 4), Grid(rank, {"pp": 2}), LOSS, WIDTH)
        for step, size in enumerate((1, 8, 20, 40, 2)):  # larger ones need larger queues
            if step == 2 and rank == 0:
                monkeypatch.setattr(os, "memfd_create", refuse_memory)
            beside.step(pipeline, batch(step, rows=4 * size).chunk(4))
            shared.append(mappings())
    return shared


def refuse_memory(*_: object) -> int:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_micro_batches_may_grow_from_step_to_step() -> None:
    for shared in run_group(2, grow):
        assert shared == [2, 2, 1, 1, 1], "one each way, then only from the last stage to the first"


@pytest.mark.parametrize(
    ("over_nccl", "two_ways", "numbers"),
    [
        (False, False, [0, 0, 0, 0]),
        (False, True, [0, 1] * 4),
        (True, False, [0, 1, 0, 1]),
        (True, True, [0, 2, 1, 3, 0, 2, 1, 3]),
    ],
)
def test_messages_that_could_pass_each_other_have_groups_of_their_own(
    over_nccl: bool, two_ways: bool, numbers: list[int]
) -> None:
    """Links are (0, 1), (1, 0), (1, 2), (2, 1), each with activations, gradients, or both."""
    links = set(simulate(all_stages("dapple", 3, 2)).messages)
    if two_ways:  # as with two stages a worker: activations also go back, gradients also on
        links |= {(receiver, sender, kind) for sender, receiver, kind in links}
    assert [number for _, number in sorted(group_numbers(links, over_nccl).items())] == numbers
