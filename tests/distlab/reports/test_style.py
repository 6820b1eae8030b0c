"""The palette of figures and pages."""

import itertools

import pytest
import torch
from torch import Tensor

from distlab.reports import style

# What those see who lack one kind of cones, in linear RGB: Machado et al., "A Physiologically-based Model for
# Simulation of Color Vision Deficiency", IEEE TVCG, 2009.
SEEN = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, seen: Tensor) -> Tensor:
    """CIELAB of a color "#rrggbb" as it is seen, in which 2 is a difference that can just be noticed."""
    rgb = torch.tensor([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ (seen @ linear).clamp(0, 1)
    x, y, z = (xyz / XYZ.sum(dim=1)).pow(1 / 3)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("cones", SEEN)
def test_color_blind_readers_can_distinguish_the_palette(cones: str) -> None:
    colors = [*style.SERIES, style.YELLOW, style.INK, "#bbbbbb"]  # the last one is that of waits
    seen = [lab(color, torch.tensor(SEEN[cones], dtype=torch.float32)) for color in colors]
    assert min(float((one - other).norm()) for one, other in itertools.combinations(seen, 2)) > 10


def test_a_legend_of_long_names_is_no_wider_than_the_figure() -> None:
    figure, _ = style.subplots(3)
    style.legend(figure, {f"curve with the number {number}": style.swatch(style.INK) for number in range(6)})
    figure.canvas.draw()
    assert 0 < figure.legends[0].get_window_extent().width < figure.bbox.width
