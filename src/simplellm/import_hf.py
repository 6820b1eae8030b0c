"""Read a Llama in Hugging Face's format, or a Mixtral, Qwen3-MoE or GLM-4-MoE: its relatives with experts.

The folder contains config.json, model.safetensors (or its parts and their index) and tokenizer.model, or tokenizer.json
alone. The lab refuses models with features that its Llama does not have, and a config.json with fields that it does not
know. Nothing is unpickled: a pytorch_model.bin may contain any program.
"""

import atexit
import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simplellm.errors import InputError
from simplellm.hub_kinds import MODEL_KINDS, Kind
from simplellm.hub_tokenizer import standalone
from simplellm.llama import CausalLLama, LLama
from simplellm.options import RopeScaling
from simplellm.saved_model import SavedModel
from simplellm.tokenizers import SPTokenizer, is_json, with_unused_pieces

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYERS = "model.layers."
MOST_POSITIONS = 2**24  # with more, the tables of rotary positions alone would fill the memory

Shape = tuple[int, ...]


def is_llama(folder: Path) -> bool:
    """Return whether a folder is in Hugging Face's format; a run's config.json does not have a model_type."""
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return True
    with contextlib.suppress(InputError):
        return "model_type" in _read_json(folder / "config.json")
    return False


def read_llama(folder: Path) -> SavedModel:
    """Return the model in a folder in Hugging Face's format, in float32 and with an untied head.

    Raises:
        InputError: a file is missing or damaged, or the model has features that the lab's Llama does not have.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; give one with config.json and {WEIGHTS}")
    path = folder / "config.json"
    config = _read_json(path)
    kind = _kind(path, config)
    options = _options(path, config, kind)
    stored = _stored(folder)
    _check_sizes(path, options, stored, kind.gate)
    tokenizer, tokenizer_path = _tokenizer(folder, options["vocab_size"], rows=stored[EMBEDDING][1][0])
    options["padding_idx"] = tokenizer.pad_id if tokenizer.pad_id >= 0 else None
    empty = LLama(CausalLLama, **options, device="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
    # As in transformers 5, a separate head is used even if the configuration says that there is none.
    tied = config.get("tie_word_embeddings") is True and HEAD not in stored
    return SavedModel(options, _parameters(folder, stored, shapes, tied, kind), tokenizer_path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file, which a model in Hugging Face's format has") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error}); copy the file again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: is a JSON {type(content).__name__}, not an object; copy the file again")
    return content


def _refuse(path: Path, key: str, value: Any, wanted: str) -> InputError:
    return InputError(f"{path}: {key} is {json.dumps(value)}: {wanted}")


# Fields that, whatever their values, do not change the result of the model.
WITHOUT_EFFECT = re.compile(
    r"""_.*|unsloth_.*|transformers_version|transformers\.js_config|architectures|torch_dtype|dtype|use_cache|
    (bos|eos|pad|sep|decoder_start)_token_id|initializer_range|pretraining_tp|is_llama_config|tokenizer_class|
    task_specific_params|finetuning_task|problem_type|id2label|label2id|num_labels|(use_)?return_dict|output_.*|
    max_length|min_length|do_sample|temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|num_beams|
    num_beam_groups|diversity_penalty|num_return_sequences|early_stopping|no_repeat_ngram_size""",
    re.VERBOSE,
)
# Fields that are read.
KNOWN = set(
    """model_type hidden_act attention_bias mlp_bias attention_dropout tie_word_embeddings quantization_config
    rope_scaling rope_parameters rope_theta original_max_position_embeddings vocab_size hidden_size head_dim
    num_attention_heads num_key_value_heads intermediate_size num_hidden_layers max_position_embeddings
    rms_norm_eps""".split()
)


def _kind(path: Path, config: dict[str, Any]) -> Kind:
    """Return the kind of model that a configuration is of.

    Raises:
        InputError: it has features that the lab's Llama does not have, or fields that are not understood.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in MODEL_KINDS:
        wanted = 'only a "llama" can be imported, and with experts a "mixtral", a "qwen3_moe" and a "glm4_moe"'
        raise _refuse(path, "model_type", name, wanted)
    kind, rope = MODEL_KINDS[name], config.get("rope_parameters")
    for key, value in kind.fixed.items():
        found = config.get(key, rope.get(key) if isinstance(rope, dict) else None)
        if found != value and (found or value):
            raise _refuse(path, key, found, f"the lab's model has {json.dumps(value)}")
    known = {*KNOWN, kind.width, kind.experts, *kind.fixed, *kind.written, *kind.known}
    if config.get("hidden_act", "silu") != "silu":
        raise _refuse(path, "hidden_act", config["hidden_act"], 'the lab\'s Llama computes "silu"')
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if config.get(key) not in (None, True, False):
            raise _refuse(path, key, config[key], "it must be true or false")
    if config.get("attention_dropout"):
        raise _refuse(path, "attention_dropout", config["attention_dropout"], "the lab's Llama has none; it must be 0")
    if config.get("quantization_config"):
        raise _refuse(path, "quantization_config", config["quantization_config"], "give a model that is not quantized")
    for key, value in config.items():
        is_off = value is None or value is False  # absent, or not used
        if key not in known and not is_off and not WITHOUT_EFFECT.fullmatch(key):
            wanted = "the lab does not know what it changes; remove it from a copy of the file if that is nothing"
            raise _refuse(path, key, value, wanted)
    return kind


def _rope(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return theta and scaling of the rotary positions, read like transformers from the fields of versions 4 and 5."""
    key = next((key for key in ("rope_scaling", "rope_parameters") if config.get(key)), "rope_parameters")
    rope = config.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind not in ("default", "llama3") or any(isinstance(value, dict) for value in rope.values()):
        raise _refuse(
            path, key, rope, 'the lab scales positions as in Llama 3.1 only; rope_type must be "default" or "llama3"'
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise _refuse(path, key, rope, "the lab's Llama rotates whole heads; partial_rotary_factor must be 1")
    found = {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
    if kind == "llama3":
        original = "original_max_position_embeddings"
        length = config.get(original, rope.get(original, config["max_position_embeddings"]))
        try:
            scaling = RopeScaling.of({**rope, original: length})
        except InputError as error:
            raise _refuse(path, key, rope, str(error)) from None
        assert scaling is not None
        found["rope_scaling"] = scaling._asdict()
    return found


def _options(path: Path, given: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Return keyword arguments for the models of `simplellm.llama`, with transformers' values for missing fields."""
    config = {**kind.defaults, **given}

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            value = default or kind.defaults.get(key)
        if value is None:
            raise InputError(f"{path}: has no {key}; it must be there, a positive integer")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _refuse(path, key, value, "it must be a positive integer")
        return value

    def positive(key: str, value: Any) -> float:
        value = kind.defaults[key] if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise _refuse(path, key, value, "it must be a number greater than 0")
        return float(value)

    dmodel, num_heads = size("hidden_size"), size("num_attention_heads")
    num_kv_heads = size("num_key_value_heads", num_heads)
    if config.get("head_dim") is None and dmodel % (2 * num_heads):
        wanted = f"it must divide hidden_size {dmodel} into heads of an even width"
        raise _refuse(path, "num_attention_heads", num_heads, wanted)
    if num_heads % num_kv_heads:
        raise _refuse(path, "num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads {num_heads}")
    head_dim = size("head_dim", dmodel // num_heads)
    if head_dim % 2:
        raise _refuse(path, "head_dim", head_dim, "rotary positions need an even width")
    ctx_size = size("max_position_embeddings")
    if ctx_size > MOST_POSITIONS:
        raise _refuse(path, "max_position_embeddings", ctx_size, f"it must be at most {MOST_POSITIONS:,}")
    rope = _rope(path, config)
    unusual = {
        "head_dim": None if head_dim * num_heads == dmodel else head_dim,
        "rope_scaling": rope.get("rope_scaling"),
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
    }
    options = {name: value for name, value in unusual.items() if value} | dict(kind.options)
    if kind.experts:
        fields = (kind.experts, "num_local_experts")  # transformers 5 writes the latter for some kinds
        field = next((field for field in fields if field in config), kind.experts)
        options |= {"experts": size(field), "experts_per_token": size("num_experts_per_tok")}
    return options | {
        "vocab_size": size("vocab_size"),
        "dmodel": dmodel,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "hidden_dim": size(kind.width),
        "n_layers": size("num_hidden_layers"),
        "ctx_size": ctx_size,
        "rope_theta": positive("rope_theta", rope["rope_theta"]),
        "norm_eps": positive("rms_norm_eps", config.get("rms_norm_eps")),
    }


def _tokenizer(folder: Path, vocab_size: int, rows: int) -> tuple[SPTokenizer, Path]:
    """Return the tokenizer in a folder, and the path of a complete file of it, which may be temporary.

    A complete tokenizer names its special tokens, and has as many tokens as the embedding of the model, whose
    vocabulary may be padded, has rows.
    """
    path = folder / "tokenizer.model"
    if not path.exists():
        path = folder / "tokenizer.json"
    if not path.exists():
        raise InputError(
            f"{folder / 'tokenizer.model'}: there is no such file; the lab reads SentencePiece models and, where there "
            "is none, tokenizer.json"
        )
    try:
        tokenizer = SPTokenizer(path)
    except InputError as error:
        if "pip install" in str(error):
            raise InputError(f"{path}: {error}") from None
        kind = "SentencePiece model" if path.suffix == ".model" else "tokenizer"
        raise InputError(f"{path}: is not a {kind} that can be read; copy the file again") from None
    if rows != vocab_size or tokenizer.vocab_size > vocab_size:
        wanted = f"it must be the number of pieces of {path.name}, {tokenizer.vocab_size}"
        wanted += "" if rows == tokenizer.vocab_size else f", or more, and {EMBEDDING} has {rows} rows"
        raise _refuse(folder / "config.json", "vocab_size", vocab_size, wanted)
    content, missing = path.read_bytes(), vocab_size - tokenizer.vocab_size
    if is_json(content):
        content = standalone(content, folder, vocab_size)
    elif missing:
        content = with_unused_pieces(content, missing)
    else:
        return tokenizer, path
    temporary = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    (temporary / "tokenizer.model").write_bytes(content)
    return tokenizer, temporary / "tokenizer.model"


def remarks(folder: Path) -> list[str]:
    """Return sentences on the features of a model's tokenizer that the lab does not use."""
    found, path = [], folder / "tokenizer_config.json"
    config = _read_json(path) if path.exists() else {}
    has_bos = config.get("add_bos_token", config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast"))
    path = folder / "tokenizer.json"
    if not has_bos and path.exists():
        has_bos = "TemplateProcessing" in json.dumps(_read_json(path).get("post_processor"))
    if has_bos:
        found.append("transformers puts the token of a beginning before each text; the lab does not, in no story")
    if "chat_template" in config or (folder / "chat_template.jinja").exists():
        found.append("its chat template is not taken over: the lab trains on plain text")
    return found


def _stored(folder: Path) -> dict[str, tuple[Path, Shape]]:
    """Return the file and the shape of each tensor, from the headers of the files; no tensor is read."""
    where = _files_of(folder)
    stored: dict[str, tuple[Path, Shape]] = {}
    for path in dict.fromkeys(where.values()):
        with _opened(path) as file:
            there = set(file.keys())
            for name in (name for name, holder in where.items() if holder == path):
                if name not in there:
                    raise InputError(f"{path}: has no tensor {name}, which {INDEX} says is in it")
                stored[name] = path, tuple(file.get_slice(name).get_shape())
    return stored


def _check_sizes(path: Path, options: dict[str, Any], stored: dict[str, tuple[Path, Shape]], gate: str) -> None:
    """Raise `InputError` if the sizes do not match the tensors, before a model of these sizes is built.

    `gate` is the name of a tensor with a row for each hidden unit.
    """
    layers = len({name.removeprefix(LAYERS).partition(".")[0] for name in stored if name.startswith(LAYERS)})
    if options["n_layers"] != layers:
        wanted = f"the files have the tensors of {layers} layers"
        raise _refuse(path, "num_hidden_layers", options["n_layers"], wanted)
    beginning, first, end = gate.partition("experts.0.")
    experts = sum(name.startswith(f"{beginning}experts.") and name.endswith(end) for name in stored)
    if first and options["experts"] != experts:
        wanted = f"the files have the tensors of {experts} experts in the first layer"
        raise InputError(f"{path}: the number of experts is {options['experts']}: {wanted}")
    for key, option, name, dimension in (
        ("hidden_size", "dmodel", EMBEDDING, 1),
        ("intermediate_size", "hidden_dim", gate, 0),
    ):
        if name not in stored:
            raise InputError(f"{path.parent}: has no tensor {name}, which must be there")
        shape = stored[name][1]
        if len(shape) != 2 or shape[dimension] != options[option]:
            raise _refuse(path, key, options[option], f"{name} has the shape {list(shape)}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: is not a complete safetensors file ({error}); copy the file again") from None


def _parameters(
    folder: Path, stored: dict[str, tuple[Path, Shape]], shapes: dict[str, Shape], tied: bool, kind: Kind
) -> dict[str, Tensor]:
    """Return the tensors of all parameters, read from their files and converted to float32."""
    names = {kind.hub_name(name): name for name in shapes}  # the parameters', by those in the files
    parameters = {name: torch.zeros(shapes[name]) for name in shapes if not kind.stores(name)}
    for path in dict.fromkeys(path for path, _ in stored.values()):
        with _opened(path) as file:
            for name in (name for name, (holder, _) in stored.items() if holder == path):
                if name.endswith(".rotary_emb.inv_freq"):  # frequencies in old files, which follow from rope_theta
                    continue
                if name not in names:
                    raise InputError(f"{path}: has a tensor {name}, for which the lab's Llama has no place")
                own = names[name]
                parameters[own] = _widened(path, name, file.get_tensor(name), shapes[own])
    if tied and EMBEDDING in parameters:
        # A separate tensor: in a pipeline, embedding and head are on different ranks.
        parameters[HEAD] = parameters[EMBEDDING].clone()
    for name, own in names.items():
        if own not in parameters:
            raise InputError(f"{folder}: has no tensor {name}, which must be there in the shape {list(shapes[own])}")
    return {name: parameters[name] for name in shapes}


def _files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    path, index = folder / WEIGHTS, folder / INDEX
    if path.exists():
        with _opened(path) as file:
            return dict.fromkeys(file.keys(), path)
    if not index.exists():
        pickled = folder / "pytorch_model.bin"
        why = "pickled weights may hold any program and are not read; " if pickled.exists() else ""
        raise InputError(f"{path}: there is no such file; {why}save the model as safetensors")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _refuse(index, "weight_map", weight_map, "it must name the file of each tensor")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise _refuse(index, name, file_name, "it must be the name of a file in the same folder")
        if not (folder / file_name).exists():
            raise InputError(f"{folder / file_name}: there is no such file, but {INDEX} names it; copy it as well")
    return {name: folder / file_name for name, file_name in weight_map.items()}


def _widened(path: Path, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise InputError(
            f"{path}: {name} has the shape {list(tensor.shape)}; by config.json it must have {list(shape)}"
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{path}: {name} is of {kind}; it must be of float32, bfloat16 or float16")
    return tensor.float()


if __name__ == "__main__":  # an earlier name of the command; the command is in distlab because it needs runs
    from distlab.exchange.import_hf import command
    from simplellm.exit_status import status_of

    raise SystemExit(status_of(command))
