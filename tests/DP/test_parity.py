"""Every data-parallel chapter gives the training run of one process: losses, gradients, parameters, under plain SGD."""

import json
from pathlib import Path

import pytest
import torch
from support.chapters import FEW_TOKENS, OneProcess, Ranks, assert_equal, assert_same_run, records, train_on
from support.processes import LAB

GRADIENT_AGGREGATION = "DP/gradient_aggr/intro_DP_GA.py"
OVERLAP = "DP/buckets/intro_DP_overlap.py"
BUCKETS = "DP/buckets/intro_DP_buckets.py"
WEIGHT_AGGREGATION = "DP/weight_aggr/intro_DP_WA.py"
WRAPPED = ["DP/mydp/intro_DP_hooks.py", "DP/ddp/intro_DP_DDP.py", "DP/mydp/intro_DP_MyDP.py"]
SCRIPTS = [GRADIENT_AGGREGATION, OVERLAP, BUCKETS, WEIGHT_AGGREGATION, *WRAPPED]


def many_processes(script: str, out: Path, world_size: int, *flags: str) -> Ranks:
    return train_on(world_size, script, out, "--world-size", str(world_size), *FEW_TOKENS, *flags)


@pytest.mark.parametrize(
    ("world_size", "transport", "batch"),
    [
        (1, "auto", "--batch-size 2"),
        pytest.param(2, "gloo", "--batch-size 3 --micro-batches 3 --recompute all", marks=pytest.mark.quick),
        pytest.param(3, "shared", "--batch-size 2", marks=pytest.mark.quick),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_is_the_run_of_one_process(
    script: str, world_size: int, transport: str, batch: str, one_process: OneProcess, tmp_path: Path
) -> None:
    batch_size, out = int(batch.split()[1]), tmp_path / "run"
    if script == OVERLAP:  # several buckets, as the default model has
        text, size = (LAB / script).read_text(), "BUCKET_BYTES = 25_000_000"
        assert size in text
        (own := tmp_path / "overlap.py").write_text(text.replace(size, "BUCKET_BYTES = 10_000"))
        script = str(own)
    clip = "--clip-norm 0.3 --lr 1.5".split() if world_size == 1 and script != WEIGHT_AGGREGATION else []
    expected = one_process(world_size * batch_size, *FEW_TOKENS, *clip)
    flags = [*batch.split(), "--transport", transport, *clip]
    parameters, gradients, losses = many_processes(script, out, world_size, *flags)
    assert json.loads((out / "config.json").read_text())["settings"]["transport"] == transport
    changed_nothing = "--transport shared changed nothing" in (out / "rank0.log").read_text()
    assert not changed_nothing, "torch's wrapper, too, goes through shared memory"
    if script == WEIGHT_AGGREGATION:  # each rank's gradient is its own; their mean is the one process's
        gradients = [{name: torch.stack([g[name] for g in gradients]).mean(0) for name in expected[1]}]
    assert_same_run((parameters, gradients, losses), expected)


@pytest.mark.parametrize("script", WRAPPED)
def test_ranks_with_other_weights_start_with_those_of_rank_0(
    script: str, one_process: OneProcess, tmp_path: Path
) -> None:
    text, options = (LAB / script).read_text(), "**run.model_options()"
    assert options in text
    own = tmp_path / "seeded.py"
    own.write_text(text.replace(options, '**run.model_options() | {"seed": run.settings.seed + run.rank}'))
    parameters, _, _ = many_processes(str(own), tmp_path / "run", 2, "--batch-size", "1")
    for of_rank in parameters:
        assert_equal(of_rank, one_process(2, *FEW_TOKENS)[0])


@pytest.mark.parametrize("topology", ["naive", "ring"])
def test_our_own_all_reduce_gives_the_same_run(topology: str, one_process: OneProcess, tmp_path: Path) -> None:
    expected, flags = one_process(3, *FEW_TOKENS), ["--batch-size", "1", "--all-reduce", topology]
    assert_same_run(many_processes(BUCKETS, tmp_path, 3, *flags), expected)
    first = records(tmp_path)[0]
    size_bytes = sum(weight.nbytes for weight in expected[0].values())
    sent_by_rank_0 = {"naive": 2, "ring": 2 * 2 / 3}[topology]  # times the gradients
    assert first["sent_bytes"]["gradients"] == pytest.approx(sent_by_rank_0 * size_bytes, rel=1e-4)


def test_weights_that_are_averaged_rarely_drift_and_are_the_same_again_after_each_average(tmp_path: Path) -> None:
    steps = ["--steps", "8"]
    every_step, _, _ = many_processes(WEIGHT_AGGREGATION, tmp_path / "h1", 3, *steps, "--sync-every", "1")
    rarely, _, _ = many_processes(WEIGHT_AGGREGATION, tmp_path / "h3", 3, *steps, "--sync-every", "3")
    for name, weight in rarely[0].items():
        for other in rarely[1:]:
            assert torch.equal(other[name], weight), f"{name}: the last average leaves all ranks with the same weights"
    assert any(not torch.allclose(every_step[0][name], weight, atol=1e-5) for name, weight in rarely[0].items())
    assert "moments" not in (tmp_path / "h3" / "rank0.log").read_text(), "plain SGD has none"
    sent = {r["step"]: r["sent_bytes"]["weights"] for r in records(tmp_path / "h3") if r["sent_bytes"].get("weights")}
    assert list(sent) == [2, 5, 7], "after every third step, and at the end; nothing in between"
    assert len(set(sent.values())) == 1
