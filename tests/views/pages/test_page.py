"""The frame of all pages: no page loads a file or runs data, and all can be read."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.core.run.stored_run import read_run
from mlxtune.views.inspection_view import render_inspection
from mlxtune.views.pages.run_page import render_runs
from tests.inspections import HOSTILE as HOSTILE_DATA
from tests.inspections import with_text
from tests.runs import write_run
from tests.views.pages.markup import Page, hostile_run

UNSEEN = set("\x00\x1b\x07\x9b\r\u202e\u2066\u200b\ufeff\ud800\x08\x7f\u2028")
# The attributes that load a file, or run a script or a style.
ACTING = {"src", "srcset", "action", "formaction", "poster", "data", "background", "style"}


# Pages of hostile data, by kind.
PAGES: dict[str, Callable[[Path], str]] = {
    "inspection": lambda folder: render_inspection(with_text(HOSTILE_DATA)),
    "run": lambda folder: render_runs([read_run(hostile_run(folder))]),
    "comparison": lambda folder: render_runs([read_run(hostile_run(folder))] * 2),
}


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Page:
    return Page(PAGES[request.param](tmp_path))


def test_hostile_text_stays_text(page: Page) -> None:
    values = page.text("charts")  # the JSON of the charts, in a script element
    assert page.html.count("<script") == page.html.count("</script>") == 1 + bool(values)
    assert "<img" not in page.html
    assert not set(page.html) & UNSEEN
    assert "&lt;script&gt;" in page.html
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")} | names & ACTING


def test_policy_allows_only_the_scripts_and_styles_hashes(page: Page) -> None:
    (policy,) = (has["content"] for tag, has in page.tags if has.get("http-equiv"))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == nothing | {"img-src": "data:"}


def test_page_is_self_contained(page: Page) -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", page.html, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    for tag, has in page.tags:
        assert has.get("href", "#").startswith(("#", "data:")), tag


def test_headings_descend_ids_are_unique_and_inputs_have_labels(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("input") == tags.count("label")
    ids = [has["id"] for _, has in page.tags if "id" in has]
    assert len(ids) == len(set(ids))


def luminance(color: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("names", "grounds", "least"),
    [
        (("ink", "muted"), ("ground", "card", "learned-ground"), 4.5),
        (("learned", "warning", "error"), ("card",), 4.5),
        (("learned", "control"), ("learned-ground",), 4.5),
        *[((name,), (f"{name}-ground",), 4.5) for name in ("control", "error", "warning")],
        (("on-found",), ("found",), 4.5),
        (("strong-line",), ("card", "ground"), 3),
        (("learned-line", "val", *(f"c{i}" for i in range(8))), ("card",), 3),
    ],
)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast_is_wcag_aa(
    tmp_path: Path, names: tuple[str, ...], grounds: tuple[str, ...], least: float, theme: int
) -> None:
    page = render_runs([read_run(write_run(tmp_path))])
    declared = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", page)
    colors = {name: each[theme] for name, *each in declared}
    for name, ground in itertools.product(names, grounds):
        low, high = sorted(luminance(colors[each]) for each in (name, ground))
        assert (high + 0.05) / (low + 0.05) >= least, (name, ground)
