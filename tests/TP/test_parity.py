"""The tensor-parallel chapter gives the training run of one process; its formula gives the bytes that ranks send."""

import json
from functools import partial
from pathlib import Path

import pytest
from support.chapters import FEW_TOKENS, OneProcess, State, assert_equal, assert_same_run, load, train_on
from support.chapters import MODEL as SMALL

from distlab.parallel.options import Style
from distlab.settings.common import parse

LESSON, SCRIPT = "TP/intro_TP.py", "TP/intro_TP_styles.py"
LAYERS = 2
# 25 tokens divide among no number of ranks, the vocabulary of 602 pieces not among 3 and 6.
MODEL = [*f"--dmodel 48 --num-heads 6 --n-layers {LAYERS} --seq-len 25".split(), *FEW_TOKENS]
CLIPPED = "--clip-norm 0.3 --lr 1.5"
ROUNDING = 2e-6  # relative: sums over ranks are added up in another order
SPLIT = {  # the dimension along which a weight is split, by the end of its module's name
    "megatron": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
        **dict.fromkeys(("o_proj", "down_proj"), 1),
    },
    "naive": dict.fromkeys("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head".split(), 0),
}


SPLIT["lesson"] = {name: dim for name, dim in SPLIT["megatron"].items() if name not in ("embed_tokens", "lm_head")}


def slices(style: str, ranks: int, whole: State, place: int) -> State:
    """What one rank has to hold of the one process's tensors."""
    dims = {name: SPLIT[style].get(name.split(".")[-2]) for name in whole}
    return {
        name: tensor if (dim := dims[name]) is None else tensor.tensor_split(ranks, dim=dim)[place]
        for name, tensor in whole.items()
    }


def style_of(flags: str) -> Style:
    return "naive" if "naive" in flags else "megatron"


def bytes_per_layer(*flags: str) -> tuple[int, int]:
    """What the script's formula gives for a layer and micro-batch, in the forward and the backward pass."""
    script = load(SCRIPT)
    forward, backward = script.bytes_per_layer(parse(script.DEFAULTS, "", ["0", *flags]))
    return forward, backward


def assert_sent(out: Path, forward: int, backward: int) -> None:
    """The ledger has these bytes for each layer in each step, and the run says so beside the formula."""
    said = (out / "rank0.log").read_text()
    for kind, expected in (("layer activations", forward), ("layer gradients", backward)):
        for line in (out / "metrics.jsonl").read_text().splitlines():
            assert json.loads(line)["sent_bytes"].get(kind, 0) == LAYERS * expected
        assert f"{kind}: {expected:,} bytes per layer and step; the formula gives {expected:,}\n" in said


def assert_carried_by(transport: str, out: Path) -> None:
    """The run was asked for this transport, and does not say that it made no difference."""
    assert json.loads((out / "config.json").read_text())["settings"]["transport"] == transport
    assert "--transport shared changed nothing" not in (out / "rank0.log").read_text()


@pytest.mark.parametrize(
    ("ranks", "flags", "transport", "more"),
    [
        (1, "--tp-style megatron", "auto", ""),
        (2, "--tp-style megatron", "gloo", CLIPPED),
        (3, "--tp-style megatron", "shared", ""),
        # Two query heads share one of keys: 24 of 48 columns, which 2 ranks split evenly for "naive" and 3 in pairs.
        (2, "--tp-style naive", "shared", "--num-kv-heads 3"),
        (3, "--sequence-parallel", "auto", "--num-kv-heads 3"),
        # The ranks have different shares of the hidden units, and one of three has none of two.
        (2, "--sequence-parallel", "shared", "--hidden-dim 41"),
        (3, "--tp-style naive", "gloo", "--hidden-dim 2"),
    ],
)
def test_is_the_run_of_one_process(
    ranks: int, flags: str, transport: str, more: str, one_process: OneProcess, tmp_path: Path
) -> None:
    model = [*MODEL, *more.split()]
    expected = one_process(2, *model)
    assert (expected[2] == one_process(2, *MODEL)[2]) == (not more)
    all_flags = f"--world-size {ranks} --batch-size 2 --transport {transport} {flags}".split()
    own, slice_of = train_on(ranks, SCRIPT, tmp_path, *all_flags, *model), partial(slices, style_of(flags), ranks)
    assert_same_run(own, expected, slice_of, ROUNDING)
    assert_sent(tmp_path, *bytes_per_layer(*all_flags, *model))
    assert_carried_by(transport, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("flags", ["--tp-style naive --recompute blocks", "--sequence-parallel --recompute all"])
def test_recomputation_gives_the_same_run_bit_for_bit(flags: str, tmp_path: Path) -> None:
    shape = [*MODEL, *"--world-size 2 --batch-size 2 --micro-batches 2".split()]
    style = flags.split(" --recompute")[0]
    usual = train_on(2, SCRIPT, tmp_path / "usual", *shape, *style.split())
    again = train_on(2, SCRIPT, tmp_path / "again", *shape, *flags.split())
    assert again[2] == usual[2]
    for own, expected in zip((*again[0], *again[1]), (*usual[0], *usual[1]), strict=True):
        assert all(own[name].equal(tensor) for name, tensor in expected.items())
    forward, backward = bytes_per_layer(*shape, *flags.split())
    assert forward > bytes_per_layer(*shape, *style.split())[0]
    assert_sent(tmp_path / "again", 2 * forward, 2 * backward)
    activations = [
        json.loads((tmp_path / run / "memory.json").read_text())[0]["activations"] for run in ("again", "usual")
    ]
    assert activations[0] < 0.8 * activations[1]


@pytest.mark.parametrize(
    ("dp", "pp", "tp", "more", "transport"),
    [
        (2, 2, 2, "--schedule zb-h1 --recompute all", "shared"),
        (2, 2, 2, "--neighbors replicas", "auto"),
        (1, 2, 3, "--recompute blocks", "gloo"),
    ],
)
def test_three_dimensions_are_the_run_of_one_process(
    dp: int, pp: int, tp: int, more: str, transport: str, one_process: OneProcess, tmp_path: Path
) -> None:
    expected_parameters, expected_gradients, expected_losses = one_process(3 * dp, *MODEL)
    script = "hybrid/intro_5d.py" if "neighbors" in more else "hybrid/intro_hybrid.py"
    layout = f"--dp {dp} --pp {pp} --tp {tp} --batch-size 3 --micro-batches 3 --transport {transport}"
    ranks, flags = dp * pp * tp, [*layout.split(), *more.split()]
    parameters, gradients, own_losses = train_on(ranks, script, tmp_path, *MODEL, *flags)
    assert_carried_by(transport, tmp_path)
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    for own, expected in ((parameters, expected_parameters), (gradients, expected_gradients)):
        for place in range(tp):
            mine = slices("megatron", tp, expected, place)
            for replica in range(dp):
                at = [stage * dp + replica if "replicas" in more else replica * pp + stage for stage in range(pp)]
                stages = [own[number * tp + place] for number in at]
                together = {name: tensor for stage in stages for name, tensor in stage.items()}
                assert len(together) == sum(map(len, stages)), "no parameter belongs to two stages"
                assert_equal(together, mine, ROUNDING)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ranks", "flags", "more"),
    [(1, "", ""), (2, "--micro-batches 2", ""), (3, "--recompute blocks", CLIPPED), (6, "", "")],
)
def test_the_lesson_is_the_run_of_one_process(
    ranks: int, flags: str, more: str, one_process: OneProcess, tmp_path: Path
) -> None:
    flags, model = f"--world-size {ranks} --batch-size 2 {flags}", [*MODEL, *more.split()]
    own = train_on(ranks, LESSON, tmp_path, *flags.split(), *model)
    assert_same_run(own, one_process(2, *model), partial(slices, "lesson", ranks), ROUNDING)


def test_micro_batches_change_nothing(one_process: OneProcess, tmp_path: Path) -> None:
    expected_parameters, _, expected_losses = one_process(6)
    flags = "--world-size 2 --batch-size 6 --micro-batches 3 --sequence-parallel".split()
    parameters, _, own_losses = train_on(2, SCRIPT, tmp_path, *flags, "--save-every", "1")
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    for place in range(2):
        assert_equal(parameters[place], slices("megatron", 2, expected_parameters, place), ROUNDING)
    forward, backward = bytes_per_layer(*SMALL, *flags)
    assert_sent(tmp_path, 3 * forward, 3 * backward)
    train_on(2, SCRIPT, tmp_path / "more", *flags, "--resume", str(tmp_path), "--steps", str(len(own_losses) + 1))
    assert_sent(tmp_path / "more", 3 * forward, 3 * backward)


@pytest.mark.parametrize("flags", ["--tp-style naive", "--sequence-parallel"])
def test_mixed_precision_stays_near_float32(flags: str, one_process: OneProcess, tmp_path: Path) -> None:
    _, _, expected_losses = one_process(2, *MODEL)
    shape = [*MODEL, *"--world-size 2 --batch-size 2 --dtype bfloat16".split()]
    _, _, own_losses = train_on(2, SCRIPT, tmp_path, *shape, *flags.split())
    assert own_losses == pytest.approx(expected_losses, rel=2e-3)
    assert_sent(tmp_path, *bytes_per_layer(*shape, *flags.split()))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # 256 tokens of 288 float32: 294,912 bytes. Four ranks send 3/4 of them twice in each all-reduce.
        ("--world-size 4 --num-heads 8 --dmodel 288", (2 * 442_368, 2 * 442_368)),
        ("--world-size 4 --num-heads 8 --dmodel 288 --sequence-parallel", (2 * 442_368, 2 * 442_368)),
        ("--world-size 4 --num-heads 8 --dmodel 288 --dtype bfloat16", (442_368, 442_368)),
        # Thirteen times 288 columns are gathered; ten times 288 are the inputs of layers.
        ("--world-size 4 --tp-style naive", (13 * 221_184, 10 * 442_368)),
        # With a third of the heads for keys and values, 11 2/3 times 288.
        ("--world-size 4 --tp-style naive --num-kv-heads 2", (2 * 221_184 * 35 // 6, 10 * 442_368)),
        ("--world-size 1", (0, 0)),
        # Three ranks: the longest slices have 17 of 50 outputs and 67 of 200, together 219; and 9 of 25 tokens.
        ("--tp-style naive --seq-len 25 --dmodel 50 --num-heads 5", (2 * 25 * 4 * 219, 66_662)),
        ("--seq-len 25 --dmodel 48 --sequence-parallel", (2 * 4 * 9 * 48 * 4, 2 * 4 * 9 * 48 * 4)),
    ],
)
def test_the_formula_as_worked_out_by_hand(flags: str, expected: tuple[int, int]) -> None:
    assert bytes_per_layer("--batch-size", "1", *flags.split()) == expected
