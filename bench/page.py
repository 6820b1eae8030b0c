"""The page of a run: seconds to make it, its size, and seconds until Chromium has drawn it.

    python bench/page.py runs/hybrid

It is made and opened in turns; seconds of drawing count from the request of the page.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from lab_runs import LAB
from tables import range_of

from simplellm import command_line
from simplellm.errors import require

sys.path.insert(0, str(LAB / "tests"))

from support.browser import CHROMIUM, Browser

DRAWN = """new Promise(done => {
    const look = () => document.body.dataset.isDrawn ? done(performance.now()) : setTimeout(look, 5);
    look();
})"""


@dataclass
class Settings:
    """What to measure."""

    run: Annotated[Path, tyro.conf.Positional]
    """folder of a run"""
    rounds: int = 5
    """times that the page is made, and opened"""


def main(settings: Settings) -> None:
    require(settings.rounds > 0, f"--rounds {settings.rounds}: give at least 1")
    require(settings.run.is_dir(), f"{settings.run}: there is no such folder")
    require(CHROMIUM is not None, "Chromium is missing: on Debian and Ubuntu, apt-get install chromium")
    made, in_view, whole = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "browser") as browser:
        file = Path(folder) / "page.html"
        for _ in range(settings.rounds):
            started = time.perf_counter()
            subprocess.run([LAB / "launch.sh", "page", settings.run, "--to", file], check=True, capture_output=True)
            made.append(time.perf_counter() - started)
            page = browser.open(file.as_uri())
            whole.append(page.value(DRAWN) / 1000)
            in_view.append(page.value("Number(document.body.dataset.drawnMs)") / 1000)
            page.call("Page.close")
        print(f"{file.stat().st_size / 1e6:.2f} MB")
    for what, seconds in (("made", made), ("drawn: what is in view", in_view), ("drawn: everything", whole)):
        print(f"{what}: {statistics.median(seconds):.2f} s ({range_of(seconds)})")


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
