"""Llamas as newer models are: imported, trained in the hybrid, exported, with transformers' own logits at both ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chapters import load, losses
from support.small_models import status_of
from support.terminals import fork_launcher, fork_python

from distlab.checkpoints.models import read_model, write_model
from distlab.exchange import import_hf
from distlab.settings.common import parse
from distlab.settings.folders import write_config
from simplellm.errors import InputError
from simplellm.export import export
from simplellm.import_hf import read_llama
from simplellm.options import RopeScaling
from simplellm.stories import story
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

# The configurations of the hub, with fewer layers and tokens, and Llama 3.2's narrower.
OF_BOTH = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "hidden_act": "silu",
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LLAMA_3_2_1B = OF_BOTH | {
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 330,
}
SMOLLM2_135M = OF_BOTH | {
    "eos_token_id": 0,
    "hidden_size": 144,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 384,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 3,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "transformers_version": "4.40.1",
    "vocab_size": 320,
}
SMALL = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>"]


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer like those of Llama 3 and SmolLM2, which begins a text with a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=310, **options)
    tokenizer.train_from_iterator([story(index) for index in range(50)], trainer)
    begin = f"{SPECIAL[0]} $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=begin, special_tokens=[(SPECIAL[0], 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def make(folder: Path, config: dict[str, Any], tokenizer_json: Path | None, **tensors: torch.Tensor) -> Path:
    """A model's folder as in the hub, with random weights; `tensors` are added to its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = 3 if parameter.dim() == 2 else 1.2
            parameter.mul_(gain) if "bias" not in name else parameter.normal_()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # as its author wrote it, not as this version does
    if tensors:
        path = folder / "model.safetensors"
        save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    if tokenizer_json is None:
        (folder / "tokenizer.model").write_bytes(SHIPPED_MODEL.read_bytes())
        return folder
    (folder / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    names = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1], "lstrip": False}}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | kind))
    return folder


@torch.no_grad()
def largest_difference(ours: torch.nn.Module, folder: Path) -> float:
    """Of the logits of transformers' model in a folder and of ours, relative to the largest one."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, theirs.config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    assert expected.std() > 0.1
    return float((ours(ids) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "SmolLM2-135M"])
def test_it_is_imported_trained_in_the_hybrid_and_exported(name: str, tokenizer_json: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = LLAMA_3_2_1B if name == "Llama-3.2-1B" else SMOLLM2_135M
    folder = make(tmp_path / "theirs", config, tokenizer_json)
    assert largest_difference(read_llama(folder).build(), folder) < 1e-5
    run, on = tmp_path / "run", tmp_path / "on"
    ended = fork_python("-m", "simplellm.import_hf", folder, run).finish()
    assert ended.status == 0, ended.err
    flags = "--dp 2 --pp 2 --seq-len 48 --batch-size 3 --micro-batches 3 --data sample --device cpu --steps 8".split()
    flags += ["--lr", "3e-3", "--save-every", "8", "--resume", str(run), "--out", str(on)]
    ended = fork_launcher("hybrid", *flags).finish(150)
    assert ended.status == 0, ended.err
    assert sum(losses(on)[-3:]) < sum(losses(on)[:3]) - 0.5, "it learns"
    export(read_model(on), tmp_path / "ours")
    assert largest_difference(read_model(on).build(), tmp_path / "ours") < 1e-5
    exported = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert exported["pad_token_id"] is None, "there is none"
    scaling: Any = config["rope_scaling"] or {}
    assert exported.get("rope_scaling", {}).items() >= scaling.items(), "for transformers 4"
    assert exported["rope_theta"] == config["rope_theta"], "likewise"
    before, after = (load_file(tmp_path / where / "model.safetensors") for where in ("theirs", "ours"))
    assert all(not torch.equal(tensor, after[each]) for each, tensor in before.items()), "all of it was trained"
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")(story(9), add_special_tokens=False)["input_ids"] == (
        SPTokenizer(read_model(on).tokenizer).encode(story(9))
    )
    again = json.loads((tmp_path / "ours" / "tokenizer.json").read_text())
    assert again == json.loads(tokenizer_json.read_text()), "as it came"


OPTIONS: dict[str, dict[str, Any]] = {
    "theta in rope_scaling": {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
    "theta in both": {"rope_theta": 1e4, "rope_scaling": {"type": "default", "rope_theta": 5e5}},
    "theta in two dictionaries": {"rope_parameters": {"rope_theta": 99.0}, "rope_scaling": {"rope_theta": 5e5}},
    "scaled positions": {"rope_theta": 1e4, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
    "scaled, in the words of 5": {"rope_parameters": LLAMA3 | {"rope_theta": 1e3, "factor": 4}},
    "scaled, the length beside it": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    "scaled, another length beside it": {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
        "original_max_position_embeddings": 32,
    },
    "wide heads": {"head_dim": 24},
    "narrow heads": {"head_dim": 6, "num_key_value_heads": 1},
    "biases of attention": {"attention_bias": True},
    "biases of the MLP": {"mlp_bias": True},
    "all biases, wide heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "off, or without effect": {"rope_interleaved": False, "sliding_window": None, "pretraining_tp": 2},
}


@pytest.mark.parametrize("what", OPTIONS)
def test_the_logits_are_those_of_transformers(what: str, tokenizer_json: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", SMALL | OPTIONS[what], tokenizer_json)
    saved = read_llama(folder)
    assert largest_difference(saved.build(), folder) < 1e-5
    export(saved, tmp_path / "ours")
    assert largest_difference(saved.build(), tmp_path / "ours") < 1e-5
    assert read_llama(tmp_path / "ours").options == saved.options
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    ids = [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert ids == [0, 1, None], "the tokenizer has no padding token"
    plain = make(tmp_path / "theirs", SMALL, tokenizer_json)
    makes_none = "without effect" in what or "heads" in what  # other widths are other tensors
    assert makes_none or largest_difference(saved.build(), plain) > 1e-3, "it makes a difference"


def test_a_head_of_its_own_is_used_where_the_configuration_says_tied(tokenizer_json: Path, tmp_path: Path) -> None:
    tied = SMALL | {"tie_word_embeddings": True}
    head = torch.randn(320, 48)
    folder = make(tmp_path / "own", tied, tokenizer_json, **{"lm_head.weight": head})
    saved = read_llama(folder)
    assert torch.equal(saved.parameters["lm_head.weight"], head)
    assert largest_difference(saved.build(), folder) < 1e-5
    folder = make(tmp_path / "tied", tied, tokenizer_json)
    assert largest_difference(read_llama(folder).build(), folder) < 1e-5


@pytest.mark.parametrize("padding", [0, 1, 200])
def test_a_padded_vocabulary_of_a_sentencepiece_model(padding: int, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", SMALL | {"vocab_size": 4096 + padding}, None)
    saved = read_llama(folder)
    tokenizer = SPTokenizer(saved.tokenizer)
    assert tokenizer.vocab_size == 4096 + padding
    assert [tokenizer.encode(story(index)) for index in range(20)] == [
        SPTokenizer().encode(story(index)) for index in range(20)
    ]
    assert tokenizer.encode("<padding 0>") == SPTokenizer().encode("<padding 0>")
    assert largest_difference(saved.build(), folder) < 1e-5
    export(saved, tmp_path / "ours")
    assert largest_difference(saved.build(), tmp_path / "ours") < 1e-5
    assert read_llama(tmp_path / "ours").tokenizer.read_bytes() == saved.tokenizer.read_bytes()


def test_a_vocabulary_that_is_too_small(tokenizer_json: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", SMALL | {"vocab_size": 300}, tokenizer_json)
    with pytest.raises(InputError, match=r"vocab_size is 300: it must be the number of pieces of tokenizer\.json, 310"):
        read_llama(folder)


def test_a_tokenizer_json_is_a_tokenizer(tokenizer_json: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", SMALL, tokenizer_json)
    (indented := folder / "indented.json").write_bytes(b"\n " + (folder / "tokenizer.json").read_bytes())
    for path in (folder / "tokenizer.json", read_llama(folder).tokenizer, indented):
        tokenizer = SPTokenizer(path)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, -1)
        for text in (story(1), "Ünïcödé 🙂 \u2581 text", f"a literal {SPECIAL[1]} here", " spaces  ", ""):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert not {0, 1, 2} & set(ids)
            assert tokenizer.decode([0, *ids, 1]) == text, "special tokens have no text"
    assert SPTokenizer(read_llama(folder).tokenizer).vocab_size == 320
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    other = SPTokenizer(indented)  # the same file, with another end of documents
    assert other.eos_id != tokenizer.eos_id
    assert other.identity != tokenizer.identity
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "a", "pad_token": SPECIAL[0]}))
    assert read_llama(folder).options["padding_idx"] == 0, "a token like any other"
    for content in (b'{"model": 3}', b'{"model": ', b'{"model": {"type": "Magic"}}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer .*bad.json: is not a tokenizer.json that can be read; give"):
            SPTokenizer(tmp_path / "bad.json")


def test_what_the_lab_does_not_use_is_said(
    tokenizer_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "theirs", SMALL, tokenizer_json)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert status_of(monkeypatch, import_hf.main, import_hf.Request, folder, tmp_path / "a run") == 0
    said = capsys.readouterr().out
    assert f"# {folder}: transformers puts the token of a beginning before each text; the lab does not" in said
    assert f"# {folder}: its chat template is not taken over" in said
    assert said.endswith(f"resume it with --resume '{tmp_path / 'a run'}'\n"), "as a shell takes it"
    flags: list[tuple[dict[str, bool], int]] = [({}, 1), ({"add_bos_token": True}, 1), ({"add_bos_token": False}, 0)]
    for flag, remarks in flags:  # of a class that puts the token there by default
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **flag}))
        assert len(import_hf.remarks(tmp_path)) == remarks
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast", "chat_template": ""}')
    assert len(import_hf.remarks(tmp_path)) == 2


def test_a_run_of_the_lab_needs_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, {"settings": {}, "layout": {"dp": 2}})
    assert status_of(monkeypatch, import_hf.main, import_hf.Request, tmp_path, tmp_path / "out") == 2
    assert f"--resume {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_lesson_of_tensor_parallelism_refuses_biases(tokenizer_json: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "run", read_llama(make(tmp_path / "theirs", SMALL | {"mlp_bias": True}, tokenizer_json)))
    flags = ["0", "--resume", str(tmp_path / "run"), "--world-size", "2"]
    with pytest.raises(InputError, match=r"its model has biases, which this script does not split; resume it with tp-"):
        parse(load("TP/intro_TP.py").DEFAULTS, "", flags)
    assert parse(load("TP/intro_TP_styles.py").DEFAULTS, "", flags).num_kv_heads == 2


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64},
        {"factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 64},
        {"factor": "8", "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64},
    ],
)
def test_a_scaling_that_cannot_be_right(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="of scaled positions"):
        RopeScaling.of(values)
