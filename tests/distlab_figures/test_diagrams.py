"""Diagrams: figures of layouts and schedules, which need no run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import same_color, to_hex
from matplotlib.patches import Rectangle

from distlab.pipeline.actions import ActionCosts
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.reports import style
from distlab.reports.style import PALE
from distlab_figures import diagrams

Point = tuple[float, float]


def legend_of(figure: Any) -> dict[str, str]:
    """The color of each entry, by the beginning of its words."""
    [shown] = figure.legends
    entries = zip(shown.get_texts(), shown.get_patches(), strict=True)
    return {text.get_text().partition(":")[0]: to_hex(swatch.get_facecolor()) for text, swatch in entries}


@pytest.fixture
def arrows(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Point, Point, str]]]:
    """A function that returns the beginning, the end and the color of each arrow in some axes."""
    made, draw = dict[Any, tuple[Point, Point, str]](), style.arrow

    def arrow(start: Point, end: Point, color: str, *args: Any, **options: Any) -> Any:
        drawn = draw(start, end, color, *args, **options)
        made[drawn] = start, end, color
        return drawn

    monkeypatch.setattr(style, "arrow", arrow)
    return lambda axes: [made[patch] for patch in axes.patches if patch in made]


def boxes(axes: Any) -> list[tuple[Point, float, float, str]]:
    """The lower left corner, the width, the height and the color of each rectangle."""
    some = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(box.get_xy(), box.get_width(), box.get_height(), to_hex(box.get_facecolor())) for box in some]


def test_arrows_have_the_colors_and_directions_of_their_messages(drawn: list[Any], arrows: Any) -> None:
    diagrams.stages(Path("a.png"), pp=3)
    colors = legend_of(drawn[0])
    *of_stages, inputs, targets = arrows(drawn[0].axes[0])
    assert len(of_stages) == 4
    for begin, end, color in of_stages:
        assert color == colors["forward" if begin[0] < end[0] else "backward"]
    assert (inputs[0] < inputs[1], targets[0] < targets[1]) == (True, False), (
        "tokens go to the first and the last stage"
    )
    diagrams.layout(Path("a.png"), dp=2, pp=3)
    colors = legend_of(drawn[1])
    ways = [(color, abs(begin[0] - end[0]) > abs(begin[1] - end[1])) for begin, end, color in arrows(drawn[1].axes[0])]
    activations, gradients = (
        colors[name] for name in ("activations and their gradients", "gradients of weights, averaged")
    )
    assert sorted(ways) == sorted([(activations, True)] * 4 + [(gradients, False)] * 3)
    for axes in (drawn[0].axes[0], drawn[1].axes[0]):
        for (x, y), (to_x, to_y), _ in arrows(axes):
            middle = (x + to_x) / 2, (y + to_y) / 2
            over = [
                low
                for low, wide, high, _ in boxes(axes)
                if 0 < middle[0] - low[0] < wide and 0 < middle[1] - low[1] < high
            ]
            assert not over, "arrows are between the boxes"


def test_f_and_g_have_the_colors_of_their_words(drawn: list[Any]) -> None:
    diagrams.block(Path("a.png"), ranks=2)
    [axes], colors = drawn[0].axes, legend_of(drawn[0])
    for text in axes.texts:
        if text.get_text() in ("f", "g"):
            x, y = text.get_position()
            [of_text] = [
                color
                for (left, low), width, height, color in boxes(axes)
                if 0 < x - left < width and 0 < y - low < height
            ]
            assert of_text == colors[text.get_text()]
    whole = [color for _, width, _, color in boxes(axes) if color == to_hex(PALE)]
    assert len(whole) == 2 * 3, "two norms and a sum, on both ranks"


def test_slices_make_up_a_matrix_and_terms_are_as_large_as_their_sum(drawn: list[Any]) -> None:
    diagrams.splits(Path("a.png"), ranks=3)
    by_outputs, by_inputs = ([width * height for _, width, height, _ in boxes(axes)] for axes in drawn[0].axes)
    inputs, weight, output = 2 * 1.2, 2 * 2, 2 * 1.2
    assert by_outputs == pytest.approx([inputs, *3 * [weight / 3], *3 * [output / 3]])
    assert by_inputs == pytest.approx([*3 * [inputs / 3], *3 * [weight / 3], *3 * [output]])


def test_only_the_all_reduce_has_arrows_between_ranks(drawn: list[Any], arrows: Any) -> None:
    diagrams.averaging(Path("a.png"), ranks=3)
    [axes] = drawn[0].axes
    across = [abs(begin[0] - end[0]) > 1 for begin, end, _ in arrows(axes)]
    assert (len(across), sum(across)) == (3 * 3 + 3 * 3, 3 * 3 - 3), "each rank to itself in three lines, to all in one"
    rows = [
        [color for (_, low), _, _, color in boxes(axes) if low == y]
        for y in sorted({low for (_, low), *_ in boxes(axes)})
    ]
    assert [len({*row}) for row in reversed(rows)] == [3, 1, 3, 1, 1], "own, equal, own, equal, equal"


def test_the_messages_of_a_topology_go_down_in_time_from_sender_to_receiver(drawn: list[Any], arrows: Any) -> None:
    diagrams.topologies(Path("a.png"), world_size=4)
    naive, tree, ring, enlarged, reduce_naive, *_, reduce_ring = drawn[0].axes
    wide, thin = ({patch.get_linewidth() for patch in axes.patches} for axes in (reduce_naive, reduce_ring))
    assert min(wide) > max(thin), "messages of a ring are chunks of the tensor"
    for axes in (naive, tree, ring):
        sent = arrows(axes)
        assert {round(end[0]) for _, end, _ in sent} == {1, 2, 3}, "of a broadcast from rank 0"
        assert all(begin[1] < end[1] for begin, end, _ in sent)
    assert {round(begin[0]) for begin, *_ in arrows(naive)} == {0}
    assert arrows(naive)[0][1][1] == pytest.approx(1.1), "the transmission and a tenth of it"
    assert {round(begin[0]) for begin, *_ in arrows(tree)} == {0, 1}
    assert {round(begin[0]) for begin, *_ in arrows(ring)} == {0, 1, 2}
    around = {(round(begin[0]), round(end[0])) for begin, end, _ in arrows(reduce_ring)}
    assert around == {(rank - 1, rank) for rank in range(5)}, "from the last to the first across both edges"
    assert enlarged.get_ylim()[0] == pytest.approx(max(end[1] for _, end, _ in arrows(enlarged)))


def test_contiguous_parts_of_sequences_are_unequal_work_by_the_pairs_of_positions(drawn: list[Any]) -> None:
    """Of 16 halves of chunks that two ranks compute, the second one has 12."""
    diagrams.sequence_parts(Path("a.png"), ranks=2)
    for axes, share in zip(drawn[0].axes, ("zigzag: busiest rank 1 ", "contiguous: busiest rank 1.5 "), strict=True):
        assert axes.get_title().startswith(share)
    diagrams.sequence_parts(Path("a.png"), ranks=3)
    zigzag, steps = ({text.get_position(): text.get_text() for text in axes.texts} for axes in drawn[1].axes)
    assert [steps[0.5, 0.5 + 2 * rank] for rank in range(3)] == ["0", "1", "2"], "the keys of rank 0 come that late"
    assert (zigzag[2.5, 5.5], zigzag[1.5, 5.5]) == ("1", "2"), "those of ranks 2 and 1 at rank 0"


def test_a_replica_holds_its_own_part_of_what_is_sharded(drawn: list[Any]) -> None:
    """Of two, each lacks half of: nothing, the optimizer state, also the gradients, also the weights."""
    diagrams.replicas(Path("a.png"), ranks=2)
    lacks = [same_color(part.get_facecolor(), PALE) for part in drawn[0].axes[0].patches]
    rows = (lacks[first : first + len(lacks) // 4] for first in range(0, len(lacks), len(lacks) // 4))
    assert [sum(row) for row in rows] == [0, 2, 4, 6]
    texts = {text.get_text(): text.get_position() for text in drawn[0].axes[0].texts}
    assert {"W", "G", "O"} <= texts.keys(), "weights, gradients, optimizer state"
    lows = [part.get_xy() for part in drawn[0].axes[0].patches]
    assert texts["rank 0"] == (min(x for x, _ in lows), pytest.approx(max(y for _, y in lows) + 0.4, abs=0.4)), "above"
    assert texts["rank 1"][0] > max(x for x, _ in lows[: len(lows) // 8]), "beside"


def test_the_last_stages_have_the_layers_that_do_not_divide(drawn: list[Any]) -> None:
    diagrams.stages(Path("a.png"), pp=2, layers=5)
    diagrams.stages(Path("a.png"), pp=6, layers=6)
    assert drawn[1].get_figwidth() == 1.5 * drawn[0].get_figwidth(), "or the texts of more than four would overlap"
    texts = [text.get_text() for text in drawn[0].axes[0].texts]
    assert {"embedding\nlayers 0, 1", "layers 2 to 4\nhead, loss"} <= {*texts}


def test_schedules_are_drawn_where_their_worker_is_that_keeps_most(drawn: list[Any]) -> None:
    """And where `auto` may keep more, it idles less."""
    diagrams.schedules(Path("a.png"), stages=3, micro_batches=3)
    for axes in drawn[0].axes:
        for curve in axes.lines[:2]:
            limits, idle = curve.get_data()
            assert ([*limits], [*idle]) == ([2, 2.5, 3], sorted({*idle}, reverse=True))
        kept = {text.get_text(): text.xy[0] for text in axes.texts}
        assert (kept["dapple"], kept["gpipe"], kept["zb-h1"]) == (3, 3, 3)
        zb_v = simulate(all_stages("zb-v", 3, 3), ActionCosts(0.5, 1.0, activation_bytes=0.5))
        assert kept["zb-v"] == max(zb_v.peak_bytes)
    equal, other = ({text.get_text(): text.xy[1] for text in axes.texts} for axes in drawn[0].axes)
    assert (equal["dapple"] == other["dapple"], equal["zb-h1"] == other["zb-h1"]) == (True, False)
    diagrams.schedules(Path("a.png"), stages=2, micro_batches=3)
    idle = {text.get_text(): text.xy[1] for text in drawn[1].axes[0].texts}
    assert idle["gpipe"] == pytest.approx(25), "percent: of the time for 3 + 1 micro-batches, that for 1"


def test_ranks_with_neighboring_numbers_hold_what_was_asked_for(drawn: list[Any]) -> None:
    for neighbors, stage in (("stages", 1), ("replicas", 0)):
        diagrams.layout(Path("a.png"), dp=2, pp=2, neighbors=neighbors)  # type: ignore[arg-type]
        assert f"rank 1\nstage {stage}" in [text.get_text() for text in drawn[-1].axes[0].texts]
