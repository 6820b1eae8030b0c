"""Start the playground: notebooks about schedules, collectives, layouts and runs, and the lessons, in a browser.

./launch.sh playground
./launch.sh playground --port 8000 --no-browser
"""

import contextlib
import runpy
import socket
import threading
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distlab.run.commands import LAB
from simplellm import command_line
from simplellm.errors import InputError, require, require_package

HOST = "127.0.0.1"
HOSTS = HOST, "localhost"
NOTEBOOKS = LAB / "notebooks"
INDEX = "index"


@dataclass
class Request:
    """The playground to start."""

    port: int = 0
    """port to listen at; 0 for a free one"""
    browser: bool = True
    """open a browser"""


def apps() -> Iterator[tuple[str, Path]]:
    """Yield the path of each app in an address, and its file."""
    for file in sorted(NOTEBOOKS.glob("*.py")):
        yield "/" + file.stem * (file.stem != INDEX), file


def start(request: Request) -> None:
    """Serve the notebooks at the loopback address until Ctrl-C."""
    port = request.port
    require(0 <= port < 65536, f"--port {port}: a port is a number from 0 to 65535")
    require(NOTEBOOKS.is_dir(), f"{NOTEBOOKS}: there are no notebooks; start the playground in a checkout of the lab")
    require_package("marimo", "the playground")
    try:
        listening = socket.create_server((HOST, port))  # requests wait until the server answers them
    except OSError as error:
        raise InputError(f"--port {port}: cannot listen there ({error.strerror}); give another one") from error
    import marimo
    import uvicorn

    # All pages load the same scripts from "/assets", so that a browser reads and compiles them once.
    builder = marimo.create_asgi_app(quiet=True, include_code=True, asset_url="")
    for path, file in apps():
        builder = builder.with_app(path=path, root=str(file))
    served = _OnlyHere(builder.build())
    config = uvicorn.Config(served, HOST, port, log_level="error", timeout_graceful_shutdown=1)
    address = f"http://{HOST}:{listening.getsockname()[1]}/"
    print(f"# {address} is the playground; Ctrl-C ends it", flush=True)
    if request.browser:
        threading.Timer(1, webbrowser.open, [address]).start()
    for _, file in apps():  # each page has a thread; when two import torch at once, one may see half of it
        with contextlib.suppress(Exception):  # its page will say what is wrong
            runpy.run_path(str(file))
    uvicorn.Server(config).run([listening])


class _OnlyHere:
    """Refuses requests of other sites' pages, which a browser would send to this machine."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        here = f"//{headers.get(b'host', b'').decode('latin-1')}"
        origin = headers.get(b"origin", here.encode()).decode("latin-1")
        if scope["type"] == "lifespan" or all(urlsplit(one).hostname in HOSTS for one in (here, origin)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"only for pages of this machine"})


command = command_line.as_command(start, Request, __doc__)

if __name__ == "__main__":
    command_line.run(start, Request, __doc__)
