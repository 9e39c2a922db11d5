"""The page of an inspection in a headless browser: search, theme, width, and harmless data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.inspection import Inspection
from mlxtune.views.inspection_view import render_inspection
from tests.browser import Browser, Tab, browsing, drive, needs_browser
from tests.inspections import HOSTILE, INSPECTION, with_text

# This script uses the page as a reader would.
STEPS = """
  const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const shown = (page) => page.querySelectorAll("article.example:not([hidden])").length;
  const count = (page) => page.getElementById("count").value;
  const ground = (page) => getComputedStyle(page.body).backgroundColor;
  for (const width of [320, 375, 1280]) for (const name of ["page.html", "hostile.html"]) {
    const page = (await frame(width, name, "")).contentDocument.documentElement;
    seen[`overflow ${name} ${width}`] = page.scrollWidth - width;
  }
  for (const theme of ["light", "dark"]) {
    const page = (await frame(400, "page.html", "#theme=" + theme)).contentDocument;
    seen["ground " + theme] = ground(page);
    page.getElementById("theme").click();
    seen["ground after a click on " + theme] = ground(page);
  }
  const view = (await frame(800, "page.html", "#q=half%20past")).contentWindow;
  const page = view.document, form = page.getElementById("filter");
  seen.found = [count(page), shown(page), view.CSS.highlights.get("found").size];
  seen.marked = [...view.CSS.highlights.get("found")].map(String);
  const ask = async (changes) => {
    form.reset();
    for (const [name, value] of Object.entries(changes)) {
      if (value === true) form.elements[name].checked = true;
      else form.elements[name].value = value;
    }
    form.dispatchEvent(new view.Event("input"));
    await later(200);
    return [count(page), view.location.hash];
  };
  seen.text = await ask({ q: "HELLO!" });
  seen.case = await ask({ q: "grüße" });
  seen.row = await ask({ q: "row:5" });
  seen.number = await ask({ q: "33" });
  seen.kind = await ask({ q: "kind:wrong" });
  seen.split = await ask({ split: "validation" });
  seen.findings = await ask({ findings: true });
  seen.both = await ask({ split: "validation", findings: true, q: "four" });
  seen.folded = await ask({ q: "word500" });
  seen.unfolded = page.querySelector("details").open;
  seen.none = await ask({ q: "no such text" });
  seen.empty = !page.getElementById("empty").hidden;
  page.getElementById("clear").click();
  seen.cleared = [count(page), view.location.hash];
  await ask({ q: "HELLO!" });
  view.location.hash = "#e6";
  const row = page.getElementById("e6");
  const inView = () => !row.hidden && row.getBoundingClientRect().top < 900;
  for (let tries = 0; tries < 300 && !inView(); tries++) await later(100);
  seen.target = [count(page), inView()];
  const token = page.querySelector("#e0 b.s i");
  token.dispatchEvent(new view.MouseEvent("mouseover", { bubbles: true }));
  seen.token = token.title;
"""

CONTROL = """<img src="http://evil.example/x.png"><script>console.log("spoken"); throw 1</script>"""

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    pages: dict[str, Inspection] = {"page": INSPECTION, "hostile": with_text(HOSTILE)}
    for name, inspection in pages.items():
        (folder / f"{name}.html").write_text(render_inspection(inspection), "utf-8", newline="")
    (folder / "control.html").write_text(CONTROL, "utf-8")
    return folder


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with browsing(folder) as started:
        yield started


@pytest.fixture(scope="module")
def seen(browser: Browser, folder: Path) -> dict[str, Any]:
    return drive(browser, folder, STEPS)


def opened(browser: Browser, folder: Path, name: str) -> Tab:
    tab = browser.new_tab()
    tab.open(f"file://{folder}/{name}")
    return tab


def test_address_with_a_search_opens_the_filtered_page(browser: Browser, folder: Path) -> None:
    page = opened(browser, folder, "page.html#q=half%20past")
    page.wait_for("document.getElementById('count').value === '1 of 7 shown'")
    hidden = re.findall(r'<article class="example" id="e(\d)"[^>]* hidden=""', page.dom)

    assert hidden == ["1", "2", "3", "4", "5", "6"]
    assert page.said == []


def test_hostile_data_neither_runs_nor_loads_nor_speaks(browser: Browser, folder: Path) -> None:
    page = opened(browser, folder, "hostile.html#q=</script><img src=x onerror=alert(1)>")
    page.wait_for("document.getElementById('count').value.startsWith('0 of ')")

    assert "<title>owned" not in page.dom
    assert not re.search(r"<(img|iframe|object|embed|form action)", page.dom)
    assert page.dom.count("<script") == 1
    assert page.said == []
    assert not [address for address in page.requested if "evil" in address]
    # The test can see requests: a page that contains this text unescaped makes them.
    control = opened(browser, folder, "control.html")
    assert [address for address in control.requested if "evil.example" in address]
    assert [event for event in control.said if "spoken" in event]


def test_page_never_scrolls_sideways(seen: dict[str, Any]) -> None:
    overflow = {name: value for name, value in seen.items() if name.startswith("overflow")}

    assert len(overflow) == 6
    assert set(overflow.values()) == {0}, overflow


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        ("ground light", "rgb(246, 246, 243)"),
        ("ground after a click on light", "rgb(17, 18, 20)"),
        ("ground dark", "rgb(17, 18, 20)"),
        ("ground after a click on dark", "rgb(246, 246, 243)"),
        # A search finds text across tokens.
        ("found", ["1 of 7 shown", 1, 1]),
        ("marked", ["half past"]),
        ("text", ["2 of 7 shown", "#q=HELLO!"]),
        ("case", ["1 of 7 shown", "#q=gr%C3%BC%C3%9Fe"]),
        ("row", ["2 of 7 shown", "#q=row%3A5"]),
        # The search for the number finds row 33, and the text `word33` in row 20.
        ("number", ["2 of 7 shown", "#q=33"]),
        ("kind", ["1 of 7 shown", "#q=kind%3Awrong"]),
        ("split", ["2 of 7 shown", "#split=validation"]),
        ("findings", ["2 of 7 shown", "#findings=1"]),
        ("both", ["1 of 7 shown", "#q=four&split=validation&findings=1"]),
        ("folded", ["1 of 7 shown", "#q=word500"]),
        ("unfolded", True),
        ("none", ["0 of 7 shown", "#q=no%20such%20text"]),
        ("empty", True),
        ("cleared", ["7 of 7 shown", ""]),
        # A link to a row shows the row even if it was filtered out.
        ("target", ["7 of 7 shown", True]),
        ("token", "1 token, supervised"),
    ],
)
def test_theme_search_filters_and_links_work(
    seen: dict[str, Any], asked: str, state: object
) -> None:
    assert seen[asked] == state
