"""What bench/kills.py kills, and what it looks for afterwards."""

import gc
import os
from types import ModuleType

import pytest
from support.chapters import load

from distlab.comm.transports.mappings import Offer, accept
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    return load("bench/kills.py")


def test_the_zero_bubble_schedules_are_killed_too_and_all_topologies_can_run(kills: ModuleType) -> None:
    ranks = {topology: kills.ranks_of(topology) for topology in kills.TOPOLOGIES}
    assert (ranks["primer"], ranks["pp-zb"], ranks["pp-zbv --world-size 2"], ranks["hybrid"]) == (1, 3, 2, 6)


def test_a_topology_is_refused_before_any_run(kills: ModuleType) -> None:
    with pytest.raises(InputError, match="6 stages for --n-layers 3"):
        kills.main(kills.Settings(topologies=("dp-ga", "pp-zbv")))


def test_memory_that_a_process_still_has_is_found(kills: ModuleType) -> None:
    def own() -> set[str]:
        found: set[str] = kills.shared_memory([os.getpid()])
        return found

    before = own()
    offer = Offer(room_bytes=1, parts=1, pipes_to=0)
    assert len(own() - before) == 1, "open"
    _, mapping, _ = accept(offer.numbers, range(1), pipes=None)
    offer.withdraw()
    assert mapping is not None
    assert len(own() - before) == 1, "mapped"
    del mapping
    gc.collect()
    assert own() == before


def test_a_kill_that_leaves_memory_is_not_good(kills: ModuleType) -> None:
    ended = {"status": 1, "seconds": 0.1, "last_line": "# rank 1 was terminated by SIGKILL", "goes_on": True}
    assert kills.Outcome("ddp", "training", 1, **ended, shared=3).is_good
    assert not kills.Outcome("ddp", "training", 1, **ended, shared=3, kept=1).is_good
