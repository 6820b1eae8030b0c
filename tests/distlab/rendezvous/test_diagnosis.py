"""Who waits for whom: cycles, culprits and pictures, from what ranks publish; and the search for what is not finite."""

from typing import Any

import pytest
import torch
from torch import nn

from distlab.axes.grid import Grid
from distlab.comm.wait_graph import find_cycle
from distlab.comm.waits import Wait
from distlab.launching.local_ranks import root_cause
from distlab.launching.processes import RankFailure
from distlab.rendezvous.diagnosis import Diagnosis, Notice, diagnose
from distlab.run.failure import out_of_memory, refused_by_gpu
from distlab.run.not_finite import find_cause, first_rank

pytestmark = pytest.mark.quick

ALL = {0, 1, 2}


def explain(*notices: Notice, world_size: int = 3, **ended: str) -> Diagnosis:
    by_rank = {notice.rank: notice for notice in notices}
    causes = {int(name.removeprefix("rank")): cause for name, cause in ended.items()}
    return diagnose(by_rank, causes, world_size, "rank {}".format, timeout_seconds=5)


def is_deadlock(found: Diagnosis) -> bool:
    return found.sentence.startswith("deadlock: ") and found.picture[-1].startswith("  cycle: ")


def sends(rank: int, to: int, what: str = "the tensor", lost_a_peer: bool = False) -> Notice:
    return Notice(rank, Wait(what, "send", (to,)), failure_number=int(lost_a_peer), lost_a_peer=lost_a_peer)


def receives(rank: int, source: int, what: str = "the tensor", lost_a_peer: bool = False) -> Notice:
    return Notice(rank, Wait(what, "receive", (source,)), failure_number=int(lost_a_peer), lost_a_peer=lost_a_peer)


def collective(rank: int, what: str, number: int, begun: int, lost_a_peer: bool = False) -> Notice:
    others = tuple(sorted(ALL - {rank}))
    return Notice(rank, Wait(what, "collective", others, number), {"0,1,2": begun}, int(lost_a_peer), lost_a_peer)


@pytest.mark.parametrize(
    ("edges", "cycle"),
    [
        ({}, []),
        ({0: [1], 1: [2]}, []),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [1], 1: [2], 2: [3], 3: [1]}, [1, 2, 3]),
        ({3: [5], 5: [4], 4: [3], 0: [3]}, [3, 5, 4]),
        ({0: [1, 2], 1: [3], 2: [0]}, [0, 2]),
        ({0: [1, 2], 1: [3], 2: [3]}, []),
    ],
)
def test_cycles(edges: dict[int, list[int]], cycle: list[int]) -> None:
    assert find_cycle(edges) == cycle


def test_two_ranks_that_both_send_first_are_a_cycle() -> None:
    found = explain(sends(0, 1), sends(1, 0), receives(2, 1, "the rest"))
    assert is_deadlock(found)
    assert found.sentence == "deadlock: rank 0 waits for rank 1, which waits for rank 0"
    assert found.picture == [
        "who waits for whom:",
        "  rank 0  waits to send the tensor  -> rank 1",
        "  rank 1  waits to send the tensor  -> rank 0",
        "  rank 2  waits for the rest  -> rank 1",
        "  cycle: rank 0 -> rank 1 -> rank 0",
    ]
    after_collectives = [Notice(rank, Wait("the rest", "receive", (1 - rank,)), {"0,1": 3}) for rank in range(2)]
    assert is_deadlock(explain(*after_collectives, world_size=2))


def test_a_message_that_its_receiver_waits_for_is_late_and_no_cycle() -> None:
    found = explain(receives(0, 1), sends(1, 0), receives(2, 0, "the rest"))
    assert not is_deadlock(found)
    assert found.sentence.startswith("rank 1 is sending the tensor to rank 0, where it has not arrived")
    assert "  rank 1  waits to send the tensor" in found.picture
    assert is_deadlock(explain(receives(0, 1), sends(1, 0, "the rest"), receives(2, 0)))


def test_a_longer_cycle_names_all_its_ranks() -> None:
    found = explain(receives(0, 2), receives(1, 0), receives(2, 1))
    assert found.sentence == "deadlock: rank 0 waits for rank 2, which waits for rank 1, which waits for rank 0"
    assert is_deadlock(explain(sends(0, 1), receives(1, 2), receives(2, 0))), "rank 1 waits for the tensor of rank 2"


def test_a_rank_that_says_nothing_holds_up_the_others() -> None:
    found = explain(receives(0, 1), receives(2, 0))
    assert not is_deadlock(found)
    assert found.sentence.startswith("rank 1 does not answer, and the others wait")
    assert "--timeout 5" in found.sentence
    assert "  rank 1  has published no wait: it is computing, is stopped, or has exited" in found.picture
    both = explain(collective(0, "the loss", 4, 5)).sentence
    assert both.startswith("rank 1 and rank 2 do not answer, and the others wait")


def test_a_closed_connection_means_that_the_silent_rank_has_ended_also_where_others_pass_it_on() -> None:
    for source in (2, 0):  # of what rank 1 waits for
        found = explain(receives(0, 1, lost_a_peer=True), receives(1, source, lost_a_peer=source == 2))
        assert found.sentence.startswith("rank 2 has exited without reporting a cause")


def test_a_connection_that_was_closed_after_a_deadline_had_passed_accuses_nobody() -> None:
    late = receives(0, 1, lost_a_peer=True)
    late.failure_number = 2
    first = Notice(2, Wait("the tensor", "receive", (1,)), failure_number=1)
    assert explain(late, first).sentence.startswith("rank 1 does not answer")


def test_with_several_silent_ranks_a_closed_connection_accuses_one_of_them() -> None:
    found = explain(collective(0, "the loss", 4, 5, lost_a_peer=True))
    assert found.sentence.startswith("one of rank 1 and rank 2 has exited")


def test_a_rank_that_reported_why_it_ended_is_the_cause() -> None:
    found = explain(receives(0, 1, lost_a_peer=True), receives(2, 0), rank1="MemoryError: 3 GB")
    assert found.sentence == "rank 1 failed: MemoryError: 3 GB"
    assert "  rank 1  has exited: MemoryError: 3 GB" in found.picture
    assert explain(receives(0, 1), rank1="nan", rank2="also nan").sentence == "rank 1 failed: nan", "the others follow"
    found = explain(receives(0, 1, lost_a_peer=True), receives(1, 0), rank2="MemoryError: 3 GB")
    assert found.sentence == "rank 2 failed: MemoryError: 3 GB", "though nobody waits for it"
    assert is_deadlock(explain(sends(0, 1), sends(1, 0), rank2="MemoryError: 3 GB")), "which no connection was lost to"


def test_a_collective_that_one_rank_skips() -> None:
    found = explain(
        collective(0, "the loss", 7, 8),
        collective(1, "the loss", 7, 8),
        Notice(2, Wait("the result", "send", (0,)), {"0,1,2": 7}),
    )
    assert found.sentence == "deadlock: rank 0 waits for rank 2, which waits for rank 0"
    assert "  rank 1  waits for the loss  -> rank 2" in found.picture


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    found = explain(collective(0, "the loss", 7, 8), collective(1, "the loss", 7, 8), collective(2, "the end", 7, 8))
    assert is_deadlock(found)
    assert found.sentence == "deadlock: rank 0 waits for rank 2, which waits for rank 0"


def test_a_rank_that_has_begun_a_later_collective_has_done_its_part() -> None:
    found = explain(collective(0, "bucket 0", 7, 10), collective(1, "bucket 1", 8, 10))
    assert found.sentence.startswith("rank 2 does not answer")
    assert "  rank 0  waits for bucket 0  -> rank 2" in found.picture
    in_a_pair = Notice(1, Wait("the average", "collective", (2,), 7), {"0,1,2": 8, "1,2": 8})
    assert "  rank 0  waits for the loss  -> rank 2" in explain(collective(0, "the loss", 7, 8), in_a_pair).picture
    sends_after = Notice(1, Wait("the tensor", "send", (0,)), {"0,1": 1})
    assert not is_deadlock(explain(Notice(0, Wait("the loss", "collective", (1,)), {"0,1": 1}), sends_after))


def test_a_rank_that_has_begun_a_collective_and_not_done_its_share_is_waited_for() -> None:
    late = Notice(1, Wait("the result", "receive", (0,)), {"0,1,2": 9}, held_back={"0,1,2": [7]})
    others = collective(0, "bucket 0", 7, 8), collective(2, "bucket 0", 7, 8)
    assert explain(others[0], late, others[1]).sentence == "deadlock: rank 0 waits for rank 1, which waits for rank 0"
    late.held_back = {"0,1,2": [8], "0,1": [7]}
    assert not is_deadlock(explain(others[0], late, others[1]))


def test_where_all_do_their_part_it_is_the_network() -> None:
    found = explain(*(collective(rank, "the loss", 7, 8) for rank in ALL))
    assert found.sentence.startswith("all ranks take part in the loss, ")
    assert "the network" in found.sentence
    assert not is_deadlock(found)


def test_a_rank_that_answers_is_not_the_one_that_has_ended() -> None:
    first = collective(0, "the loss", 4, 5, lost_a_peer=True)
    assert explain(first, Notice(2, None)).sentence.startswith("rank 1 has exited without reporting a cause")
    assert "  rank 2  answers, and has published no wait: it is computing" in explain(first, Notice(2, None)).picture


def test_a_rank_that_computes_for_long_is_alive() -> None:
    found = explain(receives(0, 1), Notice(1, None), receives(2, 0))
    assert found.sentence.startswith("rank 1 answers, but has not reached this point")
    lost = Notice(1, None, failure_number=1, lost_a_peer=True)
    assert explain(receives(0, 1), lost, receives(2, 0)).sentence == found.sentence, "it is not known in which wait"
    both = explain(collective(0, "the loss", 4, 5), Notice(1, None), Notice(2, None)).sentence
    assert both.startswith("rank 1 and rank 2 answer, but have not reached this point")


def test_in_a_wait_of_which_only_the_name_is_known_a_rank_waits_for_those_that_wait_for_nothing() -> None:
    named = (Notice(rank, Wait("all ranks to connect", "other", tuple(ALL - {rank}))) for rank in (0, 1))
    found = explain(*named, Notice(2, None))
    assert found.sentence.startswith("rank 2 answers, but has not reached this point")
    assert "  rank 0  waits for all ranks to connect  -> rank 2" in found.picture


def test_after_a_lost_connection_neither_deadlock_nor_network_is_named() -> None:
    cycle = explain(receives(0, 1, lost_a_peer=True), receives(1, 0), receives(2, 0))
    assert cycle.sentence == "rank 0 lost its connection to rank 1, though all ranks answer: see their last lines"
    together = explain(*(collective(rank, "the loss", 7, 8, lost_a_peer=rank == 0) for rank in ALL))
    assert together.sentence.startswith("rank 0 lost its connection to ranks 1 and 2")


def test_a_silent_rank_is_blamed_before_one_that_computes() -> None:
    found = explain(collective(0, "the loss", 4, 5), Notice(2, None))
    assert found.sentence.startswith("rank 1 does not answer")


def test_notices_survive_the_store() -> None:
    for notice in (collective(1, "the loss", 3, 4, lost_a_peer=True), Notice(0, None)):
        assert Notice.from_json(notice.to_json()) == notice


def test_a_lack_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert out_of_memory(caught.value) == "out of memory: could not allocate 4e+03 TB"
    assert out_of_memory(MemoryError()) == "out of memory"
    told = RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")  # by torch.cuda.set_device
    assert out_of_memory(told) == "out of memory on the GPU: CUDA error: out of memory"
    assert out_of_memory(RuntimeError("anything")) is None


def test_a_gpu_that_takes_no_more_processes_is_a_reason() -> None:
    refusal = refused_by_gpu(RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel"))
    assert refusal is not None
    assert refusal.startswith("the GPU is busy or in an exclusive compute mode")
    assert refused_by_gpu(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


def failure(exitcode: int, timestamp: int, message: str = "", **record: Any) -> RankFailure:
    return RankFailure(exitcode, record and {"message": message, **record}, timestamp)


LOST = failure(1, 100, "rank 4 has ended", status=1, lost_a_peer=True, names_rank=True)


@pytest.mark.parametrize(
    ("failures", "sentence"),
    [
        ({4: failure(-9, 100), 3: LOST}, "rank 4 (stage 1 of replica 1) was terminated by SIGKILL"),
        ({4: failure(-9, 101), 3: LOST}, "rank 4 (stage 1 of replica 1) was terminated by SIGKILL"),
        ({4: failure(-9, 106), 3: LOST}, "rank 4 has ended"),  # the launcher killed it, since it was stopped
        ({4: failure(-15, 100), 3: failure(7, 101)}, "rank 3 (stage 0 of replica 1) failed with exit status 7"),
        (
            {4: failure(-15, 100), 3: failure(-15, 100)},
            "rank 4 (stage 1 of replica 1) was terminated by SIGTERM",
        ),
        ({4: failure(-40, 100)}, "rank 4 (stage 1 of replica 1) was terminated by signal 40"),
        (
            {3: LOST, 4: failure(1, 101, "the copy failed: no disk", status=1)},
            "rank 4 (stage 1 of replica 1) failed: the copy failed: no disk",
        ),
        ({4: failure(1, 100, "rank 4 has no disk", status=1)}, "rank 4 has no disk"),
        ({3: failure(1, 100, "rank 4 is odd", status=1)}, "rank 3 (stage 0 of replica 1) failed: rank 4 is odd"),
    ],
)
def test_the_launcher_names_the_rank_that_failed_first_with_its_place(failures: Any, sentence: str) -> None:
    _, told, is_cause = root_cause(failures, Grid(0, {"dp": 2, "pp": 3}))
    assert told == sentence
    assert is_cause == (sentence != "rank 4 has ended"), "otherwise the launcher of another machine may know it"


class Overflowing(nn.Module):
    """In one of two elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 1e30])


def find_in(net: nn.Module) -> str:
    parameters = [(0, *named) for named in net.named_parameters()]
    return find_cause({0: net}, parameters, lambda: net(torch.full((1, 2), 1e10)), Grid(0, {}))


def test_the_first_output_that_is_not_finite_is_named() -> None:
    net = nn.Sequential(nn.Identity(), Overflowing(), nn.Identity())
    assert find_in(net) == "the first non-finite tensor is the output of 1 (Overflowing)"
    assert find_in(Overflowing()) == "the first non-finite tensor is the output of the model (Overflowing)"


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_parameter_comes_before_what_it_leads_to(value: float) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        net.get_parameter("1.bias")[1] = value
    assert find_in(net) == "the first non-finite tensor is the parameter 1.bias, since the previous update"


@pytest.mark.parametrize(
    ("own", "ranks", "told"), [(torch.nan, 3, ", first on rank 1"), (torch.nan, 1, ""), (2.0, 3, "")]
)
def test_the_first_rank_is_one_of_those_whose_loss_is_not_finite(own: float, ranks: int, told: str) -> None:
    assert first_rank(own, Grid(1 % ranks, {"dp": ranks}), ranks, torch.device("cpu")) == told


def test_a_loss_of_finite_activations() -> None:
    assert "only the loss is not" in find_in(nn.Linear(2, 2))


@pytest.mark.parametrize("others", [[receives(2, 3), Notice(3, None)], [receives(2, 0)]])
def test_a_cycle_is_named_though_another_rank_is_late(others: list[Notice]) -> None:
    """None of its ranks can continue, whatever rank 3 does, which may say nothing where nobody waits for it."""
    found = explain(sends(0, 1), sends(1, 0), *others, world_size=4)
    assert is_deadlock(found)
    assert found.sentence.startswith("deadlock: rank 0 waits for rank 1, which waits for rank 0")


def test_a_cycle_is_found_that_the_lowest_waiting_rank_is_not_part_of() -> None:
    found = explain(receives(0, 3), sends(1, 2), sends(2, 1), Notice(3, None), world_size=4)
    assert is_deadlock(found)
    assert found.sentence == "deadlock: rank 1 waits for rank 2, which waits for rank 1"
    assert found.picture[-1] == "  cycle: rank 1 -> rank 2 -> rank 1"
