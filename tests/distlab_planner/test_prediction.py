"""A run with `--machine` says what a step should take, and what it took."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chapters import MODEL, train_on
from support.planner_machines import cluster

from distlab.comm.recorder import StepTime
from distlab.launch import find_script
from distlab.pipeline.schedules import all_stages
from distlab.settings.common import parse
from distlab.settings.hybrid import HybridSettings
from distlab.settings.replicas import BucketSettings, ZeRO1Settings
from distlab.settings.scripts import read_script_for
from distlab.settings.stages import PipelineSettings, StageSettings
from distlab.settings.training import TrainSettings
from distlab_planner.machine import AllReduce, Measured, PassSeconds, write_machine
from distlab_planner.prediction import Prediction
from distlab_planner.table import milliseconds
from simplellm.errors import InputError

SMALL = [*MODEL, "--data", "sample"]
KINDS = [
    (TrainSettings(), 1, "naive", "none"),
    (BucketSettings(world_size=2), 2, "naive", "none"),
    (ZeRO1Settings(world_size=2), 2, "naive", "optimizer"),
    (PipelineSettings(world_size=2), 2, "naive", "none"),
    (HybridSettings(dp=2, pp=2, tp=2, schedule="zb-v", shard="gradients"), 8, "zb-v", "gradients"),
]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    more: dict[str, Any] = {"pass_seconds": 1e-4, "step_seconds": 1e-3, "slowdown": (1.0, 1.25)}
    write_machine(cluster(device="cpu", **more), path := tmp_path / "machine.json")
    return path


def settings_of(command: str, machine: Path) -> TrainSettings:
    """Those of `./launch.sh` and such a command, with a machine."""
    name, *flags = command.split()
    script, own = find_script(name)
    _, settings = read_script_for(script, [*own, *SMALL, *flags, "--machine", str(machine)], "")
    assert isinstance(settings, TrainSettings)
    return settings


@pytest.mark.parametrize(("defaults", "ranks", "schedule", "shard"), KINDS)
def test_the_layout_is_that_of_the_run(
    defaults: TrainSettings, ranks: int, schedule: str, shard: str, machine: Path
) -> None:
    settings = parse(defaults, "", [*SMALL, "--batch-size", "4", "--micro-batches", "2", "--machine", str(machine)])
    prediction = settings.prediction
    assert isinstance(prediction, Prediction)
    layout = prediction.costs.layout
    assert (layout.ranks, layout.schedule, layout.shard, layout.rows) == (ranks, schedule, shard, 2)
    assert layout.axes == settings.layout
    assert len(layout.split) == 1 + max(a.stage for line in all_stages(schedule, layout.size("pp"), 2) for a in line)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.step.seconds)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--schedule auto", "--schedule auto: its order is not known before the run"),
        ("--schedule interleaved --chunks-per-stage 3", "--chunks-per-stage 3: the planner knows 2 only"),
        ("--compile --schedule zb-h1", "--compile and --schedule zb-h1: of compiled passes, the planner knows"),
        ("--compile --tp 2", "--compile and --tp 2: of compiled passes, the planner knows"),
        ("--compile --experts 4", "--compile and --experts 4: of compiled passes, the planner knows"),
        ("--experts 4 --capacity 1.25", "--capacity 1.25: the planner does not know such runs"),
        ("--dp 40", " has 4 hosts with 8 ranks each, but the layout has 80 ranks"),
    ],
)
def test_what_the_planner_does_not_know_is_said(flags: str, sentence: str, machine: Path) -> None:
    given = f"--pp 2 --n-layers 6 --batch-size 2 --micro-batches 2 {flags} --machine {machine}"
    with pytest.raises(InputError, match=sentence):
        parse(HybridSettings(), "", [*SMALL, *given.split()])


def test_passes_are_said_to_be_estimated_where_they_were_not_measured_with_as_many_slices(machine: Path) -> None:
    one, two = (settings_of(f"tp --world-size {ranks}", machine).prediction for ranks in (1, 2))
    assert isinstance(one, Prediction)
    assert isinstance(two, Prediction)
    part = PassSeconds((1e-3,), (2e-3,), (1e-3,), (1e-3,))
    measured = Measured(one.costs.model.sizes, 1, 1, (1,), part, part, part)
    for prediction, is_estimated in ((one, False), (two, True)):
        costs = replace(prediction.costs, machine=cluster(device="cpu", measured=(measured,)))
        assert ("but estimated" in replace(prediction, costs=costs).sentence) == is_estimated


def test_keys_and_values_that_travel_in_a_ring_are_messages(machine: Path) -> None:
    ring, gathered = (settings_of(f"{command} --world-size 2", machine).prediction for command in ("cp-ring", "cp"))
    assert isinstance(ring, Prediction)
    assert isinstance(gathered, Prediction)
    assert ring.step.exchanging > 0
    assert ring.parts["collectives"] == pytest.approx(ring.step.averaging)
    assert gathered.parts["collectives"] == pytest.approx(gathered.step.averaging + gathered.step.exchanging)
    assert gathered.parts["waiting for messages"] == pytest.approx(0)


def test_the_part_that_was_off_is_named(machine: Path) -> None:
    settings = settings_of("dp-ga --world-size 2", machine)
    prediction = settings.prediction
    assert isinstance(prediction, Prediction)
    computing, collectives = (prediction.parts[part] for part in ("computing", "collectives"))
    slow = StepTime(computing + 3.0, 3.0, 2.0)
    first, *parts = prediction.beside([StepTime(100.0, 50.0, 0.0)] * 3 + [slow] * 2)
    taken, predicted = computing + 3.0, prediction.step.seconds
    shown = [milliseconds(taken), milliseconds(predicted), f"{predicted / taken - 1:+.0%}"]
    assert re.findall(r"[\d.,]+ ms|[+-]\d+%", first) == shown
    assert "collectives differs most" in first
    measured = dict(zip(prediction.parts, (computing, 2.0, 1.0), strict=True))
    pairs = [(name, milliseconds(seconds), milliseconds(measured[name])) for name, seconds in prediction.parts.items()]
    assert [(part.partition(":")[0], *re.findall(r"[\d.,]+ ms", part)) for part in parts] == pairs
    short = StepTime(computing / 2 + collectives, collectives, collectives)
    assert "computing differs most" in next(iter(prediction.beside([short])))
    assert collectives < 1
    [step] = settings.remarks_at_the_end([slow])[:1]
    assert step == first, "the first steps count only if there are no others"


@pytest.mark.parametrize(
    "command",
    [
        "primer --optimizer sgd --lr 0.1",
        "dp-ga --micro-batches 2 --batch-size 2",
        "dp-hooks",
        "mydp",
        "ddp",
        "dp-buckets --micro-batches 2 --batch-size 2",
        "dp-zero --micro-batches 2 --batch-size 2",
        "dp-fsdp --micro-batches 2 --batch-size 2",
        "pp-1f1b --world-size 2",
        "pp-gpipe --world-size 2",
        "pp-dapple --world-size 2",
        "pp-interleaved --world-size 2 --n-layers 4 --batch-size 4 --micro-batches 4",
        "pp-zb --world-size 2",
        "tp --world-size 2",
        "cp --world-size 2",
        "cp-ring --world-size 2 --cp-order contiguous",
        "5d --dp 1 --pp 1 --cp 2 --tp 1 --cp-kind heads",
        "hybrid --pp 2 --backend gloo --save-every 5 --eval-every 5 --trace",
        "hybrid --pp 2 --compile",
        "ep --world-size 2 --router-scores sigmoid",
        "5d --dp 2 --ep 2 --pp 1 --experts 4",
    ],
)
def test_what_the_chapters_run_is_predicted(command: str, machine: Path) -> None:
    assert settings_of(command, machine).prediction is not None


@pytest.mark.parametrize(
    "flags",
    [
        "pp-gpipe --world-size 2 --batch-size 4 --micro-batches 2",
        "pp-dapple --world-size 2 --num-heads 4 --num-kv-heads 2 --hidden-dim 40 --layers-per-stage 1,2 --n-layers 3",
        "hybrid --dp 2 --pp 2 --tp 2 --batch-size 6 --micro-batches 3 --recompute blocks",
        "hybrid --dp 1 --pp 2 --n-layers 4 --batch-size 4 --micro-batches 4 --schedule interleaved --recompute all",
        "5d --dp 1 --pp 2 --cp 2 --seq-len 25 --batch-size 3",
        "5d --dp 2 --pp 2 --ep 2 --experts 4 --shared-expert --hidden-dim 40 --batch-size 3",
    ],
)
def test_the_planner_gives_actions_the_threads_of_the_run(flags: str, machine: Path) -> None:
    settings = settings_of(flags, machine)
    assert isinstance(settings, StageSettings)
    assert isinstance(settings.prediction, Prediction)
    costs = settings.prediction.costs
    assert settings.pass_costs(costs.model.sizes.vocab_size) == costs.estimated


def test_one_stage_at_a_time_has_all_cores_however_small_the_model_is(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    prediction = settings_of("pp-1f1b --world-size 2", machine).prediction
    assert isinstance(prediction, Prediction)
    assert prediction.costs.threads == prediction.costs.machine.cores_per_host > 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    prediction = settings_of("pp-1f1b --world-size 2", machine).prediction
    assert isinstance(prediction, Prediction)
    assert prediction.costs.threads == 3


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("tp --world-size 2 --tp-style naive", "--tp-style naive"),
        ("tp --world-size 2 --sequence-parallel", "--sequence-parallel: the planner"),
        ("dp-buckets --all-reduce ring", "--all-reduce ring"),
        ("dp-buckets --compress topk", "--compress topk"),
        ("dp-ga --report-every 5", "--report-every 5"),
        ("mydp --batch-size 2 --micro-batches 2", "--micro-batches 2: these replicas average in every backward pass"),
        ("ddp --batch-size 2 --micro-batches 2", "--micro-batches 2: these replicas average in every backward pass"),
        ("dp-wa", "the planner knows runs that average gradients, not weights"),
        ("diloco --sync-every 10", "--sync-every 10"),
        ("hybrid --pp 2 --outer diloco", "--outer diloco"),
        ("pp-dapple --world-size 2 --run-on", "--run-on: the planner"),
        ("primer --clip-norm 1", "--clip-norm 1.0"),
        ("dp-ga --transport shared", "--transport shared: it was measured without shared memory"),
        ("dp-ga --device cuda", "its ranks compute on cpu, and those of this run on cuda"),
    ],
)
def test_settings_that_the_planner_does_not_know_are_named(command: str, named: str, machine: Path) -> None:
    with pytest.raises(InputError, match=f"^--machine {machine}.*{named}"):
        settings_of(command, machine)


def test_ranks_communicate_as_those_of_the_machine_did(tmp_path: Path) -> None:
    shared = AllReduce(ranks=2, transport="shared", size_bytes=(1e6,), seconds=(1e-3,))
    write_machine(cluster(device="cpu", all_reduces=(shared,)), path := tmp_path / "machine.json")
    for flags in ("", "--transport shared"):
        assert settings_of(f"dp-ga {flags}", path).prediction is not None
    with pytest.raises(InputError, match="--transport gloo: it was measured in shared memory"):
        settings_of("dp-ga --transport gloo", path)
    write_machine(cluster(), path)
    with pytest.raises(InputError, match="its ranks compute on cuda, and those of this run on cpu"):
        settings_of("dp-ga", path)
    with pytest.raises(InputError, match="--backend gloo: ranks on cuda were measured over nccl"):
        settings_of("dp-ga --device cuda --backend gloo", path)


def test_the_device_that_a_run_chooses_is_that_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_machine(cluster(), path := tmp_path / "machine.json")
    settings = settings_of("dp-ga --device auto", path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="its ranks compute on cuda, and those of this run on cpu"):
        settings.decide()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert settings.decide()["data"] == "sample"


def test_a_run_ends_well_if_its_machine_has_gone(machine: Path) -> None:
    settings = settings_of("dp-ga", machine)
    [predicted] = [line for line in settings.remarks(settings.decide()) if "a step should take" in line]
    machine.write_text("{}")
    first, *_ = settings.remarks_at_the_end([StepTime(1.0, 0.5, 0.5)])
    machine.unlink()
    assert settings.remarks_at_the_end([StepTime(1.0, 0.5, 0.5)])[0] == first
    assert re.findall(r"[\d.,]+ ms", predicted)[0] in first


def test_a_run_prints_both(machine: Path, tmp_path: Path) -> None:
    train_on(1, "primer/intro.py", tmp_path / "run", *SMALL, "--steps", "5", "--machine", str(machine))
    text = (tmp_path / "run/rank0.log").read_text()
    assert f"# by {machine} (passes of this model were not measured there, but estimated; " in text
    assert f" calibrate {machine}, with the model's flags, measures them), a step should take " in text
    assert "# a step took " in text
    assert "# computing: predicted " in text
