"""New kinds of actions, defined here: the search, the planner, the tables, the figures and the executor take them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.pipeline_models import LOSS, OPTIONS, VOCAB, WIDTH, assert_near, batch, louder
from support.planner_machines import MODEL, SIZES, cluster
from support.processes import free_port, process_group, run_ranks
from torch import Tensor

from distlab.axes.grid import Grid
from distlab.pipeline.actions import (
    ACTION_KINDS,
    ACTIVATIONS,
    INPUT,
    Action,
    ActionCosts,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardAgain,
    ForwardKeepingInput,
    Program,
    Result,
    of_stage,
    stages_of,
)
from distlab.pipeline.activations import MicroBatch
from distlab.pipeline.auto import Limit, find_programs
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import SCHEDULES, Schedule
from distlab.pipeline.stages import build_stages
from distlab.reports.timeline import action_color, draw, planned_panel
from distlab.show_schedule import table
from distlab_planner.costs import Costs
from distlab_planner.layouts import Choices, RunLayout, default_split
from distlab_planner.machine import Measured, PassSeconds
from distlab_planner.search import find_layouts
from distlab_planner.step import least_seconds, predict
from simplellm.llama import CausalLLama, LLama

BEGIN = "# A stage that keeps only its input, and runs its forward pass again within its backward pass."
END = "# The definitions end here."


# A stage that keeps only its input, and runs its forward pass again within its backward pass.
class Glance(Forward):
    """A forward pass without a graph."""

    letter, color, gives, keeps = "G", "#8ecae6", (ACTIVATIONS, INPUT), 0.1

    def run(self, here: MicroBatch, *received: Tensor) -> dict[str, Tensor]:
        here.kept = received or (here.ids,)
        with torch.no_grad():
            return {ACTIVATIONS: here.forward(here.kept[0])}


class Redo(Backward):
    """The forward pass again, with its graph, and the backward pass."""

    letter, color, keeps = "D", "#fb8500", -0.1

    def needs(self, stages: int) -> list[Result]:
        return [self.result(INPUT), *super().needs(stages)[1:]]

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.forward, self.stage) + super().seconds(costs)

    def run(self, here: MicroBatch, *received: Tensor) -> dict[str, Tensor]:
        [x] = here.release()
        here.kept = x, here.forward(x.requires_grad_() if self.stage else x)
        return super().run(here, *received)


def lean(workers: int, micro_batches: int, costs: ActionCosts | None = None, chunks: int = 1) -> list[list[Action]]:
    """What the search finds."""
    costs, room = costs or ActionCosts(), Limit(2 * workers)
    return find_programs(workers, micro_batches, chunks, costs, room, passes=((Glance,), (Redo,)))


LEAN = Schedule(lean, 1, lambda workers, micro_batches: True, "")  # a user's file puts it into SCHEDULES
# The definitions end here.

IN_A_V = partial(lean, chunks=2)


def test_the_definitions_take_forty_lines_at_most() -> None:
    lines = Path(__file__).read_text().splitlines()
    assert 0 < lines.index(END) - lines.index(BEGIN) - 1 <= 40


def test_the_search_finds_an_order_that_is_checked_costed_and_drawn(tmp_path: Path) -> None:
    costs = ActionCosts(activation_bytes=10.0)
    plan = simulate(lean(3, 8, costs), costs)
    assert plan.makespan == (3 + 8 - 1) * (1 + 3), "no schedule with as long passes is faster"
    assert max(plan.peak_bytes) <= 2 * 3 * 1
    uneven = replace(costs, forward=[1.0, 1.0, 2.0], backward=[2.0, 2.0, 3.0], transfer=0.5)
    assert simulate(lean(3, 8, uneven), uneven).makespan <= simulate(lean(3, 8, costs), uneven).makespan
    assert list(table(simulate(lean(2, 1), ActionCosts())))[1] == "stage 0   G0  .  .  .  . D0  -  -"
    panel = planned_panel("", plan)
    assert {bar.label[0] for bar in panel.bars} == {"G", "D"}
    assert action_color("D3") != action_color("G3")
    draw(tmp_path / "plan.png", [panel])
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_the_planner_costs_them_by_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep an input only, and take a forward pass more than others."""
    monkeypatch.setitem(SCHEDULES, "lean", LEAN)
    machine = cluster(pass_seconds=1e-5)
    lean_one, usual = (
        Costs(machine, MODEL, RunLayout({"pp": 2}, 8, 4, name, "none", "none", default_split(MODEL, 2)))
        for name in ("lean", "dapple")
    )
    for stage in (0, 1):
        for threads in (1, 2):
            forward, backward = (usual.seconds(kind(stage, 0), threads) for kind in (Forward, Backward))
            assert lean_one.seconds(Glance(stage, 0), threads) == forward
            assert lean_one.seconds(Redo(stage, 0), threads) == forward + backward
        assert lean_one.kept_bytes(Glance(stage, 0)) == round(0.1 * usual.kept_bytes(Forward(stage, 0)))
    own = predict(lean_one)
    assert own.computing == pytest.approx(predict(usual).computing * 4 / 3, rel=0.2)
    assert own.seconds > predict(usual).seconds
    assert least_seconds(lean_one) == machine.step_seconds < least_seconds(usual), "they may take any time"
    found = find_layouts(MODEL, machine, 2, 8, 1e12, choices=Choices({"pp": [2]}, schedules=["lean", "dapple"]))
    assert {row.layout.schedule for row in found.rows} == {"lean", "dapple"}


@pytest.mark.parametrize("kind", [Forward, ForwardKeepingInput, ForwardAgain, Backward, BackwardInput, BackwardWeight])
def test_a_kind_by_another_letter_costs_the_same(kind: type[Action], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTION_KINDS, "X", kind)  # and no such letter after the test
    other = type(kind.__name__, (kind,), {"letter": "X"})
    part = PassSeconds((1.0,), (7.0,), (2.0,), (5.0,))
    machine = cluster(measured=(Measured(SIZES, 1, 1, (1,), part, part, part),))
    costs = Costs(machine, MODEL, RunLayout({"pp": 2}, 8, 8, "zb-h1", "none", "none", (3, 1)))
    for stage in (0, 1):
        assert costs.seconds(other(stage, 0)) == pytest.approx(costs.seconds(kind(stage, 0)))
    assert costs.kept_bytes(other(1, 0)) == costs.kept_bytes(kind(1, 0)) != 0


def train(rank: int, port: int, workers: int, chunks: int) -> float:
    """The sum of the losses; gradients are those of one process."""
    with process_group(rank, workers, port):
        programs: list[list[Action]] = IN_A_V(workers, 4) if chunks == 2 else lean(workers, 4)
        program: Program = programs[rank]
        split = (1,) * (workers * chunks)
        nets = {stage: louder(net) for stage, net in build_stages(stages_of(program), split, VOCAB, **OPTIONS).items()}
        whole = louder(LLama(CausalLLama, VOCAB, n_layers=len(split), **OPTIONS))
        pipeline = Pipeline(nets, programs, Grid(rank, {"pp": workers}), LOSS, WIDTH)
        for step in (0, 1):
            losses = pipeline.step(batch(step).chunk(4))
            LOSS(whole(batch(step)), batch(step)).backward()
        of_whole = dict(whole.named_parameters())
        for name, parameter in (pair for net in nets.values() for pair in net.named_parameters()):
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0
            assert_near(parameter.grad, of_whole[name].grad, name)
        return sum(loss.item() for loss in losses)


@pytest.mark.parametrize(("workers", "chunks"), [(3, 1), (2, 2)])
def test_the_executor_runs_them(workers: int, chunks: int) -> None:
    losses = run_ranks(workers, train, free_port(), workers, chunks)
    whole = louder(LLama(CausalLLama, VOCAB, n_layers=workers * chunks, **OPTIONS))
    assert sum(losses) == pytest.approx(LOSS(whole(batch(1)), batch(1)).item(), rel=1e-6)
