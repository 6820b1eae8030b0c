"""Diagrams: figures of layouts and schedules, which need no run."""

from pathlib import Path
from typing import Any

from matplotlib.colors import same_color

from distlab.pipeline.actions import ActionCosts
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.reports.style import PALE
from distlab_figures import diagrams


def test_contiguous_parts_of_sequences_are_unequal_work_by_the_pairs_of_positions(drawn: list[Any]) -> None:
    """Of 16 halves of chunks that two ranks compute, the second one has 12."""
    diagrams.sequence_parts(Path("a.png"), ranks=2)
    for axes, share in zip(drawn[0].axes, ("zigzag: busiest rank 1 ", "contiguous: busiest rank 1.5 "), strict=True):
        assert axes.get_title().startswith(share)
    diagrams.sequence_parts(Path("a.png"), ranks=3)
    steps = {text.get_position(): text.get_text() for text in drawn[1].axes[1].texts}  # contiguous
    assert [steps[0.5, 0.5 + 2 * rank] for rank in range(3)] == ["0", "1", "2"], "the keys of rank 0 come that late"


def test_a_replica_holds_its_own_part_of_what_is_sharded(drawn: list[Any]) -> None:
    """Of two, each lacks half of: nothing, the optimizer state, also the gradients, also the weights."""
    diagrams.replicas(Path("a.png"), ranks=2)
    lacks = [same_color(part.get_facecolor(), PALE) for part in drawn[0].axes[0].patches]
    rows = (lacks[first : first + len(lacks) // 4] for first in range(0, len(lacks), len(lacks) // 4))
    assert [sum(row) for row in rows] == [0, 2, 4, 6]


def test_the_last_stages_have_the_layers_that_do_not_divide(drawn: list[Any]) -> None:
    diagrams.stages(Path("a.png"), pp=2, layers=5)
    diagrams.stages(Path("a.png"), pp=6, layers=6)
    assert drawn[1].get_figwidth() == 1.5 * drawn[0].get_figwidth(), "or the texts of more than four would overlap"
    texts = [text.get_text() for text in drawn[0].axes[0].texts]
    assert {"embedding\nlayers 0, 1", "layers 2 to 4\nhead, loss"} <= {*texts}


def test_schedules_are_drawn_where_their_worker_is_that_keeps_most(drawn: list[Any]) -> None:
    diagrams.schedules(Path("a.png"), stages=2, micro_batches=2)
    for axes in drawn[0].axes:
        kept = {text.get_text(): text.xy[0] for text in axes.texts}
        assert (kept["dapple"], kept["gpipe"], kept["zb-h1"]) == (2, 2, 2)
        zb_v = simulate(all_stages("zb-v", 2, 2), ActionCosts(0.5, 1.0, activation_bytes=0.5))
        assert kept["zb-v"] == max(zb_v.peak_bytes)
    equal, other = ({text.get_text(): text.xy[1] for text in axes.texts} for axes in drawn[0].axes)
    assert (equal["dapple"] == other["dapple"], equal["zb-h1"] == other["zb-h1"]) == (True, False)


def test_ranks_with_neighboring_numbers_hold_what_was_asked_for(drawn: list[Any]) -> None:
    for neighbors, stage in (("stages", 1), ("replicas", 0)):
        diagrams.layout(Path("a.png"), dp=2, pp=2, neighbors=neighbors)  # type: ignore[arg-type]
        assert f"rank 1\nstage {stage}" in [text.get_text() for text in drawn[-1].axes[0].texts]
