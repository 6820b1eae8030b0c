"""What the launcher tells the ranks when some have died, and others have finished."""

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.processes import ranks_of, run_ranks, wait_for

from distlab.launching.processes import RankFailure
from distlab.launching.repairs import Repairs
from distlab.machine.processes import NEWCOMER
from distlab.rendezvous.survivors import (
    FINISHED,
    KEEP,
    NEWS,
    PLACE,
    READY,
    TAKE,
    Answer,
    Arbiter,
    News,
    NewsError,
    Position,
    Survivor,
    await_place,
    common_position,
    describe_change,
)
from simplellm.errors import InputError


class Store(dict[str, str]):
    def read(self, *keys: str) -> dict[str, str]:
        return {key: self[key] for key in keys if key in self}

    def set(self, key: str, value: str = "") -> None:
        self[key] = value

    def has(self, *keys: str) -> bool:
        return all(key in self for key in keys)


class FakeRanks:
    def __init__(self) -> None:
        self.processes: dict[int, object] = {0: object(), 1: object()}
        self.failures: dict[int, Any] = {}
        self.ended: list[int] = []
        self.spares: list[int] = []  # that were started

    def die(self, rank: int) -> None:
        del self.processes[rank]
        self.failures[rank], self.ended = SimpleNamespace(cause="died", cannot_be_repaired=False), [rank]

    def kill_stopped(self) -> None: ...

    def exited_spares(self) -> dict[int, RankFailure]:
        return {}

    def kill(self, rank: int) -> None:
        del self.processes[rank]

    def start_spare(self, number: int, of_others: dict[str, str]) -> None:
        self.spares.append(number)

    def count_spare(self, number: int, rank: int) -> None:
        self.processes[rank] = object()


def all_train(ranks: FakeRanks, store: Store, spares: int, tp: int = 1, why_lost: Any = lambda _: "") -> Repairs:
    """The repairs of two replicas, all of whose ranks have begun to train."""
    settings: Any = SimpleNamespace(layout={"dp": 2, "tp": tp}, why_lost=why_lost)
    repairs = Repairs(settings, spares)
    repairs.begin(ranks, store, [{"RANK": f"{rank}"} for rank in ranks.processes])  # type: ignore[arg-type]
    store.update({f"{READY}/{rank}": "" for rank in ranks.processes})
    return repairs


@pytest.mark.parametrize("is_counted", [False, True], ids=["before it is counted", "after"])
def test_a_spare_that_comes_after_the_others_have_finished_hears_that_they_have(is_counted: bool) -> None:
    """In a layout in which the spare alone could not go on."""
    ranks, store = FakeRanks(), Store()
    repairs = all_train(ranks, store, spares=1, why_lost=lambda left: "" if 1 in left else "no stage is left")
    ranks.die(0)
    repairs.look()
    assert News.from_json(store[NEWS]).gone == {"0": "died"}
    store[f"{READY}/newcomer1"] = ""
    if is_counted:
        repairs.look()
        assert News.from_json(store[NEWS]).alive == (1, 0), "those that have been there longer come first"
    del ranks.processes[1]
    ranks.ended.append(1)
    repairs.look()
    news = News.from_json(store[NEWS])
    assert (news.alive, news.gone) == ((0,), {"0": "died", "1": FINISHED})
    assert json.loads(store[NEWS])["newcomers"] == {"0": 1}


def test_a_spare_waits_for_those_of_other_slices_and_other_ranks_for_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.rendezvous.survivors.SECONDS_FOR_NEWS", 0.1)
    store: Any = Store()
    with pytest.raises(ConnectionError):
        Survivor(store, 3).await_news(ConnectionError())
    arbiter = Arbiter(store)
    arbiter.tell([0, 1], {2: "died", 3: "died"})
    with pytest.raises(ConnectionError):
        Survivor(store, 3).await_news(ConnectionError())  # it was taken for dead
    counted = threading.Timer(0.5, arbiter.tell, [[0, 1, 2, 3], {}, {1: 2, 2: 3}])
    counted.start()
    survivor = Survivor(store, 3, newcomer=2)
    news = survivor.await_news(ConnectionError())
    assert news.epoch == 2
    counted.join(10)
    arbiter.tell([0, 1, 3], {2: "died"})
    assert News.from_json(store[NEWS]).processes() == {0: 0, 1: 0, 3: 2}
    with pytest.raises(NewsError):
        survivor.agree(news, Answer(Position(0, TAKE), 0), 5)
    assert survivor.await_news(ConnectionError()).epoch == 3
    with pytest.raises(ConnectionError):
        survivor.await_news(ConnectionError())  # there are no later ones


def test_a_spare_that_cannot_be_started_does_not_end_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    ranks, store, asked = FakeRanks(), Store(), list[int]()

    def start_spare(number: int, of_others: dict[str, str]) -> None:
        asked.append(number)
        if number == 2:
            raise InputError("spare 2 cannot be started: Cannot allocate memory")

    ranks.start_spare = start_spare  # type: ignore[method-assign]
    repairs = all_train(ranks, store, spares=3, tp=2)
    repairs.look()
    repairs.look()
    assert asked == [1, 2]
    sentence = "# spare 2 cannot be started: Cannot allocate memory; the run goes on, and no more spares are started\n"
    assert capfd.readouterr().err == sentence


@pytest.mark.parametrize("why", ["recurs_on_restart", "is_diagnosed"])
def test_no_spare_is_started_for_a_run_that_cannot_be_repaired(why: str) -> None:
    ranks, store = FakeRanks(), Store()
    repairs = all_train(ranks, store, spares=1)
    ranks.die(0)
    ranks.failures[0] = RankFailure(1, {"message": "failed", why: True}, 0)
    repairs.look()
    assert ranks.spares == []


def test_a_death_is_repaired_once_all_others_have_begun_to_train(capfd: pytest.CaptureFixture[str]) -> None:
    ranks, store = FakeRanks(), Store()
    lost = ["no stage is left", "", ""]
    settings: Any = SimpleNamespace(layout={"dp": 2}, why_lost=lambda _: lost.pop(0))
    repairs = Repairs(settings, spares=0)
    repairs.begin(ranks, store, [{}, {}])  # type: ignore[arg-type]
    ranks.die(0)
    for why in ("no stage is left", "some ranks have yet to begin to train"):
        repairs.look()
        assert capfd.readouterr().err == f"# rank 0 died; this cannot be repaired: {why}\n"
        assert (repairs.is_too_early, list(ranks.failures), NEWS in store) == (True, [0], False)
    store[f"{READY}/1"] = ""
    repairs.look()
    assert (repairs.is_too_early, ranks.failures, NEWS in store) == (False, {}, True)


def after_a_death(ranks: FakeRanks, store: Store, spares: int = 2) -> Repairs:
    """Two replicas of two slices, of which rank 3 has died."""
    ranks.processes |= {2: object(), 3: object()}
    repairs = all_train(ranks, store, spares, tp=2)
    repairs.look()
    ranks.die(3)
    return repairs


def test_a_spare_is_ended_whose_partner_has_exited_and_is_not_replaced() -> None:
    ranks, store, killed = FakeRanks(), Store(), list[int]()
    exited: dict[int, RankFailure] = {}
    ranks.kill_spare = killed.append  # type: ignore[attr-defined]
    ranks.exited_spares = lambda: exited  # type: ignore[method-assign]
    repairs = after_a_death(ranks, store, spares=3)
    repairs.look()
    places = [json.loads(store[f"{PLACE}/{number}"])["RANK"] for number in (1, 2)]
    assert places == ["2", "3"], "one for each of the two slices"
    store[f"{READY}/newcomer1"] = ""
    exited[2] = RankFailure(1, {}, 0)
    repairs.look()
    assert json.loads(store[f"{PLACE}/3"])["RANK"] == "3", "it is replaced while there is another spare"
    exited.clear()
    exited[3] = RankFailure(1, {}, 0)
    repairs.look()
    exited.clear()
    repairs.look()
    assert killed == [1]
    assert sorted(ranks.processes) == [0, 1]


def test_a_spare_that_exits_while_it_waits_for_a_death_is_given_no_place(capfd: pytest.CaptureFixture[str]) -> None:
    ranks, store = FakeRanks(), Store()
    repairs = after_a_death(ranks, store, spares=3)
    failure = RankFailure(1, {"message": "rank -1 failed: no memory", "names_rank": True}, 0)
    ranks.exited_spares = lambda: {1: failure}  # type: ignore[method-assign]
    repairs.look()
    assert capfd.readouterr().err == "# a spare failed: no memory; the run goes on without it\n"
    assert {key for key in store if key.startswith(PLACE)} == {f"{PLACE}/2", f"{PLACE}/3"}


def test_a_spare_that_fails_in_the_place_of_a_rank_is_told_with_its_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    program = f"""
import json, os, pathlib, sys, time
place = pathlib.Path({str(place)!r})
what = "row"
if "{NEWCOMER}" in os.environ:
    while not place.exists():
        time.sleep(0.01)
    os.environ.update(json.loads(place.read_text()))
    what = "weight"
elif os.environ["RANK"] == "1":
    time.sleep(60)
record = {{"message": f"rank 0 failed: a bad {{what}}", "names_rank": True}}
json.dump(record, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(1)
"""

    def look() -> bool:
        ranks.look()
        repairs.look()
        if f"{PLACE}/1" in store and not place.exists():
            (tmp_path / "written").write_text(store[f"{PLACE}/1"])
            (tmp_path / "written").rename(place)
        told.append(capfd.readouterr().err)
        return "a spare" in told[-1]

    ranks, store, told = ranks_of(tmp_path, program), Store({f"{READY}/0": "", f"{READY}/1": ""}), [""]
    environments = [{"RANK": "0"}, {"RANK": "1"}]
    settings: Any = SimpleNamespace(layout={"dp": 2}, why_lost=lambda _: "")
    repairs = Repairs(settings, spares=1)
    try:
        ranks.start(environments)
        repairs.begin(ranks, store, environments)  # type: ignore[arg-type]
        assert wait_for(look)
    finally:
        ranks.end(signal.SIGKILL)
    assert told[-1] == "# a spare for rank 0 failed: a bad weight; the run goes on without it\n"
    assert News.from_json(store[NEWS]).gone == {"0": "failed: a bad row"}


def test_spares_for_slices_of_the_same_layers_are_counted_together() -> None:
    ranks, store = FakeRanks(), Store()
    repairs = after_a_death(ranks, store, spares=3)
    assert ranks.spares == [1, 2], "one for each slice waits for a death"
    for number, alive in ((2, (0, 1)), (1, (0, 1, 2, 3))):
        repairs.look()
        store[f"{READY}/newcomer{number}"] = ""
        repairs.look()
        assert News.from_json(store[NEWS]).alive == alive
    partner = "has slices of the same layers as rank 3 and was ended"
    assert News.from_json(store[NEWS]).gone == {"2": partner, "3": "died"}
    assert ranks.spares == [1, 2, 3], "no more than were asked for"


@pytest.mark.parametrize(
    ("answers", "position"),
    [
        ([((3, TAKE), 3), ((3, TAKE), 3)], (3, TAKE)),
        ([((3, KEEP), 4), ((3, TAKE), 3)], (3, TAKE)),  # the second has yet to take the update of step 3
        ([((3, KEEP), 4), ((4, TAKE), 4)], (3, KEEP)),
        ([((4, TAKE), 3), ((4, TAKE), 4)], (4, TAKE)),  # with `--run-on`: only the second knows the loss of step 3
        ([((4, TAKE), 3), ((4, TAKE), 3)], (3, TAKE)),
    ],
)
def test_ranks_go_on_where_all_are_and_a_loss_that_one_of_them_knows_counts(
    answers: list[tuple[tuple[int, int], int]], position: tuple[int, int]
) -> None:
    assert common_position([Answer(Position(*at), known) for at, known in answers]) == position


def test_a_rank_that_has_died_and_is_back_in_the_same_news_is_told_as_both() -> None:
    """A rank that was busy has missed the news between."""
    news = News(3, (0, 2, 1), {"1": 2, "2": 1}, {"1": "was terminated by SIGKILL", "2": "failed: no memory"}, 0.0)
    told = describe_change(news, {0: 0, 1: 0, 2: 1}, "rank {}".format)
    assert told == "rank 1 was terminated by SIGKILL; rank 1 is back"
    news = News(4, (0, 1), news.newcomers, news.gone, 0.0)
    assert describe_change(news, {0: 0, 1: 2, 2: 1}, "rank {}".format) == "rank 2 failed: no memory"


def wait_for_a_place(_: int) -> list[str]:
    """The names of a spare's process before it has a place, and with it."""
    os.environ[NEWCOMER] = "3"
    store, names = dist.HashStore(), list[str]()
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")

    def give() -> None:
        wait_for(lambda: name.read_text().startswith("spare"))
        names.append(name.read_text())
        store.set(f"{PLACE}/3", json.dumps({"RANK": "1"}))

    giver = threading.Thread(target=give)
    giver.start()
    await_place(store)
    giver.join()
    return [*names, name.read_text()]


def test_a_spare_has_the_name_of_its_rank_when_it_has_a_place() -> None:
    assert run_ranks(1, wait_for_a_place) == [["spare 3\n", "rank 1\n"]]
