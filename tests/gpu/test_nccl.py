"""NCCL: with one rank on any machine, with several where each has a GPU of its own, and refused otherwise."""

import re
from pathlib import Path

import pytest
from support.gpu_runs import GPUS, NCCL, REHEARSAL, SAME, GPURun, assert_trained_alike, command, needs, train
from support.processes import run

SEVERAL = {  # GPUs, and what to run on them; six sequences to a step
    2: """
pp-dapple --world-size 2 --batch-size 6 --micro-batches 6
dp-ga --world-size 2 --batch-size 3
tp --world-size 2 --batch-size 6
tp --world-size 2 --batch-size 6 --sequence-parallel
hybrid --dp 1 --pp 2 --batch-size 6 --schedule gpipe
pp-1f1b --world-size 2 --batch-size 6
pp-zbv --world-size 2 --batch-size 6 --micro-batches 6
ddp --world-size 2 --batch-size 3
mydp --world-size 2 --batch-size 3
dp-wa --world-size 2 --batch-size 3
""",
    4: "hybrid --dp 2 --pp 2 --batch-size 3\nhybrid --dp 1 --pp 2 --tp 2 --batch-size 6",
    8: "hybrid --dp 2 --pp 2 --tp 2 --batch-size 3",
}


def test_a_world_of_one_trains_and_saves(reference: GPURun, tmp_path: Path) -> None:
    one = f"ddp --world-size 1 --batch-size 6 --backend {NCCL}"
    saved = train(f"{one} --save-every 3", tmp_path / "saved")
    resumed = train(one, tmp_path / "resumed", "--resume", saved.checkpoint(3))
    assert resumed.losses == pytest.approx(reference.losses[3:], rel=SAME)
    assert_trained_alike(saved, reference)


ALONE = """
dp-ga
dp-wa
mydp
dp-fsdp --shard optimizer
dp-fsdp --shard gradients
dp-fsdp --shard weights
pp-dapple --micro-batches 6
tp
tp --sequence-parallel
"""


@pytest.mark.parametrize("line", ALONE.strip().splitlines())
def test_every_topology_runs_alone(line: str, reference: GPURun, tmp_path: Path) -> None:
    own = train(f"{line} --world-size 1 --batch-size 6 --backend {NCCL}", tmp_path)
    assert_trained_alike(own, reference)


@pytest.mark.skipif(REHEARSAL > 0, reason="is about NCCL itself")
def test_ranks_that_share_a_gpu_are_refused(tmp_path: Path) -> None:
    ended = run(*command(f"ddp --world-size {GPUS + 1} --backend nccl --data sample", "--out", tmp_path))
    assert ended.status == 2, ended.err
    refusal = r"# --backend nccl: .*ranks.* share .*GPU.*, which NCCL refuses; use --backend gloo"
    assert re.fullmatch(refusal, ended.err.splitlines()[-1]), ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=needs(gpus)) for gpus in SEVERAL for line in SEVERAL[gpus].strip().splitlines()]
)
def test_a_gpu_for_each_rank(line: str, reference: GPURun, tmp_path: Path) -> None:
    assert_trained_alike(train(f"{line} --backend {NCCL}", tmp_path), reference)


@needs(2)
def test_what_several_gpus_have_saved_goes_on_in_another_layout(reference: GPURun, tmp_path: Path) -> None:
    saved = train(f"pp-dapple --world-size 2 --batch-size 6 --backend {NCCL} --save-every 3", tmp_path / "before")
    resumed = train(f"tp --world-size 2 --backend {NCCL}", tmp_path / "after", "--resume", saved.checkpoint(3))
    assert resumed.losses == pytest.approx(reference.losses[3:], rel=SAME)
