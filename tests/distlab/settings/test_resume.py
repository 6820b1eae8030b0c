"""A run goes on from a checkpoint as if nothing had happened: bit for bit in its layout, to rounding in another."""

import itertools
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chapters import BATCH, LAYOUTS, MODEL, State, assert_equal, losses, records, train_on
from support.processes import children, wait_for_steps
from support.terminals import fork_launcher

from distlab.checkpoints.format import latest_valid
from distlab.run.recording import file_of
from distlab.run.starting import decide
from distlab.settings.common import parse
from distlab.settings.replicas import DataParallelSettings
from distlab.settings.resuming import remarks
from distlab.settings.training import TrainSettings, learning_rate
from simplellm.errors import InputError

HALF, STEPS = 2, 4
TRAINING = "--optimizer adam --lr 1e-2 --num-heads 2 --n-layers 2".split()
# Of the runs that are resumed, which take it from the checkpoint.
RECIPE = "--warmup-steps 1 --lr-schedule cosine --min-lr 1e-3 --weight-decay 0.1 --betas 0.8 0.95".split()


def run(layout: str, out: Path, *flags: str | Path) -> tuple[list[State], list[float]]:
    """Each rank's parameters after a run of a layout, and the losses."""
    ranks, script, own = LAYOUTS[layout]
    parameters, _, its_losses = train_on(
        ranks, script, out, *TRAINING, "--steps", str(STEPS), *own.split(), *map(str, flags)
    )
    return parameters, its_losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[State], list[float]]]:
    """Runs by layout, as they are first asked for: the folder with its checkpoints, final parameters, losses."""
    folder = tmp_path_factory.mktemp("saved")

    class Runs(dict[str, tuple[Path, list[State], list[float]]]):
        def __missing__(self, layout: str) -> tuple[Path, list[State], list[float]]:
            self[layout] = (folder / layout, *run(layout, folder / layout, *RECIPE, "--save-every", str(HALF)))
            return self[layout]

    return Runs()


def half_way(run: Path) -> Path:
    return run / "checkpoints" / f"step-{HALF:08}"


# Those whose ranks hold and restore something else than others do, and that no test below resumes bit for bit.
@pytest.mark.parametrize("layout", "dp-zero dp-fsdp ddp pp-zbv 3d mydp".split())
def test_the_same_layout_goes_on_bit_for_bit(layout: str, saved: Any, tmp_path: Path) -> None:
    folder, expected_parameters, expected_losses = saved[layout]
    assert len(set(expected_losses)) == STEPS, "it learns something in every step"
    parameters, own_losses = run(layout, tmp_path, "--resume", half_way(folder))
    assert own_losses == expected_losses[HALF:]
    assert "# save the model next time" in (tmp_path / "rank0.log").read_text(), "it saved none of its own"
    assert not (tmp_path / "checkpoints").exists()
    for own, expected in zip(parameters, expected_parameters, strict=True):
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in own)


CIRCLE = "primer tp hybrid dp-zero dp-fsdp pp-zbv 3d pp-dapple primer".split()  # replicas: as primer


@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise(CIRCLE)])
def test_another_layout_goes_on(before: str, after: str, saved: Any, tmp_path: Path) -> None:
    folder, _, expected = saved[before]
    _, own = run(after, tmp_path, "--resume", half_way(folder))
    assert own == pytest.approx(expected[HALF:], rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [("primer", "dp-wa"), ("dp-wa", "primer")])
def test_averaged_weights_go_on_elsewhere(before: str, after: str, tmp_path: Path) -> None:
    """Where no rank has moments of its own gradients."""
    flags = ["--optimizer", "sgd", "--lr", "0.5"]
    _, expected = run(before, tmp_path / "before", *flags, "--save-every", str(HALF))
    _, own = run(after, tmp_path / "after", *flags, "--resume", half_way(tmp_path / "before"))
    assert own == pytest.approx(expected[HALF:], rel=1e-5)


def test_bfloat16_goes_on(tmp_path: Path) -> None:
    """The residual stream, too: bit for bit in its layout, and in another to what bfloat16 rounds."""
    dtypes = "--dtype", "bfloat16", "--residual", "bfloat16"
    _, expected = run("pp-zbv", tmp_path / "before", *dtypes, "--save-every", str(HALF))
    for layout, rel in (("pp-zbv", 0), ("tp", 1e-3)):
        _, own = run(layout, tmp_path / layout, "--resume", half_way(tmp_path / "before"))
        assert own == pytest.approx(expected[HALF:], rel=rel, abs=0), layout
    settings = json.loads((tmp_path / "tp" / "config.json").read_text())["settings"]
    assert settings["dtype"] == settings["residual"] == "bfloat16", "as the checkpoint has it"


def test_an_uneven_split_goes_on_whole(tmp_path: Path) -> None:
    """4,096 pieces and six heads over three and six ranks, and back."""
    flags = "--dmodel 48 --num-heads 6 --batch-size 2 --optimizer adam --lr 1e-2".split()
    script = "TP/intro_TP_styles.py"
    saving = [*flags, "--world-size", "3", "--save-every", "2"]
    _, _, expected = train_on(3, script, tmp_path / "three", *saving)
    for ranks, script_after in ((6, script), (1, "primer/intro.py")):
        size = ["--world-size", str(ranks)] if ranks > 1 else []
        resume = ["--resume", str(half_way(tmp_path / "three"))]
        _, _, own = train_on(ranks, script_after, tmp_path / str(ranks), *flags, *size, *resume)
        assert own == pytest.approx(expected[HALF:], rel=1e-5)


def test_shards_go_on_in_others(saved: Any, tmp_path: Path) -> None:
    """From three ranks that share out the weights, to two that share out less, and less still; and bit for bit."""
    folder, _, expected = saved["dp-fsdp"]
    flags = [*TRAINING, "--steps", str(STEPS), "--world-size", "2", "--batch-size", "3", "--save-every", "1"]
    own, before = {}, half_way(folder)
    for name, shard in (("first", "gradients"), ("again", "gradients"), ("less", "optimizer")):
        resume = ["--shard", shard, "--resume", str(before)]
        _, _, own[name] = train_on(2, LAYOUTS["dp-fsdp"][1], tmp_path / name, *flags, *resume)
        before = tmp_path / "first/checkpoints/step-00000003"
    assert own["first"] == pytest.approx(expected[HALF:], rel=1e-5)
    assert own["again"] == own["first"][-1:]
    assert "# 1 step of 144 tokens; 3 of 4 are done" in (tmp_path / "again/rank0.log").read_text()
    assert own["less"] == pytest.approx(expected[-1:], rel=1e-5)


def test_it_goes_on_where_it_was(saved: Any, tmp_path: Path) -> None:
    """With the run's own folder for --out its records are continued, and what came after the checkpoint replaced."""
    folder, _, expected = saved["primer"]
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08}")
    (tmp_path / "run" / "launcher.log").write_text("# rank 0 failed\n")
    recorded = file_of(tmp_path / "run", 0, 0)
    recorded.parent.mkdir(parents=True)
    recorded.touch()
    _, own = run("primer", tmp_path / "run", "--resume", tmp_path / "run", "--save-every", "1")
    assert own == expected
    assert [(record["step"], record["lr"], record["tokens"]) for record in records(tmp_path / "run")] == [
        (step, learning_rate(step, STEPS, 1e-2, 1, "cosine", 1e-3), (step + 1) * BATCH * 24) for step in range(STEPS)
    ]
    log = (tmp_path / "run" / "rank0.log").read_text()
    assert (log.count("# intro: one process"), log.count("are replaced")) == (2, 0)
    assert recorded.exists(), "of the same run"
    assert not (tmp_path / "run" / "launcher.log").exists(), "of an end before this one"
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{step:08}" for step in (2, 3, 4)]


def test_checkpoints_that_came_before_the_folder_was_claimed_are_refused(saved: Any, tmp_path: Path) -> None:
    """Of a run that had the folder while this one read its command line."""
    settings = parse(TrainSettings(), "", ["--data", "sample", "--save-every", "1", "--out", str(tmp_path / "run")])
    shutil.copytree(saved["primer"][0], tmp_path / "run")
    with pytest.raises(InputError, match=r"run: has checkpoints of another run; give another folder, or --resume"):
        decide(settings, Path("intro.py"))


def test_a_longer_run_says_how_the_learning_rate_goes_on(saved: Any) -> None:
    folder, _, _ = saved["primer"]
    checkpoint = latest_valid(half_way(folder))
    settings = parse(TrainSettings(), "", ["--resume", str(half_way(folder)), "--steps", str(2 * STEPS)])
    assert (settings.lr_schedule, settings.betas, settings.weight_decay) == ("cosine", (0.8, 0.95), 0.1)
    where, remark = remarks(settings, checkpoint)
    lrs = [f"{learning_rate(HALF, steps, 1e-2, 1, 'cosine', 1e-3):.3g}" for steps in (2 * STEPS, STEPS)]
    assert "it is now {} instead of {}; --steps sets it".format(*lrs) in remark
    assert [*remarks(replace(settings, steps=STEPS), checkpoint)] == [where]
    assert [*remarks(replace(settings, lr_schedule="constant"), checkpoint)] == [where]


def test_a_model_has_as_many_tokens_as_its_tokenizer(saved: Any) -> None:
    folder, _, _ = saved["primer"]
    checkpoint, settings = latest_valid(folder), parse(TrainSettings(), "", ["--resume", str(folder)])
    settings.check_checkpoint(checkpoint)
    for tokens in (4095, 4097):
        edited = {**checkpoint.record, "model": {**checkpoint.record["model"], "vocab_size": tokens}}
        with pytest.raises(InputError, match=f"its model has {tokens} tokens but its tokenizer has 4096$"):
            settings.check_checkpoint(replace(checkpoint, record=edited))


def test_a_complete_run_keeps_its_trace_when_it_is_resumed(tmp_path: Path) -> None:
    run("dp-ga", tmp_path, "--trace", "--save-every", str(STEPS))
    kept = [(tmp_path / name).read_bytes() for name in ("trace.json", "ledger.json")]
    run("dp-ga", tmp_path, "--trace", "--resume", tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ("trace.json", "ledger.json")] == kept
    assert (tmp_path / "rank0.log").read_text().count("# --trace recorded nothing") == 1


def test_moments_of_replicas_that_differ_stay_theirs(tmp_path: Path) -> None:
    script, flags = LAYOUTS["dp-wa"][1], [*TRAINING, *"--world-size 2 --batch-size 1 --sync-every 2".split()]
    expected_parameters, _, expected = train_on(2, script, tmp_path / "a", *flags, "--save-every", "2")
    resume = ["--resume", str(half_way(tmp_path / "a"))]
    parameters, _, own = train_on(2, script, tmp_path / "b", *flags, *resume)
    assert own == expected[HALF:]
    for ours, theirs in zip(parameters, expected_parameters, strict=True):
        assert_equal(ours, theirs, rtol=0)
    for settings, also in ((TrainSettings(), []), (DataParallelSettings(), ["--world-size", "2"])):
        with pytest.raises(InputError, match=r"2 ranks kept adam's moments .* the same script and --world-size 2"):
            parse(settings, "", [*resume, *also])


def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Every rank and the launcher at once, by SIGKILL, whatever step they have come to."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _, _, own = LAYOUTS["hybrid"]
    launch = ["hybrid", *MODEL, "--data", "sample", *TRAINING, *own.split(), "--save-every", "5"]
    launcher = fork_launcher(*launch, "--steps", "1000000", "--out", killed)
    wait_for_steps(killed, launcher, steps=7)
    for pid in [launcher.pid, *children(launcher.pid)]:
        os.kill(pid, signal.SIGKILL)
    launcher.wait(10)
    saved_at = len(losses(killed)) // 5 * 5  # at the latest
    steps = ["--steps", str(saved_at + 5)]
    _, expected = run("hybrid", whole, *steps, "--save-every", "5")
    ended = fork_launcher(*launch, *steps, "--resume", killed, "--out", killed).finish()
    assert ended.status == 0, ended.err
    assert losses(killed) == expected
