"""NCCL: with two and four ranks, which share a GPU if there is only one, and refused if they are not meant to."""

import re
from pathlib import Path

import pytest
from support.gpu_runs import GPUS, NCCL, REHEARSAL, SAME, GPURun, assert_trained_alike, command, needs, train
from support.processes import run

# Most important first. Ranks share a GPU if there are too few; six sequences to a step.
LINES = """
dp-ga --world-size 2 --batch-size 3
dp-overlap --world-size 2 --batch-size 3
dp-buckets --world-size 2 --batch-size 3
cp-ring --world-size 2 --batch-size 6
cp-ring --world-size 3 --batch-size 6
5d --dp 1 --pp 2 --cp 2 --batch-size 6
pp-dapple --world-size 2 --batch-size 6 --micro-batches 6
pp-dapple --world-size 2 --batch-size 6 --micro-batches 6 --schedule interleaved
pp-dapple --world-size 2 --batch-size 6 --micro-batches 6 --schedule zb-v
pp-dapple --world-size 2 --batch-size 6 --micro-batches 6 --schedule dualpipe-v
pp-dapple --world-size 2 --batch-size 6 --micro-batches 6 --schedule zb-h1 --run-on
hybrid --dp 2 --pp 2 --batch-size 3
hybrid-plain --dp 2 --pp 2 --batch-size 3
hybrid --dp 1 --pp 2 --tp 2 --batch-size 6 --micro-batches 6 --schedule interleaved
tp --world-size 2 --batch-size 6
tp --world-size 2 --batch-size 6 --sequence-parallel
hybrid --dp 1 --pp 2 --tp 2 --batch-size 6
dp-fsdp --world-size 2 --batch-size 3 --shard weights
dp-fsdp --world-size 2 --batch-size 3 --shard gradients
dp-fsdp --world-size 2 --batch-size 3 --shard optimizer
5d --dp 2 --pp 1 --tp 2 --batch-size 3 --shard weights
5d --dp 2 --pp 2 --batch-size 3 --shard optimizer
ddp --world-size 2 --batch-size 3
mydp --world-size 2 --batch-size 3
dp-wa --world-size 2 --batch-size 3
pp-1f1b --world-size 2 --batch-size 6
hybrid --dp 1 --pp 2 --batch-size 6 --schedule gpipe
"""


def test_a_run_goes_on_in_another_layout(reference: GPURun, tmp_path: Path) -> None:
    saved = train(f"pp-dapple --world-size 2 --batch-size 6 --backend {NCCL} --save-every 3", tmp_path / "before")
    resumed = train(f"tp --world-size 2 --backend {NCCL}", tmp_path / "after", "--resume", saved.checkpoint(3))
    assert resumed.losses == pytest.approx(reference.losses[3:], rel=SAME)


def test_experts_that_ranks_share_are_those_of_the_same_ranks_on_the_cpu(tmp_path: Path) -> None:
    """With the same routes, which differences in the last digit of a score would change."""
    line, routes = "5d --dp 2 --ep 2 --pp 1 --experts 4 --batch-size 3", tmp_path / "routes"
    expected = train(line, tmp_path / "cpu", "--record-routes", routes, device="cpu")
    own = train(f"{line} --backend {NCCL}", tmp_path / "gpu", "--replay-routes", routes)
    assert own.losses == pytest.approx(expected.losses, rel=SAME)
    assert expected.losses[0] - expected.losses[-1] > 0.5, "it learns"
    loads = [[record["expert_loads"] for record in run.records] for run in (own, expected)]
    assert loads[0] == loads[1], "of the step's tokens, and no others"


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_several_ranks_are_the_run_of_one_process(line: str, reference: GPURun, tmp_path: Path) -> None:
    assert_trained_alike(train(f"{line} --backend {NCCL}", tmp_path), reference)


@needs(8)
def test_eight_gpus(reference: GPURun, tmp_path: Path) -> None:
    line = f"hybrid --dp 2 --pp 2 --tp 2 --batch-size 3 --backend {NCCL}"
    assert_trained_alike(train(line, tmp_path), reference)


@pytest.mark.skipif(REHEARSAL > 0, reason="is about NCCL itself")
def test_ranks_that_share_a_gpu_are_refused(tmp_path: Path) -> None:
    ended = run(*command(f"ddp --world-size {GPUS + 1} --backend nccl --data sample", "--out", tmp_path))
    assert ended.status == 2, ended.err
    refusal = (
        r"# (rank \d failed: )?--backend nccl: .*ranks.* share .*GPU.*, which NCCL refuses; use --backend gloo, or .*"
    )
    assert re.fullmatch(refusal, ended.err.splitlines()[-1]), ended.err
    assert "Traceback" not in ended.err
