"""A headless browser that tests drive through the DevTools protocol.

Chromium takes commands through a pipe: JSON objects, each ended by a null character
(https://chromedevtools.github.io/devtools-protocol).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
APPLICATIONS = ("Google Chrome", "Chromium")
# The descriptors of the pipes in the browser.
_READ, _WRITTEN = 3, 4

# Runs steps in a page, which can open other pages in frames, and returns the object `seen`.
_DRIVER = """(async () => {
const seen = {};
const frame = (width, name, hash) => new Promise((resolve) => {
  const element = document.createElement("iframe");
  element.style.cssText = `width:${width}px;height:900px;border:0`;
  element.onload = () => resolve(element);
  element.src = name + hash;
  document.body.append(element);
});
STEPS
return seen;
})()"""


def find_browser() -> str | None:
    applications = [f"/Applications/{name}.app/Contents/MacOS/{name}" for name in APPLICATIONS]
    return next(filter(None, map(shutil.which, [*NAMES, *applications])), None)


BROWSER = find_browser()
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is installed"
)


class NoAnswer(Exception):
    """The browser could not execute a command."""


class Tab:
    """A tab of a browser. `said` holds the messages and errors of its console."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.said: list[str] = []
        browser.tabs[session] = self
        for domain in ("Runtime", "Page", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requested: set[str] = set()

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, parameters, self._session)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        # The browser escapes some characters of the fragment.
        place = json.dumps(address.partition("#")[0])
        self.wait_for(f"location.href.startsWith({place}) && document.readyState === 'complete'")

    @property
    def dom(self) -> str:
        return str(self.evaluate("document.documentElement.outerHTML"))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        started = time.monotonic()
        while True:
            # A page that is being replaced does not answer.
            with suppress(NoAnswer):
                if value := self.evaluate(expression):
                    return value
            assert time.monotonic() - started < SECONDS, (expression, self.said)
            time.sleep(0.05)

    def show_as(self, width: int, height: int, theme: str) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])


class Browser:
    """A running browser, and the pipes to it."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._received = b""
        self._number = 0
        self.tabs: dict[str, Tab] = {}

    def new_tab(self) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        return Tab(self, attached["sessionId"])

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise NoAnswer(method, answer)
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        tab, method = self.tabs.get(event.get("sessionId", "")), event.get("method")
        if tab is None:
            return
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            tab.said.append(json.dumps(event["params"]))
        if method == "Network.requestWillBeSent":
            tab.requested.add(event["params"]["request"]["url"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            piece = os.read(self._read, 2**16)
            assert piece, "the browser has ended"
            self._received += piece
        message, self._received = self._received.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Yield a browser that keeps its files in a folder."""
    (commands, write), (read, events) = os.pipe(), os.pipe()
    # A shell gives the pipes the descriptors that the browser expects.
    ends = f"exec {_READ}<&{commands} {_WRITTEN}>&{events}"
    process = subprocess.Popen(
        [
            *("bash", "-c", f'{ends}; exec "$@"', "browser", str(BROWSER)),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--no-first-run", "--disable-sync"),
            *("--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
            # Neither a page nor the browser itself may reach another machine.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--allow-file-access-from-files",
            *("--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"),
            "about:blank",
        ],
        pass_fds=(commands, events),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands)
    os.close(events)
    try:
        yield Browser(read, write)
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)


def drive(browser: Browser, folder: Path, steps: str) -> dict[str, Any]:
    """Run steps in JavaScript on pages of the folder; return the object `seen` that they fill.

    `await frame(width, name, hash)` opens a page. No page may print a message or make a request.
    """
    (folder / "driver.html").write_text("<!doctype html><title>running</title>", "utf-8")
    tab = browser.new_tab()
    tab.open(f"file://{folder}/driver.html")
    seen: dict[str, Any] = tab.evaluate(_DRIVER.replace("STEPS", steps))
    assert tab.said == []
    assert all(address.startswith(("file:", "data:")) for address in tab.requested)
    return seen
