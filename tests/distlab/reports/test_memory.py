"""The table of what ranks hold: counted tensor by tensor, and equal to what is known of the model."""

import json
from pathlib import Path

import pytest
import torch
from support.chapters import train_on

from distlab.comm.recorder import Recorder
from distlab.reports import memory
from distlab.reports.records import read_largest
from simplellm.errors import InputError

SCRIPT = "PP/schedules/intro_PP_schedules.py"


def test_every_kind_is_counted() -> None:
    weight, frozen = torch.zeros(10, 10, requires_grad=True), torch.zeros(3)
    optimizer = torch.optim.Adam([weight, frozen])
    report, recorder = memory.MemoryReport(optimizer, further_bytes=[lambda: 1000, lambda: 24]), Recorder()
    assert not report.counts(recorder), "no step was taken"
    x = torch.ones(7, 10)
    with report.counting():
        loss = (x @ weight).exp().sum()
    loss.backward()
    optimizer.step()
    parameters, gradients, state, copied, gathered, activations, *_ = report.counts(recorder).values()
    assert (parameters, gradients) == (400 + 12, 400)
    assert copied == gathered == 0
    assert state == 2 * 400 + 4 + 1024  # two moments, the number of steps, and what others keep
    assert activations == 2 * 280  # the input, and the result of exp()
    recorder.kept_bytes.append((0.0, 5000))  # by a pipeline, in a later step
    for kind in ("activations", memory.WITHOUT_RECOMPUTE):
        assert report.counts(recorder)[kind] == 5000, "without recomputation, no less than with it"


def counts(*sizes: int) -> dict[str, int]:
    """The bytes of a rank, of the kinds in their order."""
    return dict(zip((*memory.MEMORY_KINDS, memory.WITHOUT_RECOMPUTE, memory.ROWS), sizes, strict=True))


def test_ranks_that_hold_the_same_share_a_line() -> None:
    sizes = 1_000_000, 2_000_000, 1_000_004  # the last is shown like the first
    by_rank = [counts(size, 0, 0, 0, 0, 5, 5, 0) for size in sizes]
    head, *lines = memory.as_table(dict(enumerate(by_rank)))
    assert head.split() == "memory, MB parameters gradients optimizer state activations".split()
    assert [line.split() for line in lines] == [
        "ranks 0, 2 1.00 0.00 0.00 0.00".split(),
        "rank 1 2.00 0.00 0.00 0.00".split(),
    ]
    assert memory.as_table(dict(zip((0, 3, 5), by_rank, strict=True)))[1].startswith("ranks 0, 5 "), (
        "of those that are left"
    )
    many = memory.as_table(dict(enumerate([*([by_rank[0]] * 9), by_rank[1]])))
    assert len({len(line) for line in many}) == 1, "numbers stand below their heads, however many ranks share a line"


def test_a_column_is_there_for_any_rank_that_has_such_bytes() -> None:
    """In the order: the copy to undo, what is gathered, activations with and without recomputation, rows of experts."""
    nothing, all_kinds = counts(*[0] * 8), counts(0, 0, 0, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000)
    head, *lines = memory.as_table({0: nothing, 1: all_kinds})
    further = "copy to undo gathered activations without --recompute rows of experts"
    assert head.split() == f"memory, MB parameters gradients optimizer state {further}".split()
    assert lines[1].split()[2:] == "0.00 0.00 0.00 1.00 2.00 3.00 4.00 5.00".split()
    head, _ = memory.as_table({0: nothing})
    assert head.split() == "memory, MB parameters gradients optimizer state activations".split()


def test_the_largest_rank_is_the_one_that_holds_most_of_all_kinds_together(tmp_path: Path) -> None:
    memory.keep(
        tmp_path / "memory.json",
        [counts(9, 9, 0, 0, 0, 1, 1, 0), counts(8, 8, 0, 0, 0, 4, 4, 0), counts(7, 7, 0, 0, 0, 5, 5, 0)],
    )
    assert read_largest(tmp_path) == [8, 8, 0, 0, 0, 4]
    earlier = {"parameters": 1, "gradients": 2, "optimizer state": 3, "activations": 4}
    (tmp_path / "memory.json").write_text(json.dumps([earlier]))
    assert read_largest(tmp_path) == [1, 2, 3, 0, 0, 4], "of a run before there were further kinds"
    with pytest.raises(InputError, match="there are no memory counts of a run"):
        read_largest(tmp_path / "nothing")


def counts_of_a_pipeline(out: Path, *flags: str) -> list[dict[str, int]]:
    """What each of two stages held."""
    shape = "--world-size 2 --batch-size 4 --micro-batches 4 --steps 1".split()
    train_on(2, SCRIPT, out, *shape, *flags)
    found: list[dict[str, int]] = json.loads((out / "memory.json").read_text())
    return found


@pytest.mark.parametrize(("schedule", "off"), [("dapple", 0), ("zb-h1", 0.05)])
def test_what_would_have_been_kept_is_what_a_run_without_recomputation_keeps(
    schedule: str, off: float, tmp_path: Path
) -> None:
    usual, *others = (
        counts_of_a_pipeline(tmp_path / recompute, "--schedule", schedule, "--recompute", recompute)
        for recompute in ("none", "blocks", "all")
    )
    for own in others:
        assert own[0]["activations"] < 0.8 * usual[0]["activations"]
        for rank in (0, 1):
            assert own[rank][memory.WITHOUT_RECOMPUTE] == pytest.approx(usual[rank]["activations"], rel=off)
    assert memory.WITHOUT_RECOMPUTE not in usual[0]


def test_a_traced_pipeline_counts_the_same(tmp_path: Path) -> None:
    flags = ["--recompute", "blocks"]
    plain, traced = (counts_of_a_pipeline(tmp_path / str(len(more)), *flags, *more) for more in ([], ["--trace"]))
    for kind in ("activations", memory.WITHOUT_RECOMPUTE):
        held = [own[kind] for own in plain]
        assert [own[kind] for own in traced] == pytest.approx(held, rel=0.05)
        assert min(held) > 0


INTERLEAVED = "--world-size 2 --schedule interleaved --micro-batches 2 --batch-size 2 --optimizer adam --run-on"


@pytest.mark.parametrize(("ranks", "flags"), [(3, ""), (2, INTERLEAVED)])
def test_a_run_says_what_its_ranks_hold(ranks: int, flags: str, tmp_path: Path) -> None:
    """One stage each, and two; with `--run-on`, a copy of the weights and of the optimizer's state."""
    parameters, _, _ = train_on(ranks, SCRIPT, tmp_path, "--batch-size", "3", *flags.split())
    by_rank = json.loads((tmp_path / "memory.json").read_text())
    for rank, own in enumerate(parameters):
        size = sum(tensor.nbytes for tensor in own.values())
        assert by_rank[rank]["parameters"] == by_rank[rank]["gradients"] == size
        state = by_rank[rank]["optimizer state"]
        assert state == (2 * size + 4 * len(own) if flags == INTERLEAVED else 0), "plain SGD has none"
        assert by_rank[rank]["copy to undo"] == (size + state if flags == INTERLEAVED else 0)
        assert by_rank[rank]["activations"] > 0
    [head] = [line for line in (tmp_path / "rank0.log").read_text().splitlines() if line.startswith("# memory, MB")]
    assert ("copy to undo" in head) == (flags == INTERLEAVED)
