"""How the ranks of a run with `--repair` agree on where they go on, and compare their weights."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_group
from torch import nn
from torch.optim import SGD, Adam

from distlab.axes.grid import Grid
from distlab.comm.context import context_of
from distlab.comm.waits import TrafficError
from distlab.rendezvous.store import SharedStore
from distlab.rendezvous.survivors import TAKE, Answer, Arbiter, Position, Survivor
from distlab.run.handing_over import StateError, checksum_of, receive_state, send_state
from distlab.run.repair import Repair, is_death
from distlab.run.state_copy import StateCopy
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


def compare(rank: int, checksums: list[int]) -> str:
    """What a rank with one of these checksums finds."""
    joined: Any = SimpleNamespace(grid=Grid(rank, {"dp": len(checksums)}), store=dist.HashStore(), context=context_of())
    repair = Repair(joined, timeout_seconds=20, first_step=0)
    repair.copy = StateCopy(SGD([nn.Parameter(torch.tensor(float(checksums[rank])))]))
    try:
        repair.compare()
    except StateError as error:
        return str(error)
    return "equal"


def test_a_death_is_known_by_the_connection_that_was_lost_also_where_a_checkpoint_could_not_be_written() -> None:
    lost = TrafficError("rank 0 waited 1 s for rank 1", RuntimeError("Connection closed by peer"))
    late = TrafficError("rank 0 waited 9 s for rank 1", RuntimeError("Timed out"))
    for cause, expected in ((lost, True), (late, False)):
        unwritten = InputError("cannot write")
        unwritten.__cause__ = cause
        assert is_death(cause) == is_death(unwritten) == expected
    assert not is_death(InputError("no room"))


OWN = "its weights are not those that most of ranks 0, 1 and 2 have"
NOBODY = "the weights of ranks 0 and 1 differ, and nobody knows which are right; resume a checkpoint"


@pytest.mark.parametrize(
    ("checksums", "found"),
    [([7, 7, 8], ["equal", "equal", OWN]), ([7, 8], [NOBODY] * 2), ([7, 7], ["equal"] * 2)],
)
def test_the_rank_that_differs_from_most_has_changed(checksums: list[int], found: list[str]) -> None:
    assert run_group(len(checksums), compare, checksums) == found


def hand_over(rank: int, is_changed: bool) -> tuple[list[float], str]:
    """Give rank 1 the weight of rank 0; what it has then, and the error."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]) if rank == 0 else torch.zeros(2))
    optimizer, send = SGD([weight], lr=0.1), dist.send
    try:
        if rank == 1:
            assert receive_state(optimizer, 0)["step"] == 3
        else:
            with pytest.MonkeyPatch.context() as patch:  # after the checksum has been computed
                if is_changed:
                    patch.setattr(dist, "send", lambda x, to: send(x + (x.dtype == torch.float32), to))
                send_state(optimizer, {"step": 3}, 1)
    except StateError as error:
        return weight.tolist(), str(error)
    return weight.tolist(), ""


def test_a_state_that_changes_on_its_way_is_not_taken_over() -> None:
    assert run_group(2, hand_over, False) == [([1, 2], "")] * 2
    [_, (_, found)] = run_group(2, hand_over, True)
    assert found == "the state that a peer has sent has another checksum than it had there"


def test_a_newcomer_has_what_the_last_of_several_ranks_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which dies then, has taken the first update; the second one has not, and so has no moments."""
    sent = list[torch.Tensor]()
    monkeypatch.setattr(dist, "send", lambda tensor, _: sent.append(tensor.clone()))
    monkeypatch.setattr(dist, "recv", lambda tensor, _: tensor.copy_(sent.pop(0)))
    weights = [nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0, 3.0)]
    *sources, newcomer = (Adam([weight], lr=0.1) for weight in weights)
    weights[0].grad = torch.ones(2)
    sources[0].step()
    for source, weight in zip(sources, weights, strict=False):
        send_state(source, {"step": 3}, 1)
        assert receive_state(newcomer, 0)["step"] == 3
        assert torch.equal(weights[2], weight)
        assert newcomer.state[weights[2]].keys() == source.state[weight].keys()
        assert checksum_of(newcomer) == checksum_of(source)


def test_a_rank_that_does_not_take_part_in_a_repair_is_named() -> None:
    store = SharedStore("the launcher", 20, store=dist.HashStore())
    Arbiter(store).tell([0, 2, 3], {1: "was terminated by SIGKILL"})
    survivor, own = Survivor(store, 0), Answer(Position(4, TAKE), 4)
    news = survivor.await_news(RuntimeError("its connection was lost"))
    store.set(f"repair/{news.epoch}/2", json.dumps(own))
    with pytest.raises(TrafficError, match=r"^rank 0 waited 0\.1 s for rank 3 to take part in the repair: no answer"):
        survivor.agree(news, own, 0.1)
    store.set(f"repair/{news.epoch}/3", json.dumps(own))
    assert survivor.agree(news, own, 0.1) == dict.fromkeys((0, 2, 3), own)
