"""Models with experts in Hugging Face's format: as a Mixtral, or as a GLM-4-MoE.

Both have the lab's attention. A Mixtral (arXiv 2401.04088) has softmax scores. A GLM-4-MoE has sigmoid scores with
corrections, and a shared expert, as DeepSeek-V3 (arXiv 2412.19437) has. transformers does not have other combinations.
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
    "glm4_moe": {
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
        *("num_nextn_predict_layers", "num_mtp_layers"),
    },
}
FIRST_GATE = {  # the name of a tensor whose rows are the width of an expert
    "mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "glm4_moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
}


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
    if scores == "softmax" and not (is_shared or is_corrected or is_biased):
        own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts}
        return config | own | FIXED["mixtral"]
    if scores == "sigmoid" and is_shared and not is_biased:
        own = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": experts}
        config["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
        own |= {"moe_intermediate_size": options["hidden_dim"], "num_nextn_predict_layers": 0}
        return config | own | FIXED["glm4_moe"]
    its = f"{scores} scores{' and a shared expert' * is_shared}{', balanced by corrections,' * is_corrected}"
    sentence = "do not export: transformers has softmax scores without corrections (--balance-rate 0), as in Mixtral, "
    raise InputError(f"experts with {its} {sentence}or sigmoid scores with --shared-expert, as in GLM-4-MoE")


def mixture_options(config: dict[str, Any], size: Callable[[str], int]) -> dict[str, Any]:
    """Return the options of a model with experts from its configuration; `size` reads a positive integer of it."""
    is_mixtral = config["model_type"] == "mixtral"
    return {
        "experts": size("num_local_experts" if is_mixtral else "n_routed_experts"),
        "experts_per_token": size("num_experts_per_tok"),
        "shared_expert": not is_mixtral,
        "router_scores": "softmax" if is_mixtral else "sigmoid",
    }


def hub_name(name: str, model_type: str) -> str:
    """Return the name of a parameter in a file of transformers."""
    for own, its in MIXTRAL_NAMES.items() if model_type == "mixtral" else ():
        name = re.sub(own, its, name)
    return name
