"""What a plan prints beside the layouts: the memory that they take, and with --verify what was measured."""

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

SMALL = "--dmodel 32 --num-heads 4 --n-layers 3 --seq-len 16 --global-batch 8 --ranks 2 --dp 2 --top 1".split()


@pytest.fixture
def machine(tmp_path: Path) -> list[str]:
    write_machine(cluster(device="cpu"), tmp_path / "machine.json")
    return ["--machine", str(tmp_path / "machine.json")]


def test_the_memory_is_that_of_the_optimizer(machine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    megabytes = []
    for optimizer in ("adam", "sgd"):
        plan.command([*SMALL, *machine, "--micro-batches", "4", "--shard", "none", "--optimizer", optimizer])
        [memory] = re.findall(r"^1 +2 dp .* ms +[\d,]+ +- +([\d,]+)", capsys.readouterr().out, re.MULTILINE)
        megabytes.append(int(memory.replace(",", "")))
    assert megabytes[0] >= megabytes[1] + 2, "two numbers for each of 0.3 million weights"


def test_the_first_steps_of_a_run_do_not_count(
    machine: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        out = Path(command[command.index("--out") + 1])
        records = [json.dumps({"seconds": seconds}) for seconds in (*[9.0] * WARM_UP, 0.5, 0.25, 0.5)]
        (out / "metrics.jsonl").write_text("\n".join(records))
        (out / "memory.json").write_text(json.dumps([dict.fromkeys(MEMORY_KINDS, 10**6)]))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr("distlab_planner.plan.subprocess.run", run)
    plan.command([*SMALL, *machine, "--verify", "1"])
    assert " 500 ms " in capsys.readouterr().out.splitlines()[-1]
