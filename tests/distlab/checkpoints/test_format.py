"""What checkpoints hold, and how those are told that are damaged, or not meant for a run."""

import errno
import json
import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from resource import RLIMIT_FSIZE, setrlimit

import pytest
import torch
from support.chapters import train
from support.processes import run_ranks
from support.terminals import fork_python

from distlab.checkpoints import saving
from distlab.checkpoints.format import checksum_of, latest_valid, numbered
from distlab.checkpoints.models import read_model
from distlab.checkpoints.saving import restore
from distlab.settings.common import parse
from distlab.settings.hybrid import HybridSettings
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SHIPPED_MODEL

pytestmark = pytest.mark.quick

SENTENCE = "there is no complete checkpoint"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after its steps 2 and 4."""
    out = tmp_path_factory.mktemp("whole") / "run"
    trained(out, "--save-every", 2)
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage and to go on from."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08}"


def kept(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def trained(out: Path, *flags: object, before: Callable[[], object] = lambda: None) -> list[str]:
    """Run the primer in a fork, and return the names of the checkpoints that are then there; or why it could not."""

    def work(_: int) -> list[str]:
        before()
        try:
            train(0, "primer/intro.py", [*map(str, flags), "--out", str(out)])
        except InputError as error:
            return [str(error)]
        return kept(out)

    names: list[str] = run_ranks(1, work)[0]
    return names


def test_a_run_is_the_same_under_each_of_its_paths(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(whole)
    other.mkdir()
    monkeypatch.chdir(whole.parent)
    for path in (whole, link, Path(whole.name), step(link, 2)):
        checkpoint = latest_valid(path)
        assert [checkpoint.is_of_run(run) for run in (whole, link, Path(whole.name))] == [True] * 3, path
        assert not checkpoint.is_of_run(other)
    monkeypatch.chdir(whole / "checkpoints")
    for path in (Path("."), Path("step-00000002/..")):
        assert latest_valid(path).step == 4


def rewrite(pattern: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Return what changes a file of a checkpoint."""

    def damage(folder: Path) -> None:
        path = next(folder.glob(pattern))
        path.write_bytes(change(path.read_bytes()))

    return damage


def with_a_flipped_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def with_a_source_that_is_none(content: bytes) -> bytes:
    record = json.loads(content)
    record["data"]["source"] = 3
    del record["sha256"]
    return json.dumps({**record, "sha256": checksum_of(record)}).encode()


flip_a_bit = rewrite("*.safetensors", with_a_flipped_bit)
RECORD = "checkpoint.json"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (rewrite("*.safetensors", lambda content: content[:-1]), " bytes instead of "),
    "a flipped bit": (flip_a_bit, r"\.safetensors is damaged: its checksum"),
    "a flipped bit in another": (rewrite("tokenizer.model", with_a_flipped_bit), r"tokenizer\.model is damaged: its"),
    "a file gone": (lambda folder: next(folder.glob("*.safetensors")).unlink(), r"\.safetensors is missing"),
    "a file too many": (lambda folder: (folder / "b.safetensors").write_bytes(b"b"), r"b\.safetensors does not belong"),
    "no record": (lambda folder: (folder / RECORD).unlink(), "is incomplete: it has no checkpoint.json"),
    "half a record": (rewrite(RECORD, lambda _: b'{"step": 4,'), "cannot be read"),
    "a record of nothing": (rewrite(RECORD, lambda _: b"[]"), "cannot be read"),
    "a record of bytes": (rewrite(RECORD, lambda _: b"\xff\xfe"), "cannot be read"),
    "a source that is none": (rewrite(RECORD, with_a_source_that_is_none), "cannot be read .*data"),
    "another step": (
        rewrite(RECORD, lambda content: re.sub(rb'"step": \d', b'"step": 9', content)),
        "cannot be read .its checksum does not match",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_one_is_named_and_passed_over(how: str, run: Path) -> None:
    damage, sentence = DAMAGE[how]
    damage(step(run, 4))
    said: list[str] = []
    assert latest_valid(run, said.append).folder == step(run, 2)
    [remark] = said
    assert remark.startswith("skipped a checkpoint: step-00000004"), remark
    assert re.search(sentence, remark), remark
    if how == "cut short":
        left = next(step(run, 4).glob("*.safetensors")).stat().st_size
        assert f" has {left:,} bytes instead of {left + 1:,}" in remark
    damage(step(run, 2))
    with pytest.raises(InputError, match=f"^{run}: {SENTENCE}.*{sentence}"):
        latest_valid(run)


def test_a_folder_without_any(tmp_path: Path) -> None:
    for folder, sentence in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path, SENTENCE)):
        with pytest.raises(InputError, match=f"^{folder}: {sentence}"):
            latest_valid(folder)


def test_settings_are_the_checkpoints_by_default(run: Path) -> None:
    settings = parse(HybridSettings(), "", ["0", "--resume", str(run), "--tp", "2"])
    assert (settings.dmodel, settings.num_heads, settings.n_layers, settings.seq_len) == (32, 2, 2, 24)
    assert settings.hidden_dim == 128
    assert (settings.optimizer, settings.lr, settings.data, settings.tokenizer) == ("sgd", 0.5, "sample", None)
    assert settings.batch_size == HybridSettings().batch_size
    assert parse(HybridSettings(), "", ["0", "--resume", str(run), "--lr", "0.1"]).lr == 0.1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--dmodel 64", "--resume {run}: its model has --dmodel 32, not 64; leave that flag out"),
        ("--num-heads 4", "--resume {run}: its model has --num-heads 2, not 4; leave that flag out"),
        ("--num-kv-heads 1", "--resume {run}: its model has --num-kv-heads 2, not 1; leave that flag out"),
        ("--hidden-dim 96", "--resume {run}: its model has --hidden-dim 128, not 96; leave that flag out"),
        ("--seq-len 25", "--resume {run}: its model reads 24 tokens at most, not --seq-len 25"),
        ("--optimizer adam", "--resume {run}: it was trained with --optimizer sgd, not adam"),
        ("--seed 1", "{run}/checkpoints/step-00000004: it was trained on --data sample and --seed 0; leave out"),
        ("--data {text}", "{run}/checkpoints/step-00000004: it was trained on --data sample and --seed 0; leave out"),
        ("--tokenizer {other}", "--resume {run}: it was trained with another tokenizer than --tokenizer {other}"),
    ],
)
def test_what_is_another_run_is_refused(flags: str, sentence: str, run: Path, tmp_path: Path) -> None:
    names = {"run": run, "text": tmp_path / "stories.txt", "other": tmp_path / "other.model"}
    names["text"].write_text("Once upon a time there was a dog.\n" * 40)
    names["other"].write_bytes(SHIPPED_MODEL.read_bytes() + b"\xa0\x06\x00")  # a field that means nothing
    with pytest.raises(InputError) as refused:
        parse(TrainSettings(), "", ["--resume", str(run), *flags.format(**names).split()])
    assert str(refused.value).startswith(sentence.format(**names))


def test_a_file_of_stories_may_move_but_not_change(tmp_path: Path) -> None:
    stories, moved = tmp_path / "a.txt", tmp_path / "b.txt"
    stories.write_text("Once upon a time there was a dog.\n<|endoftext|>\n" * 40)
    trained(tmp_path / "run", "--data", stories, "--save-every", 2)

    def log(out: str, *flags: object) -> str:
        resume = ["--resume", tmp_path / "run", "--steps", 5, "--out", tmp_path / out]
        ended = fork_python("primer/intro.py", *resume, *flags).finish()
        assert ended.status == 0, ended.err
        return ended.out

    assert f"# its data is in {stories}, a file of this machine that the checkpoint names\n" in log("here")
    stories.rename(moved)
    elsewhere = log("elsewhere", "--data", moved)
    assert f"# stories from {moved}\n" in elsewhere
    assert "that the checkpoint names" not in elsewhere
    resume = ["--resume", str(tmp_path / "run"), "--data", str(moved)]
    assert parse(TrainSettings(), "", resume).data == str(moved)
    [sentence] = trained(tmp_path / "auto", *resume[:2], "--data", "auto", "--steps", 6)
    assert f"it was trained on --data {stories}" in sentence
    moved.write_text((told := moved.read_text())[:-50] + told[-50:].replace("dog", "cat"))
    with pytest.raises(InputError, match=f"it was trained on --data {stories}; leave out"):
        parse(TrainSettings(), "", resume)


def test_a_folder_with_another_runs_checkpoints_is_not_written_to(run: Path, tmp_path: Path) -> None:
    for flags in ([], ["--save-every", "2"], ["--resume", str(shutil.copytree(run, tmp_path / "third"))]):
        with pytest.raises(InputError, match=f"^--out {run}: has checkpoints of another run"):
            parse(TrainSettings(), "", [*flags, "--out", str(run)])  # would write over its metrics, too
        parse(TrainSettings(), "", [*flags, "--out", str(run), "--resume", str(run)])


def test_nothing_in_it_can_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds JSON, safetensors and a tokenizer; and no reader of pickles is called on the way back."""
    run = tmp_path / "run"
    trained(run, "--save-every", 2, "--optimizer", "adam")
    checkpoint = latest_valid(run)
    endings = {path.suffix for path in checkpoint.folder.iterdir()}
    assert endings == {".json", ".safetensors", ".model"}

    def read() -> list[torch.Tensor]:
        model = read_model(run)
        net = LLama(CausalLLama, **model.options, seed=1)
        optimizer = torch.optim.Adam(net.parameters())
        restore(checkpoint, dict(net.named_parameters()), optimizer, 0, checkpoint.layout)
        moments = [state for parameter in net.parameters() for state in optimizer.state[parameter].values()]
        assert all(moment.any() for moment in moments)
        return [*model.parameters.values(), *net.parameters(), *moments]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    before = read()  # and with it import what defines unpicklers of its own
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert all(torch.equal(*pair) for pair in zip(before, read(), strict=True))


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path) -> None:
    [sentence] = trained(tmp_path, "--save-every", 2, before=lambda: setrlimit(RLIMIT_FSIZE, (200_000, 200_000)))
    unfinished = tmp_path / "checkpoints" / "step-00000002.unfinished"
    assert sentence == f"--save-every: cannot write {unfinished} (File too large)"


@pytest.mark.parametrize(
    ("error", "of_folders"),
    [(errno.EINVAL, True), (errno.ENOSYS, False), (errno.ENOTSUP, True), (errno.EIO, False), (errno.EIO, True)],
)
def test_a_file_system_that_cannot_sync(
    error: int, of_folders: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot put folders, or files, on the disk when it is asked to."""
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if of_folders == stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(error, os.strerror(error))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    [first, *others] = trained(tmp_path, "--save-every", 2)
    if error == errno.EIO:  # the disk has failed
        assert first.endswith("step-00000002.unfinished (Input/output error)")
    else:
        assert [first, *others] == ["step-00000002", "step-00000004"]
        assert latest_valid(tmp_path).step == 4


NOT_OURS = (
    "step-100 step-00000002-hf step-00000004.best step-best step-0000003 step-+0000001 step-000000003 step-".split()
)


@pytest.mark.parametrize("begins", [False, True])
def test_names_that_the_lab_does_not_give_are_somebody_elses(begins: bool, run: Path, tmp_path: Path) -> None:
    """They are neither deleted nor moved nor resumed nor counted, whether the run begins or goes on."""
    out, resume = (tmp_path / "new", []) if begins else (run, ["--resume", run])
    for name in NOT_OURS:
        shutil.copytree(step(run, 2), out / "checkpoints" / name)
    (out / "checkpoints" / "step-00000007-unfinished").mkdir()
    before = {*kept(out)} - {"step-00000002", "step-00000004"}
    if not begins:
        assert latest_valid(run).folder == step(run, 4)
    names = trained(out, *resume, *"--steps 8 --save-every 2 --keep 2".split())
    assert set(names) == before | {"step-00000006", "step-00000008"}
    shutil.copytree(out / "checkpoints" / "step-best", out / "checkpoints" / "step-00000009.unfinished")
    for name in ("step-best", "step-00000009.unfinished"):
        given = out / "checkpoints" / name
        assert read_model(given).step == 2, "a checkpoint may have any name if it is given"
    saving.make_room(out, latest_valid(given))
    assert latest_valid(given).step == 2, "a run that resumes from it keeps it"


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    names = ["step-00000009", "step-99999999", "step-100000000", "step-1000000000"]
    for name in (*names, "step-0100000000", "step-00000010.unfinished"):
        (tmp_path / name).mkdir()
    assert [path.name for path in numbered(tmp_path).values()] == names
    assert [path.name for path in numbered(tmp_path, ".unfinished").values()] == ["step-00000010.unfinished"]
    assert numbered(tmp_path / "none") == {}


def test_from_an_earlier_step_a_run_leaves_later_ones_aside(run: Path) -> None:
    """And keeps what it has just written, also beside a later one that another run has put there."""
    flip_a_bit(step(run, 4))
    flags = ["--resume", step(run, 2), "--save-every", 1, "--keep", 1, "--steps", 3]
    assert trained(run, *flags) == ["step-00000003", "superseded"]
    assert [path.name for path in (run / "checkpoints" / "superseded").iterdir()] == ["step-00000004"]
    assert latest_valid(run).folder == step(run, 3)
    shutil.copytree(step(run, 3), step(run, 900))
    tensors, record = {"weight": torch.ones(3)}, {"step": 5, "tokens": 0, "model": {}, "settings": {}}
    saving.save(run, tensors, record, b"", keep=1)
    assert kept(run) == ["step-00000005", "step-00000900", "superseded"]


def test_none_is_deleted_before_there_are_more_than_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step(tmp_path, 0).mkdir(parents=True)  # without a record, it is no checkpoint
    for number in range(1, 7):
        if number == 6:
            monkeypatch.setattr(shutil, "rmtree", lambda _: None)  # the run is killed as it begins to delete one
        record = {"step": number, "tokens": 0, "model": {}, "settings": {}}
        saving.save(tmp_path, {"weight": torch.ones(3)}, record, b"", keep=4)
        left = [step(tmp_path, each).name for each in (0, *range(max(1, number - 3), number + 1))]
        assert kept(tmp_path) == sorted([*left, *["step-00000002.unfinished"] * (number == 6)])


def test_one_that_the_user_has_given_a_later_name_is_in_the_way_of_that_step(run: Path) -> None:
    step(run, 4).rename(step(run, 6))
    [sentence] = trained(run, "--resume", run, "--steps", 8, "--save-every", 2)
    assert sentence.startswith(f"--out {run}: {step(run, 6)} is in the way of its checkpoints")
    assert latest_valid(run).step == 4


def test_what_was_put_aside_earlier_stays(run: Path) -> None:
    for _ in range(3):
        names = trained(run, "--resume", step(run, 2), "--steps", 4, "--save-every", 1)
        assert names == ["step-00000002", "step-00000003", "step-00000004", "superseded"]
    aside = sorted(path.name for path in (run / "checkpoints" / "superseded").iterdir())
    third = ["step-00000003", "step-00000003-2"]  # the run that was resumed first has none
    assert aside == [*third, "step-00000004", "step-00000004-2", "step-00000004-3"]


def with_half_a_record(path: Path) -> None:
    path.mkdir()
    (path / "checkpoint.json").write_text('{"broken')


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "step-00001000": lambda path: path.mkdir(),
    "step-00000004": lambda path: path.write_text("a file"),
    "step-00000002": with_half_a_record,
    "step-00000004.unfinished": lambda path: path.write_text("a file"),
    "step-00000002.unfinished": lambda path: path.symlink_to(path.parent, target_is_directory=True),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_is_named_before_the_first_step(name: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / name
    place.parent.mkdir()
    IN_THE_WAY[name](place)
    [sentence] = trained(tmp_path, "--steps", 4, "--save-every", 2)
    advice = "is in the way of its checkpoints; move it, or give another folder"
    assert sentence == f"--out {tmp_path}: {place} {advice}"
    assert os.path.lexists(place)
    assert not (tmp_path / "metrics.jsonl").exists()
    shutil.rmtree(place.parent)
    place.parent.write_text("a file")
    [sentence] = trained(tmp_path, "--steps", 4, "--save-every", 2)
    assert sentence == f"--save-every: cannot write checkpoints in {place.parent} (File exists)"


def test_a_run_that_has_taken_its_steps(run: Path, tmp_path: Path) -> None:
    """Elsewhere that is a mistake; in its own folder, as after a restart, all is done."""
    asked = ["--resume", run, "--steps", 4]
    sentence = f"--steps 4: {step(run, 4)} has taken 4 steps already; give more"
    assert trained(tmp_path / "elsewhere", *asked) == [sentence]
    held = (run / "memory.json").read_text()
    assert trained(run, *asked) == ["step-00000002", "step-00000004"]
    log = (run / "rank0.log").read_text()
    assert log.count("# memory, MB") == log.count("# draw the loss: ") == 1, "of no steps there is nothing to tell"
    assert (run / "memory.json").read_text() == held
    flip_a_bit(step(run, 4))  # then there is something to do
    assert trained(run, *asked, "--save-every", 2)[:2] == ["step-00000002", "step-00000004"]
    assert latest_valid(run).folder == step(run, 4)


def test_a_tokenizer_of_ones_own_outlives_the_checkpoint_that_it_came_from(tmp_path: Path) -> None:
    own, run = tmp_path / "own.model", tmp_path / "run"
    own.write_bytes(SHIPPED_MODEL.read_bytes() + b"\xa0\x06\x00")
    flags = "--save-every 1 --keep 1 --eval-every 3 --steps".split()
    trained(run, *flags, 2, "--tokenizer", own)
    own.unlink()
    assert trained(run, *flags, 6, "--resume", run) == ["step-00000006"]
    assert latest_valid(run).tokenizer.read_bytes().endswith(b"\xa0\x06\x00")
