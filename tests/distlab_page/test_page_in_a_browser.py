"""A page in a browser: all its numbers are drawn, it needs no other file, keys work; a served one follows its run."""

import json
import shutil
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.browser import CHROMIUM, Browser
from support.page_in_browser import (
    COLORS,
    DRAWN,
    FIGURES,
    OPENED,
    PLAIN_FIGURES,
    PROSE,
    TABLES,
    TEXTS,
    as_number,
    in_figures,
    plain,
    tables,
    unknown,
)
from support.page_numbers import lines
from support.processes import finish, start_server

from distlab.reports import style
from distlab.settings.folders import Claim
from distlab_page.contents import contents
from distlab_page.records import Records, read
from distlab_page.writing import as_script, html

pytest.importorskip("plotly.offline", reason="pages need plotly: pip install plotly")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("name", ["hybrid", "killed", "served", "further panels beside another run"])
def test_a_browser_draws_each_number_and_asks_for_nothing(
    name: str, hybrid: Path, alone: Path, killed: Path, further: Records, server: str, browser: Browser, tmp_path: Path
) -> None:
    one, another = read(hybrid), read(alone)
    run, other = {
        "hybrid": (one, None),
        "killed": (read(killed), None),
        "served": (another, one),
        "further panels beside another run": (further, another),
    }[name]
    file = tmp_path / "page.html"
    file.write_text(html(run, other))
    address = server if name == "served" else f"file://{file}"
    page, content = browser.open(address), json.loads(as_script(contents(run, other)))
    page.wait_for(DRAWN)
    assert page.console == []
    assert page.requests == [address.replace("%", "%25")], "only the page itself"
    until_drawn = page.busy_seconds()
    page.value(PLAIN_FIGURES)
    assert until_drawn < 8 * (page.busy_seconds() - until_drawn), "seconds of a core; what others do slows down both"
    assert page.value("+document.body.dataset.drawnMs") > 0

    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the window"

    figures, expected = page.value(FIGURES), in_figures(content)
    assert figures.keys() == expected.keys()
    for panel, drawn in figures.items():
        of_both = [sorted(number for number in of if number is not None) for of in (drawn, expected[panel])]
        assert of_both[0] == pytest.approx(of_both[1]), panel
    grays = {style.INK, "#222", "#767676", "#bbbbbb", "#f0f0f0", "#fff"}
    assert {*page.value(COLORS)} <= {*style.SERIES, style.YELLOW, *grays}
    page.value(OPENED)
    page.wait_for("![...document.querySelectorAll('details tbody')].some(one => !one.childNodes.length)")
    shown, rows = dict(page.value(TABLES)), tables(content)
    for caption, cells in rows.items():
        assert [[as_number(text) for text in row] for row in shown[caption]] == [
            [
                pytest.approx(n, rel=1e-5, abs=0.05 * (abs(n) > 0.1)) if isinstance(n, float) else n
                for n in map(plain, row)
            ]
            for row in cells
        ], caption
    steps = [*range(1, len(run.metrics) + 1)]
    assert [as_number(row[0]) for row in shown[f"{run.name}, all {len(steps)} steps"]] == steps

    assert unknown(page.value(PROSE), content) == []
    texts = page.value(TEXTS)
    assert content["status"]["text"] in texts["top"]
    assert (" %" in texts["timeline"]) == (run.trace is not None)
    if other:
        assert content["verdict"]["is_same"]
        assert content["verdict"]["text"] in texts["top"]
    if run is one:
        assert "hybrid <b>&: 2 dp x 3 pp" in texts["top"]
        assert texts["time"].count(" %") == 4, "the factors of efficiency; all else is in seconds"
    assert page.value("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert "Content Security Policy" in page.console[0], "a page could not ask even if it wanted"


def test_a_page_is_read_with_keys_and_on_paper(hybrid: Path, browser: Browser, tmp_path: Path) -> None:
    file, content = tmp_path / "page.html", contents(read(hybrid))["timeline"]
    file.write_text(html(read(hybrid)))
    page = browser.open(f"file://{file}")
    page.wait_for(DRAWN)
    label = "document.querySelector('output').value"
    steps, typical = content["steps"], content["typical"]
    assert page.value(label).startswith(f"{steps[typical]['label']}: ")
    page.value("document.getElementById('step').focus()")
    page.press("ArrowRight" if typical + 1 < len(steps) else "ArrowLeft")
    at = page.value("+document.getElementById('step').value")
    assert abs(at - typical) == 1
    assert page.value(label).startswith(f"{steps[at]['label']}: ")
    page.press("Tab")
    assert page.value("document.activeElement.ariaLabel") == "next step"
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    page.press("Enter")
    at = min(at + 1, len(steps) - 1)
    assert page.value(label).startswith(f"{steps[at]['label']}: ")
    page.value("document.querySelector('#timeline details summary').focus()")
    page.press("Enter")
    listed = page.wait_for("document.querySelector('#timeline details[open] table')?.tBodies[0].rows.length")
    assert listed == len(steps[at]["bars"]) + len(steps[at]["arrows"])
    assert "waiting for other ranks" in page.value("document.querySelector('#timeline details').innerText")
    assert page.value("+document.getElementById('step').max") == len(steps) - 1
    page.value("[...document.querySelectorAll('button')].find(button => button.innerText == 'slowest').click()")
    slowest = steps[content["slowest"]]
    assert page.value(label).startswith(f"{slowest['label']}: ")
    assert page.value("document.querySelector('#timeline details caption').textContent") == slowest["label"]
    against = "document.getElementById('against')"
    page.value(f"{against}.value = 'tokens', {against}.dispatchEvent(new Event('change'))")
    where = page.value("document.querySelector('#curves .js-plotly-plot').data[0].x")
    assert where == [record["tokens"] for record in lines(hybrid)]
    empty = "document.querySelectorAll('#time tbody:empty, #schedules tbody:empty').length"
    assert page.value(f"dispatchEvent(new Event('beforeprint')), {empty}") == 0, "what is printed has its rows"
    assert page.value("document.querySelectorAll('#time details[open], #schedules details[open]').length") == 3
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.value("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_a_served_page_follows_the_run(killed: Path, browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    (folder / "launcher.log").unlink()
    claim, process = Claim(folder), start_server("page", folder, "--serve")
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[1]
        host, _, port = urlsplit(address).netloc.partition(":")
        with socket.create_connection((host, int(port))) as tab:  # one that is closed while it loads
            tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            tab.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        page = browser.open(address)
        page.wait_for(DRAWN)
        last = lines(killed)[-1]
        with (folder / "metrics.jsonl").open("a") as metrics:
            print(json.dumps(last | {"step": last["step"] + 1}), file=metrics)
        says = f"The run goes on: {last['step'] + 2:,} of"
        against = "document.getElementById('against')"
        page.value(f"{against}.value = 'tokens', {against}.dispatchEvent(new Event('change'))")
        page.value("document.querySelector('#curves summary').focus()")
        page.wait_for(f"document.getElementById('top').innerText.includes({says!r})")
        assert page.value("document.activeElement.closest('section').id") == "curves", "the focus stays"
        assert page.value(f"{against}.value") == "tokens"
        assert page.value("document.querySelectorAll('.js-plotly-plot').length") >= 1
    finally:
        process.send_signal(signal.SIGINT)
        ended = finish(process)
        claim.release()
    assert "Traceback" not in ended.err
    assert page.console == []
