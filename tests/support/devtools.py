"""A browser that a test drives: Chromium over its DevTools protocol. Needs the package websockets, as marimo does."""

import base64
import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.browser import CHROMIUM, FLAGS

# `all(selector)`: the elements in the page and in the shadow trees of its elements.
ALL = """(() => { globalThis.all = (selector, root = document) => {
  const found = [...root.querySelectorAll(selector)];
  for (const one of root.querySelectorAll("*")) if (one.shadowRoot) found.push(...all(selector, one.shadowRoot));
  return found; } })()"""


class Page:
    """A page, its errors, and the addresses that it asked for."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer["method"], answer["params"])

    def _note(self, event: str, params: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event == "Network.webSocketCreated":
            self.asked.append(params["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str([arg.get("value", arg.get("description")) for arg in params["args"]]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url')}")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=f"{ALL}; {script}", returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, deadline: float = 90) -> Any:
        """Return the value of a script as soon as it is true."""
        end = time.monotonic() + deadline
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, f"{script}: {self.evaluate('document.body.innerText')[-2000:]} {self.errors}"
            time.sleep(0.1)
        return value

    def picture(self, file: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    """Open an empty page; `folder` gets the browser's own files."""
    from websockets.sync.client import connect

    assert CHROMIUM is not None
    flags = [flag for flag in FLAGS if not flag.startswith("--virtual-time")]
    command = [CHROMIUM, *flags, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    browser = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert browser.stderr is not None
        port = next(found[1] for line in browser.stderr if (found := re.search(r"listening on ws://.*:(\d+)/", line)))
        import urllib.request

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(one for one in json.load(answer) if one["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        browser.terminate()
        browser.wait(10)
