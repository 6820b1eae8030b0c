"""The schedules' lists: literal ones, the order on every link, and a new schedule."""

import re

import pytest

from distlab.pipeline import schedules
from distlab.pipeline.actions import (
    GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    ActionCosts,
    Forward,
    ForwardAgain,
    stages_of,
)
from distlab.pipeline.plan import in_a_row, simulate
from distlab.pipeline.schedules import (
    ALIASES,
    SCHEDULES,
    all_stages,
    gpipe,
    schedule,
    schedule_names,
    stages_per_worker,
    with_recomputation,
)
from distlab.show_schedule import table
from simplellm.errors import InputError

pytestmark = pytest.mark.quick

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (*range(1, 9), 16)]


@pytest.mark.parametrize(
    ("name", "micro_batches", "lists"),
    [
        ("naive", 3, ["F0 B0 F1 B1 F2 B2"] * 2),
        ("gpipe", 3, ["F0 F1 F2 B0 B1 B2"] * 3),
        ("dapple", 4, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("dapple", 2, ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]),
        ("dapple", 1, ["F0 B0"] * 4),
        ("dapple", 3, ["F0 B0 F1 B1 F2 B2"]),
        ("zb-h1", 3, ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]),
        ("zb-h2", 3, ["F0 F1 F2 I0 W0 I1 W1 I2 W2", "F0 I0 F1 I1 F2 I2 W0 W1 W2"]),
    ],
)
def test_lists(name: str, micro_batches: int, lists: list[str]) -> None:
    programs = all_stages(name, len(lists), micro_batches)
    assert [" ".join(map(str, program)) for program in programs] == lists


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("naive", ["F0 b0 F1 b1 F2 b2"] * 2),
        ("gpipe", ["f0 f1 f2 R0 B0 R1 B1 R2 B2"] * 2),
        ("dapple", ["f0 f1 R0 B0 f2 R1 B1 R2 B2", "F0 b0 F1 b1 F2 b2"]),
        ("zb-h1", ["f0 f1 R0 I0 W0 f2 R1 I1 W1 R2 I2 W2", "F0 i0 F1 i1 W0 F2 i2 W1 W2"]),
    ],
)
def test_lists_with_recomputation(name: str, lists: list[str]) -> None:
    programs = with_recomputation(all_stages(name, len(lists), 3))
    assert [" ".join(map(str, program)) for program in programs] == lists


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_recomputation_one_micro_batch_of_a_stage_is_kept_at_a_time_and_all_else_is_as_before(name: str) -> None:
    for workers, micro_batches in SIZES:
        if not SCHEDULES[name].fits(workers, micro_batches):
            continue
        usual = all_stages(name, workers, micro_batches)
        programs = with_recomputation(usual)
        plan = simulate(programs, ActionCosts(activation_bytes=1, weight_bytes_share=0))
        assert max(plan.peak_bytes) == 1, "from R to the backward pass"
        for own, before in zip(programs, usual, strict=True):
            kept = [action for action in own if not isinstance(action, ForwardAgain)]
            assert [str(action).upper() for action in kept] == [str(action) for action in before]


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputation_takes_a_forward_pass_for_each_micro_batch(name: str) -> None:
    """In an action of its own, as measured, or within the backward pass; there of the stage's blocks only, if known."""
    workers, micro_batches = 3, 6
    usual = all_stages(name, workers, micro_batches)
    stages = len(simulate(usual).owners)
    forward = [1.0 + stage for stage in range(stages)]
    costs = ActionCosts(forward, backward=4.0, blocks=0.5, measured={("R", 0): 7.0})
    for before, own in zip(usual, with_recomputation(usual), strict=True):
        more = sum(map(costs.seconds, own)) - sum(map(costs.seconds, before))
        again = [a.stage for a in own if isinstance(a, ForwardAgain)]
        assert len(again) + sum(a.letter in "bi" for a in own) == micro_batches * len(stages_of(own))
        within = micro_batches * len(stages_of(own)) - len(again)
        assert more == pytest.approx(sum([7.0, *forward[1:]][stage] for stage in again) + 0.5 * within)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_the_drawing_in_its_docstring_is_that_of_the_schedule(name: str) -> None:
    text = getattr(schedules, name.replace("-", "_")).__doc__
    drawn = [line.split()[2:] for line in text.splitlines() if line.strip().startswith("worker ")]
    micro_batches = 1 + max(int(number) for number in re.findall(r"\bF(\d+)", text))
    assert len(drawn) >= 2
    _, *rows = table(simulate(all_stages(name, len(drawn), micro_batches)))
    assert [row.split()[-len(drawn[0]) :] for row in rows] == drawn


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_in_the_order_of_one_process_or_says_what_it_needs(name: str) -> None:
    """On every stage, gradients are added up in the order of the micro-batches: so their sums are the same."""
    runs = 0
    for workers, micro_batches in SIZES:
        if not SCHEDULES[name].fits(workers, micro_batches):
            plural = "s" * (workers > 1)
            needs = rf"--schedule {name} on {workers} worker{plural}, with --micro-batches {micro_batches}: give .*\d"
            with pytest.raises(InputError, match=needs):
                all_stages(name, workers, micro_batches)
            continue
        for chunks in {"interleaved": (1, 2, 3), "auto": (1, 2)}.get(name, (2,)):
            programs = all_stages(name, workers, micro_batches, chunks)
            plan = simulate(programs)  # complete, every link in order, no deadlock
            held = [len(stages_of(program)) for program in programs]
            assert held == [stages_per_worker(name, chunks)] * workers
            done = [[a.micro_batch for a in program if isinstance(a, Forward)] for program in programs]
            assert all(sorted(own) == sorted([*range(micro_batches)] * held[0]) for own in done)
            assert len(plan.owners) == workers * held[0]
            assert all(len({plan.labels[action] for action in program}) == len(program) for program in programs)
            for stage, worker in plan.owners.items():
                for kind in (GRADIENTS, WEIGHT_GRADIENTS):  # of norms and embedding; of linear layers
                    order = [a.micro_batch for a in programs[worker] if a.stage == stage and kind in a.gives]
                    assert order == [*range(micro_batches)]
            runs += 1
    assert runs >= 8


def idle_share(name: str, workers: int, micro_batches: int, weight_share: float = 0.5) -> float:
    """The mean over the workers, if the passes of all a worker's stages together take 1 forward and 2 back."""
    stages = stages_per_worker(name)
    costs = ActionCosts(forward=1 / stages, backward=2 / stages, weight_share=weight_share)
    plan = simulate(all_stages(name, workers, micro_batches), costs)
    return sum(plan.bubble) / workers


@pytest.mark.parametrize(
    ("workers", "micro_batches", "weight_share", "percent"),
    [
        (4, 8, 0.5, [27.3, 27.3, 15.8, 11.1, 11.1, 5.9, 5.9]),
        (8, 16, 0.5, [30.4, 30.4, 17.9, 12.7, 12.7, 6.8, 6.8]),
        (4, 12, 0.4, [20.0, 20.0, 11.1, 10.4, None, 4.8, 5.5]),
    ],
)
def test_workers_idle_as_long_as_the_literature_says(
    workers: int, micro_batches: int, weight_share: float, percent: list[float | None]
) -> None:
    names = "gpipe dapple interleaved zb-h1 zb-h2 zb-v dualpipe-v".split()
    told = {name: share for name, share in zip(names, percent, strict=True) if share is not None}
    idle = {name: 100 * idle_share(name, workers, micro_batches, weight_share) for name in told}
    assert idle == pytest.approx(told, abs=0.05)


def test_ten_steps_that_run_on_idle_as_long_as_the_literature_says() -> None:
    names = "gpipe dapple interleaved zb-h1 zb-h2 zb-v dualpipe-v".split()
    for name, share in zip(names, (27.3, 27.3, 15.8, 11.1, 1.2, 0.6, 5.9), strict=True):
        plan = simulate(in_a_row(all_stages(name, 4, 8), 10))
        assert 100 * sum(plan.bubble) / 4 == pytest.approx(share, abs=0.05), name
        assert max(plan.peak_live) <= 2 * 8


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("dapple", [4, 3, 2, 1]),
        ("interleaved", [5.5, 4.5, 3.5, 2.5]),
        ("zb-h1", [4, 4, 4, 4]),
        ("zb-h2", [7, 7, 7, 7]),
        ("zb-v", [4, 4, 4, 4]),
        ("dualpipe-v", [4.5, 4.5, 4.5, 4.5]),
    ],
)
def test_activations_are_kept_as_the_literature_says(name: str, kept: list[float]) -> None:
    """In micro-batches of all that a worker holds, if what a weight's gradient needs is as much as was kept before."""
    costs = ActionCosts(activation_bytes=1 / stages_per_worker(name), weight_bytes_share=1)
    assert simulate(all_stages(name, 4, 8), costs).peak_bytes == pytest.approx(kept)


def test_the_literatures_name_of_dapple() -> None:
    assert "1f1b" in schedule_names()
    assert all_stages("1f1b", 3, 5) == all_stages("dapple", 3, 5)
    assert set(schedule_names()) == {*SCHEDULES, *ALIASES}
    assert not SCHEDULES.keys() & ALIASES.keys()


def test_a_new_schedule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.pipeline.schedules.SCHEDULES", {})

    @schedule()
    def last_in_first_out(stage: int, stages: int, micro_batches: int) -> list[Action]:
        passes = gpipe(stage, stages, micro_batches)
        return passes[:micro_batches] + passes[: micro_batches - 1 : -1]

    programs = all_stages("last-in-first-out", 2, 2)
    assert [str(action) for action in programs[1]] == ["F0", "F1", "B1", "B0"]
    assert simulate(programs).makespan == simulate([gpipe(stage, 2, 2) for stage in range(2)]).makespan
    assert "last-in-first-out" not in SCHEDULES
