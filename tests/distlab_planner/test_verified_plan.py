"""What a plan prints beside the layouts: the memory that they take, and with --verify what was measured."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.planner_machines import cluster

from distlab.reports.memory import MEMORY_KINDS
from distlab_planner import plan
from distlab_planner.machine import write_machine
from distlab_planner.step import WARM_UP

WEIGHTS = 2 * 40_000 * 32 + 3 * (4 * 32**2 + 3 * 32 * 128 + 2 * 32) + 32
SMALL = "--dmodel 32 --num-heads 4 --n-layers 3 --seq-len 16 --global-batch 8 --ranks 2 --dp 2 --top 1".split()


@pytest.fixture
def machine(tmp_path: Path) -> list[str]:
    write_machine(cluster(device="cpu"), tmp_path / "machine.json")
    return ["--machine", str(tmp_path / "machine.json")]


def test_the_memory_is_that_of_the_optimizer(machine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    megabytes, flags = [], "--micro-batches 4 --shard none --vocab-size 40000 --optimizer".split()
    for optimizer in ("adam", "sgd"):
        plan.command([*SMALL, *machine, *flags, optimizer])
        columns = r"^1 +2 dp .* ([\d,.]+) ms +([\d,]+) +- +([\d,]+) +([\d,.]+) "
        shown = capsys.readouterr().out
        assert "with 320,000 MB for each" in shown, "of two ranks on a host with 640 GB"
        [row] = re.findall(columns, shown, re.MULTILINE)
        milliseconds, tokens_per_second, memory, sent = (float(number.replace(",", "")) for number in row)
        assert milliseconds / 1e3 * tokens_per_second == pytest.approx(8 * 16, rel=0.01), "of the global batch"
        assert sent == pytest.approx(4 * WEIGHTS / 1e6, abs=0.05), "of two ranks, each sends a half twice"
        megabytes.append(memory)
    assert megabytes[0] - megabytes[1] == pytest.approx(1.3 * 2 * 4 * WEIGHTS / 1e6, abs=1), (
        "with what is kept of freed"
    )


def test_the_first_layouts_are_run_without_their_first_steps(
    machine: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[list[str]]()

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        out = Path(command[command.index("--out") + 1])
        records = [json.dumps({"seconds": seconds}) for seconds in (*[9.0] * WARM_UP, 0.5, 0.25, 0.5)]
        (out / "metrics.jsonl").write_text("".join(f"{record}\n" for record in records))
        (out / "memory.json").write_text(json.dumps([dict.fromkeys(MEMORY_KINDS, 10**6)]))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr("distlab_planner.plan.subprocess.run", run)
    plan.command([*SMALL, "--top", "3", *machine, "--verify", "2"])
    shown, _, verified = capsys.readouterr().out.rpartition("\n\n")
    steps = [float(found.replace(",", "")) for found in re.findall(r"^\d .* ([\d,.]+) ms ", shown, re.MULTILINE)]
    planned = [line.split()[3:] for line in shown.splitlines() if "launch.sh" in line]
    assert len(steps) == len(planned) == 3
    _, *lines = verified.splitlines()
    for number, line in enumerate(lines):
        numbers = [float(found.replace(",", "")) for found in re.findall(r"[+-]?\d[\d,.]*", line)]
        _, predicted, measured, off, held, counted, off_of_memory = numbers
        assert (predicted, measured, counted) == (steps[number], 500, len(MEMORY_KINDS))
        shares = predicted / measured - 1, held / counted - 1
        assert (off / 100, off_of_memory / 100) == pytest.approx(shares, abs=0.02)
    for flags, command in zip(planned[:2], commands, strict=True):
        begin = command.index("5d") + 1
        assert command[begin : begin + len(flags)] == flags
        assert {*itertools.pairwise(command)} >= {("--steps", "12"), ("--device", "cpu")}
    assert len(lines) == 2
