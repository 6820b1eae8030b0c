"""Every topology on the GPU is the training run of one process on the CPU, under plain SGD."""

from pathlib import Path

import pytest
from support.gpu_runs import NEAR, SAME, GPURun, assert_trained_alike, launch, train

FLOAT32 = """
primer --batch-size 6
dp-ga --world-size 3 --batch-size 2
dp-overlap --world-size 3 --batch-size 2
dp-buckets --world-size 3 --batch-size 2
pp-dapple --world-size 3 --batch-size 6 --micro-batches 6
hybrid --dp 2 --pp 2 --tp 2 --batch-size 3
ddp --world-size 3 --batch-size 2
mydp --world-size 3 --batch-size 2
dp-wa --world-size 3 --batch-size 2
dp-ga --world-size 3 --batch-size 2 --all-reduce ring
dp-ga --world-size 3 --batch-size 2 --micro-batches 2 --all-reduce tree
tp --world-size 3 --batch-size 6
tp --world-size 3 --batch-size 6 --tp-style naive
tp --world-size 3 --batch-size 6 --sequence-parallel
pp-1f1b --world-size 3 --batch-size 6
pp-gpipe --world-size 3 --batch-size 6
hybrid --dp 2 --pp 3 --batch-size 3 --schedule gpipe
hybrid --dp 1 --pp 2 --tp 3 --batch-size 6 --micro-batches 2 --schedule naive
pp-zb --world-size 3 --batch-size 6
pp-zbv --world-size 2 --batch-size 6 --micro-batches 6
pp-interleaved --world-size 2 --batch-size 6 --micro-batches 6
dp-zero --world-size 3 --batch-size 2
dp-fsdp --world-size 3 --batch-size 2 --shard gradients
dp-fsdp --world-size 3 --batch-size 2 --shard weights
hybrid --dp 2 --pp 2 --batch-size 3 --shard optimizer --recompute blocks
hybrid --dp 1 --pp 2 --batch-size 6 --micro-batches 6 --schedule dualpipe-v
hybrid --dp 1 --pp 3 --batch-size 6 --micro-batches 6 --schedule zb-h2 --run-on
hybrid --dp 1 --pp 2 --batch-size 6 --micro-batches 6 --schedule auto
primer --batch-size 6 --recompute all
"""
BFLOAT16 = """
primer --batch-size 6
hybrid --dp 1 --pp 2 --tp 2 --batch-size 6
dp-ga --world-size 2 --batch-size 3
"""


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.mark.parametrize("line", lines(FLOAT32))
def test_float32_is_the_run_of_one_process_on_the_cpu(line: str, reference: GPURun, tmp_path: Path) -> None:
    assert_trained_alike(train(line, tmp_path), reference)


@pytest.mark.parametrize("line", lines(BFLOAT16))
def test_bfloat16_stays_near_it(line: str, reference: GPURun, tmp_path: Path) -> None:
    own = train(f"{line} --dtype bfloat16", tmp_path)
    assert_trained_alike(own, reference, NEAR)
    assert own.losses != pytest.approx(reference.losses, rel=SAME), "it did compute in bfloat16"


OWN_RUNS = """
diloco --world-size 3 --batch-size 2 --sync-every 2
diloco --world-size 2 --batch-size 3 --sync-every 4 --fragments 2 --overlap-steps 1 --compress bf16
hybrid --dp 2 --pp 2 --batch-size 3 --outer diloco --sync-every 3
dp-ga --world-size 3 --batch-size 2 --compress powersgd
"""


@pytest.mark.parametrize("line", lines(OWN_RUNS))
def test_what_is_no_run_of_one_process_is_that_of_the_same_ranks_on_the_cpu(line: str, tmp_path: Path) -> None:
    assert_trained_alike(train(line, tmp_path / "gpu"), train(line, tmp_path / "cpu", device="cpu"))


CLASSIFIERS = {  # by the run of one process on the CPU
    "mlp --n-layers 3 --d-in 64 --train-size 1000 --niters 6 --batch-size 60": [
        "mlp-ddp --n-layers 3 --d-in 64 --train-size 1000 --niters 6 --world-size 3 --batch-size 20",
        "mlp-mydp --n-layers 3 --d-in 64 --train-size 1000 --niters 6 --world-size 3 --batch-size 20",
    ],
    "sentiment --samples 96 --epochs 2 --bsz 32 --optimizer sgd --lr 0.1 --world-size 1 --tp 1": [
        "sentiment --samples 96 --epochs 2 --bsz 32 --optimizer sgd --lr 0.1 --world-size 4 --tp 2",
    ],
}


@pytest.mark.parametrize("alone", CLASSIFIERS)
def test_classifiers_are_the_run_of_one_process_on_the_cpu(alone: str, tmp_path: Path) -> None:
    expected = launch(alone, tmp_path / "cpu", device="cpu").losses
    assert len(set(expected)) == 6, "it learns"
    for number, line in enumerate(CLASSIFIERS[alone]):
        assert launch(line, tmp_path / str(number)).losses == pytest.approx(expected, rel=SAME)
