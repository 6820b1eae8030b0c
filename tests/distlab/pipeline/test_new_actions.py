"""Kinds of action and schedules with two stages a rank, defined outside of the library: they run, and are checked."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_models import LOSS, OPTIONS, VOCAB, WIDTH, BesideWhole, batch, programs_from
from support.processes import run_group
from torch import Tensor

from distlab.axes.grid import Grid
from distlab.comm.context import context_of
from distlab.comm.recorder import STEP
from distlab.pipeline.actions import (
    ACTION_KINDS,
    GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    ActionCosts,
    Backward,
    Forward,
    Program,
    Result,
    stages_of,
)
from distlab.pipeline.activations import MicroBatch
from distlab.pipeline.engine import ScheduleError
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import simulate
from distlab.pipeline.stages import build_stage
from distlab.reports.timeline import action_color, draw, measured_panel, planned_panel
from distlab.reports.trace import Trace, merge, read_chrome, write_chrome
from distlab.show_schedule import table
from simplellm.errors import InputError

pytestmark = pytest.mark.quick

INPUT_DONE = "graph without its input"


# The backward pass in two parts, and a schedule with the stages r and 2p - 1 - r on worker r.
class InputFirst(Backward):
    """Gradients from the stage after -> gradients of what the stage before sent."""

    letter, color, gives, keeps = "J", "#e9c46a", (GRADIENTS, INPUT_DONE), -0.25

    def seconds(self, costs: ActionCosts) -> float:
        return super().seconds(costs) / 2

    def run(self, here: MicroBatch, *received: Tensor) -> dict[str, Tensor]:
        x, y = here.kept
        here.kept = y, *received
        return {GRADIENTS: torch.autograd.grad(y, x, received or None, retain_graph=True)[0]} if self.stage else {}


class WeightLater(InputFirst):
    """Gradients from the stage after, which `InputFirst` has left here -> gradients of this stage's weights."""

    letter, color, keeps = "V", "#2a9d8f", -0.75
    gives = (WEIGHT_GRADIENTS,)  # type: ignore[assignment]

    def needs(self, stages: int) -> list[Result]:
        return [self.result(INPUT_DONE)]

    def run(self, here: MicroBatch, *received: Tensor) -> dict[str, Tensor]:
        y, *gradient = here.release()
        y.backward(*gradient, inputs=list(here.stage.net.parameters()))
        return {}


def v_shape(worker: int, workers: int, micro_batches: int) -> list[Action]:
    """Worker 0 runs ahead: its activations wait on the link while gradients for the same worker overtake them."""
    inner, outer = worker, 2 * workers - 1 - worker
    order = [(Forward, inner), (Forward, outer), (InputFirst, outer), (InputFirst, inner)]
    order += [(WeightLater, outer), (WeightLater, inner)]
    actions = [kind(stage, k) for k in range(micro_batches) for kind, stage in order]
    return sorted(actions, key=lambda action: worker > 0 or not isinstance(action, Forward) or action.stage > 0)


def split_of(workers: int) -> tuple[int, ...]:
    """The layers of two stages a worker."""
    return (1,) * (2 * workers)


def programs_of(micro_batches: int, workers: int = 2) -> list[Program]:
    return [v_shape(worker, workers, micro_batches) for worker in range(workers)]


def compare_with_one_process(rank: int, workers: int, micro_batches: int, counted: bool) -> list[str]:
    """Train two stages on each rank next to the whole model; the names of the parameters compared."""
    programs, split = programs_of(micro_batches, workers), split_of(workers)
    context_of().recorder.enabled = counted
    nets = {stage: build_stage(stage, split, VOCAB, **OPTIONS) for stage in stages_of(programs[rank])}
    beside = BesideWhole(nets, len(split))
    pipeline = Pipeline(nets, programs, Grid(rank, {"pp": workers}), LOSS, WIDTH)
    for step in range(3):
        beside.step(pipeline, batch(step).tensor_split(micro_batches))
        assert pipeline.kept is None or pipeline.kept.now_bytes == 0, "nothing is kept after a step"
    return beside.compared()


@pytest.mark.parametrize(("workers", "counted"), [(2, False), (3, True)])
def test_new_actions_and_two_stages_a_rank_give_the_gradients_of_one_process(workers: int, counted: bool) -> None:
    for micro_batches in (1, 3):
        compared = run_group(workers, compare_with_one_process, workers, micro_batches, counted)
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= {*compared[0]}
        names = [name for own in compared for name in own]
        assert len(names) == len(set(names)) == 3 + 9 * 2 * workers


def trace_two_stages_a_rank(rank: int, folder: Path) -> None:
    programs = programs_of(3)
    context_of().recorder.enabled = True
    nets = {stage: build_stage(stage, split_of(2), VOCAB, **OPTIONS) for stage in stages_of(programs[rank])}
    pipeline = Pipeline(nets, programs, Grid(rank, {"pp": 2}), LOSS, WIDTH)
    for step in range(3):
        with context_of().recorder.span(STEP, f"step {step}"):
            pipeline.step(batch(step).tensor_split(3))
    recorded: list[Any] = [None, None]
    torch.distributed.all_gather_object(recorded, context_of().recorder.as_json())
    if rank == 0:
        write_chrome(Trace(merge(recorded), {"pp": 2}, programs), folder / "trace.json")


def test_the_trace_of_two_stages_a_rank_knows_them_and_is_drawn_under_the_plan(tmp_path: Path) -> None:
    run_group(2, trace_two_stages_a_rank, tmp_path)
    trace = read_chrome(tmp_path / "trace.json")
    assert trace.programs == programs_of(3)
    assert set(trace.costs().measured) == set(product("FJV", range(4)))
    lines = list(trace.report())
    assert lines[0].startswith("rank 0 (stages 0 and 3): busy")
    assert lines[1].startswith("rank 1 (stages 1 and 2): busy")
    panel = measured_panel("run", trace)
    assert panel.rows == ["rank 0\n(stages 0 and 3)", "rank 1\n(stages 1 and 2)"]
    for row in (0, 1):
        drawn = Counter(bar.label for bar in panel.bars if bar.row == row and bar.label != "wait")
        assert drawn == {f"{letter}{k}{prime}": 2 for letter in "FJV" for k in range(3) for prime in ("", "'")}
    draw(tmp_path / "timeline.png", [panel])
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_and_the_figure_show_workers_with_two_stages() -> None:
    plan = simulate(programs_of(2))
    assert list(table(plan)) == [
        "tick              0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17",
        "stages 0 and 3   F0  F1   . F0' J0'   .   .  J0 V0'  V0   . F1' J1'   .   .  J1 V1'  V1",
        "stages 1 and 2    .  F0 F0'   .   . J0'  J0 V0'  V0  F1 F1'   .   . J1'  J1 V1'  V1   .",
    ]
    panel = planned_panel("", plan)
    assert panel.rows == ["stages 0 and 3", "stages 1 and 2"]
    assert {bar.label for bar in panel.bars} == set(plan.labels.values())


def test_each_stage_of_a_worker_has_its_shade() -> None:
    from matplotlib.colors import to_rgb

    shades = [action_color(label) for label in ("F0", "F0'", "F12''", "V3")]
    assert shades[0] == pytest.approx(to_rgb(Forward.color))
    assert sum(shades[0]) < sum(shades[1]) < sum(shades[2]) < 3
    assert shades[3] == pytest.approx(to_rgb(WeightLater.color))


def test_costs_and_what_is_kept_are_those_that_the_actions_say() -> None:
    program: Program = [
        Forward(0, 0),
        Forward(0, 1),
        *(kind(0, k) for k in (0, 1) for kind in (InputFirst, WeightLater)),
    ]
    plan = simulate([program], ActionCosts(forward=1, backward=3, activation_bytes=100))
    assert [(str(span.action), span.start, span.end) for span in plan.spans[0]] == [
        ("F0", 0, 1),
        ("F1", 1, 2),
        ("J0", 2, 3.5),
        ("V0", 3.5, 5),
        ("J1", 5, 6.5),
        ("V1", 6.5, 8),
    ]
    assert (plan.peak_live, plan.peak_bytes) == ([2], [200])
    late = [*program[:3], program[4], program[3], program[5]]
    assert simulate([late]).peak_live == [2], "a micro-batch is live until its weights' gradients are there"
    half = simulate([[Forward(0, 0), InputFirst(0, 0), Forward(0, 1), *program[3:]]], ActionCosts(activation_bytes=100))
    assert (half.peak_live, half.peak_bytes) == ([2], [175])
    assert simulate([program], ActionCosts(measured={("V", 0): 10.0})).makespan == 1 + 1 + 1 + 10 + 1 + 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("F0 V0", f"stage 0 never computes the {INPUT_DONE} of micro-batch 0, which V0 of stage 0 needs"),
        ("F0 B0 J0 V0", "stage 0 computes the gradients of micro-batch 0 twice, in B0 and in J0"),
        ("F0 R0 B0", "stage 0 computes the graph of micro-batch 0 twice, in F0 and in R0"),
        ("f0 B0", "stage 0 never computes the graph of micro-batch 0, which B0 of stage 0 needs"),
        ("f0 B0 R0", "stage 0 runs B0 before R0"),
        (
            "0: F0 2: F0 0: F1 2: F1 B0 B1 0: B0 B1 | 1: F0 F1 3: F0 F1 J0 V0 B1 1: B0 B1",
            "stage 2 sends the activations of micro-batch 0 where worker 1 expects "
            "the activations of micro-batch 1 of stage 0; both ends of a link must agree on the order",
        ),
    ],
)
def test_new_actions_that_are_missing_repeated_or_out_of_order_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        simulate(programs_from(text))


class Keeper(WeightLater):
    """Frees less than `InputFirst` leaves."""

    letter, keeps = "K", -0.5


class Freer(WeightLater):
    """Frees more than `InputFirst` leaves."""

    letter, keeps = "L", -1.0


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        ("K0", "stage 1 still keeps 0.25 of the activations of micro-batch 0 after a step"),
        ("L0", "stage 1 frees in L0 0.25 more of the activations of micro-batch 0 than it keeps"),
    ],
)
def test_activations_that_are_not_freed_or_were_not_kept_are_refused(last: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}; what its actions keep and free must add up to 0"):
        simulate(programs_from(f"F0 J0 V0 | F0 J0 {last}"))


class Mystery(Backward):
    """Nobody has said how it runs."""

    letter, run = "M", Action.run


def one_rank(stages: Any, programs: Sequence[Program], pp: int = 1) -> Pipeline:
    return Pipeline(stages, list(programs), Grid(0, {"pp": pp}), LOSS, WIDTH)


def test_a_pipeline_refuses_when_it_is_built_what_it_cannot_run() -> None:
    both = programs_from("0: F0 1: F0 B0 0: B0")
    nets = {stage: build_stage(stage, (1, 1), VOCAB, **OPTIONS) for stage in (0, 1)}
    for given, held in ((nets[0], [0]), ({0: nets[0]}, [0]), ({1: nets[1]}, [1]), ({**nets, 2: nets[0]}, [0, 1, 2])):
        with pytest.raises(InputError, match=re.escape(f"worker 0 runs the stages [0, 1] but has modules for {held}")):
            one_rank(given, both)
    for stage, programs in enumerate((programs_from("F0 M0"), programs_from("F0 B0 | F0 M0"))):  # also another rank's
        with pytest.raises(InputError, match=f"^stage {stage} cannot run M0: Mystery does not implement run$"):
            one_rank(nets[0], programs, pp=len(programs))
    with pytest.raises(InputError, match="the schedule is for 1 workers but the pipeline has 2"):
        one_rank(nets, both, pp=2)
    with pytest.raises(ScheduleError, match="stage 1 runs B0 before F0"):
        one_rank(nets, programs_from("0: F0 1: B0 F0 0: B0"))


def test_a_letter_belongs_to_one_kind_of_action() -> None:
    with pytest.raises(TypeError, match="Another needs a letter of its own: F is Forward"):

        class Another(Forward):
            pass

    assert ACTION_KINDS["F"] is Forward
