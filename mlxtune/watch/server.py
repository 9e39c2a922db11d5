"""`mlxtune watch`: serves the live page of runs to one user of this machine.

The server listens on the loopback interface only. A request must have the token in its address and
name this machine in `Host`, so that no other site can reach the server by a domain that resolves to
this machine. A request that changes something must come from the page itself, as its `Origin`
shows. No file is served.
"""

import hmac
import io
import os
import re
import secrets
import select
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

from mlxtune.config import as_path, user_cache
from mlxtune.config.limits import Limits, parse_json
from mlxtune.core.files.processes import PIPE, Process, end, own_environment, python, start
from mlxtune.core.files.reading import read_json
from mlxtune.core.files.writing import make_folder, write_json
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.errors import MlxTuneError, OutputError
from mlxtune.views.output import print_line
from mlxtune.watch.asking import Asker
from mlxtune.watch.connections import LimitedReader, LimitedServer
from mlxtune.watch.live import LiveSite

ADDRESS = "127.0.0.1"
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
# Limits of a request in seconds and bytes, including its headers, and limits of its JSON.
_SECONDS, _MAX_REQUEST_BYTES = 10.0, 128 * 1024
_BODY = Limits(64 * 1024, values=100, entries=20, text=32 * 1024)
# The maximum number of connections; each page keeps one connection for events.
_CONNECTIONS = 32
# Seconds after which a stream of events ends. An open page connects again, after the milliseconds
# that the stream's last line says; a stream that nobody reads frees its connection.
_STREAM_SECONDS, _RETRY_EVENT = 600.0, b"retry: 100\n\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The server ends after the first number of seconds without an open page or a run in progress. The
# second number is the number of seconds between checks for pages and runs.
_IDLE_SECONDS, _POLL_SECONDS = 600.0, 2.0
# A file with the last port and token of each folder, so that open pages find the next server, and
# the maximum number of folders in the file.
_ADDRESSES, _MAX_ADDRESSES = "watch.json", 100
_MAX_LINE_BYTES, _START_SECONDS = 4096, 20.0


class Site(Protocol):
    """The served site: a page, its events, and the answers to its requests."""

    def page(self) -> str:
        """Return the page as HTML."""

    def follow(self, view: str, last: str) -> Iterator[tuple[str, str] | None]:
        """Yield events, each with its id and data, and None at times, to test for a closed page.

        `last` is the id of the last event that the page received.
        """

    def act(self, action: str, values: Mapping[str, Any]) -> bool:
        """Carry out a page's request, or raise MlxTuneError; return False for an unknown action."""


class PageServer(LimitedServer):
    """Serves a site under a token. Port 0 takes any free port. Raises OSError for a port in use."""

    request_queue_size = most_connections = _CONNECTIONS

    def __init__(self, site: Site, token: str, port: int = 0) -> None:
        self.site, self.token = site, token
        super().__init__((ADDRESS, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "mlxtune", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(LimitedReader(self.connection, _SECONDS, _MAX_REQUEST_BYTES))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the address contains the token."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        del explain  # for pages of HTML
        self._answer(code, message or HTTPStatus(code).phrase)

    def do_GET(self) -> None:
        """Answer with the page or its events; change nothing."""
        if (target := self._place()) is None:
            return
        path, query = target
        if path == "":
            self._answer(HTTPStatus.OK, self.server.site.page(), "text/html; charset=utf-8")
        elif path == "events":
            self._send_events(query.get("view", ""))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        """Carry out a request of the page, whose values are JSON."""
        if (target := self._place()) is None:
            return
        if self.headers.get_all("Origin") != [f"http://{self.headers['Host']}"]:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if self.headers.get_content_type() != "application/json":
            self.send_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            return
        size = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,6}", size) or int(size) > _BODY.bytes:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        try:
            values = parse_json(self.rfile.read(int(size)), _BODY, "the request")
            done = isinstance(values, dict) and self.server.site.act(target[0], values)
        except MlxTuneError as error:
            self._answer(HTTPStatus.CONFLICT, str(error))
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
        else:
            self._answer(HTTPStatus.OK if done else HTTPStatus.NOT_FOUND, "")

    def _place(self) -> tuple[str, dict[str, str]] | None:
        """Return the path after the token, and the query; None for a request that is refused."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return None
        path, _, query = self.path.partition("?")
        token, slash, path = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()) or not slash:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        return path, {name: values[0] for name, values in parse_qs(query).items()}

    def _send_events(self, view: str) -> None:
        self._start(HTTPStatus.OK, "text/event-stream")
        # Milliseconds until a page that lost the server connects again.
        self.wfile.write(b"retry: 1000\n\n")
        until = time.monotonic() + _STREAM_SECONDS
        # When the page closes, the browser ends the connection.
        with suppress(OSError):
            for event in self.server.site.follow(view, self.headers.get("Last-Event-ID", "")):
                text = ":\n\n" if event is None else f"id: {event[0]}\ndata: {event[1]}\n\n"
                self.wfile.write(text.encode())
                if time.monotonic() >= until:
                    self.wfile.write(_RETRY_EVENT)
                    break

    def _answer(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        content = text.encode()
        self._start(code, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _start(self, code: int, kind: str, more: Mapping[str, str] | None = None) -> None:
        self.connection.settimeout(_SECONDS)
        self.send_response(code)
        for name, value in {"Content-Type": kind, **_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()


# The command


def main(folder: str) -> None:
    """Serve the page of the runs in a folder until nobody needs it, and open the browser.

    Raises OutputError if the folder has no run.
    """
    live = LiveSite(as_path(folder), Asker())
    server = start_server(live, live.folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        print_line(f"page: {server.address}", flush=True)
        if has_browser():
            webbrowser.open(server.address)
        while live.idle_seconds() < _IDLE_SECONDS:
            time.sleep(_POLL_SECONDS)
    finally:
        live.close()
        server.shutdown()
        server.server_close()


def start_server(live: LiveSite, folder: Path) -> PageServer:
    """Return a server at the folder's last address, or at a new one if the port is in use."""
    path, key = user_cache() / _ADDRESSES, str(folder.resolve())
    addresses: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        addresses = read_json(path)
    server = None
    with suppress(OSError, OverflowError, TypeError, ValueError):
        port, token = addresses[key] if key in addresses else (0, secrets.token_urlsafe(24))
        server = PageServer(live, str(token), int(port))
    if server is None:
        server = PageServer(live, secrets.token_urlsafe(24))
    addresses.pop(key, None)
    addresses[key] = [server.server_address[1], server.token]
    # If this fails, open pages will not find the next server.
    with suppress(OutputError):
        make_folder(path.parent)
        write_json(path, dict(list(addresses.items())[-_MAX_ADDRESSES:]), private=True)
    return server


def has_browser() -> bool:
    """Return whether a graphical browser can be opened here."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


class PageOpener(TrainingObserver):
    """Starts `mlxtune watch` once a run's files exist, as a process that outlives the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: Process | None = None

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        """Start the server, which opens the page, and print the page's address."""
        try:
            process = start(
                python("-m", "mlxtune", "watch", str(self._folder)),
                stdout=PIPE,
                environment=own_environment(),
            )
        except OSError as problem:
            print_line(f"warning: the page could not be opened: {problem}", stderr=True)
            return
        assert process.stdout is not None
        line = ""
        if select.select([process.stdout], [], [], _START_SECONDS)[0]:
            line = process.stdout.readline(_MAX_LINE_BYTES).decode(errors="replace").strip()
        if not line:
            end(process)
        process.stdout.close()
        self._server = process
        print_line(line or "warning: the page could not be opened", stderr=True)
