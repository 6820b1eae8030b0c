"""Whole models in checkpoints: read from those of runs, and written as a run to go on from."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bad_inputs.files import forge
from support.processes import LAB, leave_group, make_group_of_one
from support.small_models import saved_model
from support.terminals import fork_python

from distlab.checkpoints import saving, writer
from distlab.checkpoints.format import place_of
from distlab.checkpoints.models import SavedModel, read_model, write_model
from distlab.launching.start import check_story
from distlab.run.main import flags_to_resume
from distlab.settings.common import parse
from distlab.settings.experts import ExpertParallelSettings
from distlab.settings.hybrid import HybridSettings, ThreeAxesSettings
from distlab.settings.replicas import (
    DataParallelSettings,
    DiLoCoSettings,
    GradientAverageSettings,
    RepairSettings,
    StreamingSettings,
)
from distlab.settings.scripts import read_script_for
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SHIPPED_MODEL

pytestmark = pytest.mark.quick

SHAPE = {"dmodel": 32, "num_heads": 4, "num_kv_heads": 1, "hidden_dim": 40, "n_layers": 2, "ctx_size": 30}

UNUSUAL: dict[str, Any] = {  # what the lab's own models do not have
    "rope_theta": 500.0,
    "norm_eps": 1e-5,
    "head_dim": 10,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_scaling": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 9},
}


def test_an_imported_model_is_a_run_to_go_on_from(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    net = LLama(CausalLLama, 4096, **SHAPE, **UNUSUAL, padding_idx=3)
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    leave_group()  # the command that imports is no rank
    try:
        write_model(tmp_path / "run", SavedModel(net.options, parameters, SHIPPED_MODEL))
        read = read_model(tmp_path / "run")
    finally:
        make_group_of_one()
    assert not recwarn.list, "as torch's, that a single process writes or reads"
    assert read.options == net.options
    assert all(torch.equal(read.parameters[name], parameters[name]) for name in parameters)
    resume = ["0", "--resume", str(tmp_path / "run"), "--optimizer", "adamw"]
    for settings in (TrainSettings(), DataParallelSettings(), HybridSettings()):
        given = parse(settings, "", resume)
        assert (given.num_kv_heads, given.hidden_dim, given.dmodel, given.seq_len) == (1, 40, 32, 30)
    write_model(tmp_path / "long", replace(read, options=net.options | {"ctx_size": 1000}))
    long = parse(TrainSettings(), "", ["0", "--resume", str(tmp_path / "long")])
    assert long.seq_len == TrainSettings().seq_len
    check_story("cat " * 300, long, "intro.py")  # which the model reads, though not in training
    with pytest.raises(InputError, match="the model reads 30 at most"):
        check_story("cat " * 300, given, "intro.py")
    batch = ["--optimizer", "sgd", "--data", "sample", "--steps", "1", "--save-every", "1", "--out", tmp_path / "on"]
    ended = fork_python("primer/intro.py", *resume[1:3], *batch).finish()
    assert ended.status == 0, ended.err
    assert read_model(tmp_path / "on").options == net.options
    [step] = (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(step)["tokens"] == given.batch_size * given.seq_len


def test_a_model_is_read_without_the_state_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the states of each rank's optimizer; written in pieces, as large tensors are."""
    monkeypatch.setattr(writer, "PIECE_BYTES", 1000)
    net = LLama(CausalLLama, 4096, **SHAPE)
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    states = "optimizer.lm_head.weight.step", "rank1.optimizer.lm_head.weight.exp_avg", "random.0.cpu"
    record = {"step": 3, "tokens": 9, "model": net.options, "settings": {"document_mask": True}}
    tensors, tokenizer = parameters | dict.fromkeys(states, torch.ones(3)), SHIPPED_MODEL.read_bytes()
    tensors["random.0.cpu"] = torch.ones(3, dtype=torch.uint8)
    saving.save(tmp_path, tensors, record, tokenizer, keep=1)
    [content] = [path.read_bytes() for path in tmp_path.rglob("*.safetensors")]
    begin = 8 + int.from_bytes(content[:8], "little")
    places = {name: about.get("data_offsets") for name, about in json.loads(content[8:begin]).items()}
    assert all((begin + offsets[0]) % tensors[name].itemsize == 0 for name, offsets in places.items() if offsets)
    read = read_model(tmp_path)
    assert read.parameters.keys() == parameters.keys()
    assert all(torch.equal(read.parameters[name], parameters[name]) for name in parameters)
    assert (read.step, read.document_mask) == (3, True)
    wrong = {"position": {"document": 1}, "layout": {"dp": 0}, "data": {"seed": 0}, "settings": []}
    for name, value in (wrong | {"model": net.options | {"rope_scaling": {"factor": 0}}}).items():
        saving.save(tmp_path / name, tensors, record | {name: value}, tokenizer, keep=1)
        with pytest.raises(InputError, match=f"its {name} cannot be|factor 0 of scaled positions"):
            read_model(tmp_path / name)
    forge(place_of(tmp_path, 3), lambda record: record["files"].update(lost={"bytes": 3}))
    with pytest.raises(InputError, match=r"its entry for the file lost cannot be {'bytes': 3}"):
        read_model(tmp_path)


def test_a_script_resumes_only_what_it_can_go_on_with(tmp_path: Path) -> None:
    write_model(tmp_path / "experts", saved_model(experts=2, experts_per_token=1))
    assert not read_model(tmp_path / "experts").document_mask, "settings of earlier versions do not have it"
    with pytest.raises(InputError, match="its model has experts; resume it with a script that has --experts"):
        parse(TrainSettings(), "", ["0", "--resume", str(tmp_path / "experts")])
    write_model(tmp_path / "dense", model := saved_model())
    own, dense = ExpertParallelSettings(), ["0", "--resume", str(tmp_path / "dense")]
    for settings, flags, has in (HybridSettings(), ["--experts", "4"], "--experts 0, not 4"), (own, [], "no experts"):
        with pytest.raises(InputError, match=f"its model has {has}"):
            parse(settings, "", [*dense, *flags])
    record = {"step": 1, "tokens": 1, "model": model.options, "settings": {"fragments": 2}}
    saving.save(tmp_path / "fragments", dict(model.parameters), record, SHIPPED_MODEL.read_bytes(), keep=1)
    resume = ["0", "--resume", str(tmp_path / "fragments")]
    assert parse(StreamingSettings(), "", resume).fragments == 2
    with pytest.raises(InputError, match="with --fragments 2, which the script for these flags does not have"):
        parse(DiLoCoSettings(), "", resume)
    record |= {"settings": {"compress": "topk", "outer": "diloco"}, "layout": {"dp": 3}}
    saving.save(tmp_path / "topk", dict(model.parameters), record, SHIPPED_MODEL.read_bytes(), keep=1)
    resume = ["0", "--resume", str(tmp_path / "topk")]
    assert parse(StreamingSettings(), "", resume).compress == "none", "as topk is of dp-buckets, with other choices"
    for script in (GradientAverageSettings(), RepairSettings(), ThreeAxesSettings()):
        flag = "outer diloco" if isinstance(script, ThreeAxesSettings) else "compress topk"
        with pytest.raises(InputError, match=f"with --{flag}, which the script for these flags does not have"):
            parse(script, "", resume)
    with pytest.raises(InputError, match="the script that wrote it, and only with flags of that script"):
        read_script_for(LAB / "DP/buckets/intro_DP_buckets.py", [*resume, "--run-on"])


def test_only_restarted_ranks_go_on_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(run := tmp_path / "run", saved_model())
    for restarts, out, expected in ("0", run, []), ("1", run, ["--resume", str(run)]), ("1", tmp_path / "none", []):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setattr("sys.argv", ["intro.py", "--out", str(out)])
        assert flags_to_resume() == expected


@pytest.mark.parametrize(
    ("part", "name", "value", "told"),
    [
        ("settings", "betas", [0.8], "its record has [0.8] for --betas"),
        ("settings", "betas", [0.8, 0.9, 0.99], "its record has [0.8, 0.9, 0.99] for --betas"),
        ("settings", "betas", [0.8, "0.9"], "its record has [0.8, '0.9'] for --betas"),
        ("settings", "lr_schedule", "steep", "its record has 'steep' for --lr-schedule"),
        ("files", "../b", {"bytes": 1, "sha256": "0"}, "its entry for the file ../b cannot be"),
        ("model", "rope_scaling", [8], "its rope_scaling cannot be [8]"),
        ("model", "head_dim", 0, "its head_dim cannot be 0"),
        ("model", "num_heads", 0, "its num_heads cannot be 0"),
        ("model", "n_layers", True, "its n_layers cannot be True"),
        ("model", "norm_eps", 0.0, "its norm_eps cannot be 0.0"),
        ("model", "mlp_bias", "no", "its mlp_bias cannot be 'no'"),
        ("model", "qk_norm", 2, "its qk_norm cannot be 2"),
        ("model", "experts_per_token", 0, "its experts_per_token cannot be 0"),
        ("model", "router_scores", "tanh", "its router_scores cannot be 'tanh'"),
        ("model", "padding_idx", 0, "--ep 0 with --dp 2: give a divisor of --dp"),  # the record is right
    ],
)
def test_what_a_record_cannot_have_is_told(part: str, name: str, value: object, told: str, tmp_path: Path) -> None:
    """And flags that cannot be, though a checkpoint's settings are looked up by their layout before."""
    write_model(tmp_path, saved_model())
    forge(place_of(tmp_path, 0), lambda record: record[part].update({name: value}))
    with pytest.raises(InputError, match=re.escape(told)):
        parse(HybridSettings(), "", ["0", "--resume", str(tmp_path), "--ep", "0"])
