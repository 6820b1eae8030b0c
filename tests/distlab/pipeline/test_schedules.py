"""The schedules' lists: literal ones, the order on every link, and a new schedule."""

import pytest

from distlab.pipeline.actions import Action, Backward, Forward
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import ALIASES, SCHEDULES, all_stages, gpipe, schedule, schedule_names

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 10)]


@pytest.mark.parametrize(
    ("name", "micro_batches", "lists"),
    [
        ("naive", 3, ["F0 B0 F1 B1 F2 B2"] * 2),
        ("gpipe", 3, ["F0 F1 F2 B0 B1 B2"] * 3),
        (
            "dapple",
            4,
            ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
        ),
        ("dapple", 2, ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]),
        ("dapple", 1, ["F0 B0"] * 4),
        ("dapple", 3, ["F0 B0 F1 B1 F2 B2"]),
    ],
)
def test_lists(name: str, micro_batches: int, lists: list[str]) -> None:
    programs = all_stages(name, len(lists), micro_batches)
    assert [" ".join(map(str, program)) for program in programs] == lists


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_and_both_ends_of_each_link_agree_on_the_order(name: str) -> None:
    for stages, micro_batches in SIZES:
        programs = all_stages(name, stages, micro_batches)
        simulate(programs)
        assert [{action.stage for action in program} for program in programs] == [{s} for s in range(stages)]
        for kind in (Forward, Backward):
            orders = [[a.micro_batch for a in program if isinstance(a, kind)] for program in programs]
            assert sorted(orders[0]) == list(range(micro_batches))
            assert orders == [orders[0]] * stages


def test_the_literatures_name_of_dapple() -> None:
    assert "1f1b" in schedule_names()
    assert all_stages("1f1b", 3, 5) == all_stages("dapple", 3, 5)
    assert set(schedule_names()) == {*SCHEDULES, *ALIASES}
    assert not SCHEDULES.keys() & ALIASES.keys()


def test_passes_of_one_micro_batch_differ_by_kind_and_stage() -> None:
    assert len({Forward(0, 1), Backward(0, 1), Forward(1, 1), Forward(1, 0), Forward(0, 1)}) == 4


def test_a_new_schedule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.pipeline.schedules.SCHEDULES", {})

    @schedule
    def last_in_first_out(stage: int, stages: int, micro_batches: int) -> list[Action]:
        passes = gpipe(stage, stages, micro_batches)
        return passes[:micro_batches] + passes[: micro_batches - 1 : -1]

    programs = all_stages("last_in_first_out", 2, 2)
    assert [str(action) for action in programs[1]] == ["F0", "F1", "B1", "B0"]
    assert simulate(programs).makespan == simulate([gpipe(stage, 2, 2) for stage in range(2)]).makespan
    assert "last_in_first_out" not in SCHEDULES
