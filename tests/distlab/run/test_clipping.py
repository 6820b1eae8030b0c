"""`--clip-norm` in every layout: the norm, the losses and the weights are those of one process."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chapters import LAYOUTS, STEPS, State, assert_equal, losses, merged, records, train, train_on
from support.processes import free_port, run_ranks

from distlab.parallel import clipping
from distlab.parallel.clipping import NormSum
from distlab.run.clipping import ClippingRun, LossSum
from distlab.run.run import Run as BaseRun
from distlab.run.steps import NotFiniteError

ALWAYS, SOMETIMES = "0.3", "0.82"  # the norms of the four steps are about 0.81, 0.81, 0.83 and 1.02
OTHERS = {
    "tp-naive": (2, "TP/intro_TP_styles.py", "--world-size 2 --tp-style naive --batch-size 6"),
    "tp-sequence": (2, "TP/intro_TP_styles.py", "--world-size 2 --sequence-parallel --batch-size 6"),
    "micro-batches": (2, "DP/mydp/intro_DP_MyDP.py", "--world-size 2 --batch-size 3 --micro-batches 3"),
}
HYBRID = {
    "pp-tp": (4, "hybrid/intro_5d.py", "--dp 1 --pp 2 --tp 2 --batch-size 6"),
    "zero": (2, "hybrid/intro_5d.py", "--dp 2 --pp 1 --batch-size 3 --shard optimizer"),
    "slices": (2, "hybrid/intro_5d.py", "--dp 1 --pp 1 --tp 2 --batch-size 6"),
}
RUNS = LAYOUTS | OTHERS | HYBRID
Run = tuple[list[State], list[State], list[float], list[float]]


def clipped(layout: str, out: Path, clip_norm: str, *flags: str) -> Run:
    """Each rank's parameters and gradients of the last step, the losses, also of a validation, and the norms."""
    ranks, script, own = RUNS[layout]
    clipping = [*"--steps 4 --eval-every 4 --eval-sequences 5 --clip-norm".split(), clip_norm]
    parameters, gradients, own_losses = train_on(ranks, script, out, *own.split(), *clipping, *flags)
    own_losses += [record["validation_loss"] for record in records(out) if "validation_loss" in record]
    return parameters, gradients, own_losses, [record["grad_norm"] for record in records(out)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The runs of one process, by `--clip-norm`."""
    folder = tmp_path_factory.mktemp("alone")
    return {most: clipped("primer", folder / most, most) for most in (ALWAYS, SOMETIMES, "100")}


def test_one_process_is_clipped_as_the_limit_says(alone: dict[str, Run]) -> None:
    norms_of = {most: run[3] for most, run in alone.items()}
    assert all(norm > float(ALWAYS) for norm in norms_of[ALWAYS])
    assert len({norm > float(SOMETIMES) for norm in norms_of[SOMETIMES]}) == 2, "now and then"
    for most, (_, [gradients], own_losses, own_norms) in alone.items():
        left = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
        assert left == pytest.approx(min(own_norms[-1], float(most)), rel=1e-5)
        assert (own_losses == alone["100"][2]) == (most == "100")
    first = norms_of[SOMETIMES].index(max(norms_of[SOMETIMES][:3]))
    assert alone[SOMETIMES][2][: first + 1] == alone["100"][2][: first + 1], "the same run until it bites"


@pytest.mark.parametrize("layout", ["dp-ga", "dp-zero", "ddp", "tp", "pp-tp", "pp-zbv", *OTHERS])
def test_every_layout_clips_by_the_norm_of_one_process(layout: str, alone: dict[str, Run], tmp_path: Path) -> None:
    """Those of hybrid/test_layouts.py clip, too: shards, schedules, and parts of sequences."""
    most = SOMETIMES if layout in ("dp-ga", "tp") else ALWAYS
    [expected_parameters], [expected_gradients], expected_losses, expected_norms = alone[most]
    parameters, gradients, own_losses, own_norms = clipped(layout, tmp_path, most)
    assert own_norms == pytest.approx(expected_norms, rel=1e-5)
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(merged(parameters), expected_parameters)
    if layout != "dp-zero":  # where a rank has the mean of its range only
        assert_equal(merged(gradients), expected_gradients)


def order_of_a_step(_: int, flags: list[str]) -> list[str]:
    """What a step asks for and waits for, in order, in a run of one process."""
    order: list[str] = []

    def noting(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            order.append(what)
            return call(*args, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseRun, "global_loss", noting("loss", BaseRun.global_loss))
        patch.setattr(LossSum, "__init__", noting("loss begun", LossSum.__init__))
        patch.setattr(LossSum, "wait", noting("loss read", LossSum.wait))
        patch.setattr(clipping, "sum_norm", noting("norm begun", clipping.sum_norm))
        patch.setattr(NormSum, "wait", noting("norm read", NormSum.wait))
        patch.setattr(clipping, "clip", noting("clipped", clipping.clip))
        _, script, own = RUNS["primer"]
        train(0, script, [*own.split(), "--steps", "1", *flags])
    return order


def test_the_work_for_loss_and_norm_is_begun_before_the_host_waits(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path)]
    [order] = run_ranks(1, order_of_a_step, [*flags, "--clip-norm", ALWAYS])
    assert order == ["loss begun", "norm begun", "loss read", "norm read", "clipped"]
    [order] = run_ranks(1, order_of_a_step, flags)
    assert order == ["loss"]


@pytest.fixture
def _script_does_not_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClippingRun, "clip", lambda *_: None)


@pytest.mark.usefixtures("_script_does_not_clip")
@pytest.mark.parametrize("updates", [True, False])
def test_a_script_that_does_not_clip_still_prints_each_loss(
    updates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_update(own: Any, model: Any, make: Callable[..., Any] = ClippingRun.optimizer) -> Any:
        optimizer: Any = make(own, model)
        optimizer.step = lambda: None
        return optimizer

    if not updates:
        monkeypatch.setattr(ClippingRun, "optimizer", without_update)
    flags = [*RUNS["primer"][2].split(), "--clip-norm", ALWAYS, "--steps", "3"]
    train_on(1, RUNS["primer"][1], tmp_path, *flags)
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    assert [line.split()[0] for line in lines if line[0].isdigit()] == ["0", "1", "2"]
    assert len(losses(tmp_path)) == 3


def diverge(rank: int, flags: list[str], layout: str) -> str:
    with pytest.raises(NotFiniteError) as raised:
        train(rank, RUNS[layout][1], flags)
    return str(raised.value)


@pytest.mark.usefixtures("_script_does_not_clip")
def test_a_script_that_does_not_clip_learns_of_a_loss_that_is_not_finite_before_the_update(tmp_path: Path) -> None:
    """The first tensor that is not finite is then an output; after the update, it would be a parameter."""
    flags = [*RUNS["primer"][2].split(), "--lr", "1e30", "--steps", "3", "--out", str(tmp_path)]
    told = [run_ranks(1, diverge, [*flags, *more], "primer")[0] for more in ([], ["--clip-norm", "1e30"])]
    assert told[0] == told[1]
    assert "the first non-finite tensor is the output of" in told[0]


def test_a_loss_that_is_not_finite_is_named_before_the_norm(tmp_path: Path) -> None:
    flags = [*RUNS["tp"][2].split(), "--clip-norm", "1e30", "--lr", "1e30", "--steps", "3", "--out", str(tmp_path)]
    ended = run_ranks(2, diverge, [*flags, "--master-port", str(free_port())], "tp")
    assert ended[0] == ended[1]
    assert re.match(r"the loss of step 1 is nan: the first non-finite tensor is the .*, on rank 0", ended[0]), ended[0]


def test_in_bfloat16(tmp_path: Path) -> None:
    *_, expected_losses, expected_norms = clipped("primer", tmp_path / "one", ALWAYS, "--dtype", "bfloat16")
    *_, own_losses, own_norms = clipped("pp-tp", tmp_path / "four", ALWAYS, "--dtype", "bfloat16")
    assert own_norms == pytest.approx(expected_norms, rel=1e-2)
    assert own_losses == pytest.approx(expected_losses, rel=1e-3)


def test_without_the_flag_nothing_is_sent_or_recorded(tmp_path: Path) -> None:
    ranks, script, own = RUNS["pp-dapple"]
    for most, kinds in (([], False), (["--clip-norm", "1"], True)):
        out = tmp_path / str(kinds)
        train_on(ranks, script, out, *own.split(), *most)
        first = records(out)[0]
        assert ("gradient norm" in first["sent_bytes"]) == ("grad_norm" in first) == kinds
        assert len(losses(out)) == STEPS


@pytest.mark.parametrize(
    ("layout", "most", "bites"), [("pp-zbv", 0.75, 7), ("pp-zbv", 1, 2), ("slices", 1, 2), ("zero", 1, 2)]
)
def test_a_clipped_step_that_ran_on_is_undone_and_taken_again(
    layout: str, most: float, bites: int, tmp_path: Path
) -> None:
    """The same run bit for bit, whether every step has to be clipped or two of seven."""
    flags = ["--steps", "7", "--micro-batches", "3", "--optimizer", "adam", "--lr", "1e-2"]
    if layout == "zero":  # in shared memory, a rank may happen to see another's restored shards
        flags += ["--transport", "gloo"]
    *expected, expected_losses, expected_norms = clipped(layout, tmp_path / "usual", str(most), *flags)
    *own, own_losses, own_norms = clipped(layout, tmp_path / "late", str(most), *flags, "--run-on")
    assert sum(norm > most for norm in expected_norms) == bites
    assert own_norms == expected_norms
    assert own_losses == expected_losses
    for parts in zip(own, expected, strict=True):
        for mine, others in zip(*parts, strict=True):
            assert all(torch.equal(mine[name], others[name]) for name in others)
    assert "# steps that were taken again took" in (tmp_path / "late" / "rank0.log").read_text()
