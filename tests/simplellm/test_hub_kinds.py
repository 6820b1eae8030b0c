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


KINDS: dict[str, dict[str, Any]] = {"mixtral": {}, "qwen3_moe": {"qk_norm": True}, "glm4_moe": LIKE_DEEPSEEK}


def exportable(**options: Any) -> SavedModel:
    """A model with experts, without corrections where transformers has none."""
    model = saved_model(**EXPERTS | options)
    if options.get("shared_expert"):
        return model
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

    export(saved := exportable(**options), tmp_path / "there")
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


@pytest.mark.parametrize("kind", ["llama", *KINDS])
def test_missing_fields_have_transformers_values(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind).to_dict()
    key_heads = 16 if kind == "llama" else theirs["num_key_value_heads"]
    sizes = {"dmodel": 64, "num_heads": 16, "num_kv_heads": key_heads}
    export(saved_model(**sizes) if kind == "llama" else exportable(**KINDS[kind], **sizes), tmp_path)
    change_config(tmp_path, num_key_value_heads=..., rope_parameters=...)
    for missing in (None, ...):
        change_config(tmp_path, max_position_embeddings=missing, rms_norm_eps=missing, rope_theta=missing)
        own = read_llama(tmp_path).options
        found = [own[name] for name in ("num_kv_heads", "ctx_size", "norm_eps", "rope_theta")]
        fields = theirs["max_position_embeddings"], theirs["rms_norm_eps"], theirs["rope_parameters"]["rope_theta"]
        assert found == [key_heads, *fields]


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
    export(exportable(), tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(InputError, match=told):
        read_llama(tmp_path)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts"), ("glm4_moe", "n_routed_experts")],
)
def test_a_missing_number_of_experts_is_told_by_the_field_of_its_kind(kind: str, field: str, tmp_path: Path) -> None:
    export(exportable(**KINDS[kind]), tmp_path)
    change_config(tmp_path, **{field: ...})
    with pytest.raises(InputError, match=f"has no {field}; it must be there"):
        read_llama(tmp_path)


@pytest.mark.parametrize(
    ("options", "further"),
    [
        ({}, "softmax scores, balanced by corrections,"),
        ({"shared_expert": True}, "softmax scores and a shared expert, balanced by corrections,"),
        ({"router_scores": "sigmoid"}, "sigmoid scores"),
        (LIKE_DEEPSEEK | {"qk_norm": True}, "sigmoid scores and a shared expert, balanced by corrections,"),
        ({"attention_bias": True}, "softmax scores and biases"),
        ({"mlp_bias": True}, "softmax scores and biases"),
    ],
)
def test_experts_that_transformers_does_not_have(options: dict[str, Any], further: str, tmp_path: Path) -> None:
    model = exportable(**options) if options else saved_model(**EXPERTS)
    with pytest.raises(InputError, match=f"^experts with {further} do not export: transformers has softmax scores"):
        export(model, tmp_path / "there")
    with pytest.raises(InputError, match="normalized queries and keys do not export without experts"):
        export(saved_model(qk_norm=True), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_generation_with_a_cache() -> None:
    """One token after another computes what all together compute."""
    net = saved_model(**EXPERTS | LIKE_DEEPSEEK).build()
    ids = torch.tensor([SPTokenizer().encode(story(1))[:20]])
    with torch.no_grad():
        expected, cache = net(ids), net.new_cache()
        own = torch.cat([net(ids[:, at : at + 1], cache=cache) for at in range(20)], dim=1)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
