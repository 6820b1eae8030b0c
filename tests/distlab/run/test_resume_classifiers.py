"""The classifiers keep checkpoints and go on from them as the Llama's runs do, and nobody takes one for the other."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file
from support import chapters, sentiment_ranks
from support.bad_inputs.files import forge
from support.chapters import losses, records
from support.processes import LAB, free_port, run_ranks
from support.small_models import saved_model
from support.terminals import fork_python

from distlab.checkpoints.format import latest_valid
from distlab.checkpoints.models import read_model, write_model
from distlab.exchange import export
from distlab.run.run import Run
from distlab.settings.common import parse
from distlab.settings.resuming import file_identity
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError

HALF, STEPS = 4, 10  # of steps; no epoch ends there
INPUTS, REVIEWS = 30, 8  # to a step, of all ranks together
CPU = ["--device", "cpu"]
MLP = f"--n-layers 3 --d-in 16 --n-classes 4 --d-hidden 8 --train-size 100 --niters {STEPS} --lr 0.2".split()
WIDE = "--n-layers 5 --d-in 300 --d-hidden 300 --niters 6 --save-every 3"
SENTIMENT = f"--samples 40 --layers 2 --dim 16 --heads 4 --epochs 2 --bsz {REVIEWS}".split()
LAYOUTS = {  # ranks, script, flags
    "mlp": (1, "primer/mlp.py", "--batch-size 30"),
    "mlp-ddp": (2, "DP/ddp/mlp_ddp.py", "--world-size 2 --batch-size 15"),
    "mlp-ddp wide": (3, "DP/ddp/mlp_ddp.py", f"--world-size 3 --batch-size 10 {WIDE}"),
    "mlp-mydp": (3, "DP/mydp/mlp_mydp.py", "--world-size 3 --batch-size 10"),
    "sentiment": (1, "TP/sentiment/tp_tensor_parallel.py", "--world-size 1 --tp 1"),
    "sentiment dp": (2, "TP/sentiment/tp_tensor_parallel.py", "--world-size 2 --tp 1"),
    "sentiment tp": (2, "TP/sentiment/tp_tensor_parallel.py", "--world-size 2 --tp 2"),
    "sentiment dp tp": (4, "TP/sentiment/tp_tensor_parallel.py", "--world-size 4 --tp 2"),
}


def load(script: str) -> ModuleType:
    """A classifier's script as a module. Only forked ranks call this."""
    return sentiment_ranks.load(Path(script).stem) if script.startswith("TP") else chapters.load(script)


def train(rank: int, script: str, flags: list[str]) -> None:
    module = load(script)
    run: Run[Any] = Run(parse(module.DEFAULTS, "", [str(rank), *flags]), LAB / script)
    module.train(run)
    run.close()


def run(layout: str, out: Path, *flags: str | Path) -> list[float]:
    """The losses of a run of a layout."""
    ranks, script, own = LAYOUTS[layout]
    shape = SENTIMENT if layout.startswith("sentiment") else MLP
    where = [*CPU, "--master-port", str(free_port()), "--out", str(out)]
    run_ranks(ranks, train, script, [*shape, *own.split(), *where, *map(str, flags)])
    return losses(out)


Runs = Callable[..., tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs by layout and flags, as they are first asked for: the folder with its checkpoints, and the losses."""
    folder, runs = tmp_path_factory.mktemp("saved"), dict[str, tuple[Path, list[float]]]()

    def get(layout: str, *flags: str) -> tuple[Path, list[float]]:
        name = " ".join((layout, *flags))
        if name not in runs:
            runs[name] = folder / name, run(layout, folder / name, "--save-every", str(HALF), *flags)
        return runs[name]

    return get


def step(run: Path, number: int = HALF) -> Path:
    return run / "checkpoints" / f"step-{number:08}"


def content(checkpoint: Path) -> dict[str, list[bytes]]:
    """The parts of each tensor, of parameters, optimizer state and random generators, whoever wrote them."""
    files = [load_file(path) for path in checkpoint.glob("*.safetensors")]
    names = {name for tensors in files for name in tensors}
    return {name: sorted(file[name].numpy().tobytes() for file in files if name in file) for name in names}


@sentiment_ranks.in_a_fork
def settings_of(layout: str, *flags: str | Path) -> Any:
    """What a script's flags come to, read in a fork."""
    try:
        return vars(parse(load(LAYOUTS[layout][1]).DEFAULTS, "", ["0", *map(str, flags)]))
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("layout", ["mlp-mydp", "sentiment dp tp"])
def test_the_same_layout_goes_on_bit_for_bit(layout: str, saved: Runs, tmp_path: Path) -> None:
    """Also what dropout draws."""
    flags = ["--dropout", "0.3"] if layout.startswith("sentiment") else []
    folder, expected = saved(layout, *flags)
    assert len(set(expected)) == STEPS, "it learns something in every step"
    own = run(layout, tmp_path, "--resume", step(folder), "--save-every", str(HALF))
    assert own == expected[HALF:]
    assert content(step(tmp_path, STEPS)) == content(step(folder, STEPS))


@pytest.mark.parametrize(("before", "after"), [("mlp-mydp", "mlp"), ("mlp", "mlp-mydp"), ("sentiment tp", "sentiment")])
def test_another_layout_goes_on(before: str, after: str, saved: Runs, tmp_path: Path) -> None:
    folder, expected = saved(before)
    assert run(after, tmp_path, "--resume", step(folder)) == pytest.approx(expected[HALF:], rel=1e-5)


def test_ranks_that_share_a_layer_draw_the_same_after_a_change_of_layout(saved: Runs, tmp_path: Path) -> None:
    """Their dropout has to leave out the same; the checkpoint's generators are those of two replicas."""
    folder, _ = saved("sentiment dp", "--dropout", "0.3")
    run("sentiment tp", tmp_path, "--resume", step(folder), "--save-every", str(STEPS))
    saved_tensors = content(step(tmp_path, STEPS))
    assert saved_tensors["random.0.cpu"] == saved_tensors["random.1.cpu"]


@pytest.mark.parametrize(("layout", "unit", "a_step"), [("mlp", "inputs", INPUTS), ("sentiment", "reviews", REVIEWS)])
def test_it_goes_on_where_it_was(layout: str, unit: str, a_step: int, saved: Runs, tmp_path: Path) -> None:
    """With the run's own folder for --out; and a damaged checkpoint is named and passed over."""
    folder, expected = saved(layout)
    own = shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(step(own, STEPS))
    shard = next(step(own, 8).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run(layout, own, "--resume", own, "--save-every", "5", "--keep", "2") == expected
    steps = [(record["step"], record[unit]) for record in records(own)]
    assert steps == [(number, (number + 1) * a_step) for number in range(STEPS)]
    log = (own / "rank0.log").read_text()
    assert "# skipped a checkpoint: step-00000008: shard-" in log
    assert f"# resuming from {step(own)}, after {HALF} steps\n" in log
    kept = sorted(path.name for path in (own / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000010", "superseded"]


def test_settings_are_the_checkpoints_by_default(saved: Runs) -> None:
    folder, _ = saved("mlp-mydp")
    sizes = {"n_layers": 3, "d_in": 16, "n_classes": 4, "d_hidden": 8, "train_size": 100}
    same = settings_of("mlp-ddp", "--resume", folder)
    assert same.items() >= {**sizes, "lr": 0.2, "batch_size": 10}.items()
    other = settings_of("mlp", "--resume", folder, "--lr", "0.3")
    assert other.items() >= {**sizes, "lr": 0.3, "batch_size": INPUTS}.items(), "one process has the whole batch"
    assert settings_of("mlp", "--resume", folder, "--batch-size", "7")["batch_size"] == 7
    folder, _ = saved("sentiment dp", "--dropout", "0.3")
    expected = {"layers": 2, "dim": 16, "heads": 4, "samples": 40, "bsz": 8, "dropout": 0.3, "data": "sample"}
    assert settings_of("sentiment", "--resume", folder, "--tp", "2").items() >= expected.items()


@pytest.mark.parametrize(
    ("layout", "flags", "sentence"),
    [
        ("mlp", "--d-hidden 9", "its model has --d-hidden 8, not 9; leave that flag out"),
        ("mlp", "--n-layers 2", "its model has --n-layers 3, not 2; leave that flag out"),
        ("mlp", "--seed 1", "it was trained with --seed 0, not 1; leave that flag out"),
        ("mlp", "--train-size 99", "it was trained with --train-size 100, not 99; leave that flag out"),
        ("sentiment", "--dim 32", "its model has --dim 16, not 32; leave that flag out"),
        ("sentiment", "--bsz 4", "it was trained with --bsz 8, not 4; leave that flag out"),
        ("sentiment", "--seed 1", "it was trained with --seed 0, not 1; leave that flag out"),
        ("sentiment", "--optimizer sgd", "it was trained with --optimizer adam, not sgd; leave that flag out"),
        ("sentiment", "--data imdb", "it was trained on --data sample and --seed 0; leave out the flags that differ"),
    ],
)
def test_what_is_another_run_is_refused(layout: str, flags: str, sentence: str, saved: Runs) -> None:
    folder, _ = saved(layout)
    refusal = settings_of(layout, "--resume", folder, *flags.split())
    assert refusal in (f"--resume {folder}: {sentence}", f"{step(folder, STEPS)}: {sentence}")


def test_a_folder_of_reviews_is_its_content_in_whatever_order_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(f"text,label\n{name},1\n")
    moved = shutil.copytree(tmp_path, tmp_path.with_name("moved"))
    before, listed = file_identity(str(tmp_path)), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: reversed([*listed(folder, pattern)]))
    assert before == file_identity(str(tmp_path)) == file_identity(str(moved)) | {"source": str(tmp_path)}
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert file_identity(f"~/{tmp_path.name}") == before
    (moved / "test.csv").rename(moved / "tests.csv")
    assert before["sha256_of_first_mib"] != file_identity(str(moved))["sha256_of_first_mib"]
    for name, first, second in (("a", 1, 2), ("b", 2, 1)):  # MiB
        (tmp_path / name).mkdir()
        (tmp_path / name / "1").write_bytes(bytes(first << 20))
        (tmp_path / name / "2").write_bytes(bytes(second << 20))
    a, b = (file_identity(str(tmp_path / name)) for name in "ab")
    assert a["bytes"] == b["bytes"]
    assert a["sha256_of_first_mib"] != b["sha256_of_first_mib"], "it has the size of each file"


def test_another_tokenizer_is_refused(saved: Runs, tmp_path: Path) -> None:
    own = shutil.copytree(saved("sentiment")[0], tmp_path / "run")
    with (step(own, STEPS) / "tokenizer.model").open("ab") as file:
        file.write(b"\xa0\x06\x00")  # a field that means nothing
    forge(step(own, STEPS), lambda _: None)
    sentence = "it was trained with another tokenizer than the one that comes with the lab"
    assert settings_of("sentiment", "--resume", own) == f"--resume {own}: {sentence}"


def test_another_architecture_is_refused(saved: Runs, tmp_path: Path) -> None:
    write_model(tmp_path / "llama", saved_model())
    folders = {"mlp": saved("mlp")[0], "sentiment": saved("sentiment")[0], "llama": tmp_path / "llama"}

    def refusal(own: str, theirs: str) -> str:
        return f"--resume {folders[theirs]}: its model is of the architecture {theirs}, not {own}; give a run of the"

    for own, theirs in (("mlp", "sentiment"), ("mlp", "llama"), ("sentiment", "mlp"), ("sentiment", "llama")):
        assert settings_of(own, "--resume", folders[theirs]).startswith(refusal(own, theirs))
    with pytest.raises(InputError, match=refusal("llama", "mlp")):
        parse(TrainSettings(), "", ["--resume", str(folders["mlp"])])


def test_a_run_that_has_taken_its_steps(saved: Runs, tmp_path: Path) -> None:
    for layout, flag in (("mlp", f"--niters {STEPS}"), ("sentiment", "--epochs 2")):
        folder, _ = saved(layout)
        with pytest.raises(AssertionError) as failed:
            run(layout, tmp_path / layout, "--resume", folder)
        assert f"{flag}: {step(folder, STEPS)} has taken {STEPS} steps already; give more" in str(failed.value)


def test_no_story_and_no_export_of_a_classifier(saved: Runs, tmp_path: Path) -> None:
    for layout in ("mlp", "sentiment"):
        folder, _ = saved(layout)
        sentence = (
            f"{step(folder, STEPS)}: its model is of the architecture {layout}; only a llama can tell stories and be "
            "exported"
        )
        with pytest.raises(InputError) as refused:
            read_model(folder)
        assert str(refused.value) == sentence
        with pytest.raises(InputError) as refused:
            export.main(export.Request(folder, tmp_path / "exported"))
        assert str(refused.value) == sentence
    ended = fork_python("primer/tell_story.py", folder).finish()
    assert (ended.status, ended.err) == (2, f"# {sentence}\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(inputs="many"),
        lambda record: record.update(unit=[]),
        lambda record: record.update(position={"document": 1, "offset": 2}),
        lambda record: record.update(layout={"dp": "many"}),
    ],
)
def test_a_record_that_cannot_be(change: Callable[[dict[str, Any]], object], saved: Runs, tmp_path: Path) -> None:
    own = shutil.copytree(saved("mlp")[0], tmp_path / "run")
    forge(step(own, STEPS), change)
    said: list[str] = []
    assert latest_valid(own, said.append).step == 8
    assert "step-00000010 is damaged: checkpoint.json cannot be read" in said[0]


@pytest.mark.parametrize(
    ("name", "value"), [("lr", "fast"), ("lr", None), ("train_size", "all"), ("train_size", True), ("d_in", "wide")]
)
def test_a_setting_that_cannot_be(name: str, value: object, saved: Runs, tmp_path: Path) -> None:
    """Only the script knows the types of its settings."""
    own = shutil.copytree(saved("mlp")[0], tmp_path / "run")
    forge(step(own, STEPS), lambda record: record["model" if name == "d_in" else "settings"].update({name: value}))
    sentence = f"{step(own, STEPS)}: its record has {value!r} for --{name.replace('_', '-')}"
    assert settings_of("mlp", "--resume", own) == sentence


def test_torchs_wrapper_goes_on_bit_for_bit_on_three_ranks(tmp_path: Path) -> None:
    """Where the order matters in which numbers are added up, and with it the bucket that a gradient lies in."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = run("mlp-ddp wide", whole)
    assert run("mlp-ddp wide", resumed, "--resume", step(whole, 3)) == expected[3:]
    assert content(step(resumed, 6)) == content(step(whole, 6))
