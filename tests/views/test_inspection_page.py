"""The page of an inspection shows all of the inspection as text."""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from urllib.parse import unquote

from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.inspection import Piece
from mlxtune.views.inspection_view import render_page
from tests.inspections import EMPTY, HOSTILE, INSPECTION, LEDGER, PAIRED, example, with_text
from tests.views.pages.markup import Page


def page(**changes: Any) -> Page:
    return Page(render_page(dataclasses.replace(INSPECTION, **changes)))


def test_ledger_is_shown_as_sums() -> None:
    shown = page(files=(LEDGER, LEDGER | {"path": "data/other.jsonl", "rows_train": 799}))
    tokens = "50,000 tokens = 20,000 supervised + 29,000 context + 1,000 truncated"
    assert shown.of("sum") == [
        *("1,010 rows read = 800 train + 200 validation + 10 skipped", tokens),
        *("1,010 rows read ≠ 799 train + 200 validation + 10 skipped", tokens),
    ]
    assert shown.of("reasons")[:2] == [
        "10 skipped = 7 no assistant turn + 3 not valid JSON",
        "in 1,200 examples; truncated: 51 rows",
    ]
    assert len(shown.of("file")) == 2


def test_total_of_supervised_tokens_notes_a_later_cut() -> None:
    cut, whole = (page(files=(LEDGER | {"tokens_truncated": n},)) for n in (1000, 0))
    assert "of all, before --max-seq-len cuts" in cut.text("body")
    assert "--max-seq-len cuts" not in whole.text("body")


def test_findings_show_errors_first_with_advice_and_places() -> None:
    shown = page()
    assert shown.of("finding") == [
        "✕ Error looks wrong 1 row Mend the template. data/chat.jsonl:12 odd <b> "
        "Show its rows on this page",
        "! Warning answer cut off 51 rows Raise --max-seq-len to 2153. data/chat.jsonl:33 "
        "1,300 tokens :999 and 49 more rows Show its rows on this page",
    ]
    for findings, verdict in (
        (INSPECTION.findings, "✕ Not ready: 1 error and 1 warning. mlxtune train refuses this"),
        (INSPECTION.findings[:1], "! Worth a look: 1 warning. mlxtune train accepts this data."),
        ((), "✓ No findings."),
    ):
        assert page(findings=findings).text("verdict").startswith(verdict)


def test_place_links_to_its_row_on_the_page() -> None:
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


def test_search_link_keeps_every_character_of_a_kind() -> None:
    kind = '100% "wrong" <&#+>\u202e'
    finding = dataclasses.replace(INSPECTION.findings[0], kind=kind)
    shown = page(findings=(finding,), shown=(example(1, ("user", "Hi"), kinds=(kind,)),))
    (link,) = (has["href"] for tag, has in shown.tags if "q=" in has.get("href", ""))

    assert unquote(link) == "#q=kind:" + kind.replace("\u202e", r"\u202e")
    assert re.fullmatch(r"[\w%.-]+", link.removeprefix("#q=kind:"))


def test_lengths_limits_and_cost_are_shown_and_the_current_limit_is_marked() -> None:
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


def test_header_of_an_example_names_its_row_and_counts_its_tokens() -> None:
    headers = page().of("example")
    assert headers[2].startswith(
        "data/chat.jsonl:5 part 2 of 2 · train · 27 tokens · 7 supervised (26%)"
    )
    assert headers[6].endswith("… 1,234 more tokens are beyond --max-seq-len 512")
    assert "answer cut off" in headers[6]


def test_control_tokens_are_chips_and_a_piece_counts_its_tokens() -> None:
    (shown,) = (INSPECTION.shown[2],)
    # The first code element belongs to the legend.
    assert page(shown=(shown,)).of("code")[1:] == ["<|im_start|>", "<|im_end|>"] * 4
    pieces = (Piece("日", 3, False, True), Piece("x", 1, False, True))
    tokens = [has for tag, has in page(shown=(example(1, pieces=pieces),)).tags if tag == "i"]
    assert tokens == [{"data-n": "3", "title": "3 tokens"}, {}]


@given(
    st.lists(
        st.tuples(st.text(st.sampled_from("ab <&>\"'\n\té日$%{}"), min_size=1), st.booleans()),
        min_size=1,
    )
)
def test_every_character_is_on_the_page_and_supervised_text_is_marked(
    texts: list[tuple[str, bool]],
) -> None:
    pieces = tuple(Piece(text, 1, False, supervised) for text, supervised in texts)
    shown = page(shown=(example(1, pieces=pieces),))

    assert shown.texts(lambda _, has: has.get("class") == "text") == [
        "".join(text for text, _ in texts)
    ]
    # The first element belongs to the legend.
    supervised = shown.texts(lambda tag, has: tag == "b" and has.get("class") == "s")[1:]
    assert "".join(supervised) == "".join(text for text, learned in texts if learned)


def test_middle_of_a_long_example_is_folded() -> None:
    shown = page(shown=(INSPECTION.shown[5],))
    parts = shown.of("text")

    assert len(parts) == 3
    assert parts[0].startswith("<|im_start|>user")
    assert parts[2].endswith("the end.<|im_end|>")
    assert shown.of("summary") == ["… 396 tokens more in between"]
    assert shown.of("details")[0].endswith(parts[1])


def test_hostile_text_changes_no_element_and_is_shown_with_escapes() -> None:
    def skeleton(shown: Page) -> list[tuple[str, list[str]]]:
        """Return a page's elements and the names of their attributes, without <u> in tokens."""
        return [(tag, sorted(has)) for tag, has in shown.tags if tag != "u"]

    shown, harmless = (Page(render_page(with_text(t))) for t in (HOSTILE, "\x00harmless\x00"))
    assert skeleton(shown) == skeleton(harmless)
    for name in ("finding", "file", "settings", "example"):
        text = shown.text(name)
        assert "</script><script>document.title='owned'</script><img src=x" in text
        assert r"\x1b[31m\x1b]0;owned\x07\x9b2J\x00\r\u202e\u2066\u200b\ufeff\ud800" in text
        assert "${x}$style" in text


def test_only_controls_are_hidden_without_the_script() -> None:
    hidden = [has.get("id") for _, has in page().tags if "hidden" in has]
    assert hidden == ["theme", "filter", "empty"]


def test_inspection_of_no_rows_is_a_page() -> None:
    shown = Page(render_page(EMPTY))
    assert shown.of("h1") == ["no file, as Qwen3-4B-4bit will read it"]
    assert shown.of("output") == ["0 of 0 shown"]


def test_page_of_300_examples_is_below_three_megabytes() -> None:
    pieces = tuple(Piece(f" wor{i % 10}", 1, False, i > 250) for i in range(500))
    shown = tuple(example(row, pieces=pieces) for row in range(300))
    assert len(render_page(dataclasses.replace(INSPECTION, shown=shown))) < 3e6


def test_pair_is_one_article_with_both_answers_and_marked_differences() -> None:
    finding = Finding("warning", "odd", 1, "", (Place(INSPECTION.shown[0].path, 3),))
    shown = page(shown=tuple(PAIRED), examples=3, findings=(finding,))

    articles = shown.of("example")
    assert len(articles) == 2
    assert articles[0].count("A table at half past seven?") == 1
    assert [shown.of(role)[-1] for role in ("chosen", "rejected")] == [
        "chosen 3 supervised, 1 differ 19:30 for 4",
        "rejected 3 supervised, 1 differ 19:00 for 4",
    ]
    assert shown.of("mark")[2:] == ["30", "00"]
    assert "desirable" in articles[1]
    # The finding links to the article of its row.
    assert [a["href"] for tag, a in shown.tags if a.get("href", "").startswith("#e")] == ["#e1"]
    assert "All 3 examples" in shown.text("note")
