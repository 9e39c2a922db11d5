"""A headless browser for tests: opens pages, and reports their state."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
APPLICATIONS = ("Google Chrome", "Chromium")
TRIES = 5

# A page that runs steps, can open other pages in frames, and reports the object `seen`.
_DRIVER = """<!doctype html><title>running</title><pre id="result"></pre><script>
const seen = {};
const frame = (width, name, hash) => new Promise((resolve) => {
  const element = document.createElement("iframe");
  element.style.cssText = `width:${width}px;height:900px;border:0`;
  element.onload = () => resolve(element);
  element.src = name + hash;
  document.body.append(element);
});
(async () => {
STEPS
})().catch((error) => { seen.error = error + error.stack; }).then(() => {
  document.getElementById("result").textContent = JSON.stringify(seen);
});
</script>"""


def find_browser() -> str | None:
    applications = [f"/Applications/{name}.app/Contents/MacOS/{name}" for name in APPLICATIONS]
    return next(filter(None, map(shutil.which, [*NAMES, *applications])), None)


BROWSER = find_browser()
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is installed"
)


@dataclasses.dataclass(frozen=True)
class Visit:
    """The result of visiting a page: its final DOM, console messages and requested addresses."""

    dom: str
    said: list[str]
    requested: set[str]


def browse(folder: Path, address: str) -> Visit:
    """Open a page of the folder; return the result of the visit."""
    net_log = folder / "net.json"
    process = subprocess.run(
        [
            *(str(BROWSER), "--headless=new", "--hide-scrollbars", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
            *("--disable-component-update", "--disable-extensions", "--disable-sync"),
            # Neither a page nor the browser itself may reach another machine.
            "--host-resolver-rules=MAP * ~NOTFOUND",
            *(
                "--enable-logging=stderr",
                f"--log-net-log={net_log}",
                "--allow-file-access-from-files",
            ),
            *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=8000"),
            *("--dump-dom", f"file://{folder}/{address}"),
        ],
        capture_output=True,
        timeout=120,
        check=True,
    )
    said = [
        line
        for line in process.stderr.decode("utf-8", "replace").splitlines()
        if ":CONSOLE" in line
    ]
    requested = set(re.findall(r'"url":"([^"]*)"', net_log.read_text("utf-8", "replace")))
    return Visit(process.stdout.decode("utf-8"), said, requested)


def drive(folder: Path, steps: str) -> dict[str, Any]:
    """Run steps in JavaScript on pages of the folder; return the object `seen` that they fill.

    `await frame(width, name, hash)` opens a page. No page may print a message or make a request.
    """
    (folder / "driver.html").write_text(_DRIVER.replace("STEPS", steps), "utf-8")
    # On a busy machine, the time budget may end before the steps do.
    for _ in range(TRIES):
        visit = browse(folder, "driver.html")
        if text := visit.dom.partition('<pre id="result">')[2].partition("</pre>")[0]:
            break
    assert visit.said == []
    # Chromium itself requests lists from its vendor, and gets no answer.
    asked = [each for each in visit.requested if not each.startswith(("file:", "chrome", "data"))]
    assert not [each for each in asked if not re.search(r"googleapis|google\.com", each)]
    found: dict[str, Any] = json.loads(html.unescape(text))
    assert "error" not in found, found
    return found
