"""Experts that ranks share give the training run of one process, in every layout, under plain SGD."""

import json
from pathlib import Path

import pytest
from support.chapters import State, assert_equal, merged, train_on

PLAIN, ALL_AXES = "EP/intro_EP.py", "hybrid/intro_5d.py"
MODEL = (
    "--experts 12 --balance-rate 0.002 --dmodel 32 --num-heads 4 --hidden-dim 40 --n-layers 2 --seq-len 12 --lr 0.5 "
    "--clip-norm 0.5"
).split()
SHARED = "--shared-expert --router-scores sigmoid"
ROUNDING = 1e-5  # relative: sums over ranks are added up in another order
Run = tuple[State, State, list[float], list[float]]


def records(out: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (out / "metrics.jsonl").read_text().splitlines()]


def trained(ranks: int, script: str, out: Path, *flags: str) -> Run:
    parameters, gradients, losses = train_on(ranks, script, out, *MODEL, *flags)
    return merged(parameters), merged(gradients), losses, records(out, "grad_norm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One process, without and with a shared expert."""
    flags = "--dp 1 --pp 1 --batch-size 12".split()
    return {
        more: trained(1, ALL_AXES, tmp_path_factory.mktemp("alone"), *flags, *more.split()) for more in ("", SHARED)
    }


def assert_same_run(own: Run, expected: Run) -> None:
    assert own[2] == pytest.approx(expected[2], rel=1e-6)
    assert own[3] == pytest.approx(expected[3], rel=1e-6)
    assert_equal(own[0], expected[0], ROUNDING)
    assert_equal(own[1], expected[1], ROUNDING)
    for name, tensor in expected[0].items():
        assert "bias" not in name or own[0][name].equal(tensor), f"{name}: loads are the same in every layout"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_plain_form(ranks: int, alone: dict[str, Run], tmp_path: Path) -> None:
    flags = f"--world-size {ranks} --batch-size {12 // ranks} --micro-batches {1 + (ranks == 3)}".split()
    assert_same_run(trained(ranks, PLAIN, tmp_path, *flags), alone[""])


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        pytest.param("--dp 2 --pp 1 --ep 2", "--recompute all --micro-batches 2", marks=pytest.mark.quick),
        ("--dp 3 --pp 1 --ep 3", f"--transport gloo --micro-batches 2 {SHARED}"),
        ("--dp 4 --pp 1 --ep 2", "--shard gradients"),
        ("--dp 4 --pp 1 --ep 2", "--shard optimizer"),
        ("--dp 2 --pp 1 --ep 1", ""),
        ("--dp 2 --pp 2 --ep 2", "--schedule zb-h1 --micro-batches 3 --layers-per-stage 2,0"),
        ("--dp 2 --pp 2 --ep 2", "--schedule dapple --micro-batches 2 --neighbors replicas --recompute blocks"),
        ("--dp 2 --pp 1 --cp 2 --ep 2", "--micro-batches 2"),
        ("--dp 2 --pp 1 --tp 2 --ep 2", SHARED),
    ],
)
def test_beside_other_axes(layout: str, flags: str, alone: dict[str, Run], tmp_path: Path) -> None:
    sizes = dict(zip(layout.split()[::2], map(int, layout.split()[1::2]), strict=True))
    ranks = sizes["--dp"] * sizes["--pp"] * sizes.get("--cp", 1) * sizes.get("--tp", 1)
    shape = [*layout.split(), "--batch-size", str(12 // sizes["--dp"]), *flags.split()]
    expected = alone[SHARED if SHARED in flags else ""]
    if sizes.get("--tp", 1) > 1:  # parameters are in slices
        losses = train_on(ranks, ALL_AXES, tmp_path, *MODEL, *shape)[2]
        assert losses == pytest.approx(expected[2], rel=1e-6)
        assert records(tmp_path, "grad_norm") == pytest.approx(expected[3], rel=1e-6)
    else:
        assert_same_run(trained(ranks, ALL_AXES, tmp_path, *shape), expected)


def test_clips_and_routes(alone: dict[str, Run]) -> None:
    """Or the tests above would show less than they seem to."""
    assert min(alone[""][3]) > 0.5, "all gradients are clipped"
    biases = [tensor for name, tensor in alone[""][0].items() if "bias" in name]
    assert all(len(bias.unique()) > 1 for bias in biases)
    experts = [grad for name, grad in alone[""][1].items() if ".experts." in name]
    assert len(experts) == 2 * 12 * 3
    assert sum(bool(grad.any()) for grad in experts) > len(experts) / 2, "others had no tokens in the last step"


def test_resumes_with_other_numbers_of_ranks(alone: dict[str, Run], tmp_path: Path) -> None:
    """One process, then two ranks, then four: the losses are those of an unbroken run; so is validation."""
    recipe = "--pp 1 --eval-every 1 --eval-sequences 3 --save-every 1".split()
    one = train_on(1, ALL_AXES, tmp_path / "1", *MODEL, *recipe, *"--dp 1 --batch-size 12 --steps 1".split())[2]
    more = [*recipe, *"--dp 2 --ep 2 --batch-size 6 --steps 2".split(), "--resume", str(tmp_path / "1")]
    two = train_on(2, ALL_AXES, tmp_path / "2", *MODEL, *more)[2]
    more = [*recipe, *"--dp 4 --ep 4 --batch-size 3 --steps 4".split(), "--resume", str(tmp_path / "2")]
    parameters, _, four = train_on(4, ALL_AXES, tmp_path / "4", *MODEL, *more)
    assert [*one, *two, *four] == pytest.approx(alone[""][2], rel=1e-6)
    assert_equal(merged(parameters), alone[""][0], ROUNDING)
    for name, tensor in alone[""][0].items():
        assert "bias" not in name or merged(parameters)[name].equal(tensor)


def test_replayed_routes(alone: dict[str, Run], tmp_path: Path) -> None:
    """A run of one process is forced upon four ranks; and routes that are not their own change the losses."""
    folder = tmp_path / "routes"
    shape = "--dp 1 --pp 1 --batch-size 12 --micro-batches 2".split()
    one = train_on(1, ALL_AXES, tmp_path / "1", *MODEL, *shape, "--record-routes", str(folder))[2]
    assert one == pytest.approx(alone[""][2], rel=1e-6)
    shape = "--dp 2 --pp 2 --ep 2 --batch-size 6 --micro-batches 3 --schedule dapple".split()
    replay = ["--replay-routes", str(folder)]
    four = train_on(4, ALL_AXES, tmp_path / "4", *MODEL, *shape, *replay)[2]
    assert four == pytest.approx(one, rel=1e-6)
    assert sum(records(tmp_path / "4", "other_routes")) == 0
    other = train_on(4, ALL_AXES, tmp_path / "other", *MODEL, *shape, *replay, "--seed", "1")[2]
    free = train_on(4, ALL_AXES, tmp_path / "free", *MODEL, *shape, "--seed", "1")[2]
    assert min(records(tmp_path / "other", "other_routes")) > 0
    assert other != pytest.approx(free, rel=1e-6)
