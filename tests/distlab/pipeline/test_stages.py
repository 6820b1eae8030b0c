"""The stages' parts of the model: how layers are shared out, and that the parts together are the model."""

import itertools
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from distlab.pipeline.schedules import all_stages
from distlab.pipeline.split import Split, balance, multiply_adds, read_split
from distlab.pipeline.stages import build_stage, remark_on_weight_gradients
from distlab.settings.common import parse
from distlab.settings.stages import PipelineSettings
from simplellm.errors import InputError
from simplellm.llama import CausalLLama

pytestmark = pytest.mark.quick

SIZES: dict[str, Any] = {"dmodel": 12, "num_heads": 2, "ctx_size": 8, "hidden_dim": 20}


def test_the_default_model_on_three_stages() -> None:
    assert balance(6, 3, multiply_adds(vocab_size=4096, dmodel=288, seq_len=256)) == (2, 2, 2)


@pytest.mark.parametrize(("layers", "who"), [(1, "0 computes"), (3, "0 and 2 others compute")])
def test_a_remark_counts_the_layers_that_cannot_defer_their_weight_gradients(
    layers: int, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])]
    remark_on_weight_gradients(stages, all_stages("dapple", 2, 2))
    assert not capsys.readouterr().out
    remark_on_weight_gradients(stages, all_stages("zb-h1", 2, 2))
    assert capsys.readouterr().out.startswith(f"# {who} weight gradients in I")


@pytest.mark.parametrize("vocab_size", [10, 3000, 10**5])
def test_all_layers_are_shared_out_and_no_middle_stage_is_empty(vocab_size: int) -> None:
    for n_layers in range(1, 13):
        for stages in range(1, n_layers + 3):
            split = balance(n_layers, stages, multiply_adds(vocab_size=vocab_size, dmodel=32, seq_len=64))
            assert (len(split), sum(split)) == (stages, n_layers)
            assert min(split[1:-1], default=1) > 0
            assert read_split(",".join(map(str, split)), n_layers, stages) == split


@pytest.mark.parametrize("vocab_size", [10, 150, 1000])
def test_no_other_split_has_a_faster_slowest_stage(vocab_size: int) -> None:
    model = CausalLLama(vocab_size, n_layers=1, **SIZES)
    matrices = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
    layer = matrices + 2 * 12 * 8 / 2
    ends = [12, model.get_parameter("lm_head.weight").numel()]

    def slowest(split: Split) -> tuple[float, float]:  # where others are as fast, the stages are as equal as possible
        costs = [count * layer for count in split]
        costs[0] += ends[0]
        costs[-1] += ends[1]
        return max(costs), sum(cost**2 for cost in costs)

    for n_layers, stages in itertools.product(range(1, 7), range(1, 5)):
        splits = [s for s in itertools.product(range(n_layers + 1), repeat=stages) if sum(s) == n_layers]
        allowed = [slowest(s) for s in splits if 0 not in s[1:-1]]
        if allowed:
            split = balance(n_layers, stages, multiply_adds(vocab_size=vocab_size, dmodel=12, seq_len=8, hidden_dim=20))
            assert slowest(split) == min(allowed)


def test_too_many_stages() -> None:
    sentence = (
        "5 stages for --n-layers 2: every stage except the first and the last needs a layer; "
        "give at most 4 stages, or more layers"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        balance(2, 5, multiply_adds(vocab_size=10, dmodel=8, seq_len=8))


@pytest.mark.parametrize(("text", "split"), [("3,2,1", (3, 2, 1)), ("0, 6,0", (0, 6, 0)), ("6", (6,))])
def test_read_split(text: str, split: Split) -> None:
    assert read_split(text, 6, len(split)) == split


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("3,x,1", "give one number for each stage, like 3,2,1"),
        ("", "give one number for each stage, like 3,2,1"),
        ("3,,3", "give one number for each stage, like 3,2,1"),
        ("3,3", "2 numbers for 3 stages; give one for each"),
        ("2,2,1", "the numbers must add up to --n-layers 6, but add up to 5"),
        ("7,0,-1", "the number of layers of a stage cannot be negative"),
        ("3,0,3", "only the first or the last stage, with the embedding or the head, may have no layers"),
    ],
)
def test_a_bad_split_is_refused_with_its_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(f'--layers-per-stage {text}: {sentence}')}$"):
        read_split(text, 6, 3)


def test_a_lone_stage_needs_a_layer() -> None:
    with pytest.raises(InputError, match="may have no layers"):
        read_split("0", 0, 1)


@pytest.mark.parametrize("split", [(3,), (2, 1), (0, 3), (1, 1, 1), (0, 3, 0), (0, 2, 1)])
def test_the_stages_together_are_the_whole_model(split: Split) -> None:
    whole = CausalLLama(11, n_layers=3, seed=5, **SIZES)
    parts = [build_stage(stage, split, 11, seed=5, **SIZES) for stage in range(len(split))]
    weights = [(name, weight) for part in parts for name, weight in part.state_dict().items()]
    assert [name for name, _ in weights] == list(whole.state_dict())
    for name, weight in weights:
        assert torch.equal(weight, whole.state_dict()[name]), name
    first, last = [True] + [False] * (len(split) - 1), [False] * (len(split) - 1) + [True]
    assert [part.model.embed_tokens is not None for part in parts] == first
    assert [part.model.norm is not None for part in parts] == last
    assert [part.lm_head is not None for part in parts] == last
    x = ids = torch.tensor([[1, 10, 3, 0]])
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(ids))


def test_keys_and_values_that_heads_share_make_layers_cheaper() -> None:
    """So the head is worth more of them."""
    for num_kv_heads in (8, 1):
        model = CausalLLama(11, dmodel=64, num_heads=8, num_kv_heads=num_kv_heads, hidden_dim=8, n_layers=1)
        matrices = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
        of_a_layer = {"dmodel": 64, "seq_len": 8, "hidden_dim": 8, "kv_width": 64 * num_kv_heads // 8}
        # A head that costs as much as three layers leaves its stage without any.
        vocab_size = 3 * (matrices + 64 * 8) // 64
        assert balance(4, 2, multiply_adds(vocab_size=vocab_size - 8, **of_a_layer)) == (3, 1)
        assert balance(4, 2, multiply_adds(vocab_size=vocab_size + 8, **of_a_layer)) == (4, 0)
    settings = parse(PipelineSettings(), "", "0 --dmodel 64 --num-heads 8 --n-layers 4 --world-size 2".split())
    assert settings.split(3700) == (3, 1)
    settings.hidden_dim = 8  # a layer costs a fifth
    assert settings.split(3700) == (4, 0)
    assert replace(settings, num_kv_heads=1).split(3700) == (4, 0)


def test_a_thousand_layers_on_hundreds_of_stages() -> None:
    started = time.process_time()
    split = balance(1000, 300, multiply_adds(vocab_size=4096, dmodel=288, seq_len=256))
    assert (len(split), sum(split)) == (300, 1000)
    assert time.process_time() - started < 2
