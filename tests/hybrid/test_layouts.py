"""Any layout with any options is the training run of one process.

In float64, losses, norms, gradients and weights agree to 1e-9: more than an order of sums explains, and less than any
fault. The runs have most pairs of the options' values, because what tests of single options miss needs two of them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.chapters import FEW_TOKENS, State, load, merged, records, train_on

from distlab.axes.layout import layout_size
from distlab.settings.common import parse

SCRIPT = "hybrid/intro_5d.py"
MODEL = "--dmodel 48 --num-heads 12 --num-kv-heads 6 --hidden-dim 40 --n-layers 3 --seq-len 25"
MORE_LAYERS = "--n-layers 5"  # of six stages on three workers, the first and the last need none
SEQUENCES = 12  # of all replicas
TOLERANCE = 1e-9
TRAINING = {
    "plain": "",
    "adam": "--optimizer adam --lr 0.01 --weight-decay 0.1 --clip-norm 0.5 --warmup-steps 2 --lr-schedule cosine "
    "--eval-every 2 --eval-sequences 5",
    "mask": "--seq-len 99 --document-mask --clip-norm 0.5",
    "experts": "--seq-len 24 --experts 6 --capacity 0.8 --qk-norm",
    "shared": "--seq-len 24 --experts 6 --shared-expert --router-scores sigmoid --clip-norm 0.5",
}
RUNS = [
    ("plain", "--dp 1 --pp 1 --tp 2 --cp 2 --micro-batches 2 --shard weights --recompute blocks --cp-kind heads"),
    ("plain", "--dp 2 --pp 2 --schedule zb-h1 --micro-batches 3 --shard optimizer --neighbors replicas"),
    ("plain", "--dp 2 --pp 2 --schedule zb-v --micro-batches 1 --recompute except-attention --run-on --transport gloo"),
    ("adam", "--dp 1 --pp 1 --tp 2 --cp 2 --micro-batches 3 --recompute except-attention --report-every 2"),
    (
        "adam",
        "--dp 1 --pp 3 --cp 2 --schedule dapple --micro-batches 1 --shard gradients --recompute all --report-every 2",
    ),
    ("adam", "--dp 2 --pp 2 --schedule naive --micro-batches 3 --recompute all --neighbors replicas"),
    ("adam", "--dp 2 --pp 3 --schedule dapple --micro-batches 2 --shard optimizer --recompute blocks --run-on"),
    ("mask", "--dp 1 --pp 2 --cp 2 --schedule zb-h2 --micro-batches 3 --run-on --cp-kind heads --transport gloo"),
    (
        "mask",
        "--dp 1 --pp 2 --cp 3 --schedule zb-v --micro-batches 1 --shard optimizer --recompute except-attention "
        "--neighbors replicas --run-on --cp-kind gather",
    ),
    (
        "mask",
        "--dp 2 --pp 1 --cp 2 --micro-batches 2 --shard weights --recompute all --cp-kind gather --report-every 2",
    ),
    (
        "mask",
        "--dp 3 --pp 2 --schedule zb-h1 --micro-batches 2 --shard gradients --neighbors replicas --report-every 2",
    ),
    ("experts", "--dp 1 --pp 1 --tp 2 --cp 2 --micro-batches 1 --shard gradients --run-on --cp-kind gather"),
    (
        "experts",
        "--dp 1 --pp 3 --cp 2 --schedule auto --micro-batches 1 --shard optimizer --recompute blocks "
        f"--neighbors replicas --run-on --cp-kind heads --transport gloo {MORE_LAYERS}",
    ),
    ("experts", "--dp 1 --pp 3 --cp 2 --cp-order contiguous --schedule gpipe --micro-batches 1 --run-on"),
    ("experts", "--dp 3 --ep 3 --pp 2 --schedule interleaved --micro-batches 2 --recompute blocks --run-on"),
    (
        "experts",
        "--dp 3 --pp 2 --schedule gpipe --micro-batches 2 --shard gradients --recompute except-attention "
        "--report-every 2",
    ),
    (
        "shared",
        "--dp 1 --pp 2 --cp 2 --schedule naive --micro-batches 3 --shard optimizer --recompute blocks "
        "--neighbors replicas --cp-kind gather --report-every 2",
    ),
    (
        "shared",
        "--dp 1 --pp 3 --cp 2 --schedule interleaved --micro-batches 3 --shard optimizer --recompute all "
        f"{MORE_LAYERS}",
    ),
    (
        "shared",
        "--dp 2 --pp 3 --schedule auto --micro-batches 3 --shard gradients --recompute except-attention "
        f"--neighbors replicas --report-every 2 --transport gloo {MORE_LAYERS}",
    ),
    ("shared", "--dp 3 --pp 1 --tp 2 --micro-batches 1 --shard weights --recompute all --run-on --transport gloo"),
]


@dataclass
class Run:
    """What a run came to."""

    records: list[dict[str, Any]]
    parameters: State
    gradients: State


def run(training: str, flags: str, out: Path) -> Run:
    replicas = int(flags.partition("--dp ")[2].split()[0])
    shape = ["--batch-size", str(SEQUENCES // replicas)]
    arguments = [*MODEL.split(), *FEW_TOKENS, *TRAINING[training].split(), *flags.split(), *shape]
    ranks = layout_size(parse(load(SCRIPT).DEFAULTS, "", ["0", *arguments]).layout)
    parameters, gradients, _ = train_on(ranks, SCRIPT, out, *arguments, exact=True)
    return Run(records(out), merged(parameters), merged(gradients))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Run]:
    """The run of one process, by its training and its layers."""
    flags, folder = "--dp 1 --pp 1 --micro-batches 1", tmp_path_factory.mktemp("alone")
    return functools.cache(lambda training, layers: run(training, f"{flags} {layers}", folder / (training + layers)))


@pytest.mark.parametrize(("training", "flags"), RUNS)
def test_is_the_run_of_one_process(training: str, flags: str, alone: Callable[[str, str], Run], tmp_path: Path) -> None:
    own, expected = run(training, flags, tmp_path), alone(training, MORE_LAYERS if MORE_LAYERS in flags else "")
    reported = [False, True, True] if "report-every" in flags else [True] * 3
    assert [record["loss"] is not None for record in own.records] == reported
    assert ("heads" in own.records[-1]["sent_bytes"]) == ("--cp-kind heads" in flags)
    for mine, right in zip(own.records, expected.records, strict=True):
        for name in ("loss", "grad_norm", "validation_loss", "lr"):
            if mine.get(name) is not None:
                assert mine[name] == pytest.approx(right[name], rel=TOLERANCE, abs=0), name
        loads, whole = (record.get("expert_loads", []) for record in (mine, right))
        assert {sum(load) for load in loads} == {sum(load) for load in whole}, "every token counts once, none twice"
    for mine, right in ((own.parameters, expected.parameters), (own.gradients, expected.gradients)):
        assert mine.keys() == right.keys()
        for name, tensor in right.items():
            assert float((mine[name] - tensor).abs().max()) <= TOLERANCE, name
