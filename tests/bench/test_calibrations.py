"""What bench/calibrations.py computes of its measurements."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from support.chapters import load
from support.planner_machines import cluster

from distlab_planner.machine import AllReduce, read_machine


def test_of_several_measurements_of_a_machine_every_number_is_the_median(tmp_path: Path) -> None:
    calibrations = load("bench/calibrations.py")
    measured = [
        cluster(
            step_seconds=seconds,
            slowdown=(1.0, 3 - seconds),
            all_reduces=(AllReduce(2, "shared", (1e5,), (seconds / 10,)),),
        )
        for seconds in (0.5, 0.25, 1.0)
    ]
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(calibrations.medians([asdict(machine) for machine in measured])))
    assert read_machine(file) == replace(measured[0], slowdown=(1.0, 2.5))


def test_sizes_are_those_that_the_flags_ask_for() -> None:
    sizes = load("bench/calibrations.py").sizes_of("--dmodel 24 --num-heads 6 --num-kv-heads 2 --hidden-dim 80")
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.hidden_dim) == (6, 2, 80)
    plain = load("bench/calibrations.py").sizes_of("--dmodel 24")
    assert (plain.num_kv_heads, plain.hidden_dim) == (6, 96)
