"""The style of all figures: palette, text sizes, line widths, background, resolution. Colors are defined only here.

A figure is as wide as a README on GitHub, and its text is nearly as large as the page's. The background is light, so
that the figure is also legible in a dark theme. The palette is by Okabe and Ito ("Color Universal Design", 2008);
color-blind readers can distinguish its colors.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simplellm.errors import InputError, require_package

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
YELLOW = "#f0e442"  # for areas: too light for lines
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)  # of curves, ranks, stages: in this order
BACKGROUND, INK, PALE = "#ffffff", "#222222", "#e4e4e4"

WIDTH = 8.3  # inches; at 100 pixels per inch the 830 pixels of a README on GitHub
DPI = 200  # two pixels of the file for each of the page, for high-density screens
SMALL, TEXT, TITLE = 9, 10, 11  # points; at 100 pixels per inch 12.5, 14 and 15 pixels

LETTERS_OF_A_LEGEND = 120  # in one line
Point = tuple[float, float]

SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": TEXT,
    "figure.labelsize": TEXT,
    "axes.titlesize": TITLE,
    "axes.labelsize": TEXT,
    "legend.fontsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), BACKGROUND),
    "savefig.dpi": DPI,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "patch.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": PALE,
    "legend.frameon": False,
}


def subplots(height: float, rows: int = 1, columns: int = 1, width: float = WIDTH, **options: Any) -> tuple[Any, Any]:
    """Return a figure, sized in inches, and its axes as `Figure.subplots` returns them; needs no display."""
    require_package("matplotlib", "a figure")
    import matplotlib.style
    from matplotlib.figure import Figure

    matplotlib.style.use(SETTINGS)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def lighter(color: str, share: float) -> tuple[float, ...]:
    """Return a color mixed with white, with `share` of the color left; red, green, blue from 0 to 1."""
    from matplotlib.colors import to_rgb

    return tuple(1 - (1 - part) * share for part in to_rgb(color))


def rectangle(x: float, y: float, width: float, height: float, color: "str | tuple[float, ...]") -> Any:
    """Return a filled rectangle to add to axes."""
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, edgecolor=BACKGROUND)


def arrow(start: Point, end: Point, color: str, width: float = 1.6, heads: str = "-|>") -> Any:
    """Return an arrow between two points of the axes that it is added to, clipped at their edges."""
    from matplotlib.patches import FancyArrowPatch

    look: dict[str, Any] = {"color": color, "linewidth": width, "mutation_scale": min(2 + 5.5 * width, 12)}
    return FancyArrowPatch(start, end, arrowstyle=heads, shrinkA=0, shrinkB=0, **look)


def swatch(color: Any) -> Any:
    """Return a square of a color, for a legend."""
    return rectangle(0, 0, 1, 1, color)


def plain(name: str) -> str:
    """Escape a name for matplotlib, which leaves `_name` out of legends, and sets `$…$` as a formula."""
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def legend(figure: Any, entries: Mapping[str, Any]) -> None:
    """Draw a legend above all axes, from names to drawn objects."""
    place, most = "outside upper center", 7
    if sum(len(name) + 5 for name in entries) > LETTERS_OF_A_LEGEND:  # with the swatches
        most = math.ceil(len(entries) / 2)
    figure.legend(entries.values(), map(plain, entries), loc=place, ncols=min(len(entries), most), columnspacing=1.5)


def units(unit: str) -> Any:
    """Return a formatter for axis labels with SI prefixes: "10 kB", "100 µs"."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(unit)


def save(figure: Any, png: Path) -> None:
    """Write a figure to a file; raises `InputError` if that fails, as with an unknown suffix."""
    from PIL import Image  # matplotlib depends on it

    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png)
        if png.suffix == ".png":
            with Image.open(png) as image:
                image.convert("RGB").quantize().save(png, optimize=True)  # with 256 colors, a third of the bytes
    except OSError as error:
        raise InputError(f"{png}: cannot be written ({error.strerror or error})") from error
    except ValueError as error:
        raise InputError(f"{png}: cannot be drawn ({error}); give the path of a .png file") from error
