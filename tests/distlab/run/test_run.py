"""A run owns its parts: what a script has not handed over is missed at the start, and what it has is used."""

import json
import math
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.chapters import MODEL, losses, train_on
from support.processes import LAB, run, wait_for
from support.small_models import saved_model
from support.terminals import fork_python, terminals

from distlab.axes.grid import Grid
from distlab.checkpoints.format import latest_valid
from distlab.checkpoints.models import write_model
from distlab.comm.waits import TrafficError
from distlab.rendezvous.diagnosis import Diagnosis
from distlab.run.clipping import LossSum
from distlab.run.failure import Failure, refused_by_gpu
from distlab.run.main import warn_of_other_checkout
from distlab.run.run import Run
from distlab.run.steps import NotFiniteError
from distlab.settings.common import RunSettings, parse
from distlab.settings.folders import new_folder
from distlab.settings.hybrid import HybridSettings
from distlab.settings.replicas import DataParallelSettings, DiLoCoSettings, WeightAverageSettings
from distlab.settings.resume_policy import ResumePolicy, marked
from distlab.settings.resuming import remarks
from distlab.settings.training import TrainSettings
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

PRIMER = "primer/intro.py"
BUSY = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
SHAPE = [*MODEL, "--data", "sample", "--lr", "0.1", "--optimizer", "sgd"]


def forgetful(folder: Path) -> Path:
    """A script that hands over nothing."""
    script = folder / "forgetful.py"
    text = (LAB / "primer/intro.py").read_text()
    assert "run.track(net, optimizer)\n" in text
    script.write_text(text.replace("    run.track(net, optimizer)\n", ""))
    return script


@pytest.mark.parametrize(
    "flag", ["--save-every 1", "--eval-every 1", "--resume", "--warmup-steps 2", "--lr-schedule cosine"]
)
def test_a_script_that_hands_over_nothing_is_refused_before_its_first_step(flag: str, tmp_path: Path) -> None:
    """As one that builds its optimizer itself, and would otherwise save and restore nothing in silence."""
    script = forgetful(tmp_path)
    if flag == "--resume":
        write_model(tmp_path / "before", saved_model(dmodel=32, num_heads=2, num_kv_heads=2, ctx_size=24))
        flag += f" {tmp_path / 'before'}"
    ended = fork_python(script, *SHAPE, "--steps", "2", *flag.split(), "--out", tmp_path / "run").finish()
    assert ended.status == 2
    assert "a script that calls run.track before its first step" in ended.err
    assert not any(line[0].isdigit() for line in ended.out.splitlines()), "no step was taken"


def test_a_script_that_hands_over_nothing_trains_without_these_flags(tmp_path: Path) -> None:
    script = forgetful(tmp_path)
    plain = fork_python(script, *SHAPE, "--steps", "1", "--out", tmp_path / "plain").finish()
    assert (plain.status, len(losses(tmp_path / "plain"))) == (0, 1)
    plain = fork_python(script, *SHAPE, *"--steps 2 --lr 1e30 --out".split(), tmp_path / "nan").finish()
    assert (plain.status, len(losses(tmp_path / "nan"))) == (1, 1)
    assert plain.err.splitlines()[-1] == "# the loss of step 1 is nan (is --lr 1e+30 too large?)"


def test_a_rank_without_others_has_no_death_to_repair_and_no_launcher_to_notice_it(tmp_path: Path) -> None:
    assert train_on(1, "DP/repair/intro_DP_repair.py", tmp_path, "--world-size", "1", "--repair", "on")[-1]


def test_an_imported_models_constants_are_its_own(tmp_path: Path) -> None:
    """What no flag asks for: a run that resumes from it computes with them, and saves them."""
    constants = {"norm_eps": 0.3, "rope_theta": 50.0}
    model = saved_model(dmodel=32, num_heads=2, num_kv_heads=2, ctx_size=24, **constants)
    write_model(tmp_path / "imported", model)
    write_model(tmp_path / "long", saved_model(dmodel=32, num_heads=2, num_kv_heads=2, ctx_size=512))
    lengths = [parse(TrainSettings(), "", ["--resume", str(tmp_path / name)]).seq_len for name in ("imported", "long")]
    assert lengths == [24, TrainSettings.seq_len], "what it can read, and what runs usually read"
    flags = ["--resume", str(tmp_path / "imported"), "--batch-size", "2", "--save-every", "1", "--steps", "1"]
    train_on(1, "primer/intro.py", tmp_path / "run", *flags)
    saved = latest_valid(tmp_path / "run").record["model"]
    assert {name: saved[name] for name in constants} == constants

    def first_loss(**options: float) -> float:
        ids = next(TinyStories(SPTokenizer(), 2, 24, data="sample"))
        net = type(model)(model.options | options, model.parameters, model.tokenizer).build()
        return causalLLMLoss(net(ids), ids, model.options["vocab_size"]).item()

    assert losses(tmp_path / "run") == [pytest.approx(first_loss(), rel=1e-6)]
    assert first_loss(norm_eps=1e-6) != pytest.approx(first_loss(), rel=1e-4)
    assert first_loss(rope_theta=1e4) != pytest.approx(first_loss(), rel=1e-4)


@pytest.fixture(scope="module")
def run_of_six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks with six sequences a step."""
    folder = tmp_path_factory.mktemp("run of six")
    flags = "--world-size 2 --batch-size 3 --save-every 2".split()
    train_on(2, "DP/gradient_aggr/intro_DP_GA.py", folder, *flags)
    return folder


@pytest.mark.parametrize(
    ("defaults", "flags", "batch_size", "remark"),
    [
        (TrainSettings(), "", 6, None),
        (DataParallelSettings(), "--world-size 3", 2, None),
        (DataParallelSettings(), "--world-size 6", 1, None),
        (HybridSettings(), "--pp 2", 3, None),
        (DataParallelSettings(), "--world-size 7", 1, "the global batch is now 7 and was 6: --batch-size sets it"),
        (TrainSettings(), "--batch-size 2", 2, "the global batch is now 2 and was 6: --batch-size sets it"),
        (HybridSettings(batch_size=4, micro_batches=4), "--pp 2", 4, "the global batch is now 8 and was 6"),
    ],
)
def test_another_layout_keeps_the_global_batch(
    defaults: Any, flags: str, batch_size: int, remark: str | None, run_of_six: Path
) -> None:
    """Where it divides among the replicas; otherwise, or if asked for another one, the run says so."""
    model = "--dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24".split()
    settings = parse(defaults, "", ["0", *model, "--resume", str(run_of_six), *flags.split()])
    assert settings.batch_size == batch_size
    first, *said = remarks(settings, latest_valid(run_of_six))
    assert first.startswith(f"resuming from {run_of_six}")
    assert any(line.startswith(remark) for line in said) if remark else "global batch" not in "".join(said)


@pytest.mark.parametrize(("defaults", "flag"), [(DataParallelSettings(), "--world-size"), (HybridSettings(), "--dp")])
def test_no_replicas_to_resume_with(defaults: Any, flag: str, tmp_path: Path) -> None:
    write_model(tmp_path, saved_model(dmodel=32, num_heads=2, num_kv_heads=2, ctx_size=24))
    with pytest.raises(InputError, match="every size must be at least 1"):
        parse(defaults, "", ["0", flag, "0", "--resume", str(tmp_path)])


def test_a_field_keeps_its_policy_in_a_class_that_gives_it_another_default() -> None:
    for settings in (TrainSettings(), DataParallelSettings(), HybridSettings()):
        assert set(marked(settings, ResumePolicy.PER_REPLICA)) == {"batch_size"}
        assert "micro_batches" in marked(settings, ResumePolicy.SAME_LAYOUT)
    assert "sync_every" in marked(DiLoCoSettings(), ResumePolicy.FIXED), "unlike in a class that it is derived from"
    assert "schedule" in marked(HybridSettings(), ResumePolicy.SAME_LAYOUT)
    assert "sync_every" in marked(WeightAverageSettings(), ResumePolicy.SAME_LAYOUT)
    sizes = {"dmodel", "num_heads", "num_kv_heads", "hidden_dim", "n_layers"}
    assert set(marked(TrainSettings(), ResumePolicy.MODEL)) == sizes


def broken(folder: Path, script: str, lines: str) -> Path:
    """A copy of a pipeline's script, in which these lines do something to its stage before it has an optimizer."""
    text, builds_optimizer = (LAB / script).read_text(), "    optimizer = run.optimizer("
    assert builds_optimizer in text
    begin = "    import os, torch\n    from distlab.run import not_finite\n    ((stage, net),) = nets.items()\n"
    (folder / "broken.py").write_text(text.replace(builds_optimizer, f"{begin}{lines}{builds_optimizer}"))
    return folder / "broken.py"


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("parameter of both stages", "the parameter model.layers.0.mlp.up_proj.weight, since the previous update"),
        ("output of stage 0, parameter of stage 1", "the parameter model.layers.1.mlp.up_proj.weight, since the"),
        ("output of both stages", "the output of model.layers.0.mlp"),
        ("gradient of both stages", "the gradient of model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_is_not_finite_is_named_in_the_order_of_the_model(where: str, name: str, tmp_path: Path) -> None:
    """With two replicas of two stages: a parameter before outputs, then the earlier stage, then the smaller rank.

    Of gradients, that of the later stage, from which the backward pass comes.
    """
    change = {
        "parameter of both stages": "layer.mlp.up_proj.weight.data.fill_(torch.nan)",
        "output of stage 0, parameter of stage 1": (
            "layer.mlp.up_proj.weight.data.fill_(torch.nan) if stage else "
            "layer.mlp.register_forward_hook(lambda m, i, o: o * torch.inf)"
        ),
        "gradient of both stages": "layer.mlp.up_proj.weight.register_hook(lambda gradient: gradient * torch.nan)",
        "output of both stages": (  # in the last micro-batch only
            "calls = iter([1, 1, torch.inf] * 9); "
            "layer.mlp.register_forward_hook(lambda m, i, o, calls=calls: o * next(calls))"
        ),
    }[where]
    lines = f"    for layer in net.model.layers.values():\n        {change}\n"
    script = broken(tmp_path, "hybrid/intro_hybrid.py", lines)
    flags = "--dp 2 --pp 2 --layers-per-stage 1,1 --batch-size 3 --micro-batches 3 --steps 2 --clip-norm 1".split()
    with terminals(script, 4, tmp_path, *SHAPE, *flags) as ranks:
        ended = [rank.finish(60) for rank in ranks]
    stage = 1 if "layers.1" in name else 0
    for rank in ended:
        assert rank.status == 1
        assert f"the first non-finite tensor is {name}" in rank.err
        assert f"on rank {stage} (stage {stage} of replica 0)" in rank.err, rank.err


def test_a_ranks_share_of_a_loss_stays_beside_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the shares, the first rank is found whose loss is not finite."""

    def make_not_finite(total: torch.Tensor, async_op: bool = False) -> None:
        total.fill_(torch.nan)

    def cause(_: int, share: float) -> str:
        return f", and the share was {share}"

    monkeypatch.setattr("torch.distributed.all_reduce", make_not_finite)
    own: Any = Run.__new__(Run)
    own.device, own.grid, own.settings = torch.device("cpu"), Grid(0, {"dp": 2}), RunSettings()
    own.records, own._why_not_finite = SimpleNamespace(values={}), cause
    with pytest.raises(NotFiniteError, match=r"the loss of step 0 is nan, and the share was 2\.0"):
        own.global_loss(0, [torch.tensor(2.0)])
    loss = LossSum(0, torch.tensor(2.0), 2)
    assert math.isnan(loss.wait())
    assert loss.own == 2


def test_a_wait_of_the_search_for_what_is_not_finite_is_called_what_it_is(tmp_path: Path) -> None:
    """One stage is gone when the others look: the wait that fails is none of a validation."""
    lines = (
        "    if stage:\n        next(net.parameters()).data.fill_(torch.nan)\n"
        "    else:\n        not_finite.find_cause = lambda *_: os._exit(7)\n"
    )
    script = broken(tmp_path, "PP/schedules/intro_PP_schedules.py", lines)
    flags = "--world-size 2 --batch-size 1 --micro-batches 1 --steps 2 --timeout 5".split()
    with terminals(script, 2, tmp_path, *SHAPE, *flags) as ranks:
        ended = [rank.finish(60) for rank in ranks]
    assert "the activations of micro-batch 0 again, to find what is not finite in step 0" in ended[1].err
    assert "validation" not in ended[1].err


def test_a_folder_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for parent in (tmp_path / "dangling", tmp_path / "file", tmp_path / "file/inside"):
        with pytest.raises(InputError, match=f"{parent}: no folder can be created there .*; give --out"):
            new_folder(parent)
    monkeypatch.setattr(
        "distlab.settings.folders.datetime", SimpleNamespace(now=lambda: datetime(2026, 7, 8, 9, 10, 11))
    )
    names = [new_folder(tmp_path / "runs").name for _ in range(3)]
    assert names == [f"2026-07-08_09-10-11{number}" for number in ("", "-2", "-3")]


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_is_there(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = PRIMER, *SHAPE, "--out", out, "--steps"
    first = fork_python(*command, "1000000")
    try:
        assert wait_for((out / "metrics.jsonl").exists)
        second = fork_python(*command, "10").finish()
        assert second.status == 2
        assert second.err == f"# --out {out}: another run is writing there; give another folder\n"
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("name", ["metrics.jsonl", ".config.json", "rank0.log"])  # the second becomes config.json
def test_a_full_disk_is_told_in_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    ended = fork_python(PRIMER, *SHAPE, "--steps", "3", "--out", tmp_path).finish()
    if name == "rank0.log":
        lost = f"# {tmp_path / name}: cannot be written (No space left on device); what follows is on the terminal only"
        assert (ended.status, ended.err, len(losses(tmp_path))) == (0, "", 3)
        assert ended.out.splitlines()[0] == lost
        assert ended.out.count(lost) == 1
        return
    advice = {"metrics.jsonl": "make room", ".config.json": "give another folder"}[name]
    sentence = f"--out {tmp_path}: cannot write there (No space left on device); {advice}"
    assert (ended.status, ended.err) == (2, f"# {sentence}\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError(), "ValueError"),
        (ValueError("a shape\nof two lines"), "ValueError: a shape"),
        (BUSY, refused_by_gpu(BUSY)),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),  # of a pipe of the user's own
    ],
)
def test_an_error_is_told_in_one_line_with_the_rank(error: Exception, told: str) -> None:
    assert Failure.of(error, 2).sentence == f"rank 2 failed: {told}"
    assert Failure.of(error).cause == told, "for the others"
    assert Failure.of(InputError("no disk")).cause == "no disk"


@pytest.mark.parametrize(
    ("why", "is_partial", "lost"),
    [("Timed out", False, False), ("Timed out", True, True), ("closed by peer", False, True)],
)
def test_a_wait_that_the_ranks_cannot_explain_counts_as_a_consequence_of_another_failure(
    why: str, is_partial: bool, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher then names another rank, if one has failed."""
    found = Diagnosis([], "rank 0 does not answer", is_partial)
    board = SimpleNamespace(explain=lambda _: found, publish_diagnosis=lambda _: None)
    monkeypatch.setattr("distlab.run.failure.world_group", lambda: SimpleNamespace(notices=board))
    failure = Failure.of(TrafficError("rank 1 waited", RuntimeError(why)))
    assert (failure.sentence, failure.lost_a_peer, failure.is_diagnosed) == (found.sentence, lost, True)


def test_a_script_of_another_checkout_is_told_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path.resolve() / "src"
    (other / "distlab/run").mkdir(parents=True)
    (other / "distlab/run/main.py").touch()
    for script, rank in ((tmp_path, "0"), (tmp_path, "1"), (LAB, "0")):
        monkeypatch.setenv("RANK", rank)
        warn_of_other_checkout(script / PRIMER)
        told = f"not in {other}: start it with ./launch.sh, or PYTHONPATH={other}" in capsys.readouterr().out
        assert told == ((script, rank) == (tmp_path, "0"))


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [("KeyboardInterrupt", 130, "interrupted"), ("ValueError('a bad row')", 1, "rank 0 failed: ValueError: a bad row")],
)
def test_a_run_that_nobody_reads_any_more_ends_as_others_do(error: str, status: int, told: str, tmp_path: Path) -> None:
    """As when Ctrl-C also ends the program that reads."""
    script, file = tmp_path / "script.py", tmp_path / "error"
    script.write_text(f"""
import os
from distlab.run.main import main
from distlab.settings.training import TrainSettings

def train(run):
    reads, writes = os.pipe()
    os.close(reads)
    for stream in (1, 2):
        os.dup2(writes, stream)
    raise {error}

main(train, TrainSettings(), None)
""")
    flags = ["--data", "sample", "--out", str(tmp_path / "run")]
    ended = fork_python(script, *flags, TORCHELASTIC_ERROR_FILE=str(file)).finish()
    assert (ended.status, json.loads(file.read_text())["message"]) == (status, told)


def test_a_rank_that_fails_before_its_flags_are_read_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from distlab.run.main import main\n"
        "from distlab.settings.training import TrainSettings\n\n"
        "class Broken(TrainSettings):\n"
        "    def check(self): raise MemoryError\n\n"
        "main(print, Broken(), None)\n"
    )
    ended = fork_python(script, RANK="2", WORLD_SIZE="3", TORCHELASTIC_RUN_ID="test").finish()
    assert (ended.status, ended.err) == (1, "# rank 2 failed: out of memory\n")


def test_a_run_imports_what_only_some_runs_use_when_they_use_it() -> None:
    """All ranks import at the same time, often on few cores. Nor does training import torch's compiler."""
    late = "torch._dynamo torch.distributed.checkpoint torch.distributed.elastic.agent torch.utils.tensorboard".split()
    late += "datasets matplotlib pyarrow sympy distlab_planner.collective_model distlab.reports.timeline".split()
    program = f"""
import sys, torch
import distlab.run.main
from distlab.run.model import build_optimizer
from simplellm.autograd import backward
x = torch.ones(2, requires_grad=True)
for result in (x * x, torch.autograd.graph.get_gradient_edge(x * x), x):  # as pipelines do, which torch's would import
    backward(result, torch.ones(2))
assert x.grad.tolist() == [5, 5]
layer = torch.nn.Linear(2, 2)
optimizer = build_optimizer("adam", layer.parameters(), 0.1)
optimizer.zero_grad()
layer(x).sum().backward()
optimizer.step()
print(*sys.modules.keys() & {set(late)})
"""
    ended = run(sys.executable, "-c", program)
    assert (ended.status, ended.out.split()) == (0, []), ended.err
