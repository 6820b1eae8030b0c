"""./launch.sh plan, and ./launch.sh calibrate, whose file it reads."""

import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.planner_machines import cluster
from support.processes import LAB, run
from support.terminals import fork_launcher, fork_python

from distlab.launch import find_script, launch
from distlab.launching.launcher_flags import assign_ranks, read_flags
from distlab.machine.devices import Place
from distlab.run.terminal import ERASE_LINE
from distlab.settings.hybrid import HybridSettings
from distlab.settings.scripts import read_script
from distlab_planner import calibrate, plan, search
from distlab_planner.machine import Machine, Measured, PassSeconds, read_machine, write_machine
from distlab_planner.measuring import PAUSES
from distlab_planner.memory import share_of_rank
from distlab_planner.model import Sizes
from distlab_planner.table import milliseconds
from simplellm.errors import InputError
from simplellm.tokenizers import SPTokenizer

CLUSTER = str(LAB / "docs/machines/cluster.json")
SMALL = "--dmodel 32 --num-heads 4 --n-layers 3 --seq-len 16 --global-batch 8".split()
MODEL = "--dmodel 32 --num-heads 4 --seq-len 16".split()


EXPERTS = "--experts 4 --experts-per-token 1 --shared-expert --ep 2"


@pytest.mark.parametrize("more", ["", "--cp 2 --cp-kind gather heads", EXPERTS, "--compile"])
def test_the_commands_of_a_plan_are_those_of_runs(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ranks", "4", "--machine", CLUSTER, "--top", "5", *more.split()]
    assert launch(["plan", *SMALL, *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line.split(maxsplit=1)[1] for line in lines if "./launch.sh" in line]
    assert len(commands) == 5
    script, _ = find_script("5d")
    for command in commands:
        _, name, *flags = shlex.split(command)
        settings = read_script(script).parse(flags, "")
        assert name == "5d"
        assert isinstance(settings, HybridSettings)
        assert settings.dp * settings.pp * settings.cp * settings.tp == 4
        assert settings.cp == (2 if "--cp" in more else 1)
        mixture = settings.experts, settings.experts_per_token, settings.shared_expert, settings.ep
        assert mixture == ((4, 1, True, 2) if more == EXPERTS else (0, 2, False, 1))
        assert settings.compile == (more == "--compile")
        assert settings.dp * settings.batch_size == 8
        assert (settings.dmodel, settings.num_heads, settings.n_layers, settings.seq_len) == (32, 4, 3, 16)
    steps = [float(found[1].replace(",", "")) for line in lines if (found := re.search(r"([\d.,]+) ms", line))]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--ranks 2000", "--ranks 2000: {} has 128 hosts with 8 ranks each"),
        ("--memory 8", "--memory 8: give a size like 8GB or 500MB"),
        ("--memory 0GB", "--memory 0GB: give a size like 8GB or 500MB"),
        ("--seq-len 1", "--seq-len 1: predicting the next token needs at least 2"),
        ("--qk-norm", "--qk-norm: it is for models with experts; give --experts"),
        ("--shared-expert", "--shared-expert: it is for models with experts; give --experts"),
        ("--vocab-size 99 --tokenizer a.model", "--vocab-size 99 with --tokenizer: a run has the vocabulary"),
        ("--steps 4 --verify 1", "--steps 4: the first 3 do not count; give 5 or more"),
        ("--compile --ranks 2 --cp 2", "no layout divides the batch, the heads and the layers, and compiles whole"),
        ("--memory 1MB --ranks 2", "no layout fits into 1 MB a rank; the smallest needs 1,0"),
        ("--ranks 7 --global-batch 3 --tp 7", "no layout divides the batch, the heads and the layers"),
        ("--schedule fast", "--schedule fast: give some of naive, "),
        ("--schedule auto", "--schedule auto: its order is not known before the run; give some of naive, "),
        ("--micro-batches 0", "--micro-batches 0: must be greater than 0"),
        ("--micro-batches 4 -2", "--micro-batches -2: must be greater than 0"),
        ("--dp --pp 2", "--dp: give a value"),
        ("--shard", "--shard: give a value"),
        ("--tp 0", "--tp 0: must be greater than 0"),
        ("--ranks 4 --cp 4 --cp-kind heads --tp 4", "no layout divides the batch, the heads and the layers"),
        ("--ep 1 2", "--ep 2: there are no experts to share; give --experts"),
        ("--experts -1", "--experts -1: give 0 for none"),
        ("--experts 4 --experts-per-token 5", "--experts-per-token 5: there are 4 experts; give a number from 1 to 4"),
        ("--experts 4 --ep 3 --ranks 3", "no layout divides the batch, the experts, the heads and the layers"),
        ("--experts 4 --compile", "--compile with --experts 4: of compiled passes, the planner knows those of whole"),
        ("--compile --ranks 2 --tp 2", "no layout divides the batch, the heads and the layers, and compiles whole"),
        ("--vocab-size 0", "--vocab-size 0: must be greater than 0"),
        ("--vocab-size 99 --verify 1", "--vocab-size 99 with --verify: a run has the vocabulary of its --tokenizer"),
        ("--verify -1", "--verify -1: give 0 or more"),
        (
            "--verify 1 --ranks 9",
            "--verify 1 with --ranks 9: by {}, the ranks are on 2 hosts, and this is one computer",
        ),
        ("--verify 1 --ranks 8", "--verify 1 with --ranks 8: by {}, the ranks have 8 GPUs, and torch sees 0 here"),
    ],
)
def test_what_cannot_be_planned_is_said(flags: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        plan.command([*SMALL, "--machine", CLUSTER, *flags.split()])
    assert sentence.format(CLUSTER) in caught.value.with_flags()


def test_a_machine_is_measured_once_with_the_flags_of_the_model_and_two_to_four_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def measure(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(" ".join(command))
        write_machine(machine, Path("runs/machine.json"))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distlab_planner.plan.subprocess.run", measure)
    request = plan.PlanRequest(vocab_size=99, dmodel=96, n_layers=2, optimizer="sgd", dtype="bfloat16")
    part, sizes = PassSeconds((1e-4,), (2e-4,), (1e-4,), (1e-4,)), request.model.sizes
    machine = cluster(measured=(Measured(sizes, 1, 1, (1,), part, part, part),))
    for ranks, measured in ((1, 2), (3, 3), (9, 4)):
        for _ in range(2):
            assert plan.machine_for(replace(request, ranks=ranks), sizes) == machine
        flags = f"runs/machine.json --world-size {measured} --dmodel 96 --dtype bfloat16 --vocab-size 99"
        assert asked.pop().endswith(f"calibrate {flags}")
        assert not asked, "the second time, it is there"
        write_machine(cluster(), Path("runs/machine.json"))  # of a model of other sizes
    failed = SimpleNamespace(returncode=1, stderr="no memory\n")
    monkeypatch.setattr("distlab_planner.plan.subprocess.run", lambda *_, **__: failed)
    for memory, sentence in ((None, "runs/machine.json: measuring has failed: no memory"), ("8", "--memory 8: give a")):
        with pytest.raises(InputError, match=f"^{sentence}"):
            plan.plan(replace(request, memory=memory))


def test_a_plan_is_verified_where_there_is_a_gpu_for_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    plan.check_computer(cluster(), plan.PlanRequest(ranks=2, verify=1))
    plan.check_computer(cluster(cores_per_host=2), plan.PlanRequest(ranks=4, verify=1))  # of which two share one
    with pytest.raises(InputError, match="have 3 GPUs, and torch sees 2 here"):
        plan.check_computer(cluster(), plan.PlanRequest(ranks=3, verify=1))


def test_another_name_of_a_schedule_gives_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for name in ("dapple", "1f1b"):
        plan.command([*SMALL, "--machine", CLUSTER, "--pp", "3", "--schedule", name])
        plans.append(re.sub(rf"{name} *", "", capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert "3 pp" in plans[0]


def test_hosts_with_different_numbers_of_ranks_are_not_calibrated() -> None:
    joined = SimpleNamespace(local_ranks=2, places=[Place("A"), Place("A"), Place("B")])
    run: Any = SimpleNamespace(settings=calibrate.DEFAULTS, device=None, joined=joined)
    with pytest.raises(InputError, match="the hosts have 2 and 1 ranks: give each host the same number"):
        calibrate.calibrate(run)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.mark.parametrize(("ranks", "shares"), [(8, (8,)), (12, (8, 4)), (16, (8, 8)), (20, (8, 8, 4))])
def test_the_commands_place_ranks_as_the_planner_does(
    ranks: int, shares: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--ranks", str(ranks), "--global-batch", str(ranks), "--top", "1", "--dp", str(ranks)]
    plan.command([*SMALL, *flags, "--machine", CLUSTER])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    [command] = [line.split(maxsplit=3)[3] for line in lines if "./launch.sh" in line]
    own, rest = read_flags([*shlex.split(command), "--node-rank", "0"])
    assert own.nnodes == len(shares)
    assert ("--ranks-per-node" in command) == (len({*shares}) > 1)
    settings = read_script(find_script("5d")[0]).parse(rest, "")
    assert assign_ranks(own, settings.layout, "192.0.2.1").ranks_of == shares
    assert ("--node-rank" in lines[-1]) == (" each, with 80,000 MB for each" in shown) == (len(shares) > 1)


def test_a_plan_says_which_slices_were_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, times = tmp_path / "machine.json", PassSeconds((1e-4,), (2e-4,), (1e-4,), (1e-4,))
    sizes = Sizes(32, 4, 4, 128, 16, SPTokenizer(None).vocab_size)
    passes = Measured(sizes, tp=1, threads=1, rows=(1,), embedding=times, block=times, head=times)
    write_machine(cluster(measured=(passes,)), file)
    remarks = []
    for tp in "1", "2":
        plan.command([*SMALL, "--ranks", "2", "--tp", tp, "--top", "1", "--machine", str(file)])
        remarks += [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert remarks == [f"# {file} has no times of passes with layers in 2 slices; they are estimated"]


def test_bfloat16_and_a_vocabulary_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--machine", str(LAB / "docs/machines/h100.json"), "--ranks", "2", "--dp", "2", "--top", "1"]
    seconds = {}
    for flags in ("", "--dtype bfloat16", "--dtype bfloat16 --vocab-size 128000"):
        plan.command([*SMALL, "--dmodel", "1024", *machine, *flags.split()])
        shown = capsys.readouterr().out
        seconds[flags] = float(re.findall(r"([\d.]+) ms", shown)[0])
        assert ("--dtype bfloat16" in shown) == ("bfloat16" in flags)
        assert len(re.findall(r"^1   .*launch\.sh ", shown, re.MULTILINE)) == 1, "the command of the first row"
        assert ("with a SentencePiece model of 128,000 pieces" in shown) == ("vocab" in flags)
        assert f"by the file {machine[1]}, which names its machine " in shown
        assert "its numbers are from NVIDIA's data sheets" in shown
        assert "h100.json has no times of passes of this model; they are estimated" in shown
    assert seconds["--dtype bfloat16"] < seconds[""] < seconds["--dtype bfloat16 --vocab-size 128000"]


def test_each_key_of_a_machines_file_has_its_row_in_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", (LAB / "docs/planner.md").read_text(), re.MULTILINE)
    keys = {field.name: field.default is MISSING for field in fields(Machine)}
    assert {name: without == "needed" for name, without in rows if name in keys} == keys


def test_sizes_of_memory() -> None:
    assert [plan.read_size(text) for text in ("500MB", "8GB", "1.5TB")] == [500e6, 8e9, 1.5e12]


def test_the_flags_of_a_model_are_those_that_a_run_needs() -> None:
    run_of = HybridSettings()
    for name in plan.MODEL:
        assert getattr(plan.PlanRequest(), name) == getattr(run_of, name), name
    assert plan.PlanRequest().model_flags() == []
    changed = plan.PlanRequest(num_kv_heads=2, n_layers=3, optimizer="sgd").model_flags()
    assert changed == "--num-kv-heads 2 --n-layers 3 --optimizer sgd".split()


def test_a_rank_has_the_memory_of_its_gpu_or_its_share_of_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = cluster()
    assert [share_of_rank(gpus, ranks) / 1e9 for ranks in (1, 2, 8, 32)] == [80] * 4
    crowded = cluster(ranks_per_host=16)
    assert [share_of_rank(crowded, ranks) / 1e9 for ranks in (8, 9, 16)] == [80, 40, 40]
    cpus = cluster(device="cpu")
    assert [share_of_rank(cpus, ranks) / 1e9 for ranks in (1, 2, 32)] == [640, 320, 80]
    plan.command([*SMALL, "--ranks", "2", "--machine", CLUSTER, "--top", "1"])
    assert "2 ranks on 1 host with 8 GPUs, with 80,000 MB for each" in capsys.readouterr().out


def test_a_plan_counts_with_the_threads_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_machine(cluster(device="cpu", cores_per_host=2), tmp_path / "machine.json")
    tokens = []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        plan.command([*SMALL, "--ranks", "1", "--machine", str(tmp_path / "machine.json"), "--top", "1"])
        [per_second] = re.findall(r"one rank .* ms +([\d,]+) ", capsys.readouterr().out)
        tokens.append(int(per_second.replace(",", "")))
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.05)


def test_milliseconds_have_three_digits() -> None:
    shown = [milliseconds(seconds) for seconds in (0.0, 4.2e-5, 8.47e-4, 1e-3, 0.0413, 7.282)]
    assert shown == ["0.000 ms", "0.042 ms", "0.847 ms", "1.00 ms", "41.3 ms", "7,282 ms"]


def test_a_plan_says_how_many_layouts_it_leaves_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for (large, slow), shown in (((2_000, 30), "; 2,000 do not fit, 30 are slower in any case"), ((0, 0), "")):

        def counted(*args: Any, large: int = large, slow: int = slow, **flags: Any) -> search.Found:
            return replace(search.find_layouts(*args, **flags), too_large=large, too_slow=slow)

        monkeypatch.setattr(plan, "find_layouts", counted)
        plan.command([*SMALL, "--ranks", "2", "--machine", CLUSTER, "--top", "1"])
        assert re.search(rf"^[\d,]+ layouts{shown}$", capsys.readouterr().out, re.MULTILINE)


def test_a_terminal_shows_which_layout_is_simulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(plan, "can_erase", lambda _, is_terminal=is_terminal: is_terminal)
        plan.command([*SMALL, "--ranks", "2", "--machine", CLUSTER, "--top", "1"])
        shown, _, table = capsys.readouterr().out.rpartition(ERASE_LINE)
        layouts = re.search(r"^([\d,]+) layouts", table, re.MULTILINE)
        assert layouts
        of_all = re.findall(rf"# simulating layout ([\d,]+) of at most {layouts[1]}\b", shown)
        numbers = [int(number.replace(",", "")) for number in of_all]
        assert numbers == [*range(1, len(numbers) + 1)]
        assert bool(numbers) == is_terminal


def test_a_plan_starts_without_torch() -> None:
    code = "import sys; from distlab_planner import plan; sys.exit('torch' in sys.modules)"
    assert run(sys.executable, "-c", code, PYTHONPATH=str(LAB / "src")).status == 0


real_run = subprocess.run


def forked(command: list[str], **more: Any) -> Any:
    """What `subprocess.run` returns for the launcher; a rank that calls git calls it."""
    if "distlab.launch" not in command:
        return real_run(command, **more)
    ended = fork_launcher(*command[command.index("distlab.launch") + 1 :]).finish()
    return SimpleNamespace(returncode=ended.status, stderr=ended.err)


@pytest.mark.parametrize(
    "command",
    [
        "distlab.launch",
        f"distlab.launch plan --machine {CLUSTER}",
        "distlab.launch check --help",
        "distlab.show_schedule dapple",
    ],
)
def test_output_to_a_full_disk_is_one_sentence(command: str) -> None:
    full = shlex.join([sys.executable, "-m", *command.split()]) + " > /dev/full"
    ended = run("bash", "-c", full, PYTHONPATH=str(LAB / "src"))
    assert ended.err == "# cannot write the output or a file (No space left on device); make room\n"
    mute = run("bash", "-c", f"{full} 2>&1", PYTHONPATH=str(LAB / "src"))
    assert (ended.status, mute.status) == (2, 2)


def test_a_plan_ends_quietly_when_its_reader_does() -> None:
    command = shlex.join([sys.executable, "-m", "distlab.launch", "plan", *SMALL, "--ranks", "4", "--machine", CLUSTER])
    ended = run("bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}", PYTHONPATH=str(LAB / "src"))
    assert (ended.status, ended.err) == (141, "")


@pytest.mark.alone  # another test's load slows a pass as much as a core that has been idle
def test_a_machine_is_measured_and_a_plan_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that a run counts is what was predicted; the time is, within the mood of a machine that runs tests."""
    file = tmp_path / "machine.json"
    flags = [*MODEL, "--world-size", "2", "--seconds", "0.1", "--rows", "1", "8", "--device", "cpu"]
    ended = fork_python("-m", "distlab.calibrate", file, *flags).finish(deadline=200)
    assert ended.status == 0, ended.err
    machine = read_machine(file)
    assert (machine.device, machine.hosts, machine.ranks_per_host) == ("cpu", 1, 2)
    assert {(entry.tp, entry.threads) for entry in machine.measured} >= {(1, 1), (2, 1)}
    assert {(entry.ranks, entry.transport) for entry in machine.all_reduces} >= {(2, "gloo")}
    assert len(machine.slowdown) == 2
    assert [one.idle_seconds for one in machine.waking] == list(PAUSES)
    waking = [one.seconds for one in machine.waking]
    assert waking == sorted(waking), "a longer pause never costs less; on some machines, it costs nothing"
    one = machine.measured[0]
    assert len(one.again) == len(one.rows)
    assert 0.3 * one.block.F[-1] < one.again[-1] < 3 * one.block.F[-1]
    assert machine.step_seconds > 0
    assert machine.process_bytes > 50e6
    monkeypatch.setattr("distlab_planner.plan.subprocess.run", forked)
    plan.command([*SMALL, "--ranks", "2", "--machine", str(file), "--tp", "2", "--verify", "1", "--steps", "6"])
    predicted, counted, off = capsys.readouterr().out.splitlines()[-1].split()[-3:]
    assert float(counted) > 0
    assert abs(int(off.strip("%+"))) <= 5, (predicted, counted)
