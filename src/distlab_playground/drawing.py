"""Drawings as SVG, which a page shows without scripts; every bar has its words as a tooltip.

The colors are those of the lab's figures, which color-blind readers can distinguish.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distlab.pipeline.plan import Plan, Span
from distlab.reports import style

if TYPE_CHECKING:
    from distlab.collectives.simulation import Passed  # imports torch

WIDTH, LEFT, ROW, GAP = 1000, 110, 30, 6  # units of a drawing: its width, the names of rows, a row, between two rows
PLAYED_NOT_YET = 0.25  # opacity
TICKS = 10  # at most, on an axis
FONT, SMALLEST, WIDE = 13, 7, 0.78  # size of letters, at least in a bar; width of a letter, relative to its size


@dataclass(frozen=True)
class Bar:
    """A piece of a row, from `start` to `end` on the axis."""

    start: float
    end: float
    color: str
    label: str
    words: str
    opacity: float = 1.0


def rows(
    names: Sequence[str],
    bars: Sequence[Sequence[Bar]],
    about: str,
    unit: str,
    end: float | None = None,
    cursor: float | None = None,
    limit: float | None = None,
) -> str:
    """Return a drawing with a row for each name.

    Args:
        names: of the rows.
        bars: of each row.
        about: the drawing in words, for readers who do not see it.
        unit: what the axis counts.
        end: of the axis; by default, the end of the last bar.
        cursor: where a line marks the present.
        limit: where a line marks a limit.
    """
    end = end or max((bar.end for line in bars for bar in line), default=1.0) or 1.0
    x = _scale(end)
    height = len(names) * ROW
    parts = list[str]()
    for row, (name, line) in enumerate(zip(names, bars, strict=True)):
        top = row * ROW
        parts.append(_text(LEFT - 8, top + ROW / 2, name, anchor="end"))
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT}" height="{ROW - GAP}" fill="{style.PALE}"/>')
        for bar in line:
            left, width = x(bar.start), x(bar.end) - x(bar.start)
            words = f"<title>{html.escape(bar.words)}</title>"
            box = f'x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW - GAP}" fill="{bar.color}"'
            parts.append(f'<g opacity="{bar.opacity}">{words}<rect class="bar" {box} stroke="{style.BACKGROUND}"/>')
            size = min(FONT, width / max(1, len(bar.label)) / WIDE)
            if size >= SMALLEST:
                parts.append(_text(left + width / 2, top + (ROW - GAP) / 2, bar.label, ink=_ink(bar.color), size=size))
            parts.append("</g>")
    for at, dashes in ((cursor, ""), (limit, ' stroke-dasharray="6 4"')):
        if at is not None:
            parts.append(f'<path d="M{x(at):.2f} 0V{height}" stroke="{style.INK}" stroke-width="2"{dashes}/>')
    return _svg(height, about, [*parts, *_axis(end, height, unit)])


def stacked(
    names: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    about: str,
    unit: str,
    digits: int,
    end: float | None = None,
    limit: float | None = None,
) -> str:
    """Return a drawing with a row for each name, of parts one after another, and its legend.

    Args:
        parts: the size of each part of each row, by its words; all rows have the same words.
        digits: after the point, of the sizes in the tooltips.
    """
    colors = dict(zip(parts[0], style.SERIES, strict=False))
    lines = []
    for row in parts:
        at, line = 0.0, list[Bar]()
        for words, size in row.items():
            line.append(Bar(at, at + size, colors[words], words, f"{words}: {size:.{digits}f} {unit}"))
            at += size
        lines.append(line)
    return legend(colors) + rows(names, lines, about, unit, end, limit=limit)


def legend(colors: Mapping[str, str]) -> str:
    """Return a line with the color of each name, as HTML."""
    swatch = "display:inline-block;width:0.9em;height:0.9em;background:"
    entries = (
        f'<span style="margin-right:1em"><span style="{swatch}{color}"></span> {html.escape(name)}</span>'
        for name, color in colors.items()
    )
    return f"<div>{''.join(entries)}</div>"


def passes(plan: Plan, names: Sequence[str], played: int | None = None, about: str = "the schedule") -> str:
    """Return a schedule's drawing; of its actions in the order of their starts, those after `played` are pale."""
    order = in_order(plan)
    played = len(order) if played is None else played
    begun = {span.action for _, span in order[:played]}
    now = order[played - 1][1].end if 0 < played < len(order) else None

    def bar(span: Span) -> Bar:
        action, label = span.action, plan.labels[span.action]
        what = f"{label}: {action.in_words()} of micro-batch {action.micro_batch}, stage {action.stage}"
        words = f"{what}, {span.start:g} to {span.end:g} ticks"
        return Bar(span.start, span.end, action.color, label, words, 1.0 if action in begun else PLAYED_NOT_YET)

    kinds = dict.fromkeys(type(span.action) for _, span in order)
    drawn = rows(names, [[bar(span) for span in line] for line in plan.spans], about, "ticks", plan.makespan, now)
    return legend({f"{kind.letter}: {kind.in_words()}": kind.color for kind in kinds}) + drawn


def in_order(plan: Plan) -> list[tuple[int, Span]]:
    """Return all actions with their workers, in the order in which they start."""
    spans = [(worker, span) for worker, line in enumerate(plan.spans) for span in line]
    return sorted(spans, key=lambda pair: (pair[1].start, pair[1].end, pair[0]))


def kept(
    lines: Sequence[Sequence[tuple[float, float]]], names: Sequence[str], end: float, limit: float | None = None
) -> str:
    """Return the activations that each worker keeps over time, from (time, kept from then on), as steps of a curve."""
    most = max([limit or 0.0, *(size for line in lines for _, size in line)])
    x, height = _scale(end), 120
    parts = [_text(LEFT - 8, 0, f"{most:g} kept", anchor="end")]
    for worker, line in enumerate(lines):
        path = f"M{x(0):.2f} {height}" + "".join(f"H{x(at):.2f}V{height * (1 - size / most):.2f}" for at, size in line)
        color = style.SERIES[worker % len(style.SERIES)]
        title = f"<title>{html.escape(names[worker])}</title>"
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2">{title}</path>')
        parts.append(_text(LEFT - 22, 20 + 16 * worker, names[worker], anchor="end"))
        parts.append(f'<path d="M{LEFT - 18} {20 + 16 * worker}h12" stroke="{color}" stroke-width="4"/>')
    if limit is not None:
        y = height * (1 - limit / most)
        parts.append(
            f'<path d="M{LEFT} {y:.2f}H{WIDTH}" stroke="{style.INK}" stroke-width="2" stroke-dasharray="6 4"/>'
        )
    about = "micro-batches whose activations each worker keeps, over time"
    return _svg(max(height, 20 + 16 * len(names)), about, [*parts, *_axis(end, height, "ticks")])


def messages(ranks: int, passed: Sequence["Passed"], makespan: float, shown: int | None = None) -> str:
    """Return messages in time: a line for each rank, and an arrow from each sender to the receiver."""
    end = makespan or 1.0
    x, step = _scale(end * 1e3), max(24.0, min(60.0, 480 / ranks))
    height = step * ranks
    parts = [
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="context-stroke"/></marker></defs>'
    ]
    for rank in range(ranks):
        y = (rank + 0.5) * step
        parts.append(_text(LEFT - 8, y, f"rank {rank}", anchor="end"))
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH}" stroke="{style.INK}" stroke-width="0.5"/>')
    for number, one in enumerate(passed[:shown], start=1):
        color = style.SERIES[one.sender % len(style.SERIES)]
        (x0, y0), (x1, y1) = (
            (x(at * 1e3), (rank + 0.5) * step)
            for at, rank in ((one.started_seconds, one.sender), (one.ended_seconds, one.receiver))
        )
        width = 4 if number == shown else 2
        arrow = f'<path class="bar" d="M{x0:.2f} {y0}L{x1:.2f} {y1}" stroke="{color}" stroke-width="{width}"'
        parts.append(f'{arrow} marker-end="url(#head)"><title>{message_words(passed, number)}</title></path>')
    about = f"{len(passed)} messages between {ranks} ranks"
    return _svg(height, about, [*parts, *_axis(end * 1e3, height, "ms")])


def message_words(passed: Sequence["Passed"], number: int) -> str:
    """Return the message with this number, from 1, in words."""
    one = passed[number - 1]
    times = f"{one.started_seconds * 1e3:.4g} to {one.ended_seconds * 1e3:.4g} ms"
    return f"Message {number}: rank {one.sender} to rank {one.receiver}, {one.size_bytes:,} bytes, {times}."


def table(head: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> str:
    """Return an HTML table; the first column names the rows, the others are aligned to the right."""

    def row(tag: str, cells: Sequence[str]) -> str:
        sides = ["left"] + ["right"] * (len(cells) - 1)
        shown = (
            f'<{tag} style="text-align:{side};padding:2px 8px 2px 0">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    title = f'<caption style="text-align:left;font-weight:bold;white-space:nowrap">{html.escape(caption)}</caption>'
    body = "".join(row("td", line) for line in lines)
    return f'<table style="width:fit-content">{title}<thead>{row("th", head)}</thead><tbody>{body}</tbody></table>'


def _scale(end: float) -> Callable[[float], float]:
    return lambda at: LEFT + (WIDTH - LEFT - 12) * at / end


def _axis(end: float, height: float, unit: str) -> list[str]:
    """Return the marks of an axis from 0 to `end`, below a drawing."""
    power = 10.0 ** math.floor(math.log10(end / TICKS))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= end / TICKS)
    marks, x = list[str](), _scale(end)
    for number in range(int(end / step + 1e-9) + 1):
        at = number * step
        marks.append(f'<path d="M{x(at):.2f} {height}v5" stroke="{style.INK}"/>')
        marks.append(_text(x(at), height + 15, f"{at:g}"))
    return [*marks, _text(LEFT - 8, height + 15, unit, anchor="end")]


def _text(x: float, y: float, text: str, anchor: str = "middle", ink: str = style.INK, size: float = FONT) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" font-size="{size:.3g}" text-anchor="{anchor}" dominant-baseline="central"'
    place += f' fill="{ink}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _ink(color: str) -> str:
    """Return the color of text on a background."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return style.BACKGROUND if 0.3 * red + 0.59 * green + 0.11 * blue < 110 else style.INK


def _svg(height: float, about: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 -6 {WIDTH} {height + 34}" style="width:100%;background:{style.BACKGROUND}"'
    words = html.escape(about, quote=True)
    return f'<svg role="img" aria-label="{words}" {box} font-family="sans-serif">{"".join(parts)}</svg>'
