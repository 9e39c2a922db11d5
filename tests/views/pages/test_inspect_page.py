"""The page of an inspection shows all of the inspection as text, even hostile data."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.inspection import Piece
from mlxtune.views.pages.inspect_page import render_page
from tests.inspections import EMPTY, HOSTILE, INSPECTION, LEDGER, PAIRED, example, with_text

VOID = {"meta", "link", "input", "rect"}
INLINE = {"i", "b", "u", "code", "a", "span", "mark"}
Attributes = dict[str, str]


class Page(HTMLParser):
    """The parsed elements of a page, and their text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, Attributes]] = []
        self._open: list[tuple[str, Attributes]] = []
        self._texts: list[tuple[list[tuple[str, Attributes]], str]] = []
        self.feed(html)
        self.close()
        assert not self._open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = tag, {name: value or "" for name, value in attrs}
        assert len(element[1]) == len(attrs)
        self.tags.append(element)
        if tag not in VOID:
            self._open.append(element)
        if tag not in VOID | INLINE | {"div", "script", "style"}:
            self._texts.append((list(self._open), " "))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self._texts.append((list(self._open), data))

    def texts(self, wanted: Callable[[str, Attributes], bool]) -> list[str]:
        """Return the text of each element for which `wanted` is true."""
        found: dict[int, str] = {}
        for parents, data in self._texts:
            for element in parents:
                if wanted(*element):
                    found[id(element)] = found.get(id(element), "") + data
        return list(found.values())

    def of(self, name: str) -> list[str]:
        """Return the text of each element with this class or tag, in single-spaced words."""
        texts = self.texts(lambda tag, has: name == tag or name in has.get("class", "").split())
        return [" ".join(text.split()) for text in texts]


def page(**changes: Any) -> Page:
    return Page(render_page(dataclasses.replace(INSPECTION, **changes)))


def test_rows_and_tokens_of_each_file_are_sums_that_can_be_seen() -> None:
    shown = page(files=(LEDGER, LEDGER | {"path": "data/other.jsonl"}))

    assert shown.of("sum")[:2] == [
        "1,010 rows read = 800 train + 200 validation + 10 skipped",
        "50,000 tokens = 20,000 supervised + 29,000 context + 1,000 truncated",
    ]
    assert shown.of("reasons")[:2] == [
        "10 skipped = 7 no assistant turn + 3 not valid JSON",
        "in 1,200 examples; truncated: 51 rows",
    ]
    assert len(shown.of("file")) == 2


def test_total_of_supervised_tokens_says_if_they_are_cut_later() -> None:
    cut, whole = (page(files=(LEDGER | {"tokens_truncated": n},)) for n in (1000, 0))
    assert "of all, before --max-seq-len cuts" in " ".join(cut.of("body"))
    assert "--max-seq-len cuts" not in " ".join(whole.of("body"))


def test_sum_that_does_not_add_up_is_not_called_equal() -> None:
    assert page(files=(LEDGER | {"rows_train": 799},)).of("sum") == [
        "1,010 rows read ≠ 799 train + 200 validation + 10 skipped",
        "50,000 tokens = 20,000 supervised + 29,000 context + 1,000 truncated",
    ]


def test_errors_stand_before_warnings_with_count_advice_and_places() -> None:
    shown = page()

    assert shown.of("finding") == [
        "✕ Error looks wrong 1 row Mend the template. data/chat.jsonl:12 odd <b> "
        "Show its rows on this page",
        "! Warning answer cut off 51 rows Raise --max-seq-len to 2153. data/chat.jsonl:33 "
        "1,300 tokens :999 and 49 more rows Show its rows on this page",
    ]
    assert shown.of("verdict") == [
        "✕ Not ready: 1 error and 1 warning. mlxtune train refuses this data."
    ]
    assert page(findings=INSPECTION.findings[:1]).of("verdict") == [
        "! Worth a look: 1 warning. mlxtune train accepts this data."
    ]
    assert "No findings" in page(findings=()).of("verdict")[0]


def test_place_links_to_its_row_where_that_is_on_the_page() -> None:
    shown = page()
    links = {has["href"] for tag, has in shown.tags if tag == "a"}
    targets = {has["id"] for _, has in shown.tags if "id" in has}

    # Links count from 0: row 12 is the fifth example, and row 33 the seventh. Row 999 is not shown.
    assert {link for link in links if link.startswith("#e")} == {"#e4", "#e6"}
    assert {link for link in links if "q=" in link} == {
        "#q=kind:looks%20wrong",
        "#q=kind:answer%20cut%20off",
    }
    assert {link[1:] for link in links if "=" not in link} <= targets


def test_link_that_searches_for_a_kind_keeps_all_of_its_characters() -> None:
    kind = '100% "wrong" <&#+>\u202e'
    finding = dataclasses.replace(INSPECTION.findings[0], kind=kind)
    shown = page(findings=(finding,), shown=(example(1, ("user", "Hi"), kinds=(kind,)),))
    (link,) = (has["href"] for tag, has in shown.tags if "q=" in has.get("href", ""))

    assert unquote(link) == "#q=kind:" + kind.replace("\u202e", r"\u202e")
    assert re.fullmatch(r"[\w%.-]+", link.removeprefix("#q=kind:"))


def test_lengths_limits_and_cost_are_there_and_the_limit_in_use_is_named() -> None:
    shown = page()
    rows = shown.of("tr")

    assert "95th percentile 129 76" in rows
    assert "mean 80.2 42.1" in rows
    assert [row for row in rows if "now" in row] == ["512 now 51 0 1,000 348"]
    assert shown.of("current") == ["512 now 51 0 1,000 348"]
    assert shown.of("figures")[1] == (
        "optimizer steps of 4 rows 200 tokens through the model, without padding 64,197 "
        "of them supervised (52%) 33,580 tokens in one validation 15,626"
    )


def test_header_of_an_example_says_which_it_is_and_what_of_it_is_learned() -> None:
    headers = page().of("example")

    assert headers[2].startswith(
        "data/chat.jsonl:5 part 2 of 2 · train · 27 tokens · 7 supervised (26%)"
    )
    assert headers[6].endswith("… 1,234 more tokens are beyond --max-seq-len 512")
    assert "answer cut off" in headers[6]


def test_marked_text_is_the_supervised_text_and_control_tokens_are_chips() -> None:
    pieces = INSPECTION.shown[2].pieces
    shown = page(shown=(INSPECTION.shown[2],))

    assert shown.texts(lambda _, has: has.get("class") == "text") == [
        "".join(piece.text for piece in pieces)
    ]
    # The first element of each kind belongs to the legend.
    assert shown.of("s")[1:] == ["Hello!<|im_end|>", "So long.<|im_end|>"]
    assert shown.of("code")[1:] == ["<|im_start|>", "<|im_end|>"] * 4


@given(
    st.lists(
        st.tuples(st.text(st.sampled_from("ab <&>\"'\n\té日$%{}"), min_size=1), st.booleans()),
        min_size=1,
    )
)
def test_every_character_of_every_token_is_on_the_page_in_order(
    texts: list[tuple[str, bool]],
) -> None:
    pieces = tuple(Piece(text, 1, False, supervised) for text, supervised in texts)
    shown = page(shown=(example(1, pieces=pieces),))

    assert shown.texts(lambda _, has: has.get("class") == "text") == [
        "".join(text for text, _ in texts)
    ]
    supervised = shown.texts(lambda tag, has: tag == "b" and has.get("class") == "s")[1:]
    assert "".join(supervised) == "".join(text for text, learned in texts if learned)


def test_piece_of_several_tokens_says_how_many() -> None:
    shown = page(
        shown=(example(1, pieces=(Piece("日", 3, False, True), Piece("x", 1, False, True))),)
    )
    tokens = [has for tag, has in shown.tags if tag == "i"]

    assert tokens == [{"data-n": "3", "title": "3 tokens"}, {}]


def test_long_example_shows_its_ends_and_folds_its_middle() -> None:
    shown = page(shown=(INSPECTION.shown[5],))
    parts = shown.of("text")

    assert len(parts) == 3
    assert parts[0].startswith("<|im_start|>user")
    assert parts[2].endswith("the end.<|im_end|>")
    assert shown.of("summary") == ["… 396 tokens more in between"]
    assert shown.of("details")[0].endswith(parts[1])


def skeleton(html: str) -> list[tuple[str, list[str]]]:
    """Return a page's elements and the names of their attributes, without <u> in tokens."""
    return [(tag, sorted(has)) for tag, has in Page(html).tags if tag != "u"]


def test_hostile_text_anywhere_changes_no_element_and_no_attribute() -> None:
    assert skeleton(render_page(with_text(HOSTILE))) == skeleton(
        render_page(with_text("\x00harmless\x00"))
    )


def test_hostile_text_is_shown_as_it_is_with_its_unseen_characters_as_escapes() -> None:
    html = render_page(with_text(HOSTILE))

    html.encode("utf-8")
    assert not set(html) & set("\x00\x1b\x07\x9b\r\u202e\u2066\u200b\ufeff\ud800\x08\x7f\u2028")
    for name in ("finding", "file", "settings", "example"):
        text = "".join(Page(html).of(name))
        assert "</script><script>document.title='owned'</script><img src=x" in text
        assert r"\x1b[31m\x1b]0;owned\x07\x9b2J\x00\r\u202e\u2066\u200b\ufeff\ud800" in text
        assert "${x}$style" in text


def test_page_allows_its_own_script_and_style_by_hash_and_nothing_else() -> None:
    html = render_page(with_text(HOSTILE))
    shown = Page(html)
    (policy,) = (has["content"] for tag, has in shown.tags if has.get("http-equiv"))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))

    for tag in ("script", "style"):
        (text,) = shown.texts(lambda name, _, tag=tag: name == tag)  # type: ignore[misc]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_page_refers_to_nothing_outside_itself() -> None:
    shown = Page(render_page(INSPECTION))
    (style,) = shown.texts(lambda tag, _: tag == "style")

    for tag, has in shown.tags:
        assert not [name for name in has if name.startswith("on") or name in ("style", "src")]
        assert has.get("href", "#").startswith(("#", "data:")), tag
    assert "url(" not in style
    assert "@import" not in style


def test_all_content_is_visible_without_the_script() -> None:
    hidden = [has.get("id") for _, has in page().tags if "hidden" in has]

    assert hidden == ["theme", "filter", "empty"]


def test_headings_descend_and_controls_have_names() -> None:
    shown = page()
    levels = [int(tag[1]) for tag, _ in shown.tags if re.fullmatch("h[1-6]", tag)]

    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert [tag for tag, _ in shown.tags].count("input") == len(
        shown.texts(lambda tag, has: tag == "label")
    )
    ids = [has["id"] for _, has in shown.tags if "id" in has]
    assert len(ids) == len(set(ids))


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("text", "ground", "least"),
    [
        *[(text, ground, 4.5) for text in ("ink", "muted") for ground in ("ground", "card")],
        *[(name, f"{name}-ground", 4.5) for name in ("learned", "control", "error", "warning")],
        *[("muted", f"{name}-ground", 4.5) for name in ("learned",)],
        *[("control", "learned-ground", 4.5), ("on-found", "found", 4.5), ("card", "ink", 4.5)],
        *[("strong-line", "card", 3), ("strong-line", "ground", 3), ("learned-line", "card", 3)],
    ],
)
def test_colours_have_the_contrast_of_wcag_aa(
    text: str, ground: str, least: float, theme: int
) -> None:
    declared = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", render_page(EMPTY))
    colours = {name: (light, dark) for name, light, dark in declared}
    one, other = sorted(luminance(colours[name][theme]) for name in (text, ground))

    assert (other + 0.05) / (one + 0.05) >= least


def test_page_of_nothing_is_a_page() -> None:
    shown = Page(render_page(EMPTY))

    assert shown.of("h1") == ["no file, as Qwen3-4B-4bit will read it"]
    assert shown.of("output") == ["0 of 0 shown"]


@pytest.mark.slow
def test_large_page_stays_below_three_megabytes() -> None:
    pieces = tuple(Piece(f" wor{i % 10}", 1, False, i > 250) for i in range(500))
    shown = tuple(example(row, pieces=pieces) for row in range(300))

    assert len(render_page(dataclasses.replace(INSPECTION, shown=shown))) < 3e6


def test_pair_is_one_article_with_its_sides_beside_each_other_and_what_differs_marked() -> None:
    finding = Finding("warning", "odd", 1, "", (Place(INSPECTION.shown[0].path, 3),))
    inspection = dataclasses.replace(
        INSPECTION, shown=tuple(PAIRED), examples=3, findings=(finding,)
    )
    page = Page(render_page(inspection))

    articles = page.texts(lambda tag, attributes: attributes.get("class") == "example")
    assert len(articles) == 2
    assert articles[0].count("A table at half past seven?") == 1
    sides = [
        page.texts(lambda tag, attributes, role=role: attributes.get("class") == role)
        for role in ("chosen", "rejected")
    ]
    assert [side[-1].split() for side in sides] == [
        ["chosen", "3", "supervised,", "1", "differ", "19:30", "for", "4"],
        ["rejected", "3", "supervised,", "1", "differ", "19:00", "for", "4"],
    ]
    marked = page.texts(lambda tag, attributes: tag == "mark")
    assert marked[2:] == ["30", "00"]
    assert "desirable" in articles[1]
    # The finding links to the article of its row.
    assert [a["href"] for tag, a in page.tags if a.get("href", "").startswith("#e")] == ["#e1"]
    assert "All 3 examples" in " ".join(page.texts(lambda tag, a: a.get("class") == "note"))
