"""Write a model as a folder that Hugging Face's transformers loads.

    AutoModelForCausalLM.from_pretrained("DIR"), AutoTokenizer.from_pretrained("DIR")

These compute the same logits and token ids as the lab. The weights need no conversion, because the parameters already
have the names of that library; for models with experts, see `simplellm.hub_kinds`.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from simplellm.errors import InputError
from simplellm.hub_kinds import MODEL_KINDS, kind_of
from simplellm.hub_tokenizer import original
from simplellm.saved_model import SavedModel
from simplellm.tokenizer_json import as_tokenizer_json
from simplellm.tokenizers import SPTokenizer, is_json


def export(model: SavedModel, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files.

    Args:
        model: the model to write.
        folder: a new or an empty folder.

    Raises:
        InputError: the folder is not empty or cannot be written to, or the tokenizer or the experts cannot be exported.
    """
    content, tokenizer = model.tokenizer.read_bytes(), SPTokenizer(model.tokenizer)
    tokenizer_json = original(content) if is_json(content) else as_tokenizer_json(model.tokenizer)
    ids = token_ids(tokenizer)
    kind = kind_of(model.options, model.parameters)
    check_free(folder)
    try:
        with _all_or_nothing(folder) as place:
            _write(place / "config.json", hub_config(model.options, kind) | ids)
            _write(place / "generation_config.json", {"_from_model_config": True} | ids)
            _write(place / "tokenizer.json", tokenizer_json)
            _write(place / "tokenizer_config.json", tokenizer_config(tokenizer, model.options["ctx_size"]))
            if not is_json(content):
                shutil.copyfile(model.tokenizer, place / "tokenizer.model")
            stored = {name: tensor for name, tensor in model.parameters.items() if MODEL_KINDS[kind].stores(name)}
            weights = {MODEL_KINDS[kind].hub_name(name): tensor.contiguous() for name, tensor in stored.items()}
            save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
            # safetensors makes its file unreadable for other users; an export is meant to be shared.
            (place / "model.safetensors").chmod((place / "config.json").stat().st_mode)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: cannot be written ({why}); give another folder") from error


def check_free(folder: Path) -> None:
    """Raise `InputError` unless files can be written there without replacing any."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is not an empty folder; give a new one")


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield the place to write the files of a folder: a different folder, which is renamed when it is complete.

    An empty folder that exists may be a mount point, or the user's working directory, so it is kept and gets the files
    directly. If writing fails, for example because the disk is full, no files remain.
    """
    is_new = not folder.exists()
    place = folder.with_name(f"{folder.name}.unfinished") if is_new else folder
    try:
        place.mkdir(parents=True, exist_ok=True)
        yield place
        if is_new:
            place.rename(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            for path in place.iterdir():
                path.unlink()
            if is_new:
                place.rmdir()
        raise


def hub_config(options: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return the model's sizes as the fields of transformers' configuration of a kind of models."""
    kind, theta, scaling = MODEL_KINDS[model_type], options["rope_theta"], options.get("rope_scaling")
    rope = {"rope_type": "llama3" if scaling else "default", **(scaling or {}), "rope_theta": theta}
    rope |= {key: value for key, value in kind.fixed.items() if key == "partial_rotary_factor"}
    config = {
        "architectures": [f"{kind.architecture}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": options["vocab_size"],
        "hidden_size": options["dmodel"],
        "intermediate_size": options["hidden_dim"],
        "num_hidden_layers": options["n_layers"],
        "num_attention_heads": options["num_heads"],
        "num_key_value_heads": options["num_kv_heads"],
        "head_dim": options.get("head_dim") or options["dmodel"] // options["num_heads"],
        "max_position_embeddings": options["ctx_size"],
        "rms_norm_eps": options["norm_eps"],
        "rope_theta": theta,  # where transformers 4 looks
        **({"rope_scaling": rope} if scaling else {}),
        "rope_parameters": rope,  # and where 5 does
        "hidden_act": "silu",
        **({} if kind.experts else {name: options.get(name, False) for name in ("attention_bias", "mlp_bias")}),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if kind.experts:
        config |= {"num_experts_per_tok": options["experts_per_token"], kind.experts: options["experts"]}
    return config | {kind.width: options["hidden_dim"], **kind.written, **kind.fixed}


def token_ids(tokenizer: SPTokenizer) -> dict[str, int | None]:
    """Return the ids of the special tokens; None for one that the tokenizer does not have."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {name: id if id >= 0 else None for name, id in ids.items()}


def tokenizer_config(tokenizer: SPTokenizer, ctx_size: int) -> dict[str, Any]:
    """Return the configuration with which transformers uses tokenizer.json like `SPTokenizer.encode`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that adds nothing to tokenizer.json
        "model_max_length": ctx_size,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "</s>" in a text is four characters like any others
    } | {f"{name}_token": piece for name, piece in tokenizer.special_pieces().items()}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":  # an earlier name of the command; the command is in distlab because it needs runs
    from distlab.exchange.export import command
    from simplellm.exit_status import status_of

    raise SystemExit(status_of(command))
