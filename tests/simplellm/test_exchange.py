"""Models to Hugging Face's format and back: against transformers itself, and what cannot be taken over."""

import errno
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.hub_folders import assert_same_logits, change_config
from support.small_models import SIZES, saved_model, status_of
from support.terminals import fork_python
from torch import Tensor

from distlab.checkpoints.models import read_model, write_model
from distlab.exchange import import_hf, read_saved
from distlab.exchange.export import Request, main
from simplellm.errors import InputError
from simplellm.export import export
from simplellm.import_hf import read_llama
from simplellm.stories import story
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

GROUPED = {"num_kv_heads": 2, "hidden_dim": 72, "rope_theta": 5e5, "norm_eps": 1e-3, "head_dim": 10}


@pytest.mark.parametrize("options", [{}, GROUPED], ids=["multi-head", "grouped-query"])
def test_transformers_loads_an_export(options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = saved_model(**options)
    export(saved, tmp_path / "there")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.dtype == torch.float32
    assert_same_logits(saved.build(), theirs)
    ids = SPTokenizer()
    generation = theirs.generation_config
    assert (generation.bos_token_id, generation.eos_token_id) == (ids.bos_id, ids.eos_id), "where stories begin and end"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "there")
    assert tokenizer(story(3))["input_ids"] == SPTokenizer().encode(story(3))
    assert tokenizer.model_max_length == saved.options["ctx_size"]
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert special == (ids.bos_id, ids.eos_id, ids.pad_id)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "there").iterdir()}
    assert len(set(modes.values())) == 1, modes


def transformers_llama(**options: Any) -> Any:
    """A Llama as transformers saves it, with the shipped tokenizer, and weights as after training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {
        "vocab_size": SIZES["vocab_size"],
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**config | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1.2)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    shutil.copyfile(SHIPPED_MODEL, folder / "tokenizer.model")
    return folder


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({"num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-3}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "pad_token_id": 0}, {}),
        ({"tie_word_embeddings": True, "num_key_value_heads": 2}, {"max_shard_size": "100KB"}),
    ],
    ids=["multi-head", "tied", "multi-query", "theta", "sharded"],
)
def test_a_llama_of_transformers(
    options: dict[str, Any], how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = transformers_llama(**options)
    folder = save(theirs, tmp_path / "theirs", **how)
    assert (folder / "model.safetensors").exists() != bool(how)
    opened = Counter[str]()

    def counted(path: Path, **options: Any) -> Any:
        opened[path.name] += 1
        return safe_open(path, **options)

    monkeypatch.setattr("simplellm.import_hf.safe_open", counted)
    saved = read_llama(folder)
    assert opened.keys() == {path.name for path in folder.glob("*.safetensors")}
    assert max(opened.values()) < 4, "whatever the number of its tensors"
    assert_same_logits(saved.build(), theirs)
    embedding, head = (saved.parameters[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert embedding.data_ptr() != head.data_ptr()
    assert torch.equal(embedding, head) == options.get("tie_word_embeddings", False)


def test_only_theta_is_among_the_rope_parameters(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_theta": 99.0, "rms_norm_eps": 0.5}, rms_norm_eps=1e-3)
    options = read_llama(folder).options
    assert (options["rope_theta"], options["norm_eps"]) == (99.0, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_width(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save(transformers_llama().to(dtype), tmp_path / "theirs")
    saved = read_llama(folder)
    assert {parameter.dtype for parameter in saved.parameters.values()} == {torch.float32}
    in_float32 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same_logits(saved.build(), in_float32, atol=5e-5)


def test_a_config_in_the_words_of_transformers_4(tmp_path: Path) -> None:
    """It has rope_theta and rope_scaling beside the rest, and frequencies among the tensors."""
    theirs = transformers_llama(rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    folder = save(theirs, tmp_path / "theirs")
    change_config(folder, rope_parameters=..., rope_theta=777.0, rope_scaling=None, head_dim=..., torch_dtype="float32")
    change_tensors(folder, lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    saved = read_llama(folder)
    assert saved.options["rope_theta"] == 777.0
    assert_same_logits(saved.build(), theirs)


def test_out_and_in_again(tmp_path: Path) -> None:
    saved = saved_model(**GROUPED)
    write_model(tmp_path / "run", saved)
    for command in ("simplellm.export run one", "simplellm.import_hf one back", "simplellm.export back two"):
        module, *folders = command.split()
        ended = fork_python("-m", module, *(tmp_path / folder for folder in folders)).finish()
        assert ended.status == 0, ended.err
        size = f"{sum(p.numel() for p in saved.parameters.values()):,} parameters"
        for folder, line in zip(folders, ended.out.splitlines(), strict=True):
            assert line.startswith(f"# {tmp_path / folder}: {size}")
    again = read_model(tmp_path / "back")
    assert again.options == saved.options
    torch.testing.assert_close(again.parameters, saved.parameters, rtol=0, atol=0)
    assert again.tokenizer.read_bytes() == SHIPPED_MODEL.read_bytes()
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("module", "folder"),
    [("export", "folder of a run with checkpoints"), ("import_hf", "folder with config.json, model.safetensors and")],
)
def test_the_commands_explain_their_arguments_under_either_name(module: str, folder: str) -> None:
    for package in ("simplellm", "distlab.exchange"):
        ended = fork_python("-m", f"{package}.{module}", "--help").finish()
        assert ended.status == 0, ended.err
        assert f"python -m simplellm.{module} " in ended.out
        assert folder in ended.out


# ------------------------------------------------------------------------------------------- what cannot be taken over


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(saved_model(), folder)
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        read_saved(folder)
    return str(error.value).replace(str(folder), "DIR")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "mistral"}, 'model_type is "mistral": only a "llama" can be imported'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu": the lab\'s Llama computes "silu"'),
        ({"attention_bias": 1.5}, "attention_bias is 1.5: it must be true or false"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no": it must be true or false'),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1: the lab's Llama has none; it must be 0"),
        ({"sliding_window": 4096}, "sliding_window is 4096: the lab does not know what it changes; remove it from a "),
        ({"logit_scale": 0.5}, "logit_scale is 0.5: the lab does not know what it changes"),
        ({"rope_interleaved": True}, "rope_interleaved is true: the lab does not know what it changes"),
        ({"layer_types": ["full"]}, 'layer_types is ["full"]: the lab does not know what it changes'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling is {"type": "dynamic", "factor": 2.0}: '),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "rope_parameters is {"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, 'rope_parameters is {"full_attention": '),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear": '),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling is {"type": "linear", "factor": 2.0}: '),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, 'rope_parameters is {"rope_type": "llama3"'),
        ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}: give a model that is not'),
        ({"head_dim": 9}, "head_dim is 9: rotary positions need an even width"),
        ({"num_attention_heads": 5, "head_dim": ...}, "num_attention_heads is 5: it must divide hidden_size 32"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: it must divide num_attention_heads 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: it must be a positive integer"),
        ({"num_hidden_layers": "two"}, 'num_hidden_layers is "two": it must be a positive integer'),
        ({"hidden_size": ...}, "has no hidden_size; it must be there, a positive integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1: it must be a number greater than 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0: it must be a number greater than 0"),
        ({"hidden_size": 2**40, "head_dim": ...}, "hidden_size is 1099511627776: model.embed_tokens.weight has the"),
        ({"intermediate_size": 2**63 - 1}, "intermediate_size is 9223372036854775807: model.layers.0.mlp.gate_proj"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1: the files have the tensors of 2 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: the files have the tensors of 2 layers"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776: it must be at most"),
        ({"vocab_size": 32000}, "vocab_size is 32000: it must be the number of pieces of tokenizer.model, 4096"),
    ],
)
def test_a_config_of_another_model(values: dict[str, Any], sentence: str, folder: Path) -> None:
    change_config(folder, **values)
    assert re.match(rf"DIR/config\.json:? {re.escape(sentence)}", refusal(folder))


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: {k: v for k, v in tensors.items() if k != NORM}, f"DIR: has no tensor {NORM}, which must be"),
        (lambda tensors: {k: v for k, v in tensors.items() if "embed" not in k}, "DIR: has no tensor model.embed_"),
        (lambda tensors: {**tensors, NORM: torch.ones(31)}, f"{NORM} has the shape [31]; by config.json it must have"),
        (lambda tensors: {**tensors, EMBEDDING: torch.ones(32)}, f"{EMBEDDING} has the shape [32]"),
        (lambda tensors: {**tensors, NORM: torch.ones(32, dtype=torch.int8)}, f"{NORM} is of int8; it must be of flo"),
        (lambda tensors: {**tensors, f"{NORM}.bias": torch.ones(32)}, f"has a tensor {NORM}.bias, for which the lab"),
    ],
    ids=["missing", "no embedding", "shape", "dimensions", "dtype", "bias"],
)
def test_tensors_of_another_model(change: Any, sentence: str, folder: Path) -> None:
    change_tensors(folder, change)
    assert sentence in refusal(folder)


def test_damaged_files(folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    content = weights.read_bytes()
    for damaged in (content[: len(content) // 2], content[:100], b"", b"\xff" * 200):
        weights.write_bytes(damaged)
        assert refusal(folder).startswith("DIR/model.safetensors: is not a complete safetensors file (")
    for damaged in (config.read_bytes()[:50], b"\xff\xfe", b"[" * 100_000):
        config.write_bytes(damaged)
        assert refusal(folder).startswith("DIR/config.json: is not JSON (")
    config.write_text("[]")
    assert refusal(folder) == "DIR/config.json: is a JSON list, not an object; copy the file again"


def test_files_that_are_not_there(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"{}")
    assert refusal(folder) == "DIR/tokenizer.model: is not a SentencePiece model that can be read; copy the file again"
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.json").write_text('{"model": "none"}')
    assert refusal(folder) == "DIR/tokenizer.json: is not a tokenizer that can be read; copy the file again"
    (folder / "tokenizer.json").unlink()
    assert refusal(folder).startswith("DIR/tokenizer.model: there is no such file; the lab reads SentencePiece models")
    shutil.copyfile(SHIPPED_MODEL, folder / "tokenizer.model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusal(folder).startswith("DIR/model.safetensors: there is no such file; pickled weights may hold any prog")
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder) == "DIR/model.safetensors: there is no such file; save the model as safetensors"
    with pytest.raises(InputError, match=r"none: there is no such folder"):
        read_llama(folder / "none")


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({}, "DIR/model.safetensors.index.json: weight_map is {}: it must name the file of each tensor"),
        (
            {NORM: "../model.safetensors"},
            f'{NORM} is "../model.safetensors": it must be the name of a file in the same',
        ),
        ({NORM: "other.safetensors"}, "DIR/other.safetensors: there is no such file, but model.safetensors.index.json"),
        ({"model.other": "part.safetensors"}, "DIR/part.safetensors: has no tensor model.other, which model.safetens"),
    ],
)
def test_an_index_that_leads_nowhere(weight_map: dict[str, str], sentence: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sentence in refusal(folder)


def test_nothing_is_replaced(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in exported.iterdir())
    assert status_of(monkeypatch, import_hf.main, import_hf.Request, exported, exported) == 2
    assert capsys.readouterr().err == f"# {exported}: exists and is not an empty folder; give a new one\n"
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        export(saved_model(), exported)
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in exported.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/model: cannot be written \(Not a directory\); give another folder"):
        export(saved_model(), tmp_path / "file" / "model")
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(InputError, match="Permission denied"):
            export(saved_model(), tmp_path / "locked" / "model")


def test_says_which_checkpoint_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "run", saved_model())
    checkpoints = tmp_path / "run/checkpoints"
    shutil.copytree(checkpoints / "step-00000000", checkpoints / "step-00000006")
    (checkpoints / "step-00000006/tokenizer.model").unlink()
    assert status_of(monkeypatch, main, Request, tmp_path / "run", tmp_path / "out") == 0
    passed_over, _, written = capsys.readouterr().out.splitlines()
    assert passed_over == "# skipped a checkpoint: step-00000006: tokenizer.model is missing"
    assert " parameters after 0 steps, config.json" in written


@pytest.mark.parametrize(
    ("is_there", "raised", "told"),
    [
        (False, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), InputError),
        (True, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), InputError),
        (False, KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["new folder", "empty folder", "Ctrl-C"],
)
def test_an_export_that_fails_leaves_no_half_model(
    is_there: bool, raised: BaseException, told: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    if is_there:
        folder.mkdir()

    def save_half(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        assert (folder / "config.json").exists() == is_there
        raise raised

    message = r"model: cannot be written \(No space left on device\)" if told is InputError else None
    with monkeypatch.context() as failing:
        failing.setattr("simplellm.export.save_file", save_half)
        with pytest.raises(told, match=message):
            export(saved_model(), folder)
    assert [path.name for path in tmp_path.rglob("*")] == (["model"] if is_there else [])
    export(saved_model(), folder)
    read_llama(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, main, Request, tmp_path, tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(f"# {tmp_path}: there is no complete checkpoint")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
def test_a_full_disk_leaves_no_half_run(
    is_there: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = set(tmp_path.rglob("*")), tmp_path / "some" / "run"
    if is_there:
        out.mkdir(parents=True)
        before |= {out, out.parent}

    def fill_the_disk(_: int) -> None:
        assert list(out.glob("checkpoints/*.unfinished/*"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fill_the_disk)
        assert status_of(monkeypatch, import_hf.main, import_hf.Request, folder, out) == 2
    sentence = f"# {out}: cannot be written (No space left on device); give another folder\n"
    assert capsys.readouterr().err == sentence
    assert set(tmp_path.rglob("*")) == before
    assert status_of(monkeypatch, import_hf.main, import_hf.Request, folder, out) == 0
