"""`mlxtune watch`: serves the live page of runs, and opens it in the browser."""

import os
import secrets
import select
import sys
import threading
import time
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxtune.config import as_path, user_cache
from mlxtune.core.files.files import make_folder, read_json, write_json
from mlxtune.core.files.processes import PIPE, Process, end, own_environment, start
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.errors import OutputError
from mlxtune.views.output import print_line
from mlxtune.watch.asking import Asker
from mlxtune.watch.live import Live
from mlxtune.watch.server import PageServer

# The server ends after the first number of seconds without an open page or a run in progress. The
# second number is the number of seconds between checks for pages and runs.
_IDLE_SECONDS, _LOOK_EVERY = 600.0, 2.0
# A file with the last port and token of each folder, so that open pages find the next server, and
# the maximum number of folders in the file.
_ADDRESSES, _MOST_ADDRESSES = "watch.json", 100
_LONGEST_LINE, _START_SECONDS = 4096, 20.0


def show(folder: str) -> None:
    """Serve the page of the runs in a folder until nobody needs it, and open the browser.

    Raises OutputError if the folder has no run.
    """
    live = Live(as_path(folder), Asker())
    server = start_server(live, live.folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        print_line(f"page: {server.address}", flush=True)
        if has_browser():
            webbrowser.open(server.address)
        while live.idle_seconds() < _IDLE_SECONDS:
            time.sleep(_LOOK_EVERY)
    finally:
        live.close()
        server.shutdown()
        server.server_close()


def start_server(live: Live, folder: Path) -> PageServer:
    """Return a server at the folder's last address, or at a new one if the port is in use."""
    place, key = user_cache() / _ADDRESSES, str(folder.resolve())
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = read_json(place)
    server = None
    with suppress(OSError, OverflowError, TypeError, ValueError):
        port, token = known[key] if key in known else (0, secrets.token_urlsafe(24))
        server = PageServer(live, str(token), int(port))
    if server is None:
        server = PageServer(live, secrets.token_urlsafe(24))
    known.pop(key, None)
    known[key] = [server.server_address[1], server.token]
    # If this fails, open pages will not find the next server.
    with suppress(OutputError):
        make_folder(place.parent)
        write_json(place, dict(list(known.items())[-_MOST_ADDRESSES:]), private=True)
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
                [sys.executable, "-m", "mlxtune", "watch", str(self._folder)],
                stdout=PIPE,
                environment=own_environment(),
            )
        except OSError as problem:
            print_line(f"warning: the page could not be opened: {problem}", stderr=True)
            return
        assert process.stdout is not None
        line = ""
        if select.select([process.stdout], [], [], _START_SECONDS)[0]:
            line = process.stdout.readline(_LONGEST_LINE).decode(errors="replace").strip()
        if not line:
            end(process)
        process.stdout.close()
        self._server = process
        print_line(line or "warning: the page could not be opened", stderr=True)
