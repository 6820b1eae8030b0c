"""`--repair` in pipelines: a rank dies at a given action of a step, and the run goes on with the same losses."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chapters import losses, prepared, records, train, train_on
from support.processes import free_port, run_ranks
from support.repairs import DIES_IN, SHAPE, STEPS, Death, run_dying, run_with
from torch import Tensor

from distlab.pipeline.executor import Pipeline
from distlab.pipeline.plan import simulate
from distlab.pipeline.rerouting import reroute, side_by_side
from distlab.run.run import Run
from distlab.settings.common import parse
from distlab.settings.hybrid import HybridRepairSettings
from distlab_page.contents import contents
from distlab_page.records import read
from simplellm.tokenizers import SPTokenizer

LESSON = "hybrid/intro_hybrid_repair.py"
FLAGS = f"--n-layers 4 --steps {STEPS} --optimizer sgd --lr 0.5".split()
LAYOUT = "--dp 2 --pp 3 --batch-size 3".split()
CLIP = ["--clip-norm", "1000"]  # so that the norm is computed
MANY = "64"  # cores, for which backward passes are split
FEW = "2"


def norms(out: Path) -> list[float]:
    return [record["grad_norm"] for record in records(out)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run in one process."""
    out = tmp_path_factory.mktemp("one process")
    train_on(1, "primer/intro.py", out, *SHAPE, *FLAGS, *CLIP, "--batch-size", "6")
    return out


@pytest.mark.parametrize(
    ("deaths", "flags", "cores"),
    [
        ([(4, DIES_IN, 4, "SIGSTOP")], ["--transport", "gloo"], FEW),
        (
            [(5, DIES_IN, 6, "SIGKILL"), (1, DIES_IN, 3, "exception")],
            ["--save-every", "3", "--trace", *CLIP],
            FEW,
        ),  # in different stages
        # Rank 1 has its gradients but no update; the others have to undo theirs.
        ([(1, DIES_IN, 12, "lost"), (0, DIES_IN + 1, 0, "SIGKILL")], ["--schedule", "zb-h1"], FEW),
        # Rank 5 dies before the replicas have made their groups; then one of another stage.
        ([(5, 0, -1, "ready"), (0, DIES_IN, 2, "SIGKILL")], ["--schedule", "zb-v"], MANY),
        ([(1, DIES_IN, 3, "SIGKILL"), (6, DIES_IN + 1, 5, "exception")], [*"--pp 2 --tp 2".split(), *CLIP], FEW),
        # Rank 0, the writer, dies between its micro-batches, and has not printed the loss of the step before; rank 4
        # then has a step more than rank 1.
        (
            [(0, DIES_IN, 1, "SIGKILL"), (1, DIES_IN + 1, 9, "lost"), (4, DIES_IN + 2, 1, "SIGKILL")],
            ["--run-on", *CLIP],
            MANY,
        ),
    ],
    ids=["stop", "two", "undo", "zb-v", "slices", "run-on"],
)
def test_the_losses_are_those_of_the_undisturbed_run(
    deaths: list[Death], flags: list[str], cores: str, one_process: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    printed = run_with(deaths, out, LESSON, *FLAGS, *LAYOUT, *flags, CORES=cores)
    assert losses(out) == pytest.approx(losses(one_process), abs=1e-6)
    if CLIP[0] in flags:
        assert norms(out) == pytest.approx(norms(one_process), rel=1e-5)
    for rank, *_, how in deaths:
        assert how == "lost" or f"rank {rank} (stage" in printed
    if "--trace" in flags:
        record = read(out, has_ended=True)
        assert record.trace is not None
        told = " ".join(repair.name for repair in record.trace.repairs())
        assert all(f"rank {rank} (stage" in told for rank, *_ in deaths)
        assert (out / "timeline.png").exists()
        shown = contents(record)["timeline"]
        assert shown["ranks"] == [record.trace.describe_number(rank) for rank in (0, 2, 3, 4)]


def test_exact_is_bit_for_bit_the_same_run(tmp_path: Path) -> None:
    """Also its norms, of the whole model, and the updates of clipped steps."""
    most = 2.0
    # Of three numbers, the sum depends on which two are added up first.
    flags = [*FLAGS, *f"--dp 3 --pp 2 --batch-size 3 --micro-batches 3 --repair exact --clip-norm {most}".split()]
    train_on(1, "primer/intro.py", tmp_path / "one", *SHAPE, *FLAGS, *CLIP, "--batch-size", "9", "--steps", "1")
    run_with([], tmp_path / "undisturbed", LESSON, *flags)
    deaths: list[Death] = [(2, DIES_IN, 3, "SIGKILL"), (5, DIES_IN + 1, 1, "SIGKILL")]
    run_with(deaths, tmp_path / "run", LESSON, *flags, "--run-on", CORES=MANY)
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert norms(tmp_path / "run") == norms(tmp_path / "undisturbed")
    assert norms(tmp_path / "run")[0] == pytest.approx(norms(tmp_path / "one")[0], rel=1e-5)
    assert min(norms(tmp_path / "run")) < most < max(norms(tmp_path / "run"))


def threads_of_losses(rank: int, flags: list[str]) -> list[int]:
    """The threads with which a rank computes its losses, where each of the host's pipelines has two cores."""
    module, seen = prepared(LESSON, tuple(flags))[0], list[int]()

    def pipeline(nets: Any, programs: Any, grid: Any, loss: Any, **options: Any) -> Pipeline:
        def watched(*given: Any) -> Tensor:
            seen.append(torch.get_num_threads())
            computed: Tensor = loss(*given)
            return computed

        # Without costs, threads always pay.
        return Pipeline(nets, programs, grid, watched, **{**options, "costs": None})

    module.Pipeline = pipeline  # type: ignore[attr-defined]
    setattr(Run, "shared_cores", 2)  # noqa: B010  # only in this fork
    train(rank, LESSON, flags)
    return seen


@pytest.mark.parametrize(("repair", "threads"), [("on", 2), ("exact", 1)])
def test_exact_has_the_same_number_of_threads_after_a_death(
    repair: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_LAUNCHER", str(os.getpid()))  # which would notice a death
    flags = f"--dp 2 --pp 1 --batch-size 1 --micro-batches 1 --n-layers 1 --steps 2 --repair {repair}".split()
    flags += ["--out", str(tmp_path), "--master-port", str(free_port())]
    assert run_ranks(2, threads_of_losses, flags) == [[threads] * 2] * 2


@pytest.mark.parametrize(("layout", "dead"), [("--dp 2 --pp 3", [4]), ("--dp 3 --pp 4 --tp 2", [2, 3, 12, 13])])
def test_the_plan_of_a_death(layout: str, dead: list[int]) -> None:
    """On many cores, as the engine simulates it; on two, the ranks that are left have the same work as before."""
    settings = parse(HybridRepairSettings(), "", [*FLAGS, *layout.split(), *"--micro-batches 6 --batch-size 6".split()])
    alive = [rank for rank in range(settings.dp * settings.pp * settings.tp) if rank not in dead]
    costs = settings.pass_costs(SPTokenizer(settings.tokenizer).vocab_size)
    workers = sorted({rank // settings.tp for rank in alive})
    lists = [reroute(settings.programs(), settings.dp, workers, costs), side_by_side(settings.programs(), settings.dp)]
    now, healthy = (simulate(each, costs, holders=settings.dp).makespan for each in lists)
    assert now != healthy
    assert settings.slowdown(alive, 64) == pytest.approx(now / healthy)
    assert settings.slowdown(alive, 2) == pytest.approx(1)


@pytest.mark.parametrize(
    ("schedule", "owners", "kept", "lost"),
    [
        # Without the first worker; without the second, 4.
        ("interleaved", [0, 1, 0, 1], (10, 5), ("stages 0 and 2", "stages 1 and 3")),
        (
            "zb-v",
            [0, 1, 1, 0],
            (8, 4),
            ("stages 0 and 3", "stages 1 and 2"),
        ),  # without the second; without the first, 7
    ],
)
def test_the_worst_death_counts(schedule: str, owners: list[int], kept: tuple[int, int], lost: tuple[str, str]) -> None:
    flags = f"--dp 2 --pp 2 --schedule {schedule} --micro-batches 6 --batch-size 6"
    settings = parse(HybridRepairSettings(), "", [*FLAGS, *flags.split()])
    assert settings.owners == owners
    assert settings.growth() == kept[0] / kept[1]
    [told] = [remark for remark in settings.remarks(settings.decide()) if "after a death" in remark]
    assert re.findall(r"\d+(?= micro-batches)|(?<=instead of )\d+", told) == [*map(str, kept)]
    told_of = settings.why_lost([1, 3]), settings.why_lost([0, 2])
    assert told_of == tuple(f"no rank is left that holds {stages}" for stages in lost)
    assert settings.why_lost([1, 2]) == ""


def fails_with(deaths: list[Death], out: Path, **environment: str) -> str:
    ended = run_dying(deaths, LESSON, *FLAGS, *LAYOUT, "--out", out, **environment)
    assert ended.status
    return ended.out + ended.err


def test_without_detours_the_check_names_a_micro_batch_that_nobody_computes(tmp_path: Path) -> None:
    told = fails_with([(4, DIES_IN, 1, "SIGKILL")], tmp_path / "run", LEAVE_OUT="1")
    assert "stage 1 never computes the gradients of micro-batches 3, 4 and 5," in told


def test_the_last_rank_with_a_stage_cannot_be_replaced(tmp_path: Path) -> None:
    """It is named by its place in the layout, though the ranks have other numbers among each other by then."""
    told = fails_with([(1, DIES_IN, 1, "SIGKILL"), (4, DIES_IN + 1, 1, "exception")], tmp_path / "run")
    assert "this cannot be repaired: no rank is left that holds stage 1" in told
    assert "# rank 4 (stage 1 of replica 1) failed: ValueError: a bad row" in told


def test_spares_take_the_places_of_dead_ranks_and_of_the_other_slices(tmp_path: Path) -> None:
    out = tmp_path / "run"
    deaths: list[Death] = [(1, 1, 1, "SIGKILL"), (0, 3, 3, "exception")]  # then one of those that have come
    training = [*FLAGS, *"--n-layers 2 --optimizer adam --lr 1e-3".split()]  # spares also get Adam's moments
    expected = train_on(1, "primer/intro.py", tmp_path / "one process", *SHAPE, *training, "--batch-size", "6")[-1]
    flags = [*training, *"--dp 2 --pp 2 --tp 2 --batch-size 3 --spares 4".split()]
    printed = run_with(deaths, out, LESSON, *flags, ALL_BACK="1")
    assert losses(out) == pytest.approx(expected, abs=1e-5)
    assert printed.count(" is back") == 4, printed
