"""A run's page in a browser: expressions for what it holds, and what its content says that it should hold."""

from collections.abc import Sequence
from typing import Any

from support.page_numbers import NUMBER, in_texts, numbers

DRAWN = "document.body && document.body.dataset.isDrawn"
TEXTS = "Object.fromEntries([...document.querySelectorAll('header, section')].map(one => [one.id, one.innerText]))"
OPENED = "document.querySelectorAll('details').forEach(one => one.open = true)"
TABLES = """[...document.querySelectorAll('table')].map(one => [one.caption.innerText,
  [...one.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText))])"""
PLAIN_FIGURES = """(async () => {
  for (let i = 0; i < 10; i++) {
    const place = document.body.appendChild(document.createElement("div"));
    await Plotly.newPlot(place, [{y: [...Array(100).keys()]}]);
    place.remove();
  }
})()"""  # draws ten, which says how fast a machine is
FIGURES = """Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map(one => [one.closest('section').id,
  one.data.flatMap(t => t.z ? t.z.flat() : t.orientation ? [...(t.base || []), ...t.x] : t.y)]))"""
COLORS = """[...document.querySelectorAll('.js-plotly-plot')].flatMap(one => one.data.flatMap(t =>
  [t.marker && t.marker.color, t.line && t.line.color])).concat([...document.querySelectorAll('svg.layout *')].flatMap(
  one => [one.getAttribute('fill'), one.getAttribute('stroke')])).filter(color => color && !color.startsWith('url'))"""
PROSE = "[...document.querySelectorAll('p, output, li, summary, svg.layout text')].map(one => one.textContent)"
LISTS = {"bars", "arrows", "plan", "at", "values", "kinds", "matrix", "rows", "loads", "logs", "table", "pairs"}


def unknown(prose: Sequence[str], content: dict[str, Any]) -> list[str]:
    """Return the numbers in a page's sentences that are not in its content, as they are or in percent."""
    summary = {name: without_lists(part) for name, part in content.items()}
    known = [*numbers(summary).values(), *(n for found in in_texts(content).values() for n in found)]
    said = (text for sentence in prose for text in NUMBER.findall(sentence))
    return [text for text in said if not any(is_shown(text, n) or is_shown(text, 100 * n) for n in known)]


def without_lists(value: Any) -> Any:
    """Return content without the numbers of figures and tables, among which any number is found."""
    if isinstance(value, dict):
        return {k: without_lists(held) for k, held in value.items() if k not in LISTS or isinstance(held, float)}
    return [without_lists(held) for held in value] if isinstance(value, list) else value


def is_shown(text: str, value: float) -> bool:
    """Return whether a text is a number, rounded to the digits of the text."""
    decimals = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.501 * 10**-decimals


def tables(value: Any) -> dict[str, list[list[Any]]]:
    """Return the rows of all tables in the content of a page, by caption."""
    if isinstance(value, dict) and value.keys() >= {"caption", "rows", "shares"}:
        shares = [value["head"].index(name) for name in value["shares"]]
        return {
            value["caption"]: [
                [cell and 100 * cell if column in shares else cell for column, cell in enumerate(row)]
                for row in value["rows"]
            ]
        }
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {caption: rows for one in inner for caption, rows in tables(one).items()}


def in_figures(page: dict[str, Any]) -> dict[str, list[float]]:
    """Return the numbers that the figures of a page should have."""
    figures = {"curves": [v for run in page["curves"]["runs"] for values in run["values"].values() for v in values]}
    if page["timeline"]:
        bars = page["timeline"]["steps"][page["timeline"]["typical"]]["bars"] + page["timeline"]["plan"]
        figures["timeline"] = [n for _, _, _, *times in bars for n in times]
    if page["memory"]:
        held = [page["memory"]["bars"], page["memory"]["plan"] or {}]
        figures["memory"] = [size / 1e6 for one in held for values in one.values() for size in values]
    if page["ledger"] and page["ledger"]["matrix"]:
        figures["ledger"] = [size for line in page["ledger"]["matrix"] for size in line]
    if page["prediction"]:
        figures["prediction"] = [1e3 * seconds for _, *pair in page["prediction"]["parts"] for seconds in pair]
    if page["experts"]:
        figures["experts"] = page["experts"]["loads"]
    if page["ring"]:
        figures["ring"] = [1e3 * seconds for row in page["ring"]["rows"] for seconds in row]
    return figures | {"time": [seconds for row in page["time"]["rows"] for seconds in row]}


def as_number(text: str) -> float | str | None:
    try:
        return None if text == "\N{EN DASH}" else float(text.removesuffix(" %").replace(",", ""))
    except ValueError:
        return text


def plain(cell: Any) -> Any:
    return as_number(cell) if isinstance(cell, str) else cell
