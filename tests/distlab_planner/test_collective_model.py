"""The cost model: predictions are the formulas where formulas exist."""

import math
import re

import pytest
from support.small_models import status_of
from support.terminals import fork_python

from distlab.collectives.ring import SEGMENT_BYTES
from distlab.collectives.simulation import Link
from distlab_planner.collective_costs import CollectivesRequest, table
from distlab_planner.collective_model import CostModel, bytes_of_a_message, predict_collective, whole_numbers

pytestmark = pytest.mark.quick

SIZE_BYTES = 4_000_000
COSTS = CostModel(Link(0.001, 1e9), math.inf, 4e9)  # of this size: a message takes 5 ms, an addition 1 ms
MESSAGE, ADDITION, LATENCY = 0.005, 0.001, 0.001


@pytest.mark.parametrize(
    ("operation", "topology", "seconds"),
    [
        ("broadcast", "naive", 7 * MESSAGE),
        ("broadcast", "tree", 3 * MESSAGE),
        ("reduce", "naive", 7 * (MESSAGE + ADDITION)),
        ("reduce", "tree", 3 * (MESSAGE + ADDITION)),
        ("all-reduce", "butterfly", 3 * (2 * MESSAGE + ADDITION)),  # in each round one gives first, then the other
        ("all-reduce", "ring", 7 * (LATENCY + 0.0005 + ADDITION / 8) + 7 * (LATENCY + 0.0005)),
        ("all-gather", "ring", 7 * (LATENCY + 0.0005)),  # all give and take at the same time
        ("reduce-scatter", "ring", 7 * (LATENCY + 0.0005 + ADDITION / 8)),
        ("all-to-all", "pairwise", 7 * (LATENCY + 0.0005)),
        ("gather", "naive", 7 * (LATENCY + 0.0005)),
        ("gather", "tree", 3 * LATENCY + (1 + 2 + 4) * 0.0005),
    ],
)
def test_predictions_are_the_formulas(operation: str, topology: str, seconds: float) -> None:
    assert predict_collective(operation, topology, SIZE_BYTES, 8, COSTS).makespan == pytest.approx(seconds)


def test_messages_at_the_same_time_share_what_the_computer_moves() -> None:
    shared = CostModel(Link(0, 1e9), 2e9, math.inf)
    # One of 4 MB takes 4 ms alone, and one from each of eight ranks 16 ms: 12 / 7 ms for each further one. The tree's
    # rounds have one, two and four.
    assert predict_collective("broadcast", "tree", SIZE_BYTES, 8, shared).makespan == pytest.approx(
        0.012 + (1 + 3) * 0.012 / 7
    )
    assert predict_collective("broadcast", "naive", SIZE_BYTES, 8, shared).makespan == pytest.approx(0.004 * 7)
    latency = CostModel(Link(0.001, 1e9), 2e9, math.inf)
    assert predict_collective("broadcast", "tree", SIZE_BYTES, 8, latency).makespan == pytest.approx(
        0.015 + (1 + 3) * 0.015 / 7
    )


@pytest.mark.parametrize(
    ("operation", "topology", "size_bytes", "message_bytes"),
    [
        ("broadcast", "naive", SIZE_BYTES, SIZE_BYTES),
        ("all-reduce", "ring", SIZE_BYTES, SIZE_BYTES // 8),
        ("all-reduce", "ring", 8 * 5 * SEGMENT_BYTES, SEGMENT_BYTES),
        ("gather", "naive", SIZE_BYTES, SIZE_BYTES // 8),
        ("gather", "tree", SIZE_BYTES, (1 + 2 + 4) * SIZE_BYTES // 8 // 3),
    ],
)
def test_what_a_message_carries(operation: str, topology: str, size_bytes: int, message_bytes: int) -> None:
    assert bytes_of_a_message(operation, topology, size_bytes, 8) == message_bytes


def test_several_in_a_row_are_predicted_one_after_the_other() -> None:
    costs = CostModel(Link(1e-3, 1e9), math.inf, math.inf)
    one, three = (
        predict_collective("broadcast", "naive", SIZE_BYTES, 2, costs, in_a_row=count).makespan for count in (1, 3)
    )
    assert three == pytest.approx(3 * one)


def test_four_that_add_at_the_same_time_on_two_cores_take_twice_as_long() -> None:
    of_their_own, shared = CostModel(Link(), math.inf, 1e9), CostModel(Link(), math.inf, 1e9, ranks_at_once=2)
    seconds = [
        predict_collective("all-reduce", "ring", SIZE_BYTES, 4, costs).makespan for costs in (of_their_own, shared)
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_a_part_that_is_copied_takes_its_time() -> None:
    costs = CostModel(Link(), math.inf, math.inf, copied_bytes_per_second=1e9)
    assert predict_collective("gather", "naive", SIZE_BYTES, 4, costs).makespan == pytest.approx(
        0.001
    )  # the root's own
    assert predict_collective("broadcast", "naive", SIZE_BYTES, 4, costs).makespan == 0
    butterfly = predict_collective("all-reduce", "butterfly", SIZE_BYTES, 4, costs).makespan
    assert butterfly == pytest.approx(2 * 0.004), "in each round the higher rank sends a copy"


def test_sizes_are_rounded_up_to_whole_numbers_for_each_rank() -> None:
    assert [whole_numbers(size, 4) for size in (0, 1, 16, 17, 1000)] == [16, 16, 16, 32, 1008]
    assert predict_collective("broadcast", "naive", 1, 2, COSTS).counts[0].sent_bytes == 8


def test_the_rates_are_told_of_messages_alone_and_together_of_adding_and_of_copying() -> None:
    costs = CostModel(Link(1e-5, 1e9), 2e9, 3e9, 4e9)
    assert re.findall(r"(\S+) GB/s", str(costs)) == ["1.0", "2.0", "3.0", "4.0"]


def test_the_table() -> None:
    asked = "4 --latency-us 1000 --gigabytes-per-second 1 --kilobytes 4000 1000".split()
    head, *rows = fork_python("-m", "distlab.collective_costs", *asked).finish().out.splitlines()
    assert head.split() == ["ms", "4,000", "kB", "1,000", "kB"]
    assert ["broadcast", "tree", "10.00", "4.00"] in [row.split() for row in rows]
    assert rows[-1].split()[:2] == ["all-to-all", "pairwise"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("0", "# 0 computers: give 1 to 1024"),
        ("4 --latency-us -1", "# --latency-us -1: give 0 or more"),
        ("4 --gigabytes-per-second 0", "# --gigabytes-per-second 0: must be greater than 0"),
        ("4 --kilobytes 1 0", "# --kilobytes 1 0: give one or more sizes, from 1 up"),
        ("1025", "# 1025 computers: give 1 to 1024"),
        ("4 --no-such-flag 1", "# Unrecognized options: --no-such-flag"),
        ("", "# missing: INT (number of computers, with one rank each)"),
    ],
)
def test_a_wrong_flag_ends_the_table_with_a_sentence(
    flags: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, table, CollectivesRequest, *flags.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(sentence)
    assert told.count("\n") == 1
