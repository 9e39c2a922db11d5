"""The page of runs in a headless browser: both widths, both themes, and values on hover."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.run.stored_run import read_run
from mlxtune.views.pages.run_page import render_runs
from tests.browser import Browser, browsing, drive, needs_browser
from tests.runs import EVALUATION, as_lines, step_line, write_rewarded_run, write_run
from tests.views.pages.markup import HOSTILE, hostile_run

pytestmark = [needs_browser, pytest.mark.slow]

# This script uses the pages as a reader would.
STEPS = """
  const colour = (element, name) => getComputedStyle(element)[name];
  const point = (view, plot, x, y) => plot.dispatchEvent(new view.PointerEvent("pointermove",
    { clientX: x, clientY: y, bubbles: true }));
  const told = (figure) => {
    const tip = figure.querySelector(".tip");
    return tip.hidden ? null : [tip.querySelector("b").textContent,
      ...Array.from(tip.querySelectorAll("span"), (each) =>
        each.querySelector("em").textContent + " = " + each.querySelector("strong").textContent)];
  };
  for (const theme of ["light", "dark"]) for (const width of [375, 1280]) {
    for (const name of ["one.html", "several.html", "many.html", "hostile.html", "bare.html", "rewarded.html"]) {
      const view = (await frame(width, name, "#theme=" + theme)).contentWindow;
      const page = view.document, root = page.documentElement;
      const key = `${name} ${width} ${theme}`;
      seen["overflow " + key] = root.scrollWidth - width;
      seen["ground " + theme] = colour(page.body, "backgroundColor");
      const outside = Array.from(page.querySelectorAll(".plot text")).filter((text) => {
        const box = text.getBoundingClientRect(), around = text.closest(".framed").getBoundingClientRect();
        return box.width > 0 && (box.left < around.left || box.right > around.right + 1);
      });
      seen["labels outside " + key] = outside.map((text) => text.textContent);
      seen["cut " + key] = Array.from(page.querySelectorAll(".stack"))
        .filter((table) => table.scrollWidth > table.clientWidth + 1).length;
      const path = page.querySelector("path.line");
      if (path) seen["stroke " + key] = colour(path, "stroke");
    }
  }
  const view = (await frame(1280, "one.html", "")).contentWindow, page = view.document;
  const figure = page.querySelector("figure[data-chart]"), plot = figure.querySelector(".plot");
  const box = plot.getBoundingClientRect();
  seen.before = told(figure);
  point(view, plot, box.left + box.width / 2, box.top + 50);
  seen.middle = told(figure);
  seen.others = page.querySelectorAll(".pointer:not([hidden]) line").length;
  point(view, plot, box.right, box.top + 50);
  seen.end = told(figure);
  const tip = figure.querySelector(".tip").getBoundingClientRect();
  seen.inside = tip.right <= page.documentElement.clientWidth && tip.left >= 0;
  plot.dispatchEvent(new view.PointerEvent("pointerleave"));
  seen.after = told(figure);
  const key = (name) => plot.dispatchEvent(new view.KeyboardEvent("keydown", { key: name }));
  key("Home"); key("ArrowRight"); key("ArrowRight");
  seen.keys = told(figure)[0];
  key("Escape");
  seen.escaped = told(figure);
  const theme = page.getElementById("theme"), first = colour(page.body, "backgroundColor");
  theme.click();
  seen.theme = first !== colour(page.body, "backgroundColor");

  const other = (await frame(1280, "several.html", "")).contentWindow, compared = other.document;
  const drawn = () => Array.from(compared.querySelectorAll("figure:first-of-type path.line"))
    .filter((path) => path.getBoundingClientRect().width > 0).length;
  const chart = compared.querySelectorAll("figure[data-chart]")[1];
  const area = chart.querySelector(".plot").getBoundingClientRect();
  const ask = () => {
    point(other, chart.querySelector(".plot"), area.left + 2, area.top + 20);
    return told(chart).map((line) => line.split(" ")[0]);
  };
  seen.all = [drawn(), ask()];
  compared.querySelector("#runs input[value='1']").click();
  seen.without = [drawn(), ask()];
  compared.querySelector("#runs input[value='1']").click();
  seen.again = [drawn(), ask()];
"""  # noqa: E501


def write_pages(folder: Path) -> None:
    """Write pages of one run, three runs, 20,000 steps, hostile text, and an almost empty run."""
    runs = folder / "runs"
    one = read_run(write_run(runs / "one", evaluation=EVALUATION))
    three = [
        read_run(write_run(runs / name, epochs=epochs, finished=finished, options={"lr": lr}))
        for name, epochs, finished, lr in (
            ("a", 2, True, 1e-4),
            ("b", 4, True, 5e-3),
            ("a_run_of_a_long_name_that_is_still_to_fit_a_phone", 3, False, 1e-3),
        )
    ]
    many = write_run(runs / "many", epochs=1, per_epoch=10)
    lines = [step_line(step, 30_000) for step in range(1, 20_001)]
    (many / "metrics.jsonl").write_bytes(as_lines(lines))
    bad = hostile_run(runs)
    ledger = json.loads((bad / "ledger.json").read_text())
    ledger[0]["path"] = HOSTILE + "x" * 300
    (bad / "ledger.json").write_text(json.dumps(ledger))
    bare = runs / "bare"
    bare.mkdir()
    (bare / "run.json").write_text("{}")
    pages = {"one": [one], "several": three, "many": [read_run(many)]}
    pages |= {"hostile": [read_run(bad)], "bare": [read_run(bare)]}
    pages["rewarded"] = [read_run(write_rewarded_run(runs / "rewarded", text="x" * 3000))]
    for name, shown in pages.items():
        (folder / f"{name}.html").write_text(render_runs(shown), "utf-8", newline="")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    write_pages(folder)
    return folder


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with browsing(folder) as started:
        yield started


@pytest.fixture(scope="module")
def seen(browser: Browser, folder: Path) -> dict[str, Any]:
    return drive(browser, folder, STEPS)


def test_page_never_scrolls_sideways_and_no_label_leaves_its_chart(seen: dict[str, Any]) -> None:
    overflow = {name: value for name, value in seen.items() if name.startswith("overflow")}
    assert len(overflow) == 6 * 2 * 2
    assert set(overflow.values()) == {0}, overflow
    outside = {name: value for name, value in seen.items() if name.startswith("labels") and value}
    assert outside == {}
    names = ("cut several.html 375", "cut rewarded.html", "cut one.html")
    cut = {name: value for name, value in seen.items() if name.startswith(names)}
    assert set(cut.values()) == {0}, "a table is cut on a phone"


def test_theme_follows_the_address_and_the_button_and_colors_curves(seen: dict[str, Any]) -> None:
    assert seen["ground light"] == "rgb(246, 246, 243)"
    assert seen["ground dark"] == "rgb(17, 18, 20)"
    assert seen["theme"] is True
    light, dark = seen["stroke one.html 375 light"], seen["stroke one.html 375 dark"]
    assert (light, dark) == ("rgb(44, 156, 106)", "rgb(63, 174, 121)")


def test_chart_shows_values_at_the_pointer_and_by_keys(seen: dict[str, Any]) -> None:
    assert seen["before"] is None
    loss = step_line(40, 40)["loss"]
    assert seen["middle"][:2] == ["step 40", f"training, each step = {loss:.5g}"]
    assert seen["middle"][3] == "validation = 2"
    assert seen["end"][0] == "step 80"
    assert seen["others"] == 5, "the same step is marked in all charts"
    assert seen["inside"] is True
    assert seen["after"] is None
    assert (seen["keys"], seen["escaped"]) == ("step 3", None)


def test_step_can_be_selected(browser: Browser, folder: Path) -> None:
    tab = browser.new_tab()
    tab.open(f"file://{folder}/rewarded.html")
    shown = """Array.from(document.querySelectorAll("[data-sampled]"))
        .filter((each) => each.checkVisibility()).map((each) => each.dataset.sampled).join()"""
    assert tab.evaluate(shown) == "12"
    tab.evaluate("""const select = document.getElementById("sampled");
        select.value = "3"; select.dispatchEvent(new Event("change", { bubbles: true }));""")
    assert tab.evaluate(shown) == "3"
    assert tab.said == []


def test_runs_can_be_hidden_and_shown_again(seen: dict[str, Any]) -> None:
    count, told = seen["all"]
    assert told[0] == "step"
    assert [name.rpartition("/")[2] for name in told[1:]][:2] == ["a", "b"]
    assert seen["without"][0] < count
    assert seen["without"][1] == [told[0], told[1], told[3]]
    assert seen["again"] == seen["all"]


def test_hostile_page_neither_runs_nor_loads_nor_speaks(browser: Browser, folder: Path) -> None:
    tab = browser.new_tab()
    tab.open(f"file://{folder}/hostile.html")
    assert tab.dom.count("<script") == 2
    assert "<img" not in tab.dom
    assert tab.said == []
