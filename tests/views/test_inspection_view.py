"""An inspection on a terminal of any width, colour and encoding, in a pipe, and on a page."""

from __future__ import annotations

import io
import re
import unicodedata
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.inspection import Inspection, Piece, ShownExample
from mlxtune.views.inspection_view import render_inspection, show_inspection
from mlxtune.views.terminal import result_console
from tests.inspections import EMPTY, HOSTILE, INSPECTION, LEDGER, PAIRED, example, pair, with_text
from tests.views.pages.markup import Page

COLOR = re.compile(r"\x1b\[[0-9;]*m")


def printed(
    inspection: Inspection = INSPECTION,
    examples: list[ShownExample] | None = None,
    **options: Any,
) -> str:
    """Return an inspection's output in a pipe, or on a terminal with `force_terminal`."""
    options = {"width": 80, "color_system": None, "force_terminal": False, "_environ": {}} | options
    options["width"] = options["width"] if options["force_terminal"] else 10_000
    console = Console(file=io.StringIO(), legacy_windows=False, **options)
    show_inspection(inspection, console, examples=examples)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def on_terminal(inspection: Inspection = INSPECTION, width: int = 80, **options: Any) -> str:
    """Return an inspection's output on a terminal with colours."""
    return printed(
        inspection, **{"force_terminal": True, "color_system": "standard", "width": width} | options
    )


def words(text: str) -> str:
    return " ".join(text.split())


def section(text: str, heading: str, count: int) -> list[str]:
    """Return the lines below a heading."""
    lines = [line.strip() for line in text.splitlines()]
    return lines[lines.index(heading) + 1 :][:count]


def test_ledger_is_shown_as_sums() -> None:
    heading = "Where every row went"
    assert section(printed(), heading, 5) == [
        "data/chat.jsonl",
        "1,010 rows read = 800 train + 200 validation + 10 skipped",
        "10 skipped = 7 no assistant turn + 3 not valid JSON",
        "50,000 tokens = 20,000 supervised + 29,000 context + 1,000 truncated",
        "51 rows truncated",
    ]
    wrong = LEDGER | {"rows_read": 1, "tokens": 1}
    _, rows, _, tokens = section(printed(replace(INSPECTION, files=(wrong,))), heading, 4)
    assert rows == "1 row read != 800 train + 200 validation + 10 skipped"
    assert tokens.startswith("1 token != 20,000 supervised + ")


def test_lengths_limits_and_cost_are_shown_and_the_current_limit_is_marked() -> None:
    text = " ".join(printed().split())

    assert "median p95 longest mean sum all 75 129 2,153 80 50,000" in text
    assert "supervised 39 76 986 42 20,400" in text
    assert "128 951 12 16,291 13,758 ▸ 512 51 0 1,000 348 4,096 0 0 0 0" in text
    assert "One epoch 200 steps of 4 rows, 64,197 tokens through the model, 33,580" in text
    assert "a validation reads 15,626 tokens" in text


def test_findings_show_errors_first_with_their_places() -> None:
    assert section(printed(), "Findings", 8) == [
        "error: looks wrong (1 row)",
        "Mend the template.",
        "data/chat.jsonl:12  odd <b>",
        "warning: answer cut off (51 rows)",
        "Raise --max-seq-len to 2153.",
        "data/chat.jsonl:33  1,300 tokens",
        ":999",
        "and 49 more rows",
    ]
    assert "Findings  none" in printed(EMPTY)


def rows_shown(text: str) -> list[str]:
    return re.findall(r"^── data/chat\.jsonl:(\d+)", text, re.MULTILINE)


def test_rows_of_findings_and_the_first_row_are_shown_by_default() -> None:
    assert rows_shown(printed()) == ["1", "12", "33"]
    assert rows_shown(printed(examples=[INSPECTION.shown[5], INSPECTION.shown[1]])) == ["20", "5"]
    assert "Rows as the model sees them" not in printed(examples=[])


def test_supervised_text_is_bracketed_without_color() -> None:
    for options in ({}, {"force_terminal": True, "color_system": "standard", "no_color": True}):
        text = COLOR.sub("", printed(examples=[INSPECTION.shown[2]], **options))
        assert text.endswith(
            "── data/chat.jsonl:5  part 2 of 2, train, 27 tokens, 7 supervised\n"
            "<|im_start|>user↵\nHi<|im_end|>↵\n"
            "<|im_start|>assistant↵\n⟦Hello!<|im_end|>⟧↵\n"
            "<|im_start|>user↵\nBye<|im_end|>↵\n"
            "<|im_start|>assistant↵\n⟦So long.<|im_end|>⟧↵\n"
        )


@pytest.mark.parametrize(
    ("chosen", "supervised"),
    [(2, "Hello!<|im_end|>So long.<|im_end|>"), (3, "·Ünïcödé·<|im_end|>")],
)
def test_supervised_text_is_bold_green_in_color(chosen: int, supervised: str) -> None:
    output = on_terminal(width=200, examples=[INSPECTION.shown[chosen]])
    text = Text.from_ansi(output.partition(f"{INSPECTION.shown[chosen].supervised} supervised")[2])
    green = "".join(
        text.plain[span.start : span.end]
        for span in text.spans
        if not isinstance(span.style, str)
        and span.style.bold
        and span.style.color is not None
        and span.style.color.number == 2
    )

    assert green == supervised
    assert "⟦" not in output


def test_truncation_and_spaces_are_shown() -> None:
    text = printed(examples=[INSPECTION.shown[6], INSPECTION.shown[3]])

    assert "... 1,234 more tokens are beyond --max-seq-len 512\n" in text
    assert "system↵\n··Be···brief.·↵\n↵\n<|im_end|>" in text
    assert "👩\\u200d💻→   Tab" in text
    assert "⟦·Ünïcödé·<|im_end|>⟧↵" in text


def test_middle_of_a_long_example_is_left_out() -> None:
    text = printed(examples=[INSPECTION.shown[5]])

    assert "word0 word1" in text
    assert re.search(r"\n\.\.\. 596 tokens not shown here \.\.\.\n", text)
    assert "word500" not in text
    assert text.endswith("the end.<|im_end|>⟧↵\n")


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for inspection in (INSPECTION, with_text(HOSTILE), with_text("日本語" * 90), EMPTY):
        lines = COLOR.sub("", on_terminal(inspection, width)).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_pipe_does_not_wrap(capsys: pytest.CaptureFixture[str]) -> None:
    shown = example(1, ("user", "word " * 100), ("assistant", "yes"))
    show_inspection(INSPECTION, result_console(), examples=[shown])

    assert "word " * 99 + "word·<|im_end|>↵" in capsys.readouterr().out.splitlines()


# The second text has no lone surrogate, so that a terminal can encode it.
@pytest.mark.parametrize("hostile", [HOSTILE, HOSTILE.replace("\ud800", "")])
def test_hostile_text_is_escaped(hostile: str) -> None:
    for text in (on_terminal(with_text(hostile)), printed(with_text(hostile))):
        plain = COLOR.sub("", text).replace("\n", "")
        assert not {unicodedata.category(c) for c in plain} & {"Cc", "Cf", "Cs", "Zl"}
        # The only escape sequences are the program's own colours.
        assert not re.search(r"\x1b(?!\[[0-9;]*m)", text)
        text.encode("utf-8")
    assert r"\x1b[31m\x1b]0;owned\x07\x9b2J\x00" in printed(with_text(hostile))


def test_markup_and_emoji_codes_stay_text() -> None:
    text = printed(with_text("[bold red]x[/] :smile: [link=https://x.example]y[/link]"))

    assert text.count("[bold red]x[/] :smile: [link=https://x.example]y[/link]") >= 10


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_outside_the_encoding_are_escaped(encoding: str) -> None:
    for options in ({}, {"force_terminal": True, "color_system": "standard"}):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
        console = Console(file=file, width=80, _environ={}, **options)  # type: ignore[arg-type]
        show_inspection(INSPECTION, console, examples=[INSPECTION.shown[3]])
        file.flush()
        text = file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        text = COLOR.sub("", text)
        assert r"\u65e5\u672c\u8a9e" in text
        assert r"assistant\u21b5" in text
        assert ("Grüße" if encoding == "latin-1" else r"Gr\xfc\xdfe") in text


def test_example_without_a_newline_ends_its_line() -> None:
    shown = example(1, pieces=(Piece("Hi", 1, False, True),))

    assert printed(examples=[shown]).endswith("\n⟦Hi⟧\n")


# Pairs


def test_pair_is_in_two_columns_with_differences_in_color() -> None:
    text = on_terminal(examples=PAIRED)
    plain = COLOR.sub("", text).splitlines()

    start = next(i for i, line in enumerate(plain) if line.startswith("── data/chat.jsonl:2"))
    assert plain[start].endswith("train, 12 tokens in common")
    titles = next(i for i, line in enumerate(plain) if line.startswith("chosen: 3 supervised"))
    assert "1 differ" in plain[titles] and plain[titles].index("rejected: 3 supervised") == 40
    assert plain[titles + 1].split() == ["19:30", "for", "4", "19:00", "for", "4"]
    assert "\x1b[1;30;42m30\x1b[0m" in text and "\x1b[1;37;41m00\x1b[0m" in text
    assert "── data/chat.jsonl:3  train, desirable, 13 tokens, 3 supervised" in plain


def test_pair_in_a_pipe_is_in_sequence_with_differences_quoted() -> None:
    for text in (printed(examples=PAIRED), printed(examples=PAIRED, width=50)):
        lines = text.splitlines()
        at = lines.index("chosen: 3 supervised, 1 differ")
        assert lines[at:][:4] == [
            "chosen: 3 supervised, 1 differ",
            "⟦19:«30» for 4⟧",
            "rejected: 3 supervised, 1 differ",
            "⟦19:«00» for 4⟧",
        ]


def test_pair_counts_as_one_of_three_shown_rows() -> None:
    pairs = [each for row in range(1, 6) for each in pair(row, ["yes"], ["no"])]
    assert rows_shown(printed(replace(INSPECTION, shown=tuple(pairs)))) == list("123")


# On a page


def page(**changes: Any) -> Page:
    return Page(render_inspection(replace(INSPECTION, **changes)))


def test_page_shows_the_ledger_as_sums() -> None:
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


def test_page_shows_errors_first_with_advice_and_places() -> None:
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


def test_source_links_to_its_row_on_the_page() -> None:
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
    finding = replace(INSPECTION.findings[0], kind=kind)
    shown = page(findings=(finding,), shown=(example(1, ("user", "Hi"), kinds=(kind,)),))
    (link,) = (has["href"] for tag, has in shown.tags if "q=" in has.get("href", ""))

    assert unquote(link) == "#q=kind:" + kind.replace("\u202e", r"\u202e")
    assert re.fullmatch(r"[\w%.-]+", link.removeprefix("#q=kind:"))


def test_page_shows_lengths_limits_and_cost() -> None:
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


def test_page_folds_the_middle_of_a_long_example() -> None:
    shown = page(shown=(INSPECTION.shown[5],))
    parts = shown.of("text")

    assert len(parts) == 3
    assert parts[0].startswith("<|im_start|>user")
    assert parts[2].endswith("the end.<|im_end|>")
    assert shown.of("summary") == ["… 396 tokens more in between"]
    assert shown.of("details")[0].endswith(parts[1])


def test_hostile_text_changes_no_element_of_the_page() -> None:
    def skeleton(shown: Page) -> list[tuple[str, list[str]]]:
        """Return a page's elements and the names of their attributes, without <u> in tokens."""
        return [(tag, sorted(has)) for tag, has in shown.tags if tag != "u"]

    shown, harmless = (Page(render_inspection(with_text(t))) for t in (HOSTILE, "\x00harmless\x00"))
    assert skeleton(shown) == skeleton(harmless)
    for name in ("finding", "file", "settings", "example"):
        text = shown.text(name)
        assert "</script><script>document.title='owned'</script><img src=x" in text
        assert r"\x1b[31m\x1b]0;owned\x07\x9b2J\x00\r\u202e\u2066\u200b\ufeff\ud800" in text
        assert "${x}$style" in text


def test_only_controls_are_hidden_without_the_script() -> None:
    hidden = [has.get("id") for _, has in page().tags if "hidden" in has]
    assert hidden == ["theme", "filter", "empty"]


def test_page_of_no_rows() -> None:
    shown = Page(render_inspection(EMPTY))
    assert shown.of("h1") == ["no file, as Qwen3-4B-4bit will read it"]
    assert shown.of("output") == ["0 of 0 shown"]


def test_page_of_300_examples_is_below_three_megabytes() -> None:
    pieces = tuple(Piece(f" wor{i % 10}", 1, False, i > 250) for i in range(500))
    shown = tuple(example(row, pieces=pieces) for row in range(300))
    assert len(render_inspection(replace(INSPECTION, shown=shown))) < 3e6


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
