"""Every pipeline chapter gives the training run of one process: losses, gradients, parameters, under plain SGD."""

import json
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.chapters import FEW_TOKENS, MODEL, STEPS, OneProcess, State, assert_equal, load, train_on
from torch import Tensor

from distlab.pipeline.schedules import dapple

pytestmark = pytest.mark.quick

NAIVE = "PP/1F1B/intro_PP_1F1B.py"
MICRO_BATCHES = "PP/microbatches/intro_PP_microbatches.py"
SCHEDULES = "PP/schedules/intro_PP_schedules.py"
PLAIN_HYBRID, HYBRID, FIVE_AXES = (f"hybrid/intro_{name}.py" for name in ("hybrid_plain", "hybrid", "5d"))


def together(stages: list[State]) -> State:
    """The parts of all stages; no parameter belongs to two."""
    whole: State = {}
    for stage in stages:
        assert not whole.keys() & stage.keys()
        whole |= stage
    return whole


def clipping_in(flags: str) -> list[str]:
    return "".join(flags.partition("--clip-norm")[1:]).split()


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (NAIVE, "--world-size 1"),
        (NAIVE, "--world-size 2 --micro-batches 3 --transport shared"),
        (NAIVE, "--world-size 3 --micro-batches 6 --transport gloo"),
        (NAIVE, "--world-size 3 --layers-per-stage 0,2,0 --recompute blocks --clip-norm 0.3 --lr 1.5"),
        (MICRO_BATCHES, "--world-size 3 --schedule gpipe --micro-batches 6"),
        (MICRO_BATCHES, "--world-size 3 --micro-batches 2 --layers-per-stage 1,1,0 --clip-norm 0.3 --lr 1.5"),
        (MICRO_BATCHES, "--world-size 4 --schedule naive --micro-batches 1"),
        (SCHEDULES, "--world-size 3 --schedule zb-h1 --micro-batches 6"),
        (SCHEDULES, "--world-size 2 --schedule zb-v --micro-batches 3 --recompute all --clip-norm 0.3 --lr 1.5"),
    ],
)
def test_a_pipeline_is_the_run_of_one_process(script: str, flags: str, one_process: OneProcess, tmp_path: Path) -> None:
    expected_parameters, expected_gradients, expected_losses = one_process(6, *FEW_TOKENS, *clipping_in(flags))
    world_size = int(flags.split()[1])
    parameters, gradients, own_losses = train_on(
        world_size, script, tmp_path, "--batch-size", "6", *FEW_TOKENS, *flags.split()
    )
    assert "changed nothing" not in (tmp_path / "rank0.log").read_text(), "with --transport shared"
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(together(parameters), expected_parameters)
    assert_equal(together(gradients), expected_gradients)
    sent, borders = Counter[str](), (world_size - 1) * (2 if "zb-v" in flags else 1)
    for of_rank in json.loads((tmp_path / "ledger.json").read_text()):
        sent.update({one["kind"]: one["bytes"] for one in of_rank["sent"] if one["way"] == "send"})
    del sent["control"]  # the first messages, which make connections
    kinds = "activations", "gradients of activations"
    sizes = dict(zip(MODEL[::2], MODEL[1::2], strict=True))
    batch = 6
    activation_bytes = batch * int(sizes["--seq-len"]) * int(sizes["--dmodel"]) * torch.float32.itemsize
    assert sent == Counter(dict.fromkeys(kinds, STEPS * borders * activation_bytes))


def test_a_stage_lets_go_of_a_micro_batch_after_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two stages; its messages arrive at once."""
    script, made, held = load(MICRO_BATCHES), list[weakref.ref[Tensor]](), list[int]()
    done = SimpleNamespace(wait=lambda: None)
    world = {"get_rank": lambda: 0, "get_world_size": lambda: 2, "recv": lambda *_: None, "isend": lambda *_: done}
    monkeypatch.setattr(script, "dist", SimpleNamespace(**world))

    def net(ids: Tensor) -> Tensor:
        held.append(sum(of() is not None for of in made))
        outputs = 2 * torch.ones(*ids.shape, 3, requires_grad=True)
        made.append(weakref.ref(outputs))
        return outputs

    script.run_program(dapple(0, 2, 5), net, torch.zeros(5, 1, 4, dtype=torch.int64), 3, (None, None))
    assert held == [0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("script", "dp", "pp", "flags"),
    [
        (PLAIN_HYBRID, 2, 3, "--micro-batches 3 --clip-norm 0.3 --lr 1.5"),
        (PLAIN_HYBRID, 3, 1, "--micro-batches 2 --run-on"),
        (HYBRID, 2, 2, "--micro-batches 3 --recompute all"),
        (HYBRID, 3, 2, "--micro-batches 2 --layers-per-stage 2,0"),
        (HYBRID, 3, 1, "--micro-batches 2 --clip-norm 0.3 --lr 1.5"),
        (HYBRID, 2, 2, "--micro-batches 6 --schedule dualpipe-v"),
        (FIVE_AXES, 1, 2, "--micro-batches 3 --schedule auto --keep-at-most 100MB --recompute all"),
    ],
)
def test_a_hybrid_is_the_run_of_one_process(
    script: str, dp: int, pp: int, flags: str, one_process: OneProcess, tmp_path: Path
) -> None:
    expected_parameters, expected_gradients, expected_losses = one_process(dp * 6, *FEW_TOKENS, *clipping_in(flags))
    layout = ["--dp", str(dp), "--pp", str(pp)]
    parameters, gradients, own_losses = train_on(
        dp * pp, script, tmp_path, "--batch-size", "6", *FEW_TOKENS, *layout, *flags.split()
    )
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    for replica in range(dp):
        ranks = slice(replica * pp, (replica + 1) * pp)
        assert_equal(together(parameters[ranks]), expected_parameters)
        assert_equal(together(gradients[ranks]), expected_gradients)
