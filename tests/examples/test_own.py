"""A model and a schedule of one's own: the run of one process in five ways, saved in one and resumed in another."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chapters import State, assert_equal, merged, records, train_on
from support.processes import LAB, Ended
from support.terminals import fork_launcher

from distlab.parallel.tensor import shard
from distlab.pipeline import schedules
from distlab.pipeline.schedules import all_stages, read_schedule
from distlab.show_schedule import Request, show
from simplellm.errors import InputError

OWN_SCHEDULE = "examples/own_schedule.py"
WAYS = {  # ranks, script, flags; six sequences a step in each
    "one": (1, "examples/gpt_dp.py", "--world-size 1 --batch-size 6"),
    "dp": (2, "examples/gpt_dp.py", "--world-size 2 --batch-size 3"),
    "mydp": (2, "examples/gpt_mydp.py", "--world-size 2 --batch-size 3"),
    "zero": (2, "examples/gpt_zero.py", "--world-size 2 --batch-size 3 --shard weights"),
    "pp": (2, "examples/gpt_pp.py", "--world-size 2 --batch-size 6"),
    "pp-own": (2, "examples/gpt_pp.py", f"--world-size 2 --batch-size 6 --schedule {LAB / OWN_SCHEDULE}"),
    "pp-zb": (2, "examples/gpt_pp.py", "--world-size 2 --batch-size 6 --schedule zb-h1"),
    "tp": (2, "examples/gpt_tp.py", "--world-size 2 --batch-size 6"),
}


@pytest.fixture(scope="module", autouse=True)
def examples_are_importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(LAB / "examples"))
        yield


def trained(way: str, out: Path, *flags: str) -> tuple[list[State], list[float]]:
    ranks, script, own = WAYS[way]
    parameters, _, losses = train_on(ranks, script, out, "--steps", "4", *own.split(), *flags)
    return parameters, losses


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, list[float]]:
    """The run of one process: the folder with its checkpoint, its parameters, its losses."""
    folder = tmp_path_factory.mktemp("one")
    [parameters], losses = trained("one", folder, "--save-every", "4")
    return folder, parameters, losses


@pytest.mark.quick
@pytest.mark.parametrize("way", [way for way in WAYS if way != "one"])
def test_the_own_gpt_is_trained_as_by_one_process(
    way: str, one: tuple[Path, State, list[float]], tmp_path: Path
) -> None:
    _, expected, expected_losses = one
    parameters, losses = trained(way, tmp_path)
    log = (tmp_path / "rank0.log").read_text()
    assert ("weight gradients in I, which leaves nothing to W" in log) == (way == "pp-zb")
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert len(set(losses)) == len(losses), "it learns"
    assert_equal(merged(parameters), expected)


@pytest.mark.parametrize(("before", "after"), [("zero", "pp"), ("pp", "tp"), ("tp", "zero")])
def test_it_is_saved_in_one_layout_and_resumed_in_another(before: str, after: str, tmp_path: Path) -> None:
    """With validation, a learning rate that changes, and the table of memory."""
    recipe = "--optimizer adam --lr 1e-2 --warmup-steps 1 --lr-schedule cosine --eval-every 2 --eval-sequences 4"
    _, expected = trained(before, tmp_path / "before", *recipe.split(), "--save-every", "2")
    checkpoint = tmp_path / "before" / "checkpoints" / "step-00000002"
    _, losses = trained(after, tmp_path / "after", *recipe.split(), "--resume", str(checkpoint))
    assert losses == pytest.approx(expected[2:], rel=1e-5)
    other, own = (records(tmp_path / run)[-1]["validation_loss"] for run in ("before", "after"))
    assert own == pytest.approx(other, rel=1e-5)
    assert all("# memory, MB" in (tmp_path / run / "rank0.log").read_text() for run in ("before", "after"))


def test_another_model_does_not_resume_it(one: tuple[Path, State, list[float]]) -> None:
    ended = fork_launcher("primer", "--resume", one[0], "--steps", "9").finish()
    assert ended.status == 2
    assert "its model is of the architecture gpt, not llama" in ended.err


def test_what_the_lab_cannot_know_is_said() -> None:
    from gpt import GPT  # the example's

    settings = type("Sizes", (), {"seed": 0, "dmodel": 8, "num_heads": 2, "n_layers": 1, "seq_len": 8})()
    with pytest.raises(InputError, match=r"blocks.0.attention.q \(Linear\) is a layer that shard cannot split"):
        shard(GPT(16, settings))


TINY = "--dmodel 16 --num-heads 2 --n-layers 3 --seq-len 16 --data sample --device cpu --steps 2".split()


def steps_of(ended: Ended) -> list[str]:
    assert ended.status == 0, ended.err
    return [" ".join(line.split()[:2]) for line in ended.out.splitlines() if line[:1].isdigit()]


def test_an_own_schedule_is_run_drawn_and_listed(tmp_path: Path) -> None:
    flags = ["--schedule", LAB / OWN_SCHEDULE, *TINY, "--trace", "--out", tmp_path / "own"]
    own = fork_launcher("pp-gpipe", *flags).finish()
    assert [line.split()[0] for line in steps_of(own)] == ["0", "1"]
    assert (tmp_path / "own" / "timeline.png").exists()
    lines = list(show(Request(str(LAB / OWN_SCHEDULE), stages=3, micro_batches=3)))
    assert lines[2].split()[2:] == "F0 F1 F2 . . . . . . B2 - B1 - B0 -".split()


def test_a_checkpoint_does_not_choose_the_file_of_a_schedule(tmp_path: Path) -> None:
    """The file is a program, and the checkpoint may be a stranger's."""
    order, ran = tmp_path / "order.py", tmp_path / "ran"
    order.write_text(f"{(LAB / OWN_SCHEDULE).read_text()}\nopen({str(ran)!r}, 'w').close()\n")
    flags = ("hybrid", *TINY, "--dp", "1", "--pp", "2")
    first = "--schedule", order, "--layers-per-stage", "1,2", "--save-every", "1"
    steps_of(fork_launcher(*flags, *first, "--out", tmp_path / "run").finish())
    resume = "--resume", tmp_path / "run/checkpoints/step-00000001"
    for given in ([], ["--schedule", order]):
        ran.unlink(missing_ok=True)
        ended = fork_launcher(*flags, *resume, *given, "--out", tmp_path / f"again{len(given)}").finish()
        assert len(steps_of(ended)) == 1
        assert ran.exists() == bool(given)
        settings = json.loads((tmp_path / f"again{len(given)}/config.json").read_text())["settings"]
        assert settings["layers_per_stage"] == (
            "1,2" if given else None
        )  # another schedule may have another number of stages
        assert (f"the checkpoint's run followed --schedule {order}; this one follows dapple" in ended.out) != bool(
            given
        )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no such file"),
        ("x = 1", "it defines no schedule"),
        ("import nothing_like_this", "the file cannot be run: ModuleNotFoundError"),
    ],
)
def test_a_file_without_a_schedule(text: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=f"--schedule {path}: {sentence}"):
        read_schedule(str(path))


@pytest.mark.parametrize("last", ["one_more", "gpipe"])
def test_the_last_schedule_of_a_file_is_used(last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it has the name of another."""
    monkeypatch.setattr(schedules, "SCHEDULES", dict(schedules.SCHEDULES))
    path = tmp_path / "mine.py"
    each = "[kind(stage, k) for k in range(micro_batches) for kind in (Forward, Backward)]"
    more = f"@schedule()\ndef {last}(stage, stages, micro_batches):\n    return {each}\n"
    path.write_text((LAB / OWN_SCHEDULE).read_text() + more)
    read_schedule(str(path))
    assert all_stages(str(path), 2, 3) == all_stages("naive", 2, 3)


def test_a_schedule_that_cannot_run_says_why(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = (LAB / OWN_SCHEDULE).read_text().replace("last_in_first_out", "backward_first")
    path.write_text(
        text.replace("return [*forward, *(", "return [*(").replace("(micro_batches)))]", "(micro_batches))), *forward]")
    )
    read_schedule(str(path))
    programs = all_stages(str(path), 2, 2)
    assert [str(action) for action in programs[0]] == ["B1", "B0", "F0", "F1"]
    ended = fork_launcher("pp-gpipe", "--schedule", path, *TINY).finish()
    assert ended.status == 2
    assert "stage 0 runs B2 before F2" in ended.err


def test_plain_ddp_still_runs() -> None:
    assert fork_launcher("examples/plain_ddp.py", "--world-size", "2").finish(90).status == 0
