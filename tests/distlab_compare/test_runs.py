"""Two recorded runs, of tensors that are written by hand."""

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from safetensors.torch import save_file
from support.processes import LAB
from support.written_records import ONE_PROCESS, SHAPE, configure, record
from torch import Tensor

from distlab.checkpoints.saving import save
from distlab.run.recording import file_of
from distlab.run.steps import STOP_AFTER
from distlab_compare.command import RecordedRun, Request, compare, one_process_flags
from distlab_compare.differences import Difference, tell
from distlab_compare.mistakes import Mistake
from distlab_compare.records import Recordings, TensorPart
from distlab_compare.runs import Divergence, Pair
from distlab_compare.saved import by_step
from simplellm.errors import InputError


def compared(folder: Path, layout: dict[str, int] | None = None, **options: Any) -> Divergence:
    """Compare the run in a folder with the one process beside it, and return their first divergence."""
    layout = layout or {}
    run = Recordings(folder / "run", {"layout": layout, "world_size": math.prod(layout.values())})
    divergence = Pair(run, Recordings(folder / "one", ONE_PROCESS), tolerance=1e-4, **options).first_divergence()
    assert divergence is not None
    return divergence


def test_replicas_that_hold_the_same_slices_agree_although_slices_differ(tmp_path: Path) -> None:
    """All replicas update with replica 0's gradient: that is not each replica's own."""
    shares = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))  # of two micro-batches of each replica
    for rank in range(4):  # two replicas of two slices
        record(tmp_path / "run", rank, {"gradient.weight": shares[:2].mean(0)}, start=2 * (rank % 2), rows=2)
    kept = {f"share.{number}.weight": share / 4 for number, share in enumerate(shares)}
    record(tmp_path / "one", 0, {"gradient.weight": shares.mean(0), **kept})
    divergence = compared(tmp_path, {"dp": 2, "tp": 2}, micro_batches=2)
    told = "step 0: the gradient of weight on all ranks looks as if rank 1's share was lost; the others count 2 times"
    assert divergence.sentences[0].startswith(told)
    for rank in range(4):
        own = shares[2 * (rank // 2) :][:2].mean(0)
        record(tmp_path / "run", rank, {"gradient.weight": own}, start=2 * (rank % 2), rows=2)
    of_loss, told = compared(tmp_path, {"dp": 2, "tp": 2}, micro_batches=2, losses=({0: 2.0}, {0: 1.0})).sentences
    assert of_loss.startswith("step 0: the loss is 2 times too large")
    assert told.startswith("step 0: the gradient of weight on all ranks is that of this rank's own sequences: it was")
    for rank in range(4):
        record(tmp_path / "run", rank, {"gradient.weight": torch.zeros(SHAPE)}, start=2 * (rank % 2), rows=2)
    told = compared(tmp_path, {"dp": 2, "tp": 2}, micro_batches=2).sentences[0]
    assert told.endswith("or it was cleared before the update (100 % away)")


def test_shares_of_other_parts_of_the_batch_name_no_mistake(tmp_path: Path) -> None:
    """The other run has four of them, and the gradient that is wrong is not that of a replica's own sequences."""
    first, second = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    for rank in range(2):
        record(tmp_path / "run", rank, {"gradient.weight": first})
    shares = {f"share.{number}.weight": share / 4 for number, share in enumerate((first, second, second, first))}
    record(tmp_path / "one", 0, {"gradient.weight": (first + second) / 2, **shares})
    for micro_batches, name in ((1, "other"), (2, "other-weights")):
        divergence = compared(tmp_path, {"dp": 2}, micro_batches=micro_batches)
        assert {difference.mistake.name for difference in divergence.differences} == {name}
    record(tmp_path / "one", 0, {"gradient.weight": first - second, **shares})  # of which they are no shares
    divergence = compared(tmp_path, {"dp": 2}, micro_batches=2)
    assert {difference.mistake.name for difference in divergence.differences} == {"other"}
    assert divergence.sentences[0].endswith(" % away)")


def test_one_process_resumes_what_the_run_has_resumed_with_a_micro_batch_for_each_of_all_replicas(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"dp": 2, "pp": 3, "batch_size": 6, "micro_batches": 3}
    settings |= {"n_layers": 4, "lr": 8e-4, "seed": 7, "device": "cpu"}
    layout, config = {"dp": 2, "pp": 3}, {"script": str(LAB / "hybrid/intro_hybrid.py"), "resume": "runs/before"}
    configure(tmp_path, layout, settings, data="sample", **config)
    script, *flags = one_process_flags(RecordedRun(tmp_path), None)
    assert script == str(LAB / "primer/intro.py")
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    wanted = {"--batch-size": "12", "--micro-batches": "6", "--n-layers": "4", "--seed": "7"}
    assert given == {**wanted, "--resume": "runs/before", "--data": "sample", "--device": "cpu"}
    configure(tmp_path, layout, settings | {"experts": 4, "betas": [0.8, 0.95]}, data="sample", **config)
    script, *flags = one_process_flags(RecordedRun(tmp_path), None)
    assert script == str(LAB / "hybrid/intro_5d.py")
    assert "--experts 4" in " ".join(flags)
    assert "--betas 0.8 0.95" in " ".join(flags)


def test_one_process_records_the_steps_whose_gradients_the_run_has_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 4, 5):  # the last one has the weights after the others
        tensors = {"gradient.weight": torch.ones(SHAPE)} if step < 5 else {}
        record(tmp_path / "run", 0, {**tensors, "weights.weight": torch.ones(SHAPE)}, step=step)
    script = str(LAB / "primer/intro.py")
    configure(tmp_path / "run", script=script)
    shutil.copytree(tmp_path / "run", tmp_path / "same")

    given, until = dict[str, str](), list[str]()

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        given.update(itertools.pairwise(command))
        until.append(env[STOP_AFTER])
        shutil.copytree(tmp_path / "same", given["--out"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("distlab_compare.command.subprocess.run", run)
    assert compare(Request(tmp_path / "run", with_one_process=True)) == 0
    assert capsys.readouterr().out.startswith("# one process runs steps 3 to 4: ")
    assert (given["--record-gradients"], until) == ("2", ["5"])
    for folder in (tmp_path / "run", tmp_path / "same"):  # with checkpoints alone
        shutil.rmtree(folder)
        for step in (2, 4, 6, 8):
            save(folder, {"weight": torch.ones(SHAPE)}, {**ABOUT, "step": step}, None, keep=4)
        configure(folder, settings={"save_every": 2}, script=script)
    assert compare(Request(tmp_path / "run", with_one_process=True)) == 0
    assert (given["--save-every"], until[1]) == ("2", "8")
    assert int(given["--keep"]) >= 4, "all that are compared"

    def fail(_: list[str], stdout: IO[str], **__: Any) -> Any:
        stdout.write("# began\n# rank 0 failed: no memory\n\n")
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr("distlab_compare.command.subprocess.run", fail)
    told = r"intro\.py does not run as one process: rank 0 failed: no memory; give another --script$"
    with pytest.raises(InputError, match=told):
        compare(Request(tmp_path / "run", with_one_process=True))
    configure(tmp_path / "run", settings={"save_every": 2}, script="gone.py")
    with pytest.raises(InputError, match=r"its script gone\.py is not there; give --script$"):
        compare(Request(tmp_path / "run", with_one_process=True))
    configure(tmp_path / "run", settings={"lr": None}, script=script)
    with pytest.raises(InputError, match=r"run/config\.json: its setting lr is null, and must be a number$"):
        compare(Request(tmp_path / "run", with_one_process=True))


ABOUT: dict[str, Any] = {"architecture": "mlp", "tokens": 0, "model": {}, "settings": {}}  # of a checkpoint
OWN_SCRIPT = """from dataclasses import dataclass
from distlab.settings.training import TrainSettings

@dataclass
class OwnSettings(TrainSettings):
    has_bias: bool = True
    is_wide: bool = False
    width: int = 8

DEFAULTS = OwnSettings()
"""


def test_one_process_has_the_settings_of_a_script_s_own(tmp_path: Path) -> None:
    (script := tmp_path / "own.py").write_text(OWN_SCRIPT)
    settings = {"has_bias": False, "is_wide": True, "width": 16, "batch_size": 2}
    configure(tmp_path, settings=settings, script=str(script))
    flags = " ".join(one_process_flags(RecordedRun(tmp_path), script)[1:])
    assert all(f"{flag} --" in f"{flags} --" for flag in ("--no-has-bias", "--is-wide", "--width 16")), flags


@pytest.mark.parametrize(
    ("own", "others", "told"),
    [
        ({"lr_schedule": "cosine", "steps": 10}, {"lr_schedule": "cosine", "steps": 20}, "--steps 10 and 20, on which"),
        ({"lr_schedule": "linear", "steps": 10}, {"lr_schedule": "linear", "steps": 20}, "--steps 10 and 20, on which"),
        ({"layout": {"dp": 2, "ep": 2}, "batch_size": 1}, {"batch_size": 4}, ""),  # replicas that share experts
        ({"layout": {"dp": 2}, "bsz": 4}, {"layout": {"dp": 1}, "bsz": 4}, ""),  # rows of all replicas, as in sentiment
        ({"layout": {"dp": 2}, "bsz": 4}, {"layout": {"dp": 1}, "bsz": 8}, "a global batch of 4 and 8"),
        ({"lr_schedule": "constant", "steps": 10}, {"lr_schedule": "constant", "steps": 20}, ""),
        ({"hidden_dim": None}, {"hidden_dim": 96}, ""),
        ({"tokenizer": "a.model"}, {"tokenizer": None}, "different tokenizers"),
        ({"data_identity": "one file"}, {"data_identity": "another file"}, "different data"),
    ],
)
def test_trainings_that_should_not_be_equal_are_not_compared(
    own: dict[str, Any], others: dict[str, Any], told: str, tmp_path: Path
) -> None:
    for name, settings in (("own", own), ("others", others)):
        record(tmp_path / name, 0, {"gradient.weight": torch.ones(SHAPE)})
        configure(tmp_path / name, **{"settings": {"data": "x.txt", **settings}, "world_size": 1, **settings})
    request = Request(tmp_path / "own", tmp_path / "others")
    with pytest.raises(InputError, match=f"are different trainings: {told}") if told else contextlib.nullcontext():
        assert compare(request) == 0


def test_a_parameter_that_only_one_model_has_is_told_whichever_counts_as_right(tmp_path: Path) -> None:
    for name, more in (("small", []), ("large", ["weights.bias"])):
        kinds = ["gradient.weight", "weights.weight", *more]
        record(tmp_path / name, 0, dict.fromkeys(kinds, torch.ones(SHAPE)))
        configure(tmp_path / name)
    for own, right in itertools.permutations((tmp_path / "small", tmp_path / "large")):
        with pytest.raises(InputError, match=r"have different models: only .*/large has bias"):
            compare(Request(own, right))


def test_another_shape_is_told(tmp_path: Path) -> None:
    names = "gradient.weight", "weights.weight"
    record(tmp_path / "one", 0, dict.fromkeys(names, torch.ones(SHAPE)))
    path = file_of(tmp_path / "run", 0, 0)
    path.parent.mkdir(parents=True)
    parts = json.dumps(dict.fromkeys(names, ([3], [([0], [3])])))
    save_file({name: torch.ones(3) for name in names}, path, metadata={"parts": parts})
    told = "before step 0: the weights weight on rank 0 is (3,), and should be (4, 2)"
    assert compared(tmp_path).sentences == [told]
    for name in ("run", "one"):
        configure(tmp_path / name)
    with pytest.raises(InputError, match=r"have different models: weight is \[3\] and \[4, 2\]"):
        compare(Request(tmp_path / "run", tmp_path / "one"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda right, _: right * torch.nan, "is not finite"),
        (lambda right, _: right * torch.inf, "is not finite"),
        (lambda right, before: right + before, "also contains the gradient of the step before"),
        (lambda right, before: 2 * right + before, "is not a multiple of the other run's"),
        (lambda right, _: 0 * right, "is zero or None: nothing was added to it, or it was cleared"),
        (lambda right, _: 3 * right, "is 3 times too large: added up over the 3 ranks"),
    ],
)
def test_a_wrong_gradient_is_described_without_shares(
    wrong: Callable[[Tensor, Tensor], Tensor], told: str, tmp_path: Path
) -> None:
    before, right = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    for name, ranks, second in (("run", 3, wrong(right, before)), ("one", 1, right)):
        for rank, (step, gradient) in itertools.product(range(ranks), enumerate((before, second))):
            record(tmp_path / name, rank, {"gradient.weight": gradient}, step=step)
    told = f"step 1: the gradient of weight on all ranks {told}"
    assert compared(tmp_path, {"dp": 3}, micro_batches=2).sentences[0].startswith(told)


def test_a_parameter_whose_gradient_is_rounding_is_none_of_those_that_may_be_wrong(tmp_path: Path) -> None:
    """As an attention's bias of keys: it is no exception if all others are wrong in one way."""
    for name, factor in (("run", 2), ("one", 1)):
        wrong = dict.fromkeys(("gradient.weight", "gradient.head"), factor * torch.ones(SHAPE))
        record(tmp_path / name, 0, {**wrong, "gradient.bias": factor * 1e-9 * torch.ones(SHAPE)})
    assert "the gradient of weight, like every other parameter, on rank 0 is 2 times" in compared(tmp_path).sentences[0]


def test_steps_of_a_layout_with_more_ranks_are_not_those_of_a_resumed_run(tmp_path: Path) -> None:
    for step, ranks in enumerate((3, 2, 2)):
        for rank in range(ranks):
            record(tmp_path, rank, {"weights.weight": torch.ones(SHAPE)}, step=step)
    assert Recordings(tmp_path, {"layout": {"dp": 2}, "world_size": 2}).steps == [1, 2]
    assert Recordings(tmp_path, {"layout": {"dp": 3}, "world_size": None}).steps == [0], "the layout's"


def test_steps_of_which_one_run_has_kept_the_weights_alone_are_not_compared(tmp_path: Path) -> None:
    for name, kinds in (("run", ("gradient", "gradient")), ("one", ("gradient", "weights"))):
        for step, kind in enumerate(kinds):
            record(tmp_path / name, 0, {f"{kind}.weight": torch.ones(SHAPE)}, step=step)
    run, one = (Recordings(tmp_path / name, ONE_PROCESS) for name in ("run", "one"))
    assert Pair(run, one, tolerance=1e-4).steps == Pair(one, run, tolerance=1e-4).steps == [0]


START, OTHER = torch.ones(SHAPE), torch.arange(8.0).view(SHAPE)


@pytest.mark.parametrize(
    ("start", "update", "loss", "told"),
    [
        (START, 0.05 * START, 1.0, "after {}: the weights weight on rank 0 have changed by 0.5 times as much as they"),
        (START, 0.3 * START, 1.0, "after {}: the weights weight on rank 0 have changed by 3 times as much as they"),
        (START, 0.0012 * START, 1.0, "after {}: the weights weight on rank 0 have changed by 0.012 times as much as"),
        (START, OTHER, 1.00005, "after {}: the weights weight on rank 0 differ ("),
        (3 * START, OTHER, 2.0, "before {}: the weights weight on rank 0 are 3 times what they should be ("),
        (OTHER, OTHER, 2.0, "before {}: the weights weight on rank 0 differ ("),  # and all else follows from it
        (START, torch.nan * START, 1.0, "after {}: the weights weight on rank 0 are not finite"),
        (START, OTHER, 2.0, "{}: the loss differs: "),
    ],
)
def test_the_first_difference_of_a_step_is_told(
    start: Tensor, update: Tensor, loss: float, told: str, tmp_path: Path
) -> None:
    for name, first, change in (("run", start, update), ("one", START, 0.1 * START)):
        record(tmp_path / name, 0, {"gradient.weight": START, "weights.weight": first})
        record(tmp_path / name, 0, {"weights.weight": first - change}, step=1)
    divergence = compared(tmp_path, losses=({0: 8 * loss}, {0: 8.0}))  # 5e-5 of it is rounding
    assert divergence.step == 0
    assert divergence.sentences[0].startswith(told.format("step 0"))


def test_a_rank_that_has_not_updated_its_slice_is_told(tmp_path: Path) -> None:
    after = OTHER - 1
    for rank, own in ((0, after), (1, OTHER)):
        record(tmp_path / "run", rank, {"gradient.weight": START, "weights.weight": OTHER}, start=2 * rank, rows=2)
        record(tmp_path / "run", rank, {"weights.weight": own}, start=2 * rank, rows=2, step=1)
    record(tmp_path / "one", 0, {"gradient.weight": START, "weights.weight": OTHER})
    record(tmp_path / "one", 0, {"weights.weight": after}, step=1)
    [told, *_] = compared(tmp_path, {"tp": 2}).sentences
    assert told.startswith("after step 0: the weights weight on rank 1")
    assert "are those before the update" in told


def test_a_certain_mistake_is_told_without_what_may_follow_from_it() -> None:
    found = [
        Difference(0, rank, "weight", Mistake(name, f"is {name}")) for rank, name in enumerate(("summed", "imprecise"))
    ]
    told = tell("step 0: the gradient of", found, "rank {}".format, [["weight", "bias"]] * 3)
    assert told == ["step 0: the gradient of weight on rank 0 is summed", "rank 2: right"]
    found = [Difference(0, 0, name, Mistake("summed", "is summed")) for name in ("weight", "bias")]
    told = tell("step 0: the gradient of", found, "rank {}".format, [["weight", "bias"], ["head"]])
    assert told[0] == "step 0: the gradient of weight, like every other parameter, on rank 0 is summed"
    for names in itertools.combinations(("part", "summed", "other", "imprecise"), 2):  # the clearest first
        found = [Difference(0, rank, "weight", Mistake(name, name)) for rank, name in enumerate(reversed(names))]
        assert tell("", found, "rank {}".format, [["weight"]] * 2)[0].endswith(names[0])
    found = [
        Difference(0, rank, "weight", Mistake(name, name)) for rank, name in enumerate(("a", "b", "b", "c", "c", "c"))
    ]
    told = tell("", found, "rank {}".format, [["weight"]] * 6)
    assert [sentence[-1] for sentence in told] == ["c", "b"], "the two most frequent ones"


def test_ranks_of_the_right_run_that_part_among_each_other_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, factors in (("own", (1, 1)), ("right", (1, 2))):
        for rank, factor in enumerate(factors):
            record(tmp_path / name, rank, {"gradient.weight": factor * torch.ones(SHAPE)})
        configure(tmp_path / name, {"dp": 2})
    assert compare(Request(tmp_path / "own", tmp_path / "right")) == 1
    told = f"the ranks of {tmp_path / 'right'}, which counts as right, part among each other:"
    assert told in capsys.readouterr().out


def test_runs_that_have_no_step_in_common_are_told(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(SHAPE)}
    for name, step in (("a", 2), ("b", 4)):
        record(tmp_path / f"recorded-{name}", 0, {"gradient.weight": torch.ones(SHAPE)}, step=step)
        save(tmp_path / f"saved-{name}", dict(tensors), {**ABOUT, "step": step}, None, keep=1)
    for folder in tmp_path.iterdir():
        configure(folder)
    for own, right, told in (
        ("recorded-a", "recorded-b", "has recorded step 2, .*recorded-b step 4: there is no step that both have"),
        ("saved-a", "saved-b", r"no two checkpoints are of the same step \(.*saved-a step 2, .*saved-b step 4\)"),
        ("recorded-a", "saved-b", "recorded-a has recorded gradients and no checkpoints, .*saved-b only checkpoints"),
        ("saved-b", "recorded-a", "recorded-a has recorded gradients and no checkpoints, .*saved-b only checkpoints"),
    ):
        with pytest.raises(InputError, match=told):
            compare(Request(tmp_path / own, tmp_path / right))
    assert by_step(tmp_path / "saved-a")[2].writers("weight", torch.ones(SHAPE, dtype=torch.bool)) == [0]


def test_elements_that_no_rank_has_recorded_are_told(tmp_path: Path) -> None:
    record(tmp_path, 0, {"weights.weight": torch.ones(SHAPE)}, rows=2)
    record(tmp_path, 0, {"weights.weight": torch.ones(SHAPE)}, rows=3, step=1)
    record(tmp_path, 1, {"weights.weight": 2 * torch.ones(SHAPE)}, start=2, rows=2, step=1)
    both = Recordings(tmp_path, {"layout": {"tp": 2}, "world_size": 2}).whole(1, "weights", "weight")
    assert both[:, 0].tolist() == [1, 1, 1, 2], "of those that both have recorded, the first rank's count"
    assert TensorPart(torch.empty(0), [*SHAPE], []).of(both).tolist() == [], "of a rank that holds none of them"
    run = Recordings(tmp_path, {"layout": {"tp": 2}, "world_size": 1})
    with pytest.raises(InputError, match="no rank has recorded all of weight in step 0"):
        run.whole(0, "weights", "weight")
    with pytest.raises(InputError, match="no rank has recorded bias in step 0"):
        run.whole(0, "weights", "bias")
    (path := file_of(tmp_path, 2, 0)).parent.mkdir()
    path.write_bytes(b"half of a file")
    with pytest.raises(InputError, match=f"{path}: cannot be read .*; record the run again"):
        run.whole(2, "weights", "weight")


def test_metrics_end_with_the_last_complete_line_and_others_are_told(tmp_path: Path) -> None:
    configure(tmp_path)
    lines = '{"step": 0, "loss": 2.5}\n{"step": 1, "loss": null}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert RecordedRun(tmp_path).losses == {0: 2.5, 2: 1.5}
    for line in (b"\x80\n", b'{"step": "0", "loss": 2.5}\n', b'{"step": 0, "loss": "2.5"}\n'):
        with pytest.raises(InputError, match=r"metrics\.jsonl: these are not the metrics of a run"):
            _ = (tmp_path / "metrics.jsonl").write_bytes(line), RecordedRun(tmp_path).losses
