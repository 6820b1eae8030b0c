"""What a run on the GPU reports besides its losses: timeline, validation, memory."""

import itertools
from pathlib import Path

import pytest
from support.gpu_runs import DEVICE, NCCL, SAME, GPURun, assert_trained_alike, needs, train

from distlab.reports.trace import read_chrome

INACCURACY = 1e-3  # seconds: a GPU's clock against the host's


@pytest.mark.parametrize(
    ("stages", "backend"), [(3, "gloo"), pytest.param(2, NCCL, marks=needs(2)), pytest.param(4, NCCL, marks=needs(4))]
)
def test_a_timeline_is_plausible(stages: int, backend: str, reference: GPURun, tmp_path: Path) -> None:
    line = f"pp-dapple --world-size {stages} --batch-size 6 --micro-batches 6 --backend {backend} --trace"
    assert_trained_alike(train(line, tmp_path), reference)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = read_chrome(tmp_path / "trace.json")
    for step in trace.steps():
        ends: list[dict[str, float]] = []  # by stage: when each pass ended
        for rank, span in enumerate(step):
            passes = trace.ranks[rank].within(span, "compute")
            ends.append({event.name: event.end for event in passes})
            assert sorted(ends[-1]) == sorted(f"{letter}{number}" for letter in "FB" for number in range(6))
            assert all(before.end < after.start + INACCURACY for before, after in itertools.pairwise(passes))
            assert all(event.start < event.end for event in passes)
            assert span.start < passes[0].start + INACCURACY
            assert passes[-1].end < span.end + INACCURACY
        for number in range(6):  # a micro-batch goes forward through the stages, and back
            way = [ends[stage][f"F{number}"] for stage in range(stages)]
            way += [ends[stage][f"B{number}"] for stage in reversed(range(stages))]
            assert way == sorted(way)
    for rank in range(stages):
        busy, waiting = trace.busy(rank)
        assert 0 < busy <= 1
        assert 0 <= waiting < 1
        assert busy + waiting < 1.05


def test_validation_and_memory_are_told(reference: GPURun, tmp_path: Path) -> None:
    run = train("hybrid --dp 2 --pp 2 --batch-size 3 --eval-every 3", tmp_path)
    assert len(run.validation_losses) == 2
    assert run.validation_losses == pytest.approx(reference.validation_losses, rel=SAME)
    assert f"# validation after 6 steps: loss {run.validation_losses[-1]:.6f}, perplexity" in run.ended.out
    if DEVICE == "cuda":  # more than the weights and gradients of a stage, and less than what a whole GPU has
        assert 20e6 < run.records[-1]["peak_memory_bytes"] < 2e9
