"""The names of the mistakes in gradients, weights and losses, by the coefficients of their parts."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.written_records import SHAPE, configure, record

from distlab_compare.command import Request, compare
from distlab_compare.mistakes import name_gradient, name_loss, name_ratios, name_weights

pytestmark = pytest.mark.quick


def test_mistakes_by_the_coefficients_of_the_shares() -> None:
    n, m = 3, 2

    def named(*ratios: Sequence[float], own: int = 0) -> str:
        return name_ratios(ratios, own).name

    assert named(*[[n] * m] * n) == "summed"
    assert named(*[[1 / n] * m] * n) == "divided-twice"
    assert named(*[[m] * m] * n) == "micro-batches-summed"
    assert named(*[[1 / m] * m] * n) == "micro-batches-divided-twice"
    assert named(*[[n * m] * m] * n) == "all-summed"
    assert named(*[[n * n] * m] * n) == "scaled-again"
    assert "divided by the 3 ranks again and again" in name_ratios([[1 / n**2] * m] * n, 0).sentence
    assert named(*[[1.37] * m] * n) == named(*[[-1] * m] * n) == "scaled"
    assert named(*[[0.95 * n**4] * m] * n) == named(*[[0.95 / n**4] * m] * n) == "scaled", "near a power is not one"
    assert "sequences: it was not averaged" in name_ratios([[n, n], [0, 0], [0, 0]], 0).sentence
    assert "sequences, 2 times as large: it" in name_ratios([[2 * n] * m, [0] * m, [0] * m], 0).sentence
    assert named([1, 1], [0, 0], [0, 0]) == "not-added-up"
    assert named([0, 0], [n, n], [0, 0]) == "one-rank-only"
    assert "is that of rank 1's sequences alone" in name_ratios([[0, 0], [n, n], [0, 0]], 0).sentence
    assert named([1, 1], [0, 0], [1, 1]) == named([0, 0], [2, 2]) == "rank-missing"
    unequal = name_ratios([[1, 1], [2, 2], [0.5, 0.5]], 0)
    told = "it has rank 0's once, rank 1's 2 times, rank 2's 1/2"
    assert (unequal.name, unequal.sentence.endswith(told)) == ("unequal", True)
    assert named([0, m], [0, m], [0, m]) == "last-micro-batch"
    assert named([m, 0], [m, 0], [m, 0]) == "one-micro-batch"
    for parts, few in itertools.product((3, 4, 5), (1, 2, 3)):
        for lost in itertools.combinations(range(parts), min(few, parts - 2)):
            has = [float(part not in lost) for part in range(parts)]
            shown = " and ".join(filter(None, (", ".join(map(str, lost[:-1])), str(lost[-1]))))
            of_all = name_ratios([has] * n, 0)
            assert (of_all.name, of_all.sentence.rpartition(" micro-batch ")[2]) == ("micro-batch-missing", shown)
            of_ranks = name_ratios([[share] * m for share in has], -1)
            told = f"looks as if rank {shown}'s share was lost"
            told = f"looks as if the shares of ranks {shown} were lost" if len(lost) > 1 else told
            assert (of_ranks.name, of_ranks.sentence) == ("rank-missing", told)
    assert named([9, 3], [9, 3], [9, 3]) == named([3, 9], [3, 9], [3, 9]) == "combined-again"
    assert named([1, 2], [1, 2], [1, 2]) == named([1, 1.015, 1.03]) == "unequal-micro-batches"
    assert named([0, 2 * n], [0, 0], [0, 0]) == "not-averaged"
    own_only = name_ratios([[n, 2 * n], [0, 0], [0, 0]], 0).sentence
    assert own_only.endswith("has micro-batch 0 once, micro-batch 1 2 times"), own_only
    mixed = name_ratios([[1, 2], [3, 4], [0, 6]], 0)
    told = "rank 1's micro-batch 1 4 times, rank 2's micro-batch 0 not at all, rank 2's micro-batch 1 6 times"
    assert (mixed.name, mixed.sentence.endswith(told)) == ("other-weights", True)
    share, other = torch.eye(2)
    for made_of, words in (([[share], [share]], "2 ranks"), ([[share, share]], "micro-batches")):
        assert f"no combination of the {words}' gradients" in name_gradient(other, made_of, None, 0).sentence
    before, *shares = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    without_last, mean = (shares[0] + shares[1]) / 3, torch.stack(shares).mean(0)
    for observed, name, told in (
        (before - 0.1 * without_last, "rank-missing", "are wrong as if, in the gradient used, rank 2's share was lost"),
        (before.clone(), "not-updated", "are those before the update: the update was undone, or changed other memory"),
        (1.5 * before - 0.1 * mean, "weights-scaled", "are 1.5 times what they should be"),
        (before / 3 - 0.1 * mean, "weights-divided-twice", "are 1/3 of what they should be: divided by 3 twice"),
        (before - 0.101 * mean, "imprecise", "differ slightly from those of one process"),
    ):
        mistake = name_weights(observed, before, [[share] for share in shares], lr=0.1, own=-1)
        assert (mistake.name, mistake.sentence) == (name, told)
    assert [name_loss(8 * k, 8.0, n, m).name for k in (2, 3, 1 / 2, 1 / 3, 1.1)] == [
        "loss-not-divided",
        "loss-summed",
        "loss-divided-twice",
        "loss-divided-twice",
        "loss",
    ]
    assert name_loss(1.0, 0.0, n, m).name == name_loss(8.1, 8.0, 1, 1).name == "loss"
    assert "is 1/64 of what it should be" in name_loss(8.0 / 64, 8.0, 1, 64).sentence
    assert "divided by 3 replicas twice" in name_loss(8.0 / 3, 8.0, n, m).sentence
    assert "average" not in name_loss(16.0, 8.0, n, m).sentence
    assert "by their number, 2, or average over the 2 replicas" in name_loss(16.0, 8.0, 2, 2).sentence


@pytest.mark.parametrize(
    ("factor", "told"), [(0.012, "1/83 of"), (0.003, "1/333 of"), (0.37, "0.37 times"), (83.0, "83 times")]
)
def test_factors_are_told_with_their_digits_and_not_taken_for_others(
    factor: float, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small ones too: 0.012 is not 1/64, and 0.003 is not 0."""
    micro_batches = 64
    for name, scale in (("own", factor), ("right", 1.0)):
        record(tmp_path / name, 0, {"gradient.weight": scale * torch.ones(SHAPE)})
        configure(tmp_path / name, settings={"micro_batches": micro_batches})
    assert compare(Request(tmp_path / "own", tmp_path / "right")) == 1
    shown = capsys.readouterr().out
    assert f" is {told} what it should be (factor {factor:g})" in shown, shown
    assert name_ratios([[factor] * micro_batches], 0).name == "scaled"
    assert name_loss(8 * factor, 8.0, 1, micro_batches).name == "loss"
    before, share = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert f"are {told} " in name_weights(factor * before, before, [[share]], lr=0.1, own=-1).sentence
