"""The kinds of models in Hugging Face's format that are read and written: a Llama, and its relatives with experts.

A Mixtral (arXiv 2401.04088) has softmax scores. So has a Qwen3-MoE (arXiv 2505.09388), whose attention normalizes
queries and keys. A GLM-4-MoE has sigmoid scores with corrections, and a shared expert, as DeepSeek-V3 (arXiv
2412.19437) has. transformers does not have other combinations.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from simplellm.errors import InputError, require

CORRECTION = "e_score_correction_bias"


class Kind(NamedTuple):
    """A kind of model, which config.json names as its `model_type`."""

    architecture: str  # its class in transformers
    defaults: Mapping[str, Any]  # transformers' values of fields that may be missing
    width: str = "intermediate_size"  # the field with the number of hidden units, of each expert if there are experts
    experts: str = ""  # the field with the number of experts; "" for a model without
    options: Mapping[str, Any] = {}  # the lab's options that belong to the kind
    fixed: Mapping[str, Any] = {}  # the values of fields that the lab's model corresponds to
    written: Mapping[str, Any] = {}  # further fields of an export
    known: tuple[str, ...] = ()  # further fields that are read, or that only training or generation uses
    has_corrections: bool = False  # in its files
    renamed: Mapping[str, str] = {}  # patterns in the lab's names of tensors, and what replaces them

    @property
    def gate(self) -> str:
        """The name of a tensor that has a row for each hidden unit."""
        return self.hub_name(f"model.layers.0.mlp.{'experts.0.' if self.experts else ''}gate_proj.weight")

    def hub_name(self, name: str) -> str:
        """Return the name of a parameter in a file of transformers."""
        for own, its in self.renamed.items():
            name = re.sub(own, its, name)
        return name

    def stores(self, name: str) -> bool:
        """Return whether the files have a parameter; without corrections, they are zero."""
        return self.has_corrections or not name.endswith(CORRECTION)


MODEL_KINDS = {
    "llama": Kind("Llama", {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4}),
    "mixtral": Kind(
        "Mixtral",
        {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        experts="num_local_experts",
        options={"router_scores": "softmax", "shared_expert": False, "qk_norm": False},
        fixed={"sliding_window": None, "router_jitter_noise": 0.0},
        known=("num_experts_per_tok", "router_aux_loss_coef"),
        renamed={
            r"\.mlp\.gate\.": ".block_sparse_moe.gate.",
            r"\.mlp\.experts\.(\d+)\.gate_proj\.": r".block_sparse_moe.experts.\1.w1.",
            r"\.mlp\.experts\.(\d+)\.up_proj\.": r".block_sparse_moe.experts.\1.w3.",
            r"\.mlp\.experts\.(\d+)\.down_proj\.": r".block_sparse_moe.experts.\1.w2.",
        },
    ),
    "qwen3_moe": Kind(
        "Qwen3Moe",
        {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": 4},
        width="moe_intermediate_size",
        experts="num_experts",
        options={"router_scores": "softmax", "shared_expert": False, "qk_norm": True},
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "use_sliding_window": False},
        written={"sliding_window": None},
        known=("num_local_experts", "num_experts_per_tok", "max_window_layers", "router_aux_loss_coef"),
    ),
    "glm4_moe": Kind(
        "Glm4Moe",
        {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_key_value_heads": 8},
        width="moe_intermediate_size",
        experts="n_routed_experts",
        options={"router_scores": "sigmoid", "shared_expert": True, "qk_norm": False},
        fixed={
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "partial_rotary_factor": 1.0,
        },
        written={"num_nextn_predict_layers": 0},
        known=("num_experts_per_tok", "num_mtp_layers"),
        has_corrections=True,
    ),
}


def kind_of(options: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> str:
    """Return the kind of a model of the lab's.

    Raises:
        InputError: the lab exports no such model.
    """
    if not options.get("experts"):
        told = "normalized queries and keys do not export without experts: transformers would ignore their norms"
        require(not options.get("qk_norm"), told)
        return "llama"
    is_biased = bool(options.get("attention_bias") or options.get("mlp_bias"))
    is_corrected = any(bool(p.any()) for name, p in parameters.items() if name.endswith(CORRECTION))
    for name, kind in MODEL_KINDS.items():
        is_alike = all(options.get(option, False) == value for option, value in kind.options.items())
        if kind.experts and is_alike and not is_biased and (kind.has_corrections or not is_corrected):
            return name
    further = " and a shared expert" * options["shared_expert"] + " and biases" * is_biased
    its = f"{options['router_scores']} scores{further}{', balanced by corrections,' * is_corrected}"
    sentence = (
        "do not export: transformers has softmax scores without corrections, as in Mixtral and, with normalized "
        "queries and keys, in Qwen3-MoE; or sigmoid scores with a shared expert, as in GLM-4-MoE"
    )
    raise InputError(f"experts with {its} {sentence}")
