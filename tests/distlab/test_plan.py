"""./launch.sh plan, and python -m distlab.calibrate, whose file it reads."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import LAB, run
from terminals import fork_launcher, fork_python

from distlab import plan
from distlab.launch import find_script, launch, read_settings
from distlab.planner.machine import read_machine
from distlab.run.train_settings import HybridSettings
from simplellm.errors import InputError

CLUSTER = str(LAB / "docs/machines/cluster.json")
SMALL = "--dmodel 32 --num-heads 4 --n-layers 3 --seq-len 16 --global-batch 8".split()
MODEL = "--dmodel 32 --num-heads 4 --seq-len 16".split()


def test_the_commands_of_a_plan_are_those_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["plan", *SMALL, "--ranks", "4", "--machine", CLUSTER, "--top", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line.split(maxsplit=1)[1] for line in lines if "./launch.sh" in line]
    assert len(commands) == 5
    script, _ = find_script("hybrid")
    for command in commands:
        _, name, *flags = shlex.split(command)
        settings = read_settings(script, flags, "")
        assert name == "hybrid"
        assert isinstance(settings, HybridSettings)
        assert settings.dp * settings.pp * settings.tp == 4
        assert settings.dp * settings.batch_size == 8
        assert (settings.dmodel, settings.num_heads, settings.n_layers, settings.seq_len) == (32, 4, 3, 16)
    steps = [float(found[1].replace(",", "")) for line in lines if (found := re.search(r"([\d.,]+) ms", line))]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--ranks 2000", "--ranks 2000: {} has 128 hosts with 8 ranks each"),
        ("--memory 8", "--memory 8: give a size like 8GB or 500MB"),
        ("--memory 1MB --ranks 2", "no layout fits into 1 MB a rank; the smallest needs 1,0"),
        ("--ranks 7 --global-batch 3 --tp 7", "no layout divides the batch, the heads and the layers"),
        ("--schedule fast", "--schedule fast: give some of naive, "),
        ("--verify -1", "--verify -1: give 0 or more"),
    ],
)
def test_what_cannot_be_planned_is_said(flags: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence.format(CLUSTER))):
        plan.main([*SMALL, "--machine", CLUSTER, *flags.split()])


def test_a_plan_starts_without_torch() -> None:
    code = "import sys; from distlab import plan; sys.exit('torch' in sys.modules)"
    assert run(sys.executable, "-c", code, PYTHONPATH=str(LAB / "src")).status == 0


def forked(command: list[str], **_: object) -> SimpleNamespace:
    """What `subprocess.run` returns for `python -m distlab.launch …`."""
    ended = fork_launcher(*command[3:]).finish()
    return SimpleNamespace(returncode=ended.status, stderr=ended.err)


def test_a_machine_is_measured_and_a_plan_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that a run counts is what was predicted; the time is, within the mood of a machine that runs tests."""
    file = tmp_path / "machine.json"
    flags = [*MODEL, "--world-size", "2", "--seconds", "0.2", "--device", "cpu"]
    ended = fork_python("-m", "distlab.calibrate", file, *flags).finish(deadline=120)
    assert ended.status == 0, ended.err
    machine = read_machine(file)
    assert (machine.device, machine.hosts, machine.ranks_per_host) == ("cpu", 1, 2)
    assert {(entry.tp, entry.threads) for entry in machine.measured} >= {(1, 1), (2, 1)}
    assert {(entry.ranks, entry.transport) for entry in machine.all_reduces} >= {(2, "gloo")}
    assert len(machine.slowdown) == 2
    assert machine.step_seconds > 0
    assert machine.process_bytes > 50e6
    monkeypatch.setattr("distlab.plan.subprocess.run", forked)
    plan.main([*SMALL, "--ranks", "2", "--machine", str(file), "--tp", "2", "--verify", "1", "--steps", "6"])
    predicted, counted, off = capsys.readouterr().out.splitlines()[-1].split()[-3:]
    assert float(counted) > 0
    assert abs(int(off.strip("%+"))) <= 5, (predicted, counted)
