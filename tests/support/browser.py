"""Chromium without a window, for tests of pages: what a page holds, does on a key, writes to the console and requests.

It is driven over two pipes: https://chromedevtools.github.io/devtools-protocol. Times are real.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-extensions --disable-background-networking --no-first-run "
    "--process-per-site --disable-dev-shm-usage --disable-component-update --hide-scrollbars --window-size=1100,900"
).split()
EVENTS = "Page", "Runtime", "Log", "Network"  # the domains whose events are reported
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}


class Browser:
    """A browser; `folder` gets its own files. Close it, or use it as a context."""

    def __init__(self, folder: Path, deadline: float = 60) -> None:
        assert CHROMIUM is not None
        self.pages: dict[str, Page] = {}  # by session
        self._seconds, self._number, self._received = deadline, 0, b""
        # It reads from descriptor 3 and writes to 4; ours are numbered higher, so that the shell can move them there.
        (theirs_to_read, self._to), (self._from, theirs_to_write) = (map(_higher, os.pipe()) for _ in range(2))
        command = f'exec "$0" "$@" 3<&{theirs_to_read} 4>&{theirs_to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"],
            pass_fds=(theirs_to_read, theirs_to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_to_read)
        os.close(theirs_to_write)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(self._seconds)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def open(self, address: str) -> "Page":
        """Open a page in a new tab, and return it when it has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in EVENTS:
            page.call(f"{domain}.enable")
        page.call("Performance.enable", timeDomain="threadTicks")
        page.call("Page.bringToFront")  # a page that nobody sees is slowed down
        page.call("Page.navigate", url=address)
        self._until(lambda message: message.get("method") == "Page.loadEventFired")
        return page

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == self._number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, is_it: Any) -> dict[str, Any]:
        """Read messages, up to one for which `is_it` returns true; events are noted with their pages."""
        end = time.monotonic() + self._seconds
        while True:
            while b"\0" not in self._received:
                ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
                assert ready, "the browser does not answer"
                chunk = os.read(self._from, 1 << 16)
                assert chunk, "the browser has exited"
                self._received += chunk
            text, _, self._received = self._received.partition(b"\0")
            message: dict[str, Any] = json.loads(text)
            if message.get("sessionId") in self.pages and "method" in message:
                self.pages[message["sessionId"]].note(message["method"], message["params"])
            if is_it(message):
                return message


class Page:
    """A page that is open."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.console: list[str] = []  # what its scripts and the browser write there, each with its level: "error: …"
        self.requests: list[str] = []  # the addresses that it asks for, first its own; data in the page is none

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, as JSON; that of a promise, when it is kept."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, deadline: float = 90) -> Any:
        """Return the value of an expression as soon as it is true."""
        end, pause = time.monotonic() + deadline, 0.02
        while not (value := self.value(expression)):
            assert time.monotonic() < end, (
                f"{expression}: {self.value('document.body.innerText')[-2000:]} {self.console}"
            )
            time.sleep(pause)
            pause = min(2 * pause, 0.25)  # a page that is asked all the time loads slowly
        return value

    def busy_seconds(self) -> float:
        """Return the seconds of a core that the page's thread has used, which parses, computes and draws."""
        metrics = {one["name"]: float(one["value"]) for one in self.call("Performance.getMetrics")["metrics"]}
        return metrics["TaskDuration"]

    def press(self, key: str) -> None:
        """Press a key of `KEYS`, with what it does to the element that has the focus."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": {"Enter": "\r"}.get(key, key)} if key in ("Enter", " ") else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            address = params["request"]["url"]
            self.requests += [address] * (not address.startswith("data:"))
        elif method == "Network.webSocketCreated":
            self.requests.append(params["url"])
        elif method == "Runtime.consoleAPICalled":
            said = " ".join(str(one.get("value", one.get("description"))) for one in params["args"])
            self.console.append(f"{params['type']}: {said}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(f"error: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            entry = params["entry"]
            self.console.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")


def _higher(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
