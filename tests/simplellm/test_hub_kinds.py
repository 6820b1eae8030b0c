"""Models with experts to Hugging Face's format and back, against transformers itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.hub_folders import assert_same_logits, change_config
from support.small_models import saved_model

from simplellm.errors import InputError
from simplellm.export import export
from simplellm.hub_kinds import MODEL_KINDS
from simplellm.import_hf import read_llama
from simplellm.saved_model import SavedModel
from simplellm.stories import story
from simplellm.tokenizers import SPTokenizer

EXPERTS = {
    "experts": 5,
    "experts_per_token": 2,
    "shared_expert": False,
    "router_scores": "softmax",
    "num_kv_heads": 2,
    "hidden_dim": 40,
    "rope_theta": 5e5,
}
LIKE_DEEPSEEK = {"shared_expert": True, "router_scores": "sigmoid"}


def without_corrections(model: SavedModel) -> SavedModel:
    zeros = {name: torch.zeros_like(p) for name, p in model.parameters.items() if "correction" in name}
    return SavedModel(model.options, model.parameters | zeros, model.tokenizer)


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({}, "MixtralForCausalLM", "model.layers.1.block_sparse_moe.experts.4.w3.weight"),
        ({"qk_norm": True}, "Qwen3MoeForCausalLM", "model.layers.1.mlp.experts.4.gate_proj.weight"),
        (LIKE_DEEPSEEK, "Glm4MoeForCausalLM", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
    ids=["mixtral", "qwen3-moe", "glm4-moe"],
)
def test_transformers_computes_the_same_and_back(options: dict[str, Any], kind: str, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = saved_model(**EXPERTS | options)
    saved = saved if options == LIKE_DEEPSEEK else without_corrections(saved)
    export(saved, tmp_path / "there")
    assert name in load_file(tmp_path / "there/model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert type(theirs).__name__ == kind
    there = assert_same_logits(saved.build(), theirs)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():  # a model of theirs, with weights that the lab has not written
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.01)
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/tokenizer.model").write_bytes(saved.tokenizer.read_bytes())
    back = read_llama(tmp_path / "saved")
    assert (assert_same_logits(back.build(), theirs) - there).std() > 0.1
    assert saved.options.items() <= {**back.options, "padding_idx": saved.options["padding_idx"]}.items()


@pytest.mark.parametrize("options", [{}, LIKE_DEEPSEEK], ids=["mixtral", "glm4-moe"])
def test_missing_fields_have_transformers_values(options: dict[str, Any], tmp_path: Path) -> None:
    """They differ from those of a Llama."""
    from transformers import AutoModelForCausalLM

    sizes = {"dmodel": 64, "num_heads": 16, "num_kv_heads": 8}
    export(without_corrections(saved_model(**EXPERTS | options | sizes)), tmp_path)
    change_config(tmp_path, rms_norm_eps=..., rope_theta=..., rope_parameters=..., num_key_value_heads=...)
    assert_same_logits(read_llama(tmp_path).build(), AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_the_values_of_missing_fields_are_those_of_transformers_configurations(kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind).to_dict()
    theirs |= {"rope_theta": theirs["rope_parameters"]["rope_theta"]}
    assert MODEL_KINDS[kind].defaults.items() <= theirs.items()


@pytest.mark.parametrize(("options", "positions"), [({}, 131072), ({"qk_norm": True}, 32768), (LIKE_DEEPSEEK, 131072)])
def test_how_long_a_text_may_be_where_the_configuration_does_not_say(
    options: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    saved = saved_model(**EXPERTS | options)
    export(saved if options == LIKE_DEEPSEEK else without_corrections(saved), tmp_path)
    for missing in (None, ...):
        change_config(tmp_path, max_position_embeddings=missing)
        assert read_llama(tmp_path).options["ctx_size"] == positions


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_local_experts": 10**9}, "the number of experts is 1000000000: the files have the tensors of 5 experts"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "norm_topk_prob": False},
            "norm_topk_prob is false: the",
        ),
        ({"rope_parameters": [1]}, "rope_parameters is \\[1\\]"),
        ({"model_type": ["mixtral"]}, "model_type is"),
    ],
    ids=str,
)
def test_wrong_fields(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    export(without_corrections(saved_model(**EXPERTS)), tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(InputError, match=told):
        read_llama(tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [({}, "num_local_experts"), ({"qk_norm": True}, "num_experts"), (LIKE_DEEPSEEK, "n_routed_experts")],
)
def test_a_missing_number_of_experts_is_told_by_the_field_of_its_kind(
    options: dict[str, Any], field: str, tmp_path: Path
) -> None:
    saved = saved_model(**EXPERTS | options)
    export(saved if options == LIKE_DEEPSEEK else without_corrections(saved), tmp_path)
    change_config(tmp_path, **{field: ...})
    with pytest.raises(InputError, match=f"has no {field}; it must be there"):
        read_llama(tmp_path)


@pytest.mark.parametrize(
    "options", [{}, {"shared_expert": True}, {"router_scores": "sigmoid"}, LIKE_DEEPSEEK | {"qk_norm": True}], ids=str
)
def test_experts_that_transformers_does_not_have(options: dict[str, Any], tmp_path: Path) -> None:
    """The first has corrections."""
    with pytest.raises(InputError, match="do not export: transformers has softmax scores without"):
        export(saved_model(**EXPERTS | options), tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_experts_with_biases_are_not_exported(bias: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="experts with softmax scores and biases do not export"):
        export(without_corrections(saved_model(**EXPERTS, **{bias: True})), tmp_path / "there")


def test_generation_with_a_cache() -> None:
    """One token after another computes what all together compute."""
    net = saved_model(**EXPERTS | LIKE_DEEPSEEK).build()
    ids = torch.tensor([SPTokenizer().encode(story(1))[:20]])
    with torch.no_grad():
        expected, cache = net(ids), net.new_cache()
        own = torch.cat([net(ids[:, at : at + 1], cache=cache) for at in range(20)], dim=1)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
