"""`--run-on`: the numbers of the usual run, nobody waits at the end of a step, and a bad step is undone or named."""

import math
import re
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.chapters import losses, records, train, train_on
from support.processes import LAB, free_port, meeting_of, run_ranks
from support.terminals import fork_python
from torch import Tensor, nn

from distlab.checkpoints.format import latest_valid
from distlab.comm.context import context_of
from distlab.comm.recorder import StepTime
from distlab.pipeline.executor import Pipeline
from distlab.run.clipping import LossSum
from distlab.run.run_on import Arrived, RunningOn, UndoableLog, UndoableRun
from distlab.run.state_copy import StateCopy
from distlab.run.steps import NotFiniteError
from distlab.run.training import TrainingRun

PIPELINE = "PP/schedules/intro_PP_schedules.py"
HYBRID = "hybrid/intro_5d.py"
ADAM = "--steps 6 --optimizer adam --lr 0.01 --batch-size 6".split()
ZB_V = "--world-size 2 --schedule zb-v --micro-batches 3".split()
REPLICAS = "--dp 2 --pp 2 --schedule zb-h2 --micro-batches 3".split()


def numbers(out: Path) -> list[tuple[int, list[str], float, float | None, int]]:
    """What does not depend on time in a run's records, and the names of all values."""
    return [(r["step"], sorted(r), r["loss"], r.get("validation_loss"), r["tokens"]) for r in records(out)]


def assert_same(own: Any, expected: Any) -> None:
    for parts in zip(own[:2], expected[:2], strict=True):  # parameters, then gradients of the last step
        for mine, others in zip(*parts, strict=True):
            assert mine.keys() == others.keys()
            for name, tensor in mine.items():
                assert torch.equal(tensor, others[name]), name


def test_the_numbers_are_those_of_the_usual_run_bit_for_bit(tmp_path: Path) -> None:
    """Also with validation and checkpoints, before which the run waits, and where it is resumed."""
    flags = [*REPLICAS, *ADAM, *"--save-every 4 --eval-every 3 --keep 9".split()]
    usual, late = tmp_path / "usual", tmp_path / "late"
    expected = train_on(4, HYBRID, usual, *flags)
    own = train_on(4, HYBRID, late, *flags, "--run-on")
    assert_same(own, expected)
    assert numbers(late) == numbers(usual)
    assert [step for step, *_ in numbers(late)] == list(range(6))
    assert sum(loss is not None for *_, loss, _ in numbers(late)) == 2
    lines = (late / "rank0.log").read_text().splitlines()
    steps = [line.split()[0] for line in lines if line[0].isdigit()]
    assert steps == [str(step) for step in range(6)], "each is printed once, also the last one"
    assert lines.index(next(line for line in lines if "validation after 3 steps" in line)) > next(
        number for number, line in enumerate(lines) if line.startswith("2 ")
    )
    checkpoint = str(late / "checkpoints/step-00000004")
    assert_same(train_on(4, HYBRID, tmp_path / "resumed", "--resume", checkpoint, *flags, "--run-on"), expected)


def time_the_end_of_a_step(rank: int, flags: list[str], logged: Barrier | None) -> tuple[float, float]:
    """When this rank begins to log step 2, to which rank 1 comes late, and when it has: by a clock of all ranks.

    Rank 1 is half a second late, or, where the ranks meet at `logged`, until rank 0 has logged the step.
    """
    times, kind = dict[int, tuple[float, float]](), UndoableRun if "--run-on" in flags else TrainingRun
    log = kind.log

    def timed(run: Any, step: int, losses: Any) -> None:
        meets = logged if step == 2 else None
        if step == 2 and rank == 1:
            meets.wait(20) if meets else time.sleep(0.5)
        started = time.monotonic()
        log(run, step, losses)
        times[step] = started, time.monotonic()
        if meets and rank == 0:
            meets.wait(20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "log", timed)
        train(rank, PIPELINE, flags)
    return times[2]


def test_nobody_waits_at_the_end_of_a_step(tmp_path: Path) -> None:
    flags = [*ZB_V, *ADAM, "--out", str(tmp_path)]
    for more, logged in ([], None), (["--run-on"], meeting_of(2)):
        flags_of_both = [*flags, *more, "--master-port", str(free_port())]
        (_, first_ended), (second_started, _) = run_ranks(2, time_the_end_of_a_step, flags_of_both, logged)
        assert (first_ended > second_started) == (logged is None), more


def train_badly(rank: int, bad: list[int], flags: list[str]) -> tuple[Any, Any]:
    """A run of which some steps' losses are not finite when they are first looked at."""
    wait, seen = LossSum.wait, set[int]()

    def not_finite_at_first(loss: LossSum) -> float:
        value, is_first = wait(loss), loss.step not in seen
        seen.add(loss.step)
        return math.nan if is_first and loss.step in bad else value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossSum, "wait", not_finite_at_first)
        return train(rank, PIPELINE, flags)


def test_a_bad_step_is_undone_and_taken_again(tmp_path: Path) -> None:
    """The first step, before which Adam has no state, and two in a row."""
    flags = [*ZB_V, *ADAM]
    expected = train_on(2, PIPELINE, tmp_path / "usual", *flags)
    late = [*flags, "--run-on", "--out", str(tmp_path / "late"), "--master-port", str(free_port())]
    ended = run_ranks(2, train_badly, [0, 2, 3], late)
    assert_same(tuple(zip(*ended, strict=True)), expected)
    assert numbers(tmp_path / "late") == numbers(tmp_path / "usual")
    log = (tmp_path / "late" / "rank0.log").read_text()
    assert "# 6 steps, 864 tokens in" in log
    assert "# steps that were taken again took" in log


def diverge(rank: int, flags: list[str]) -> str:
    with pytest.raises(NotFiniteError) as raised:
        train(rank, PIPELINE, flags)
    return str(raised.value)


def test_a_loss_that_is_no_number_is_found_in_its_step_from_its_weights(tmp_path: Path) -> None:
    """Nor is it saved: before a checkpoint, the loss is waited for."""
    sentences, late = [], ["--run-on"]
    for name, more in ("usual", []), ("late", late), ("saved", [*late, "--save-every", "1"]):
        flags = [*ZB_V, *"--steps 20 --optimizer sgd --lr 3e4 --batch-size 6".split(), "--out", str(tmp_path / name)]
        sentences += run_ranks(2, diverge, [*flags, *more, "--master-port", str(free_port())])
    found = losses(tmp_path / "late")
    assert found == losses(tmp_path / "usual") == losses(tmp_path / "saved")
    assert latest_valid(tmp_path / "saved").step == len(found)
    assert len(found) > 1
    assert set(sentences) == {sentences[0]}
    assert sentences[0].startswith(f"the loss of step {len(found)} is nan: the first non-finite tensor is the ")


def diverge_in_step_2(rank: int, value: float, flags: list[str]) -> str:
    """A run in which a stage's gradients on the last rank are not finite in step 2, also when it is taken again."""
    step_of: dict[tuple[int, ...], int] = {}  # by the ids of its batch
    step = Pipeline.step

    def broken(pipeline: Pipeline, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        loss = step(pipeline, micro_batches)
        number = step_of.setdefault(tuple(micro_batches[0].flatten().tolist()), len(step_of))
        if (rank, number) == (1, 2):
            stage = next(iter(pipeline.stages.values()))
            for parameter in stage.parameters():
                torch.as_tensor(parameter.grad).fill_(value)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "step", broken)
        return diverge(rank, flags)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_are_not_finite_are_found_in_their_step(value: float) -> None:
    sentences = []
    for more in [], ["--run-on"]:
        flags = [*ZB_V, *ADAM, "--clip-norm", "100", *more, "--master-port", str(free_port())]
        sentences += run_ranks(2, diverge_in_step_2, value, flags)
    assert set(sentences) == {sentences[0]}
    assert re.match(rf"the norm of the gradients of step 2 is {value}: .* of .*down_proj", sentences[0]), sentences[0]


class Arrives:
    """A transfer in progress."""

    def __init__(self, arrived: bool, error: str = "") -> None:
        self._arrived, self._error = arrived, error

    def is_completed(self) -> bool:
        return self._arrived

    def wait(self) -> None:
        assert self._arrived, "a run that ends early waits for nobody"
        if self._error:
            raise RuntimeError(self._error)


def loss_of_step_3(transfer: Any) -> LossSum:
    """The loss of two replicas whose sum is 4 when the transfer arrives."""

    def begin(total: Tensor, async_op: bool) -> Any:
        total.fill_(4.0)
        return transfer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.all_reduce", begin)
        return LossSum(3, torch.tensor(1.0), 2)


def running_on(tell: Callable[[Arrived], None], **options: float) -> RunningOn:
    return RunningOn(StateCopy(torch.optim.SGD(nn.Linear(1, 1).parameters())), tell, **options)


@pytest.mark.parametrize(
    ("transfer", "told"),
    [(Arrives(True), [(3, {"loss": 2.0})]), (Arrives(False), []), (Arrives(True, "closed by peer"), [])],
)
def test_a_run_that_ends_early_keeps_the_loss_that_has_arrived(transfer: Any, told: list[Arrived]) -> None:
    found: list[Arrived] = []
    late = running_on(found.append)
    late.keep_arrived()
    late.leave_open(loss_of_step_3(transfer))
    run: Any = UndoableRun.__new__(UndoableRun)
    run.records = SimpleNamespace(late=late)
    run.end_early(RuntimeError("another rank has exited"))
    assert found == told


def test_after_a_death_the_loss_of_the_open_step_is_that_which_a_rank_knows_of_it() -> None:
    """Others may know only that of the step before."""
    found: list[Arrived] = []
    late = running_on(found.append)
    late.leave_open(loss_of_step_3(Arrives(False)))
    late.go_on_with(4, [Arrived(2, {"loss": 9.0}), Arrived(3, {"loss": 2.0})])
    assert found == [(3, {"loss": 2.0})]
    assert late.waits_in == 4


def test_the_step_after_a_clipped_one_waits_too() -> None:
    """Clipped steps come in groups, and one that ran on costs another step."""
    late = running_on(lambda *_: None, most=1.0)
    for step, norm, waits_in in ((3, 0.5, None), (4, 2.0, 5)):
        late.has_waited(step, norm)
        assert late.waits_in == waits_in


def test_steps_that_are_taken_back_count_apart(tmp_path: Path) -> None:
    log = UndoableLog(tmp_path, context_of())
    log.times += [StepTime(seconds, 0, 0) for seconds in (1, 2, 4)]
    for steps in (0, 2):
        log.take_back(steps)
    assert log.seconds_apart == {"steps that were taken again": 6}
    assert [time.seconds for time in log.times] == [1]


def test_a_rank_that_is_ahead_keeps_its_record_of_a_step_that_is_evaluated_again(tmp_path: Path) -> None:
    log = UndoableLog(tmp_path, context_of())
    log.begin(10, "tokens")
    with log.timing_a_step():
        log.values |= {"loss": 3.0, "validation_loss": 5.0}
    log.record(0)
    with log.timing_a_step():  # of which the rank is taken back, after a death
        pass
    log.take_back(1)
    log.continue_at(1, writes=True)
    log.values["validation_loss"] = 5.0
    log.record(0)
    with log.timing_a_step():
        log.values["loss"] = 2.0
    log.record(1)
    found = [(record["step"], record["loss"], record.get("validation_loss")) for record in records(tmp_path)]
    assert found == [(0, 3.0, 5.0), (1, 2.0, None)]


def test_a_rank_that_takes_over_writes_the_two_records_that_the_one_before_it_has_not(tmp_path: Path) -> None:
    dies, takes_over = logs = [UndoableLog(tmp_path, context_of(), rank) for rank in range(2)]
    for log in logs:
        log.begin(10, "tokens")
    for step in range(4):
        for log in logs if step < 2 else [takes_over]:
            with log.timing_a_step():
                log.values["loss"] = float(step)
            log.record(step)
    dies.close()
    takes_over.continue_at(4, writes=True)
    assert losses(tmp_path) == [0, 1, 2, 3]


def test_a_script_without_track_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UndoableRun, "track", lambda *_, **__: None)
    with pytest.raises(AssertionError, match=r"--run-on and --repair need a script that calls run\.track before"):
        train_on(1, PIPELINE, tmp_path, "--world-size", "1", "--run-on")


def test_an_error_within_track_is_one_sentence(tmp_path: Path) -> None:
    flags = "0 --world-size 1 --data sample --run-on --record-gradients 1000000 --master-port".split()
    ended = fork_python(LAB / PIPELINE, *flags, free_port(), "--out", tmp_path).finish()
    assert ended.status == 2
    assert "give at most" in ended.err.splitlines()[-1]
