"""Every exhibit: its script trains with a falling loss and is not right, the mended one is, wrong mends are not."""

import ast
import contextlib
import difflib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.mends import MENDS, Mend
from support.written_records import SHAPE, record

from distlab.launch import launch
from distlab.settings.folders import RECORDED
from distlab_compare.records import Recordings
from distlab_exercises.checker import prepare, verdict_of
from distlab_exercises.exhibits import EXHIBITS, Exhibit
from distlab_exercises.museum import initial_weights, run_exhibit
from distlab_exercises.ranks import Patience, Report, Submission
from distlab_exercises.verdict import Wrong
from simplellm.errors import InputError

OBSERVED = {
    "experts": "layers.0.mlp.experts.0.gate_proj.weight and 23 other parameters on all ranks is 2 times too large",
    "clipping": "on all ranks are wrong as if the gradient used were 1.73 times what it should be",
    "micro_batches": "is 3 times too large: the 3 micro-batches' losses are not divided by 3",
    "routers": "gate.weight and 1 other parameter on all ranks is that of this rank's own sequences",
    "slices": "layers.1.post_attention_layernorm.weight on all ranks is a part of the gradient: only the sum",
    "groups": "on all ranks is that of this replica's own sequences: it was not averaged",
    "labels": "the loss of step 0 differs",
    "documents": "is no combination of the 2 ranks' gradients",
    "accumulation": "weighs its parts wrongly: it has rank 0's micro-batch 0 once, rank 0's micro-batch 1 0.813 times",
    "shared_weight": "mlp.gate_proj.weight and 5 other parameters on all ranks is not a multiple of the right one",
    "resume": "step 2: rank 0 has the sequences of rank 0 in step 1, not its own",
    "seeds": "before step 0: the slices of model.layers.0.mlp.gate_proj.weight on rank 0 and rank 1 are equal",
}


PATIENCE = Patience(longest=60, work=60)  # two stages take turns, on cores that other tests use, too


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare(EXHIBITS.values())


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_fault_is_not_in_the_loss_but_in_gradients_weights_or_data(name: str, tmp_path: Path) -> None:
    exhibit = EXHIBITS[name]
    _, losses = run_exhibit(Submission(exhibit.script, tmp_path, PATIENCE), exhibit, steps=6, optimizer="adam", lr=3e-2)
    assert losses[-1] < 0.95 * losses[0]
    verdict = verdict_of(exhibit, exhibit.script, PATIENCE)
    assert not verdict.passed
    assert OBSERVED[name] in verdict.sentences[0]


@pytest.mark.parametrize(
    ("exhibit", "mend"),
    [
        pytest.param(EXHIBITS[name], mend, id=f"{name}-{'wrong' if mend.says else 'right'}")
        for name, mends in MENDS.items()
        for mend in mends
    ],
)
def test_a_mend_is_judged_by_what_the_ranks_compute(exhibit: Exhibit, mend: Mend, tmp_path: Path) -> None:
    text = exhibit.script.read_text()
    for old, new in mend.changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = tmp_path / exhibit.script.name
    script.write_text(text)
    verdict = verdict_of(exhibit, script, PATIENCE)
    assert verdict.passed == (not mend.says), verdict.sentences
    assert mend.says in verdict.sentences[0]
    assert mend.also in " ".join(verdict.sentences[1:])


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (([1, 2], [3, 4]), "are equal: the model has one of them twice"),
        (([-3, -6], [-9, -12]), "are the same but for their scale: the model has one of them twice"),
        (([2, -1], [4, -3]), ""),
    ],
)
def test_slices_that_ranks_initialize_are_put_together_unless_they_are_copies(
    second: Sequence[Sequence[float]], told: str, tmp_path: Path
) -> None:
    first = [[1, 2], [3, 4]]
    weight = torch.tensor([*first, *second], dtype=torch.float32)
    for rank in range(2):
        record(tmp_path, rank, {"weights.mlp": weight}, start=2 * rank, rows=2)
    records = Recordings(tmp_path, {"layout": {"tp": 2}, "world_size": 2})
    with pytest.raises(Wrong, match=told) if told else contextlib.nullcontext():
        assert load_file(initial_weights(records, tmp_path))["mlp"].equal(weight)


def test_copies_that_ranks_initialize_have_to_be_equal(tmp_path: Path) -> None:
    for rank in range(3):
        record(tmp_path, rank, {"weights.norm": torch.ones(SHAPE) * max(1, rank)})
    equal, different = (Recordings(tmp_path, {"layout": {"tp": ranks}, "world_size": ranks}) for ranks in (2, 3))
    for records, told in ((equal, ""), (different, "before step 0: the copies of norm on rank 0 and rank 2 differ")):
        with pytest.raises(Wrong, match=told) if told else contextlib.nullcontext():
            assert load_file(initial_weights(records, tmp_path))["norm"].equal(torch.ones(SHAPE))


def test_a_run_that_is_resumed_is_judged_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed before the first update did so in the first part."""

    def run_part(_: object, __: object, values: dict[str, Any]) -> tuple[list[Report], list[float]]:
        out = values.get("out", tmp_path / "run")
        (out / RECORDED).mkdir(parents=True)
        (out / RECORDED / out.name).touch()
        facts = [{"logged": [rank], "tokens": [[out.name]], "changed_early": [out.name]} for rank in range(2)]
        return [Report(rank, "ended", facts=each) for rank, each in enumerate(facts)], [2.0 if "out" in values else 1.0]

    monkeypatch.setattr("distlab_exercises.museum.run_script", run_part)
    reports, losses = run_exhibit(Submission(tmp_path / "resume.py", tmp_path), EXHIBITS["resume"])
    assert losses == [2.0, 1.0]
    joined = [{"logged": [rank] * 2, "tokens": [["first"], ["run"]], "changed_early": ["first"]} for rank in range(2)]
    assert [report.facts for report in reports] == joined
    assert {path.name for path in (tmp_path / "run" / RECORDED).iterdir()} == {"first", "run"}


def test_each_exhibit_has_a_mend_and_a_wrong_one() -> None:
    assert MENDS.keys() == EXHIBITS.keys()
    for right, *wrong in MENDS.values():
        assert not right.says
        assert wrong
        assert all(mend.says for mend in wrong)


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_is_a_short_script_with_its_fault(name: str) -> None:
    exhibit, lines, mend = EXHIBITS[name], EXHIBITS[name].lines(), MENDS[name][0]
    assert len(lines) <= 100
    assert ast.get_docstring(ast.parse("\n".join(lines)))
    mended = "\n".join(lines)
    for old, new in mend.changes.items():
        mended = mended.replace(old, new)
    changed = {line[2:] for line in difflib.ndiff(lines, mended.split("\n")) if line.startswith("- ")}
    told = {line.partition("  #")[0].strip() for line in lines if exhibit.is_at_fault(line)}
    mendable = {line.partition("  #")[0].strip() for line in changed if not line.startswith("from ")}
    assert told == mendable | {*mend.elsewhere} == {*exhibit.faults}


def test_the_line_is_checked_first_and_then_the_mended_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, lines = tmp_path / "my_fault", EXHIBITS["clipping"].lines()
    shutil.copytree(EXHIBITS["clipping"].script.parent, folder)
    at_fault = 1 + next(number for number, line in enumerate(lines) if "ReduceOp.AVG)" in line)
    assert launch(["find", str(folder), "--line", str(at_fault + 1)]) == 1
    told = capsys.readouterr().out
    assert "norm = float(square.sqrt()): the fault is not in this line" in told
    assert "# hint: What does each rank know" in told
    assert launch(["find", str(folder), "--line", str(lines.index("") + 1)]) == 1
    assert f"# line {lines.index('') + 1}, which is empty: the fault is not in this line" in capsys.readouterr().out
    (folder / "answer.txt").write_text(f"line {at_fault}, I think\n")
    assert launch(["find", str(folder)]) == 1
    assert "# not yet: after step 0: the weights" in capsys.readouterr().out
    assert launch(["find", str(folder), "--line", "1"]) == 1
    assert "the fault is not in this line" in capsys.readouterr().out, "what is given counts more than the file"
    script = folder / "clipping.py"
    script.write_text(script.read_text().replace("square, ReduceOp.AVG", "square"))
    assert launch(["find", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("# found: it is the training run of one process\n")


def test_the_fault_is_looked_for_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clipping.py").touch()
    monkeypatch.setattr("distlab_exercises.exhibits.MUSEUM", tmp_path / "museum")  # as where the lab is installed
    with pytest.raises(InputError, match=r"clipping\.py: does not exist; the museum is in the lab's checkout"):
        launch(["find", str(tmp_path), "--line", "1"])


def test_what_cannot_be_looked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder with a copy of an exhibit; copy one first"):
        launch(["find", str(tmp_path / "none")])
    with pytest.raises(InputError, match="has no script of an exhibit"):
        launch(["find", str(tmp_path)])
    (tmp_path / "labels.py").touch()
    with pytest.raises(InputError, match="--line: name the line of museum/labels"):
        launch(["find", str(tmp_path)])
    for line in ("0", "1000"):
        with pytest.raises(InputError, match=rf"--line {line}: museum/labels/labels\.py has the lines 1 to"):
            launch(["find", str(tmp_path), "--line", line])
    (tmp_path / "answer.txt").write_text("1000, I think")
    with pytest.raises(InputError, match=r"answer\.txt: 1000: museum/labels/labels\.py has the lines 1 to"):
        launch(["find", str(tmp_path)])
    (tmp_path / "answer.txt").write_text("in the middle")
    with pytest.raises(InputError, match="has no number"):
        launch(["find", str(tmp_path)])
    (tmp_path / "slices.py").touch()
    with pytest.raises(InputError, match=r"several exhibits \(slices.py, labels.py\)"):
        launch(["find", str(tmp_path), "--line", "1"])


def test_all_exhibits_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["find"]) == 0
    told = capsys.readouterr().out
    assert all(f"museum/{name} " in told and exhibit.source in told for name, exhibit in EXHIBITS.items())
