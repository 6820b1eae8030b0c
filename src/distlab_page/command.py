"""Write a run as a page: one HTML file, which needs no network and can be sent to others.

./launch.sh page runs/first
./launch.sh page runs/hybrid runs/one-process
./launch.sh page runs/first --serve
"""

import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import tyro

from distlab_page.contents import contents
from distlab_page.records import read
from distlab_page.writing import as_script, html, write
from simplellm import command_line
from simplellm.errors import InputError, require

HOST = "127.0.0.1"


@dataclass
class Request:
    """The page to write."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """the run's folder, or a folder of runs, of which the newest counts"""
    other: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="OTHER")] = None
    """a second run, laid over the first; if both are the same training run, the page says so"""
    to: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: page.html in RUN)")] = None
    """file to write"""
    serve: bool = False
    """serve the page to this machine instead; it follows the run while that goes on"""
    port: int = 0
    """with --serve: port to listen at; 0 for a free one"""


def make(request: Request) -> None:
    require(0 <= request.port < 65536, f"--port {request.port}: a port is a number from 0 to 65535")
    require(request.serve or not request.port, f"--port {request.port}: only --serve listens; give --serve too")
    require(not (request.serve and request.to), f"--to {request.to} with --serve: give one of the two")
    if request.serve:
        serve(request)
    else:
        print(f"# {write(request.run, request.other, request.to)}")


def serve(request: Request) -> None:
    """Serve the page at the loopback address until Ctrl-C."""
    folder = read(request.run).folder  # the newest run now, also if another one begins

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the page, or with its content as JSON, from the records as they are now."""
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):  # another site's name for us
                return self.send_error(403)
            try:
                run, other = read(folder), read(request.other) if request.other else None
                if self.path == "/":
                    return self._answer("text/html", html(run, other, is_live=True))
                if self.path == "/data.json":
                    return self._answer("application/json", as_script(contents(run, other, is_live=True)))
            except InputError as error:  # a record that is being written
                return self.send_error(503, explain=str(error)[:200])
            return self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *about: Any) -> None:
            """Print the traceback of an error; a tab that is closed while it loads is none."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(*about)

    try:
        server = Server((HOST, request.port), Handler)
    except OSError as error:
        raise InputError(f"--port {request.port}: cannot listen there ({error.strerror}); give another one") from error
    with server:
        print(f"# http://{HOST}:{server.server_port}/ shows the run in {folder}; Ctrl-C ends this", flush=True)
        server.serve_forever()


command = command_line.as_command(make, Request, __doc__)

if __name__ == "__main__":
    command_line.run(make, Request, __doc__)
