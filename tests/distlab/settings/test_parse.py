"""The command line of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_models import saved_model
from support.small_tokenizers import trained

from distlab.checkpoints.models import write_model
from distlab.settings.common import parse
from distlab.settings.hybrid import HybridSettings
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


def test_without_arguments_it_is_that_of_the_process_and_with_none_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["intro.py", "--steps", "7"])
    assert parse(TrainSettings(steps=3), "").steps == 7
    assert parse(TrainSettings(steps=3), "", []).steps == 3
    unknown: Any = "lion"
    with pytest.raises(InputError, match=r"^--optimizer lion: give one of adam, adamw, sgd"):
        TrainSettings(optimizer=unknown).check()  # which a script may have for its defaults


def test_a_run_says_how_its_learning_rate_changes() -> None:
    settings = TrainSettings(steps=1000, lr=0.1, warmup_steps=20, lr_schedule="linear", min_lr=0.01)
    _, own = settings.remarks({"data_because": "the generator"})
    falls = "falls from 0.1 to 0.01 along {}, until step 1,000".format
    assert own == f"the learning rate rises to 0.1 over 20 steps and then {falls('a line')}"
    _, own = replace(settings, warmup_steps=0, lr_schedule="cosine").remarks({"data_because": "the generator"})
    assert own == f"the learning rate {falls('half a cosine')}"


def test_a_file_without_a_document_for_validation_is_refused_only_where_one_is_needed(tmp_path: Path) -> None:
    few, blank = tmp_path / "few.txt", tmp_path / "blank.jsonl"
    few.write_text("One day.\n\nThe end.\n")
    blank.write_text('{"text": "One day."}\n' * 19 + '{"text": " "}\n')
    for file, why in ((few, "validation takes every 20th document"), (blank, "every validation document is blank")):
        flags = ["--data", str(file)]
        assert parse(TrainSettings(), "", flags).data == str(file)
        with pytest.raises(InputError, match=why):
            parse(TrainSettings(), "", [*flags, "--eval-every", "5"])


@pytest.mark.parametrize("flag", ["--record-routes", "--replay-routes"])
def test_routes_do_not_go_with_a_run_that_begins_later(flag: str, tmp_path: Path) -> None:
    write_model(tmp_path, saved_model(experts=2, experts_per_token=1))
    with pytest.raises(InputError, match=f"^{flag} with --resume: routes begin at the first step"):
        parse(HybridSettings(), "", ["0", "--resume", str(tmp_path), flag, "routes"])


def test_a_tokenizer_needs_an_end_of_documents_whichever_piece_that_is(tmp_path: Path) -> None:
    pieces: dict[str, Any] = {"vocab_size": 300, "bos_id": -1, "unk_id": 1}
    first = trained(tmp_path / "first.model", eos_id=0, **pieces)
    assert parse(TrainSettings(), "", ["--tokenizer", str(first)]).tokenizer == first
    none = trained(tmp_path / "none.model", eos_id=-1, **pieces | {"unk_id": 0})
    with pytest.raises(InputError, match=rf"^--tokenizer {none}: the model has no end-of-document piece"):
        parse(TrainSettings(), "", ["--tokenizer", str(none)])
