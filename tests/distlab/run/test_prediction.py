"""A run with `--machine` says what a step should take, and what it took."""

from pathlib import Path

import pytest
from chapters import MODEL, train_on
from planner_machines import cluster

from distlab.pipeline.schedules import all_stages
from distlab.planner.machine import write_machine
from distlab.run.logs import StepTime
from distlab.run.settings import parse
from distlab.run.train_settings import (
    DataParallelSettings,
    HybridSettings,
    PipelineSettings,
    ShardedSettings,
    TrainSettings,
)
from simplellm.errors import InputError

SMALL = [*MODEL, "--data", "sample"]
KINDS = [
    (TrainSettings(), 1, "naive", "none"),
    (DataParallelSettings(world_size=2), 2, "naive", "none"),
    (ShardedSettings(world_size=2), 2, "naive", "optimizer"),
    (PipelineSettings(world_size=2), 2, "naive", "none"),
    (HybridSettings(dp=2, pp=2, tp=2, schedule="zb-v", shard="gradients"), 8, "zb-v", "gradients"),
]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write_machine(cluster(pass_seconds=1e-4), path := tmp_path / "machine.json")
    return path


@pytest.mark.parametrize(("defaults", "ranks", "schedule", "shard"), KINDS)
def test_the_layout_is_that_of_the_run(
    defaults: TrainSettings, ranks: int, schedule: str, shard: str, machine: Path
) -> None:
    settings = parse(defaults, "", [*SMALL, "--batch-size", "4", "--micro-batches", "2", "--machine", str(machine)])
    prediction = settings.prediction()
    assert prediction is not None
    layout = prediction.costs.layout
    assert (layout.ranks, layout.schedule, layout.shard, layout.rows) == (ranks, schedule, shard, 2)
    assert (layout.dp, layout.pp, layout.tp) == tuple(settings.layout.get(kind, 1) for kind in ("dp", "pp", "tp"))
    assert len(layout.split) == 1 + max(a.stage for line in all_stages(schedule, layout.pp, 2) for a in line)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.step.seconds)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--schedule auto", "--schedule auto: its order is not known before the run"),
        ("--schedule interleaved --chunks-per-stage 3", "--chunks-per-stage 3: the planner knows 2 only"),
        ("--dtype bfloat16", "--dtype bfloat16: the planner knows float32 only"),
        ("--dp 40", " has 4 hosts with 8 ranks each, but the layout has 80 ranks"),
    ],
)
def test_what_the_planner_does_not_know_is_said(flags: str, sentence: str, machine: Path) -> None:
    given = f"--pp 2 --n-layers 6 --batch-size 2 --micro-batches 2 {flags} --machine {machine}"
    with pytest.raises(InputError, match=sentence):
        parse(HybridSettings(), "", [*SMALL, *given.split()])


def test_the_part_that_was_off_is_named(machine: Path) -> None:
    settings = parse(DataParallelSettings(world_size=2), "", [*SMALL, "--machine", str(machine)])
    prediction = settings.prediction()
    assert prediction is not None
    computing, collectives = (prediction.parts[part] for part in ("computing", "collectives"))
    slow = StepTime(computing + 2.0, 2.0, 2.0)
    first, *parts = prediction.beside([StepTime(100.0, 50.0, 0.0)] * 3 + [slow] * 2)
    assert "collectives differs most" in first
    assert [part.partition(":")[0] for part in parts] == list(prediction.parts)
    assert parts[1].endswith("measured 2,000 ms")
    assert collectives < 1
    [step] = settings.remarks_at_the_end([slow])[:1]
    assert step == first, "the first steps count only if there are no others"


def test_a_run_prints_both(machine: Path, tmp_path: Path) -> None:
    train_on(1, "primer/intro.py", tmp_path / "run", *SMALL, "--steps", "5", "--machine", str(machine))
    text = (tmp_path / "run/rank0.log").read_text()
    assert f"# by {machine} (passes of this model were not measured there, but estimated), a step should take " in text
    assert "# a step took " in text
    assert "# computing: predicted " in text
