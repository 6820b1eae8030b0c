"""Kinds of action and a schedule with two stages a rank, defined outside of the library: they run, and are checked."""

from pathlib import Path

import pytest
import torch
from pipeline_models import LOSS, OPTIONS, VOCAB, WIDTH, assert_near, batch, louder, update
from processes import free_port, process_group, run_ranks
from torch import Tensor, nn

from distlab.comm.grid import Grid
from distlab.comm.recorder import recorder
from distlab.pipeline.actions import (
    GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    ActionCosts,
    Backward,
    Forward,
    Program,
    Result,
)
from distlab.pipeline.executor import Pipeline, Stage
from distlab.pipeline.stages import build_stage
from simplellm.llama import CausalLLama, LLama

INPUT_DONE = "graph without its input"


# Forty lines: the backward pass as two kinds of action, and a schedule with the stages r and 2p - 1 - r on worker r.
class BackwardInput(Backward):
    """Gradients from the stage after -> gradients of what the stage before sent."""

    letter, color, gives, keeps = "I", "#e9c46a", (GRADIENTS, INPUT_DONE), -0.25

    def seconds(self, costs: ActionCosts) -> float:
        return super().seconds(costs) / 2

    def run(self, stage: Stage, *received: Tensor) -> dict[str, Tensor]:
        x, y = stage.live[self.micro_batch]
        stage.live[self.micro_batch] = y, *received
        return {GRADIENTS: torch.autograd.grad(y, x, *received, retain_graph=True)[0]} if self.stage > 0 else {}


class BackwardWeight(BackwardInput):
    """Gradients from the stage after, which `BackwardInput` has left here -> gradients of this stage's weights."""

    letter, color, gives, keeps = "W", "#2a9d8f", (WEIGHT_GRADIENTS,), -0.75

    def needs(self, stages: int) -> list[Result]:
        return [self.result(INPUT_DONE)]

    def run(self, stage: Stage, *received: Tensor) -> dict[str, Tensor]:
        y, *gradient = stage.release(self.micro_batch)
        y.backward(*gradient, inputs=list(stage.net.parameters()))
        return {}


def v_shape(worker: int, workers: int, micro_batches: int) -> list[Action]:
    """Worker 0 runs ahead: its activations wait on the link while gradients for the same worker overtake them."""
    inner, outer = worker, 2 * workers - 1 - worker
    order = [(Forward, inner), (Forward, outer), (BackwardInput, outer), (BackwardInput, inner)]
    order += [(BackwardWeight, outer), (BackwardWeight, inner)]
    actions = [kind(stage, k) for k in range(micro_batches) for kind, stage in order]
    return sorted(actions, key=lambda action: worker > 0 or not isinstance(action, Forward) or action.stage > 0)


# The forty lines end here.


class Recompute(Forward):
    """The forward pass once more, just before the backward pass."""

    letter, gives, keeps = "R", ("graph",), 0.9

    def needs(self, stages: int) -> list[Result]:
        return [self.result("input")]

    def run(self, stage: Stage, *received: Tensor) -> dict[str, Tensor]:
        (x,) = stage.release(self.micro_batch)
        return super().run(stage, *([x] if x.is_floating_point() else []))


class Forgetful(Forward):
    """A forward pass that keeps its input alone."""

    letter, gives, keeps = "f", ("activations", "input"), 0.1

    def run(self, stage: Stage, *received: Tensor) -> dict[str, Tensor]:
        x = received[0] if received else stage.micro_batches[self.micro_batch]
        stage.live[self.micro_batch] = (x,)
        with torch.no_grad():
            return {"activations": stage.forward(self.micro_batch, x)}


def interleaved(worker: int, workers: int, micro_batches: int) -> list[Action]:
    """The stages r and p + r on worker r; all passes forward, then all backward, each after its forward pass again."""
    stages, ks = (worker, workers + worker), range(micro_batches)
    again = [kind(stage, k) for stage in stages[::-1] for k in ks for kind in (Recompute, Backward)]
    return [Forgetful(stage, k) for stage in stages for k in ks] + again


SCHEDULES = {"v_shape": v_shape, "interleaved": interleaved}
SPLIT = (1, 1, 0, 1) if False else (1, 1, 1, 1)


def programs_of(name: str, micro_batches: int, workers: int = 2) -> list[Program]:
    return [SCHEDULES[name](worker, workers, micro_batches) for worker in range(workers)]


def compare_with_one_process(rank: int, port: int, name: str, micro_batches: int, counted: bool) -> list[str]:
    """Train two stages on each of two ranks next to the whole model; the names of the parameters compared."""
    programs = programs_of(name, micro_batches)
    with process_group(rank, 2, port):
        recorder.enabled = counted
        nets = {action.stage: nn.Module() for action in programs[rank]}
        nets = {stage: louder(build_stage(stage, SPLIT, VOCAB, **OPTIONS)) for stage in nets}
        whole = louder(LLama(CausalLLama, VOCAB, n_layers=sum(SPLIT), **OPTIONS))
        before = {name: p.detach().clone() for name, p in whole.named_parameters()}
        pipeline = Pipeline(nets, programs, Grid(rank, dp=1, pp=2), LOSS, WIDTH)
        for step in range(3):
            for net in (whole, *nets.values()):
                net.zero_grad()
            losses = pipeline.step(batch(step).tensor_split(micro_batches))
            expected = LOSS(whole(batch(step)), batch(step))
            expected.backward()
            assert len(losses) == (micro_batches if 3 in nets else 0)
            if losses:
                assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-6)
            of_whole = dict(whole.named_parameters())
            own = {name: p for net in nets.values() for name, p in net.named_parameters()}
            for name, parameter in own.items():
                assert parameter.grad is not None
                assert_near(parameter.grad, of_whole[name].grad, name)
            for net in (whole, *nets.values()):
                update(net)
            assert not any(stage.live for stage in pipeline._stages.values()), "nothing is kept after a step"
            assert pipeline.kept is None or pipeline.kept.now_bytes == 0
        for name, parameter in own.items():
            assert_near(parameter, of_whole[name], name)
            assert (parameter - before[name]).abs().max() > 1e-4, f"{name} was trained"
        return list(own)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("name", "holds_the_loss"), [("v_shape", 0), ("interleaved", 1)])
def test_new_actions_and_two_stages_a_rank_give_the_gradients_of_one_process(
    name: str, holds_the_loss: int, counted: bool
) -> None:
    for micro_batches in (1, 3):
        compared = run_ranks(2, compare_with_one_process, free_port(), name, micro_batches, counted)
        assert "lm_head.weight" in compared[holds_the_loss]
        assert "model.embed_tokens.weight" in compared[0]
        assert len({*compared[0], *compared[1]}) == sum(map(len, compared)) == 3 + 9 * len(SPLIT)


def test_the_sizes_of_the_definitions() -> None:
    lines = Path(__file__).read_text().splitlines()
    first, last = (
        next(n for n, line in enumerate(lines) if line.startswith(f"# {words}")) for words in ("Forty", "The forty")
    )
    assert sum(bool(line.strip()) for line in lines[first + 1 : last]) <= 40
