"""Checkpoints of two runs, without files: the first that differ, who wrote what is wrong, what counts as rounding."""

from pathlib import Path

import pytest
import torch
from support.written_records import SHAPE
from torch import Tensor

from distlab.checkpoints.format import Checkpoint
from distlab_compare.saved import Saved, first_divergence
from simplellm.errors import InputError


class Kept(Saved):
    """A checkpoint of a weight and, with Adam, of its mean gradient, without files; also of a bias with another one."""

    @property
    def parameters(self) -> list[str]:
        return ["weight", "bias"] if "bias" in self else ["weight"]

    def __init__(
        self, step: int, weight: float | Tensor, mean_gradient: Tensor | None = None, rounding: float | None = None
    ) -> None:
        super().__init__(Checkpoint(Path(), {"step": step}))
        self._kept = {"weight": torch.ones(SHAPE) * weight}
        if rounding is not None:
            self._kept |= {"bias": torch.zeros(SHAPE), "optimizer.bias.exp_avg": rounding * torch.ones(SHAPE)}
        if mean_gradient is not None:
            self._kept["optimizer.weight.exp_avg"] = mean_gradient

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name]

    def writers(self, name: str, wrong: Tensor) -> list[int]:
        return [rank for rank in (0, 1) if wrong[2 * rank : 2 * rank + 2].any()]  # each has written two rows


CHANGED = "% away); since step 4, weight has changed by 3 times as much as it should"


@pytest.mark.parametrize(
    ("weights", "how", "end"),
    [
        ((1.6, 1.2), "are 1.333 times what they should be (33.3 % away)", CHANGED),
        ((torch.arange(8.0).view(SHAPE), 1.0), "differ (", "% away)"),  # not a multiple, nor is the change
        ((1.0005, 1.0), "differ (0.05 ", "% away)"),
        ((torch.nan, 1.0), "differ", ": there, not all of them are finite"),
        ((1.0, torch.nan), "differ", ": there, not all of them are finite"),
    ],
    ids=["scaled", "other", "almost right", "not a number", "the right one is not a number"],
)
def test_how_much_too_much_a_weight_has_changed_since_the_checkpoint_before(
    weights: tuple[float | Tensor, float], how: str, end: str
) -> None:
    own, right = ({2: Kept(2, 0.5), 4: Kept(4, 1.0), 6: Kept(6, weight)} for weight in weights)
    [told] = first_divergence(own, right, [2, 4, 6], tolerance=1e-4)
    assert told.startswith(f"after 6 steps: the weights weight, as rank 0 and 1 wrote them, {how}")
    assert told.endswith(end)


@pytest.mark.parametrize("wrong", [2.0, torch.nan])
def test_the_rank_that_has_written_what_is_wrong_is_told(wrong: float) -> None:
    own = Kept(6, torch.tensor([[1.0, 1.0]] * 3 + [[1.0, wrong]]))
    assert "weight, as rank 1 wrote them, differ" in first_divergence({6: own}, {6: Kept(6, 1.0)}, [6], 1e-4)[0]


def test_with_adam_an_element_whose_mean_gradient_was_rounding_once_may_have_any_weight_from_then_on() -> None:
    def kept(sign: int) -> dict[int, Saved]:
        rounding, moved = torch.ones(SHAPE), torch.ones(SHAPE)
        rounding[0, 0], moved[0, 0] = sign * 1e-9, 1 + sign * 0.1
        return {2: Kept(2, 1.0, rounding), 4: Kept(4, moved, torch.ones(SHAPE))}

    assert first_divergence(kept(1), kept(-1), [2, 4], tolerance=1e-4) == []
    assert first_divergence(kept(1), kept(-1), [4], tolerance=1e-4) != []
    for moments, count in ((torch.ones(SHAPE), 0), (None, 1)):  # Adam makes rounding larger
        own, right = ({2: Kept(2, weight, moments)} for weight in (1 + 5e-4, 1.0))
        assert len(first_divergence(own, right, [2], tolerance=1e-4)) == count
    for rounding, count in ((1e-9, 0), (1e-3, 1)):  # of a bias whose gradient is zero in theory
        own, right = ({2: Kept(2, 1.0, torch.ones(SHAPE), sign * rounding)} for sign in (1, -1))
        assert len(first_divergence(own, right, [2], tolerance=1e-4)) == count
    plain, with_moments = {2: Kept(2, 1.0)}, {2: Kept(2, 1.0, torch.ones(SHAPE))}
    assert first_divergence(plain, with_moments, [2], 1e-4) == first_divergence(with_moments, plain, [2], 1e-4) == []
    with pytest.raises(InputError, match=r"its model has no bias of \[4, 2\]"):
        first_divergence(plain, {2: Kept(2, 1.0, rounding=1e-9)}, [2], tolerance=1e-4)
    with pytest.raises(InputError, match=r"its model has no weight of \[3, 4, 2\]"):
        first_divergence({2: Kept(2, 1.0)}, {2: Kept(2, torch.ones(3, *SHAPE))}, [2], tolerance=1e-4)


def test_parameters_of_a_checkpoint_are_in_the_order_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["layers.10.weight", "layers.2.weight", "optimizer.layers.2.weight.exp_avg", "random.0.cpu"]
    monkeypatch.setattr("distlab_compare.saved.tensors_in", lambda _: dict.fromkeys(names))
    assert Saved(Checkpoint(Path(), {"step": 1})).parameters == ["layers.2.weight", "layers.10.weight"]
