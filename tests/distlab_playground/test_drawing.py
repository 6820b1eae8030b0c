"""The drawings of the playground: all of each is seen, and can be read."""

import re

import pytest

from distlab.collectives.simulation import Passed
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.reports import style
from distlab_page.tables import table
from distlab_playground import drawing, runs


def test_what_is_drawn_is_within_the_drawing_and_legible() -> None:
    drawn = drawing.kept([[(1.0, 2.0)]], ["worker 0"], end=2.0, limit=4.0)
    assert f"M{drawing.LEFT} 0.00H" in drawn, "the limit is the highest"
    [(at, level)] = re.findall(r'd="M[\d.]+ 120H([\d.]+)V([\d.]+)"', drawn)
    assert float(at) - drawing.LEFT == pytest.approx((drawing.WIDTH - drawing.LEFT - 12) / 2), "from then on"
    assert float(level) == 60, "half of the limit"
    message = Passed(0, 1, 4, 0.25, 0.5)
    assert drawing.message_words([message], 1).endswith(", 4 bytes, 250 to 500 ms.")
    assert f"L{drawing.WIDTH - 12:.2f} " in drawing.messages(2, [message], makespan=0.5), "at the end of the axis"
    some = drawing.messages(2, [message] * 3, makespan=0.5, shown=2)
    assert re.findall('class="bar".*?stroke-width="(.*?)"', some) == ["2", "4"], "the last one is the thickest"
    [line] = re.findall(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawing.messages(2, [message], makespan=0.5))
    sent, sender, arrived, receiver = map(float, line)
    assert (sent < arrived, sender < receiver) == (True, True), "from rank 0 to rank 1, which is below it"
    plan = simulate(all_stages("gpipe", 2, 2))
    [now] = re.findall(r'<path d="M([\d.]+) 0V', drawing.passes(plan, plan.rows, played=3))
    share = (float(now) - drawing.LEFT) / (drawing.WIDTH - drawing.LEFT - 12)
    assert share * plan.makespan == pytest.approx(drawing.in_order(plan)[2][1].end, abs=0.01), (
        "when the third has ended"
    )
    drawn = drawing.stacked(["a", "b"], [{"x": 1.0, "y": 3.0}, {"x": 2.0, "y": 0.5}], "", "GB", digits=1)
    beside = [(float(x), float(width)) for x, width in re.findall('class="bar" x="(.*?)".*?width="(.*?)"', drawn)]
    unit = (drawing.WIDTH - drawing.LEFT - 12) / 4
    for (left, width), (start, size) in zip(beside, ((0, 1), (1, 3), (0, 2), (2, 0.5)), strict=True):
        assert (left - drawing.LEFT, width) == pytest.approx((start * unit, size * unit), abs=0.02), "side by side"
    assert re.findall("<title>(.*?)</title>", drawn) == ["x: 1.0 GB", "y: 3.0 GB", "x: 2.0 GB", "y: 0.5 GB"]
    for end in (0.37, 7.0, 10.0, 123.0):
        bars = [drawing.Bar(0.0, end / 2, "#000000", "F0", ""), drawing.Bar(end / 2, end, "#ffffff", "F1", "")]
        drawn = drawing.rows(["worker 0"], [bars], "", "ticks")
        assert drawing.TICKS / 3 <= drawn.count("v5") <= drawing.TICKS + 1
        widths = [float(width) for width in re.findall('class="bar".*?width="(.*?)"', drawn)]
        assert widths == pytest.approx([(drawing.WIDTH - drawing.LEFT - 12) / 2] * 2, abs=0.01)
        inks = [re.search(f'fill="([^"]*)">{label}<', drawn) for label in ("F0", "F1")]
        assert [ink and ink[1] for ink in inks] == [style.BACKGROUND, style.INK]
    assert re.findall(r">(\d+)</text>", drawn) == ["0", "20", "40", "60", "80", "100", "120"], "the marks up to 123"
    assert ">10<" in drawing.rows(["worker 0"], [[drawing.Bar(0, 10, "#000000", "", "")]], "", "ticks")
    assert "<b>" not in drawing.table(["<b>"], [["<b>"]], "<b>") + drawing.legend({"<b>": style.INK})
    shares = runs.table(table("", ("run", "busy", "idle"), [("a", 0.25, 0.5)], ("busy", "idle")))
    assert re.findall(r'<td style="text-align:(\w+);[^>]*>([^<]+)<', shares) == [
        ("left", "a"),
        ("right", "25.0%"),
        ("right", "50.0%"),
    ]
    assert runs.not_computing({"rows": [(3.0, 1.0), (0.5, 1.5), (0.0, 2.0)]}) == 1 - 3.5 / 8, "of all ranks together"
