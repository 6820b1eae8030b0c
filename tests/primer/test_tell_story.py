"""Stories: how a token is picked, transformers' greedy text against ours, and the command."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import LAB
from support.small_models import saved_model, status_of
from support.terminals import fork_command, fork_python

from distlab.checkpoints.models import write_model
from simplellm.export import export
from simplellm.tokenizers import SPTokenizer

sys.path.append(str(LAB))
from primer.tell_story import Settings, main, pick, tell

CPU = torch.device("cpu")
GREEDY = Settings(Path(), temperature=0)
PROMPTS = ["Once upon a time", "The little dog", "\n\n", "One day, Tom", "é 🐭"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(saved_model(num_kv_heads=2), folder)
    return folder


def story(args: Settings, prompt: str = PROMPTS[0], **options: Any) -> list[int]:
    net = saved_model(num_kv_heads=2, **options).build()
    return list(tell(net, SPTokenizer().encode(prompt), args, SPTokenizer().eos_id, CPU))


# ------------------------------------------------------------------------------------------------------------ sampling


def picked(probabilities: list[float], draws: int = 300, **options: Any) -> set[int]:
    """The tokens that come up in many draws."""
    args, generator = Settings(Path(), **{"temperature": 1.0, **options}), torch.Generator().manual_seed(1)
    logits = torch.tensor(probabilities).log() + 5  # what is added to all logits changes nothing
    return {pick(logits, args, generator) for _ in range(draws)}


def test_top_p_keeps_the_fewest_tokens_that_are_probable_enough() -> None:
    probabilities = [0.1, 0.5, 0.15, 0.25]
    assert picked(probabilities, top_p=0.45) == {1}
    assert picked(probabilities, top_p=0.55) == {1, 3}
    assert picked(probabilities, top_p=0.74) == {1, 3}
    assert picked(probabilities, top_p=0.76) == {1, 2, 3}
    assert picked(probabilities, top_p=0.95) == picked(probabilities) == {0, 1, 2, 3}
    for top_p in (1e-9, 0.25):
        assert picked([0.25] * 4, top_p=top_p) == {0}


def test_top_k_keeps_so_many() -> None:
    probabilities = [0.1, 0.5, 0.15, 0.25]
    assert picked(probabilities, top_k=1) == {1}
    assert picked(probabilities, top_k=3) == {1, 2, 3}
    assert picked(probabilities, top_k=9) == {0, 1, 2, 3}
    assert picked(probabilities, top_k=2, top_p=0.6) == {1}  # the two have 2/3 and 1/3 of what is left


def test_temperature() -> None:
    for temperature in (0, 1e-30, 1e-50, 5e-324):  # the last ones are 0 in float32
        assert picked([0.1, 0.5, 0.4], draws=20, temperature=temperature) == {1}
    counts = {}
    for temperature in (0.5, 1.0, 2.0):
        args, generator = Settings(Path(), temperature=temperature), torch.Generator().manual_seed(1)
        logits = torch.tensor([0.8, 0.2]).log()
        counts[temperature] = sum(pick(logits, args, generator) for _ in range(2000)) / 2000
    # Probabilities to the power of 1 / temperature, made to add up to 1 again.
    assert counts == pytest.approx({0.5: 0.04 / 0.68, 1.0: 0.2, 2.0: 0.2**0.5 / (0.2**0.5 + 0.8**0.5)}, abs=0.03)


def test_a_seed_is_a_story() -> None:
    first, again, other = (story(Settings(Path(), temperature=1, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


# ------------------------------------------------------------------------------------------------------------ the loop


@pytest.mark.parametrize("args", [GREEDY, Settings(Path(), temperature=1, top_p=0.9)])
def test_without_the_cache_the_story_is_the_same(args: Settings) -> None:
    told = story(args)
    assert len(set(told)) > 5
    assert story(dataclasses.replace(args, cache=False)) == told


@pytest.mark.parametrize("cache", [True, False])
def test_a_story_after_the_end_of_another_is_told_as_the_mask_was_trained(cache: bool) -> None:
    saved, end = saved_model(num_kv_heads=2), SPTokenizer().eos_id
    args = dataclasses.replace(GREEDY, cache=cache)
    plain, masked = (list(tell(saved.build(), [end], args, end, CPU, mask)) for mask in (False, True))
    net = dataclasses.replace(saved, options={**saved.options, "document_end": end}).build()
    with torch.no_grad():
        expected = net(torch.tensor([[end, *masked[:-1]]]))[0].argmax(-1).tolist()
    assert masked == expected
    assert masked != plain


@torch.inference_mode()
def test_with_the_cache_a_token_is_several_times_faster() -> None:
    """The newest of 256 tokens against all of them, in seconds of the processor, whoever else uses it."""
    net = saved_model(dmodel=512, hidden_dim=2048, n_layers=1, ctx_size=256).build()
    ids = torch.arange(256)[None]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(8):  # other processes' use of the memory can only add to a time
        cache = net.new_cache()
        net(ids[:, :-1], cache)
        for cached in (True, False):
            started = time.process_time()
            net(*((ids[:, -1:], cache) if cached else (ids,)))
            seconds[cached].append(time.process_time() - started)
    assert min(seconds[False]) > 5 * min(seconds[True]), seconds


@pytest.mark.parametrize("cache", [True, False])
def test_the_cache_lets_each_token_through_once(cache: bool) -> None:
    net = saved_model().build()
    seen: list[int] = []
    net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    list(tell(net, [2] * 5, dataclasses.replace(GREEDY, max_tokens=4, cache=cache), -1, CPU))
    assert seen == ([5, 1, 1, 1] if cache else [5, 6, 7, 8])


def test_the_greedy_story_is_that_of_transformers(exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs: Any
    theirs, tokenizer = (kind.from_pretrained(exported) for kind in (AutoModelForCausalLM, AutoTokenizer))
    told = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        prompt_length = inputs["input_ids"].shape[1]
        expected = theirs.generate(**inputs, do_sample=False, max_new_tokens=64 - prompt_length)[0, prompt_length:]
        told.append(story(GREEDY, prompt))
        assert told[-1] == expected.tolist()
    assert len({tuple(ids) for ids in told}) == len(PROMPTS)


def test_it_ends_where_the_document_does() -> None:
    net = saved_model().build()
    whole = list(tell(net, [2], GREEDY, -1, CPU))
    end = whole[5]
    assert list(tell(net, [2], GREEDY, end, CPU)) == whole[: whole.index(end) + 1]
    assert list(tell(net, [2], dataclasses.replace(GREEDY, max_tokens=3), -1, CPU)) == whole[:3]
    assert len(whole) == 63  # with the prompt, as many as the model can read
    assert list(tell(net, [2], dataclasses.replace(GREEDY, max_tokens=99), -1, CPU)) == whole


# --------------------------------------------------------------------------------------------------------- the command


def test_the_command_tells_the_same_from_a_run_and_from_an_export(exported: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "run", saved_model(num_kv_heads=2))
    texts = []
    for model in (tmp_path / "run", exported):
        flags = ["--prompt", "One day, Tom", "--temperature", "0", "--device", "cpu"]
        ended = fork_python("primer/tell_story.py", model, *flags).finish()
        assert (ended.status, ended.err) == (0, "")
        first, *text, ending, speed = ended.out.splitlines()
        steps = " after 0 steps" if model == tmp_path / "run" else ""
        assert re.fullmatch(rf"# {model}: [\d,]+ parameters{steps}, at most 64 tokens of text, on cpu", first)
        assert ending == "# stopped where the text has the 64 tokens that the model can read"
        assert re.fullmatch(r"# \d+ tokens in \d+\.\d\d s: \d+\.\d tokens/s, with a cache", speed)
        texts.append("\n".join(text))
    ids = SPTokenizer().encode("One day, Tom")
    assert texts[0] == texts[1] == SPTokenizer().decode(ids + story(GREEDY, "One day, Tom"))


def test_it_says_which_checkpoint_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, saved_model())
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "step-00000000", checkpoints / "step-00000006")
    (checkpoints / "step-00000006/tokenizer.model").unlink()
    assert status_of(monkeypatch, main, Settings, tmp_path, "--max-tokens", "1", "--temperature", "1e-50") == 0
    passed_over, loaded, *_ = capsys.readouterr().out.splitlines()
    assert passed_over == "# skipped a checkpoint: step-00000006: tokenizer.model is missing"
    assert " parameters after 0 steps, at most 64 tokens of text" in loaded


def test_flags(exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "", "--max-tokens", "4", "--no-cache", "--top-k", "5", "--top-p", "0.5", "--seed", "3"]
    assert status_of(monkeypatch, main, Settings, exported, *flags) == 0
    *_, ending, speed = capsys.readouterr().out.splitlines()
    assert ending == "# stopped after --max-tokens 4"
    assert speed.startswith("# 4 tokens in ")
    assert speed.endswith(" without a cache")


def test_it_comes_token_by_token_and_ends_quietly_on_control_c(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "stalling.py").write_text(STALLING)
    command = [sys.executable, str(tmp_path / "stalling.py"), str(exported)]
    pipe, end = os.pipe()
    with os.fdopen(pipe) as told, tempfile.TemporaryFile() as errors:
        with os.fdopen(end, "wb") as into_pipe:
            story_teller = fork_command(command, lambda: None, into_pipe, errors)
        assert told.readline().startswith("# ")
        assert told.read(len("One day")) == "One day"
        assert told.read(1)  # the first token, while the second has not been computed
        story_teller.send_signal(signal.SIGINT)
        assert story_teller.wait(60) == 130
        errors.seek(0)
        assert errors.read().strip() == b""


# The command as it is, but its second token takes long.
STALLING = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with Ctrl-C ignored
sys.path.insert(0, {str(LAB)!r})
from primer import tell_story
from simplellm import command_line

tell = tell_story.tell

def tell_slowly(*args):
    tokens = tell(*args)
    yield next(tokens)
    time.sleep(60)

tell_story.tell = tell_slowly
sys.argv = ["tell_story.py", sys.argv[1], "--prompt", "One day"]
command_line.run(tell_story.main, tell_story.Settings, None)
"""


def test_a_reader_that_goes_away(exported: Path) -> None:
    command = [sys.executable, LAB / "primer/tell_story.py", exported, "--temperature", "0"]
    shell = subprocess.run(
        ["bash", "-c", '"$@" | head -c 1', "-", *map(str, command)], capture_output=True, text=True, timeout=60
    )
    assert (shell.stdout, shell.stderr) == ("#", "")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--temperature -1", "--temperature -1.0: must be 0 or more"),
        ("--temperature nan", "--temperature nan: must be 0 or more"),
        ("--top-k 0", "--top-k 0: must be at least 1"),
        ("--top-p 1.5", "--top-p 1.5: must be greater than 0 and at most 1"),
        ("--max-tokens 0", "--max-tokens 0: must be at least 1"),
        ("--seed 99999999999999999999", "--seed 99999999999999999999: must have at most 63 bits"),
        ("--no-such", "Unrecognized options: --no-such (--help lists the flags)"),
        (f"--prompt {'x' * 100}", "--prompt is of 100 tokens: the model reads 64 at most, story included; give a"),
    ],
)
def test_bad_flags(
    flags: str, sentence: str, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = status_of(monkeypatch, main, Settings, exported, *flags.split())
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith(f"# {sentence}")
    assert err.count("\n") == 1


def test_bad_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        status = status_of(monkeypatch, main, Settings, folder)
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert err.startswith(f"# {folder}: ")
        assert err.count("\n") == 1


def test_a_character_that_the_last_token_leaves_incomplete_is_shown_as_such(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *incomplete, _ = SPTokenizer().encode("\N{MOUSE FACE}")
    monkeypatch.setattr("primer.tell_story.tell", lambda *_: iter(incomplete))
    main(Settings(exported))
    assert "\N{REPLACEMENT CHARACTER}" in capsys.readouterr().out
    monkeypatch.setattr("primer.tell_story.tell", lambda *_: iter([*incomplete, SPTokenizer().eos_id]))
    main(Settings(exported, max_tokens=len(incomplete) + 1))
    assert f"\n# the model ended its story\n# {len(incomplete) + 1} tokens in " in capsys.readouterr().out
