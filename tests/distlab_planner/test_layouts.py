import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from support.planner_machines import MODEL, cluster

from distlab.axes.layout import neighbors_of, replicas_in
from distlab.comm.link import Link
from distlab.settings.hybrid import HybridSettings
from distlab_planner.communication_seconds import RanksOnHosts
from distlab_planner.layouts import SAME_WEIGHTS, Choices, RunLayout, default_split, layouts
from distlab_planner.model import Model, Sizes
from distlab_planner.prediction import layout_of
from distlab_planner.search import find_layouts
from distlab_planner.step import Step
from distlab_planner.table import HEADS, Row, table
from simplellm.errors import InputError
from simplellm.tokenizers import SPTokenizer

SIZES = Sizes(dmodel=24, num_heads=6, num_kv_heads=2, hidden_dim=96, seq_len=8, vocab_size=SPTokenizer().vocab_size)
SMALL = Model(SIZES, n_layers=3)
RANKS, SEQUENCES = 4, 8


def settings(layout: RunLayout) -> HybridSettings:
    names = "dmodel", "num_heads", "num_kv_heads", "hidden_dim", "seq_len"
    model: dict[str, Any] = {name: getattr(SIZES, name) for name in names}
    sizes: dict[str, Any] = {axis: layout.size(axis) for axis in ("dp", "pp", "cp", "tp")}
    return HybridSettings(
        **model,
        **sizes,
        n_layers=SMALL.n_layers,
        batch_size=layout.batch_size,
        micro_batches=layout.micro_batches,
        schedule=layout.schedule,
        recompute=layout.recompute,
        shard=layout.shard,
        cp_kind=layout.cp_kind,
        layers_per_stage=",".join(map(str, layout.split)),
        neighbors=neighbors_of(layout.axes),
        data="tinystories",  # nothing is read
    )


def test_the_layouts_are_those_that_the_lab_accepts() -> None:
    found = list(layouts(SMALL, RANKS, SEQUENCES, Choices(recompute=("none",))))
    assert len(found) == len(set(found))
    for layout in found[::5]:
        settings(layout).check()
    tried = {
        (*map(layout.size, ("dp", "pp", "tp")), layout.micro_batches, layout.schedule, layout.shard) for layout in found
    }
    template = found[0]
    names = "dapple", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"
    for pp, tp, micro_batches, name in itertools.product((1, 2, 4), (1, 2, 4), (1, 3, 4), names):
        dp = RANKS // (pp * tp)
        if pp * tp > RANKS or (pp == 1 and name != "dapple"):
            continue
        for shard in ("none", "weights"):
            sizes: dict[str, Any] = {"batch_size": SEQUENCES // dp, "micro_batches": micro_batches, "shard": shard}
            layout = replace(template, axes={"dp": dp, "pp": pp, "tp": tp}, schedule=name, **sizes)
            asked = replace(settings(layout), layers_per_stage=None)
            if (dp, pp, tp, micro_batches, name, shard) not in tried:
                with pytest.raises(InputError):
                    asked.check()


def test_sequences_are_shared_where_a_plan_asks_for_it() -> None:
    few = Choices({"cp": (1, 2, 4, 8)}, micro_batches=(1,), recompute=("none",))
    found = list(layouts(SMALL, RANKS, SEQUENCES, few))
    for layout in found:
        assert layout.ranks == RANKS
        asked = settings(layout)
        asked.check()
        assert asked.layout == dict(layout.axes)
        assert ("--cp " in layout.flags(SMALL)) == (layout.size("cp") > 1)
    assert len(found) == len({layout.flags(SMALL) for layout in found})
    kinds = {(layout.size("cp"), layout.cp_kind) for layout in found}
    assert kinds == {(1, "ring"), (2, "ring"), (2, "gather"), (2, "heads"), (4, "ring"), (4, "gather")}, "6 heads"
    alone = {layout.shard for layout in found if (layout.size("dp"), layout.size("cp")) == (1, 2)}
    assert alone == {"none", "optimizer", "gradients", "weights"}, "they hold the same weights, as replicas do"
    without = Choices(micro_batches=(1,), recompute=("none",))
    assert [one for one in found if one.size("cp") == 1] == list(layouts(SMALL, RANKS, SEQUENCES, without))


@pytest.mark.parametrize(("seq_len", "shares"), [(8, {1, 2}), (10, {1})])
def test_experts_are_shared_as_a_run_can(seq_len: int, shares: set[int]) -> None:
    """Where ranks share sequences, these must not be padded."""
    model = replace(SMALL, sizes=replace(SIZES, experts=4, seq_len=seq_len))
    few = Choices({"cp": (1, 2), "ep": (1, 2, 3, 4)}, micro_batches=(1,), recompute=("none",))
    found = list(layouts(model, RANKS, SEQUENCES, few))
    for layout in found:
        asked = replace(settings(layout), seq_len=seq_len, experts=4, ep=layout.size("ep"), dp=replicas_in(layout.axes))
        asked.check()
        assert asked.layout == dict(layout.axes)
    replace(asked, dp=4, cp=2, cp_order="contiguous").check()  # halves, where zigzag needs quarters
    assert {layout.size("cp") for layout in found} == shares
    assert {layout.size("ep") for layout in found} == {1, 2, 4}
    assert {layout.size("ep") for layout in layouts(SMALL, RANKS, SEQUENCES, few)} == {1}, "without experts"


def test_choices_narrow_the_layouts() -> None:
    found = list(layouts(MODEL, 4, 8, Choices({"dp": (2,)}, schedules=("gpipe",), recompute=("all",), shard=("none",))))
    assert {(layout.size("dp"), layout.recompute, layout.shard) for layout in found} == {(2, "all", "none")}
    assert {layout.schedule for layout in found if layout.size("pp") > 1} == {"gpipe"}
    assert {layout.size("dp") for layout in layouts(MODEL, 4, 6, Choices(shard=("none",)))} == {1, 2}, "of 6 sequences"
    for asked, left in ((("gpipe", "naive"), {"gpipe", "naive"}), (("gpipe", "dapple"), {"dapple"})):  # all the same
        one = Choices({"pp": (2,)}, micro_batches=(1,), schedules=asked)
        assert {layout.schedule for layout in layouts(MODEL, 4, 8, one)} == left


def test_replicas_are_neighbors_where_that_divides_the_pipelines_between_hosts_but_not_the_replicas() -> None:
    few = Choices(micro_batches=(1,), schedules=("dapple",), recompute=("none",), shard=("none",))
    found = [layout for layout in layouts(SMALL, 8, 8, few, ranks_per_host=4) if next(iter(layout.axes)) == "pp"]
    assert {tuple(map(layout.size, ("dp", "pp", "tp"))) for layout in found} == {(2, 4, 1), (4, 2, 1), (2, 2, 2)}
    for layout in found:
        assert " --neighbors replicas " in layout.flags(SMALL)
        asked = settings(layout)
        asked.check()
        assert list(asked.layout.items()) == list(layout_of(asked, SIZES.vocab_size, "").axes.items())
        assert list(asked.layout) == ["pp", "dp", "tp"]
    with_parts = list(layouts(SMALL, 8, 8, replace(few, axes={"cp": (2,)}), ranks_per_host=4))
    divided = [layout for layout in with_parts if neighbors_of(layout.axes) == "replicas"]
    assert {tuple(map(layout.size, ("dp", "pp", "tp"))) for layout in divided} == {(2, 2, 1)}
    for layout in (*found, *divided):
        hosts = RanksOnHosts(cluster(hosts=2, ranks_per_host=4), layout)
        assert hosts.is_inside(SAME_WEIGHTS)
    for per_host in (None, 8, 3):
        assert all(neighbors_of(layout.axes) == "stages" for layout in layouts(SMALL, 8, 8, few, per_host))


def test_a_slow_link_divides_pipelines_and_a_fast_one_replicas() -> None:
    def first(between: Link) -> RunLayout:
        machine = cluster(hosts=2, ranks_per_host=2, between=between)
        choices = Choices({"dp": (2,), "pp": (2,)}, micro_batches=(4,), schedules=("dapple",))
        return find_layouts(MODEL, machine, 4, 8, float("inf"), choices=choices, top=1).rows[0].layout

    assert neighbors_of(first(Link(0, 1e6)).axes) == "replicas"
    assert neighbors_of(first(Link(1e-3, 1e11)).axes) == "stages"


def test_flags_leave_out_what_is_the_default() -> None:
    layout = RunLayout({"dp": 2, "pp": 2}, 4, 2, "zb-h1", "blocks", "optimizer", (3, 1))
    flags = "--dp 2 --pp 2 --tp 1 --batch-size 4 --micro-batches 2 --schedule zb-h1 --layers-per-stage 3,1"
    assert layout.flags(MODEL) == f"{flags} --recompute blocks --shard optimizer"
    plain = RunLayout({"dp": 2, "pp": 2}, 4, 2, "dapple", "none", "none", default_split(MODEL, 2))
    assert plain.flags(MODEL) == "--dp 2 --pp 2 --tp 1 --batch-size 4 --micro-batches 2 --schedule dapple"
    parts = RunLayout({"dp": 1, "cp": 2}, 4, 1, "dapple", "none", "none", (4,), "heads", "contiguous")
    flags = "--dp 1 --pp 1 --tp 1 --batch-size 4 --micro-batches 1 --cp 2 --cp-kind heads"
    assert parts.flags(MODEL) == f"{flags} --cp-order contiguous"
    assert replace(parts, cp_order="zigzag").flags(MODEL) == flags


@pytest.mark.parametrize(
    ("schedule", "split", "follows"),
    [
        ("dapple", (2, 2), [False, False]),
        ("zb-v", (1, 1, 1, 1), [False, False, True, True]),
        ("zb-v", (0, 1, 1, 1), [False, False, True, False]),
    ],
)
def test_a_stage_follows_the_blocks_of_its_own_worker(
    schedule: str, split: tuple[int, ...], follows: list[bool]
) -> None:
    layout = RunLayout({"pp": 2}, 2, 2, schedule, "none", "none", split)
    assert [layout.follows_own_blocks(stage) for stage in range(len(split))] == follows


def test_the_flag_with_which_whole_blocks_are_not_compiled_is_named() -> None:
    plain = RunLayout({"dp": 2}, 2, 1, "dapple", "none", "none", (4,))
    assert plain.not_compiled is None
    named = {replace(plain, axes={axis: 2}).not_compiled for axis in ("tp", "cp")}
    named |= {replace(plain, shard="weights").not_compiled, replace(plain, recompute="except-attention").not_compiled}
    assert named == {"--tp 2", "--cp 2", "--shard weights", "--recompute except-attention"}


def test_the_table_has_the_prediction_of_each_layout() -> None:
    step = Step(0.5, 0.1, 0.0, 0.0, 0.0, 0.0, idle=0.4, bubble=0.25, sent_bytes=1.5e6)
    slow = Step(5.0, 5.0, 0.0, 0.0, 0.0, 0.0, idle=0.0, bubble=0.25, sent_bytes=4e9)
    piped = RunLayout({"pp": 2, "dp": 2}, 4, 4, "zb-h1", "blocks", "optimizer", (3, 3))
    alone = RunLayout({}, 4, 1, "dapple", "none", "none", (6,))
    head, *lines = table([Row(piped, step, 0, 3.21e9), Row(alone, slow, 0, 2e6)], 1000)
    cells = [re.split(r"  +", line) for line in lines]
    predicted = ["500 ms", "2,000", "25%", "3,210", "1.5", "waiting for other stages"]
    assert cells[0] == ["1", "2 dp x 2 pp, replicas together", "4", "zb-h1", "blocks", "optimizer", *predicted]
    predicted = ["5,000 ms", "200", "-", "2", "4,000.0", "computing"]  # no bubble without a pipeline
    assert cells[1] == ["2", "one rank", "1", "-", "-", "-", *predicted]
    assert re.split(r"  +", head) == [*HEADS]
    for line in lines:
        (begin, end), (begins, ends) = (
            zip(*(found.span() for found in re.finditer(r"\S+( \S+)*", one)), strict=True) for one in (head, line)
        )
        assert (begin[:5], end[5:-1], begin[-1]) == (begins[1:6], ends[6:-1], begins[-1]), "words left, numbers right"
