"""Write a model as a folder that Hugging Face's transformers loads.

    AutoModelForCausalLM.from_pretrained("DIR"), AutoTokenizer.from_pretrained("DIR")

These compute the same logits and token ids as the lab. The weights need no conversion, because the parameters already
have the names of that library; for models with experts, see `simplellm.hub_mixtures`.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor

from simplellm.errors import InputError
from simplellm.hub_mixtures import CORRECTED, CORRECTION, hub_name, mixture_config
from simplellm.hub_tokenizer import HubTokenizer, original
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
    content = model.tokenizer.read_bytes()
    tokenizer = original(content) if is_json(content) else as_tokenizer_json(model.tokenizer)
    ids = token_ids(SPTokenizer(model.tokenizer))
    config = llama_config(model.options)
    if model.options.get("experts"):
        config = mixture_config(config, model.options, model.parameters)
    check_free(folder)
    try:
        with _all_or_nothing(folder) as place:
            _write(place / "config.json", config | ids)
            _write(place / "generation_config.json", {"_from_model_config": True} | ids)
            _write(place / "tokenizer.json", tokenizer)
            _write(place / "tokenizer_config.json", tokenizer_config(model.tokenizer, model.options["ctx_size"]))
            if not is_json(content):
                shutil.copyfile(model.tokenizer, place / "tokenizer.model")
            weights = {hub_name(name, config["model_type"]): p.contiguous() for name, p in model.parameters.items()}
            if config["model_type"] not in CORRECTED:
                weights = {name: weight for name, weight in weights.items() if not name.endswith(CORRECTION)}
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


def llama_config(options: dict[str, Any]) -> dict[str, Any]:
    """Return the model's sizes as the fields of transformers' LlamaConfig."""
    theta, scaling = options["rope_theta"], options.get("rope_scaling")
    rope = {"rope_type": "llama3" if scaling else "default", **(scaling or {}), "rope_theta": theta}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "attention_bias": options.get("attention_bias", False),
        "mlp_bias": options.get("mlp_bias", False),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def token_ids(tokenizer: SPTokenizer) -> dict[str, int | None]:
    """Return the ids of the special tokens; None for one that the tokenizer does not have."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {name: id if id >= 0 else None for name, id in ids.items()}


def tokenizer_config(model: Path, ctx_size: int) -> dict[str, Any]:
    """Return the configuration with which transformers uses tokenizer.json like `SPTokenizer.encode`."""
    content = model.read_bytes()
    pieces: Any = (
        HubTokenizer(content, model.parent) if is_json(content) else SentencePieceProcessor(model_proto=content)
    )
    names = {"bos": pieces.bos_id(), "eos": pieces.eos_id(), "pad": pieces.pad_id(), "unk": pieces.unk_id()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that adds nothing to tokenizer.json
        "model_max_length": ctx_size,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "</s>" in a text is four characters like any others
    } | {f"{name}_token": pieces.id_to_piece(id) for name, id in names.items() if id >= 0}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":  # an earlier name of the command; the command is in distlab because it needs runs
    from distlab.exchange.export import command
    from simplellm.errors import status_of

    raise SystemExit(status_of(command))
