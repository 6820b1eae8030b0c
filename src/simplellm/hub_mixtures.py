"""Models with experts in Hugging Face's format: as a Mixtral, a Qwen3-MoE or a GLM-4-MoE.

A Mixtral (arXiv 2401.04088) has softmax scores. So has a Qwen3-MoE (arXiv 2505.09388), whose attention normalizes
queries and keys. A GLM-4-MoE has sigmoid scores with corrections, and a shared expert, as DeepSeek-V3 (arXiv
2412.19437) has. transformers does not have other combinations.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from simplellm.errors import InputError

CORRECTION = "e_score_correction_bias"
MIXTRAL_NAMES = {  # patterns in the lab's names, which are those of GLM-4-MoE, and what replaces them
    r"\.mlp\.gate\.": ".block_sparse_moe.gate.",
    r"\.mlp\.experts\.(\d+)\.gate_proj\.": r".block_sparse_moe.experts.\1.w1.",
    r"\.mlp\.experts\.(\d+)\.up_proj\.": r".block_sparse_moe.experts.\1.w3.",
    r"\.mlp\.experts\.(\d+)\.down_proj\.": r".block_sparse_moe.experts.\1.w2.",
}
# The values of fields that the lab's model corresponds to, by model type.
FIXED: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0},
    "qwen3_moe": {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "use_sliding_window": False,
    },
    "glm4_moe": {
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
    },
}
# Fields that are read, or that only training or generation uses.
KNOWN = {
    "mixtral": {"num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"},
    "qwen3_moe": {
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
        *("sliding_window", "max_window_layers", "router_aux_loss_coef"),
    },
    "glm4_moe": {
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
        *("num_nextn_predict_layers", "num_mtp_layers"),
    },
}
FIRST_GATE = {  # the name of a tensor whose rows are the width of an expert
    "mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
    "glm4_moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
}
DEFAULTS: dict[str, dict[str, Any]] = {  # of fields that may be missing, where transformers' are not those of a Llama
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
    "qwen3_moe": {"num_key_value_heads": 4},
    "glm4_moe": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
}
NUMBER_OF_EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "glm4_moe": "n_routed_experts"}
CORRECTED = ("glm4_moe",)  # whose files have corrections


def mixture_config(llama: dict[str, Any], options: dict[str, Any], parameters: dict[str, Tensor]) -> dict[str, Any]:
    """Return the configuration of a model with experts, from the fields of transformers' LlamaConfig.

    Raises:
        InputError: transformers has no such model.
    """
    experts, scores, is_shared = options["experts"], options["router_scores"], options["shared_expert"]
    is_corrected = any(bool(p.any()) for name, p in parameters.items() if name.endswith(CORRECTION))
    config = {name: value for name, value in llama.items() if name not in ("attention_bias", "mlp_bias")}
    config["num_experts_per_tok"] = options["experts_per_token"]
    is_biased = options.get("attention_bias") or options.get("mlp_bias")
    is_normed = options.get("qk_norm")
    if scores == "softmax" and not (is_shared or is_corrected or is_biased):
        kind, architecture = ("qwen3_moe", "Qwen3Moe") if is_normed else ("mixtral", "Mixtral")
        own = {"architectures": [f"{architecture}ForCausalLM"], "model_type": kind, NUMBER_OF_EXPERTS[kind]: experts}
        own |= {"moe_intermediate_size": options["hidden_dim"], "sliding_window": None} if is_normed else {}
        return config | own | FIXED[kind]
    if scores == "sigmoid" and is_shared and not (is_biased or is_normed):
        own = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": experts}
        config["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
        own |= {"moe_intermediate_size": options["hidden_dim"], "num_nextn_predict_layers": 0}
        return config | own | FIXED["glm4_moe"]
    its = f"{scores} scores{' and a shared expert' * is_shared}{', balanced by corrections,' * is_corrected}"
    sentence = (
        "do not export: transformers has softmax scores without corrections (--balance-rate 0), as in Mixtral and, "
        "with --qk-norm, in Qwen3-MoE; "
    )
    raise InputError(f"experts with {its} {sentence}or sigmoid scores with --shared-expert, as in GLM-4-MoE")


def mixture_options(config: dict[str, Any], size: Callable[[str], int]) -> dict[str, Any]:
    """Return the options of a model with experts from its configuration; `size` reads a positive integer of it."""
    kind = config["model_type"]
    is_softmax, number = kind != "glm4_moe", NUMBER_OF_EXPERTS[kind]
    return {
        "experts": size(number if number in config else "num_local_experts"),  # which transformers 5 writes for some
        "experts_per_token": size("num_experts_per_tok"),
        "shared_expert": not is_softmax,
        "router_scores": "softmax" if is_softmax else "sigmoid",
        "qk_norm": kind == "qwen3_moe",
    }


def hub_name(name: str, model_type: str) -> str:
    """Return the name of a parameter in a file of transformers."""
    for own, its in MIXTRAL_NAMES.items() if model_type == "mixtral" else ():
        name = re.sub(own, its, name)
    return name
