"""A browser without a window, for tests of pages: what a page comes to hold, and what it says on the console."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-extensions --disable-background-networking --no-first-run "
    "--disable-component-update --hide-scrollbars --virtual-time-budget=20000 --window-size=1100,900"
).split()


@dataclass
class Opened(HTMLParser):
    """A page after its scripts have run."""

    console: list[str]
    texts: dict[str, list[str]] = field(default_factory=dict)  # by section, its texts
    drawn: dict[str, int] = field(default_factory=dict)  # by section, its figures by plotly, and pictures
    content: dict[str, Any] = field(default_factory=dict)  # as JSON, with which it was loaded
    _section: str = ""
    _hidden: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag in ("section", "header"):
            self._section = attributes["id"]
            self.texts[self._section], self.drawn[self._section] = [], 0
        if tag in ("script", "style"):
            self._hidden = "json" if attributes.get("type") == "application/json" else tag
        classes = attributes.get("class", "").split()
        if self._section and ("js-plotly-plot" in classes or "layout" in classes):
            self.drawn[self._section] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._hidden = ""

    def handle_data(self, data: str) -> None:
        if self._hidden == "json":
            self.content = json.loads(data)
        elif self._section and not self._hidden and data.strip():
            self.texts[self._section].append(data.strip())

    def text(self, section: str) -> str:
        return " ".join(self.texts[section])


def open_page(address: str, folder: Path, deadline: float = 60) -> Opened:
    """Open a page, and return what it holds when its scripts have run; `folder` gets the browser's own files."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "--enable-logging=stderr", "--dump-dom", address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=True)
    opened = Opened(re.findall(r"CONSOLE[^\]]*\] (.*)", ended.stderr))
    opened.feed(ended.stdout)
    return opened
