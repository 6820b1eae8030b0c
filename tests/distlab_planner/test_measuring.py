"""What is measured of a machine, by clocks of the tests' own."""

import collections
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.planner_machines import CLUSTER, SIZES
from support.processes import free_port, process_group, run_ranks

from distlab.comm.link import Link
from distlab.comm.recorder import COMPUTE, STEP, Event
from distlab.pipeline import rehearsal
from distlab.reports.trace import RankTrace, Trace, write_chrome
from distlab_planner import calibrate, measuring
from distlab_planner.machine import AllReduce, PassSeconds
from distlab_planner.model import Sizes
from simplellm.errors import InputError
from simplellm.llama import LLamaLastStage, LLamaPart, LLamaStage

CPU = torch.device("cpu")
PARTS = "F", "B", "I", "W", "again"


def measure_reductions(rank: int, port: int) -> tuple[AllReduce, ...]:
    """On two ranks, with a clock that a computation takes to 2, and a computation and an all-reduce to 5."""
    with process_group(rank, 2, port), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            measuring,
            "seconds_in_turn",
            lambda works, *_, **__: {name: [2.0 if name == "2" else 5.0] for name in works},
        )
        return measuring.measure_all_reduces(rank, 2, torch.device("cpu"))


def test_the_time_of_an_all_reduce_is_without_the_computation_before_it() -> None:
    for found in run_ranks(2, measure_reductions, free_port()):
        assert [(one.ranks, one.transport) for one in found] == [(2, "gloo"), (2, "shared")]
        assert {seconds for one in found for seconds in one.seconds} == {3.0}


def test_waking_is_how_much_longer_a_pass_takes_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    class Passes:
        """The forward pass takes 1 s, the backward pass 3 s, and each 100 times the pause longer."""

        def __init__(self, *_: object) -> None: ...

        def run(self, _: str, wait: partial[None] | None = None) -> tuple[float, float]:
            longer = 100 * wait.args[0] if wait else 0.0
            return 1 + longer, 3 + longer

    monkeypatch.setattr(measuring, "Passes", Passes)
    for waking in measuring.measure_waking(SIZES):
        assert waking.seconds == pytest.approx(100 * waking.idle_seconds)


def test_the_time_of_a_block_is_its_part_of_what_several_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Passes:
        """An action takes a number of seconds for each sequence and each block, or the embedding, or the head."""

        def __init__(self, net: LLamaPart, sizes: Sizes, rows: int, vocab_size: int, compiler: object) -> None:
            assert (compiler is not None) == sizes.compiled
            self.seconds = float(rows * max(1, len(net.model.layers)))

        def run(self, letters: str, micro_batches: int) -> None: ...

        def turn(self) -> dict[str, float]:
            return {name: number * self.seconds for name, number in numbers.items()}

    numbers = {"F": 1, "B": 5, "I": 2, "W": 3, "again": 4}
    monkeypatch.setattr(measuring, "Passes", Passes)
    before = torch.get_num_threads()
    for sizes in (SIZES, replace(SIZES, compiled=True)):
        kinds = [measuring.Slicing(1, before + 1)]
        [found] = measuring.measure_passes(sizes, kinds, (1, 2), torch.device("cpu"), seconds=0)
        assert torch.get_num_threads() == before
        for part in (found.embedding, found.block, found.head):
            assert part == PassSeconds(F=(1.0, 2.0), B=(5.0, 10.0), I=(2.0, 4.0), W=(3.0, 6.0))
        assert found.again == (4.0, 8.0)


def test_other_work_between_passes_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves on by one between the start and the end of a pass, and by 10 during the other work."""
    for part, kind, blocks in measuring.NETS:
        clock, begun = itertools.count(), list[int]()

        def wait(clock: Iterator[int] = clock, begun: list[int] = begun) -> None:
            begun.append(next(clock))
            collections.deque(itertools.islice(clock, 9), maxlen=0)

        monkeypatch.setattr(rehearsal, "now", lambda _, clock=clock: next(clock))
        net = measuring.build(kind, SIZES, blocks, 1, CPU)
        passes = measuring.Passes(net, SIZES, 2, SIZES.vocab_size)
        assert passes.run("FIW", wait, micro_batches=2) == [1, 1, 1], part
        assert begun[:6] == [12 * number for number in range(6)], part


def test_recomputation_takes_what_a_backward_pass_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: of a block, a forward pass takes a second, and a backward pass three."""
    clock = [0.0]

    def forward(*_: object) -> None:
        clock[0] += 1

    def backward(_: torch.Tensor) -> None:
        clock[0] += 3

    monkeypatch.setattr(rehearsal, "now", lambda _: clock[0])
    net = measuring.build(LLamaStage, SIZES, measuring.BLOCKS, 1, CPU)
    for block in net.model.layers.values():
        block.register_forward_pre_hook(forward)
        block.get_parameter("input_layernorm.weight").register_post_accumulate_grad_hook(backward)
    passes = measuring.Passes(net, SIZES, 1, SIZES.vocab_size)
    for _ in range(2):  # the model is as before
        assert passes.turn() == {name: measuring.BLOCKS * n for name, n in zip(PARTS, (1, 3, 3, 0, 1), strict=True)}
    head = measuring.Passes(measuring.build(LLamaLastStage, SIZES, 0, 1, CPU), SIZES, 1, SIZES.vocab_size)
    assert set(head.turn()) == set("FBIW"), "it has no blocks"


def test_short_passes_have_more_turns_than_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, usual = [0.0], torch.get_num_threads()
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def turn(slicing: measuring.Slicing, seconds: float) -> dict[str, float]:
        assert torch.get_num_threads() == slicing.threads
        clock[0] += seconds
        return {"F": seconds}

    passes: dict[Any, Any] = {}
    for threads, seconds in ((usual, 1.0), (usual + 1, 9.0)):
        slicing = measuring.Slicing(1, threads)
        run = SimpleNamespace(run=lambda *_, **__: None, turn=partial(turn, slicing, seconds))
        passes[slicing, "block", 1] = run
    for seconds, numbers in ((0.0, (2, 2)), (90.0, (45, 5))):
        turns = measuring.take_turns(passes, seconds)
        assert tuple(map(len, turns.values())) == numbers
    assert torch.get_num_threads() == usual


def test_a_message_takes_half_of_the_way_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own; the other rank pauses, too, before it sends. Both ways lead through shared memory.

    Only the call that sends a small message counts as the sender's own time.
    """
    link, clock, opened = Link(1e-3, 1e8), [0.0], dict[tuple[int, int], int]()

    def spend(seconds: float) -> None:
        clock[0] += seconds

    def own(tensor: torch.Tensor) -> float:
        return 2e-4 if tensor.nbytes < 100 else 5e-4

    def send(tensor: torch.Tensor, _: int) -> SimpleNamespace:
        spend(own(tensor))
        return SimpleNamespace(wait=nothing)

    def receive(tensor: torch.Tensor, _: int) -> None:
        spend(measuring.PAUSE + 2 * link.seconds(tensor.nbytes) - own(tensor))

    def nothing(*_: object) -> None: ...

    def open_queues(row: Sequence[int], message_bytes: int, _: torch.Tensor) -> None:
        opened.update(dict.fromkeys(itertools.pairwise(row), message_bytes))

    for name, instead in (("isend", send), ("recv", receive), ("all_reduce", nothing), ("broadcast", nothing)):
        monkeypatch.setattr(f"torch.distributed.{name}", instead)
    monkeypatch.setattr(measuring, "open_queues", open_queues)
    monkeypatch.setattr(measuring, "now", lambda _: clock[0])
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.sleep", spend)
    found = measuring.measure_messages(0, [(0, 1)], torch.device("cpu"))
    times = found.link.latency_seconds, found.link.bytes_per_second, found.own_seconds
    assert times == pytest.approx((1e-3, 1e8, 2e-4), rel=1e-3)
    assert opened == dict.fromkeys([(0, 1), (1, 0)], measuring.MESSAGE_BYTES[-1])


def test_the_pass_at_the_end_counts_as_far_as_it_is_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def take_a_second(_: str) -> None:
        clock[0] += 1

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    passes: Any = SimpleNamespace(run=take_a_second)
    assert [measuring.passes_per_second(passes, seconds) for seconds in (2.5, 2.0, 0.25)] == [1, 1, 1]


def test_what_is_measured_is_of_one_weight_and_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, ticks = torch.device("cpu"), iter(range(1000))
    monkeypatch.setattr(measuring, "now", lambda _: next(ticks))
    weights = torch.nn.Linear(10, 10, bias=False).parameters()
    assert measuring.measure_optimizer(torch.optim.SGD(weights), cpu) == 1 / 100
    monkeypatch.setattr(measuring, "passes_per_second", lambda *_: 10.0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)  # the second rank adds nothing
    assert measuring.measure_slowdown(SIZES, 0, 2, cpu, 0.0) == (1, 2)
    assert measuring.ascending([3.0, 1.0, 2.0]) == (1, 1, 2), "what was disturbed is no longer than what takes longer"


def test_a_tiny_run_costs_what_is_not_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step does not count; of the others the lower quartile, and of memory the end."""
    steps = [(0, 100), (100, 107), (107, 112), (112, 118), (118, 126), (126, 130)]  # each with passes of 2 seconds
    events = [event for a, b in steps for event in (Event(STEP, "step", a, b), Event(COMPUTE, "F0", a, a + 2))]

    def run(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        assert not [name for name in env if name.startswith(("LAB_", "TORCHELASTIC"))], "it is no rank of this run"
        out = Path(command[command.index("--out") + 1])
        write_chrome(Trace([RankTrace(events)], {"dp": 1, "pp": 1}), out / "trace.json")
        most = 7e6 if "--compile" in command else 4e6
        records = [{"step": step, "peak_memory_bytes": size} for step, size in enumerate((most / 2, most))]
        (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setenv("LAB_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr("subprocess.run", run)
    usual = calibrate.with_tiny_run(CLUSTER, torch.device("cpu"))
    assert usual == replace(CLUSTER, step_seconds=3.0, process_bytes=4e6)
    assert calibrate.with_tiny_run(CLUSTER, torch.device("cpu"), "--compile") == replace(usual, process_bytes=7e6)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="no memory\n"))
    with pytest.raises(InputError, match=r"^the run of a tiny model failed: no memory$"):
        calibrate.with_tiny_run(CLUSTER, torch.device("cpu"))
