"""The chapter on collectives as a reader runs it."""

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chapters import load
from support.processes import LAB, free_port
from support.terminals import fork_launcher, fork_python

from distlab.comm.link import Link
from distlab.launching.local_ranks import temporary_folder
from distlab_planner.collective_model import CostModel, predict_collective
from distlab_planner.collective_probes import fit_costs

PLAIN = "collectives/intro_collectives.py"
COSTS = CostModel(Link(0, math.inf), math.inf, math.inf)  # messages are counted, not timed


@pytest.fixture(scope="module", autouse=True)
def _calibrated_soon() -> Iterator[None]:
    """Costs are fitted to one round of each probe: no test is about their values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_costs, "__defaults__", (1,))
        yield


def test_a_prediction_is_the_time_of_the_last_rank_with_the_costs_of_messages_of_its_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of three ranks. Rank 0 has sent on its part around the ring before rank 1 has."""
    compare = load("collectives/compare_collectives.py")
    fitted = {size: CostModel(Link(seconds), math.inf, math.inf) for size, seconds in ((1_000_000, 1), (4_000_000, 8))}
    calls = [("broadcast", "naive"), ("broadcast", "ring"), ("all-reduce", "ring"), ("all-reduce", "library")]
    rows = [compare.Row(*call, 3_000_000, seconds) for seconds, call in enumerate(calls, start=4)]
    compare.show(rows, 3, fitted)
    assert [row.predicted_seconds for row in rows] == [16, 16, 4, None]
    shown = [re.split(r" {2,}", line.removeprefix("#").strip())[1:] for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        ["naive", "2", "6 MB", "16000.00 ms", "4000.00 ms", "0.25 *"],
        ["ring", "2", "6 MB", "16000.00 ms", "5000.00 ms", "0.31"],
        ["ring", "8", "8 MB", "4000.00 ms", "6000.00 ms", "1.50"],
        ["library", "7000.00 ms"],
    ]


@functools.cache
def compared(rounds: int) -> tuple[list[str], list[dict[str, Any]]]:
    """What three ranks print that compare collectives of two sizes, and the rows."""
    with temporary_folder() as out:
        flags = ["--world-size", 3, "--sizes", 1, 300_000, "--rounds", rounds, "--out", out]
        ended = fork_launcher("compare-collectives", *flags).finish(90)
        assert ended.status == 0, ended.err
        assert (out / "collectives.png").stat().st_size > 10_000
        rows = (out / "collectives.jsonl").read_text().splitlines()
    return ended.out.splitlines(), [*map(json.loads, rows)]


def test_every_topology_is_counted_predicted_and_measured() -> None:
    lines, rows = compared(2)
    assert all(line.startswith("#") for line in lines)
    assert len(rows) == 2 * (4 + 3 + 6 + 3 + 4 + 3 + 3)
    assert {row["size_bytes"] for row in rows} == {12, 300_000}
    costs = [line.split(":")[0] for line in lines if " µs each, " in line]
    assert costs == [f"# {size} MB at a time" for size in (1, 4, 16)]
    rounded = [line for line in lines if " instead of " in line]
    assert rounded == ["# 12 B instead of 1 B, so that each rank has the same number of elements of 4 bytes"]
    assert sum(line.endswith("*") for line in lines) == 2 * 7, "the fastest of each size"
    for row in rows:
        assert row["measured_seconds"] > 0
        assert (row["predicted_seconds"] is None) == (row["topology"] in ("library", "shared"))
    assert rows[0]["busiest_bytes"] == 24, "what is sent is what is shown"
    busiest = {
        (row["operation"], row["topology"]): (row["busiest_messages"], row["busiest_bytes"])
        for row in rows
        if row["size_bytes"] == 300_000
    }
    assert busiest["broadcast", "naive"] == (2, 600_000)
    assert busiest["broadcast", "ring"] == (2, 600_000)  # the rank in the middle receives it and sends it on
    assert busiest["all-reduce", "naive"] == (4, 1_200_000)
    assert busiest["all-reduce", "ring"] == (8, 800_000)
    assert busiest["gather", "naive"] == (2, 200_000)


def test_the_librarys_collectives_are_gloos_own_which_the_lab_does_not_count() -> None:
    """One more round is a barrier before each collective, and the messages of those by hand."""
    counts = [re.findall(r" of collectives by hand in (\d+) messages", " ".join(compared(n)[0])) for n in (1, 2)]
    [before], [after] = counts
    rows = compared(2)[1]
    by_hand = [row for row in rows if row["predicted_seconds"] is not None]
    calls = [(row["operation"], row["topology"], row["size_bytes"], 3) for row in by_hand]
    messages = sum(predict_collective(*call, COSTS).counts[0].sends for call in calls)
    assert int(after) - int(before) == len(rows) + messages


def test_a_world_of_one_has_nobody_to_talk_to(tmp_path: Path) -> None:
    flags = "0 --world-size 1 --sizes 1000 --rounds 1".split()
    flags += ["--master-port", str(free_port()), "--out", str(tmp_path)]
    ended = fork_python(PLAIN, *flags).finish()  # which takes the comparison's flags, too
    assert ended.status == 0, ended.err
    assert (tmp_path / "collectives.jsonl").exists()
    assert "# 1 MB at a time: adding at " in ended.out
    assert " µs each" not in ended.out, "nothing is sent"


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_ring_by_hand_sends_the_bytes_of_the_formula_and_has_the_librarys_sum(ranks: int, tmp_path: Path) -> None:
    """The script itself compares the sums."""
    ended = fork_launcher("collectives", "--world-size", ranks, "--elements", 3000, "--out", tmp_path).finish()
    assert ended.status == 0, ended.err
    assert "12,000 bytes on each" in ended.out
    expected = [f"{12_000 / ranks * (ranks - 1) / 1000:.3g} kB"] * 2 if ranks > 1 else []
    assert [size for size, kind in re.findall(r"rank 0 sent (.*) of (.*) by hand in", ended.out)] == expected


def test_a_sum_that_is_wrong_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "ring.py"
    script.write_text((LAB / PLAIN).read_text().replace("        added_to += received\n", ""))
    ended = fork_launcher(script, "--world-size", 2, "--out", tmp_path / "run").finish()
    assert ended.status == 1
    assert "Tensor-likes are not close" in ended.err + ended.out
