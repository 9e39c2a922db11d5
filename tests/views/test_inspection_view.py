"""An inspection on a terminal shows equal numbers for any width, colour and encoding."""

from __future__ import annotations

import dataclasses
import io
import re
import unicodedata
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mlxtune.core.data.inspection import Inspection, Piece, ShownExample
from mlxtune.views.inspection_view import show_inspection
from mlxtune.views.terminal import result_console
from tests.inspections import EMPTY, HOSTILE, INSPECTION, LEDGER, PAIRED, example, pair, with_text

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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


def test_rows_and_tokens_are_sums_and_stand_in_lines_of_their_own() -> None:
    lines = [line.strip() for line in printed().splitlines()]

    assert lines[lines.index("Where every row went") :][:6] == [
        "Where every row went",
        "data/chat.jsonl",
        "1,010 rows read = 800 train + 200 validation + 10 skipped",
        "10 skipped = 7 no assistant turn + 3 not valid JSON",
        "50,000 tokens = 20,000 supervised + 29,000 context + 1,000 truncated",
        "51 rows truncated",
    ]


def test_single_row_and_token_are_no_plural() -> None:
    one = LEDGER | {"rows_read": 1, "tokens": 1}
    single = printed(dataclasses.replace(INSPECTION, files=(one,)))
    assert "1 row read !=" in single
    assert "1 token !=" in single


def test_sum_that_does_not_add_up_is_not_called_equal() -> None:
    wrong = dataclasses.replace(INSPECTION, files=(LEDGER | {"rows_train": 799},))

    assert "1,010 rows read != 799 train + 200 validation + 10 skipped" in printed(wrong)


def test_lengths_limits_and_cost_are_there_and_the_limit_in_use_is_marked() -> None:
    text = words(printed())

    assert "median p95 longest mean sum all 75 129 2,153 80 50,000" in text
    assert "supervised 39 76 986 42 20,400" in text
    assert "128 951 12 16,291 13,758 ▸ 512 51 0 1,000 348 4,096 0 0 0 0" in text
    assert "One epoch 200 steps of 4 rows, 64,197 tokens through the model, 33,580" in text
    assert "a validation reads 15,626 tokens" in text


def test_errors_stand_before_warnings_with_their_places() -> None:
    lines = [line.strip() for line in printed().splitlines()]

    assert lines[lines.index("Findings") :][:9] == [
        "Findings",
        "error: looks wrong (1 row)",
        "Mend the template.",
        "data/chat.jsonl:12  odd <b>",
        "warning: answer cut off (51 rows)",
        "Raise --max-seq-len to 2153.",
        "data/chat.jsonl:33  1,300 tokens",
        ":999",
        "and 49 more rows",
    ]
    assert "Findings  none" in printed(dataclasses.replace(INSPECTION, findings=()))


def rows_shown(text: str) -> list[str]:
    return re.findall(r"^── data/chat\.jsonl:(\d+)", text, re.MULTILINE)


def test_rows_of_findings_and_the_first_are_shown_unless_others_are_asked_for() -> None:
    assert rows_shown(printed()) == ["1", "12", "33"]
    assert rows_shown(printed(examples=[INSPECTION.shown[5], INSPECTION.shown[1]])) == ["20", "5"]
    assert "Rows as the model sees them" not in printed(examples=[])


def test_without_colour_what_is_supervised_stands_in_brackets() -> None:
    for options in ({}, {"force_terminal": True, "color_system": "standard", "no_color": True}):
        text = COLOUR.sub("", printed(examples=[INSPECTION.shown[2]], **options))
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
def test_in_colour_exactly_the_supervised_text_is_bold_green(chosen: int, supervised: str) -> None:
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


def test_cut_and_overlooked_spaces_are_shown() -> None:
    text = printed(examples=[INSPECTION.shown[6], INSPECTION.shown[3]])

    assert "... 1,234 more tokens are beyond --max-seq-len 512\n" in text
    assert "system↵\n··Be···brief.·↵\n↵\n<|im_end|>" in text
    assert "👩\\u200d💻→   Tab" in text
    assert "⟦·Ünïcödé·<|im_end|>⟧↵" in text


def test_long_example_shows_its_ends_and_counts_its_middle() -> None:
    text = printed(examples=[INSPECTION.shown[5]])

    assert "word0 word1" in text
    assert re.search(r"\n\.\.\. 596 tokens not shown here \.\.\.\n", text)
    assert "word500" not in text
    assert text.endswith("the end.<|im_end|>⟧↵\n")


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for inspection in (INSPECTION, with_text(HOSTILE), with_text("日本語" * 90), EMPTY):
        lines = COLOUR.sub("", on_terminal(inspection, width)).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_lines_of_a_pipe_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    shown = example(1, ("user", "word " * 100), ("assistant", "yes"))
    show_inspection(INSPECTION, result_console(), examples=[shown])

    assert "word " * 99 + "word·<|im_end|>↵" in capsys.readouterr().out.splitlines()


# The second text has no lone surrogate, so that a terminal can encode it.
@pytest.mark.parametrize("hostile", [HOSTILE, HOSTILE.replace("\ud800", "")])
def test_hostile_text_anywhere_reaches_no_terminal_raw(hostile: str) -> None:
    for text in (on_terminal(with_text(hostile)), printed(with_text(hostile))):
        plain = COLOUR.sub("", text).replace("\n", "")
        assert not {unicodedata.category(c) for c in plain} & {"Cc", "Cf", "Cs", "Zl"}
        # The only escape sequences are the program's own colours.
        assert not re.search(r"\x1b(?!\[[0-9;]*m)", text)
        text.encode("utf-8")
    assert r"\x1b[31m\x1b]0;owned\x07\x9b2J\x00" in printed(with_text(hostile))


def test_text_that_looks_like_markup_or_an_emoji_code_is_left_alone() -> None:
    text = printed(with_text("[bold red]x[/] :smile: [link=https://x.example]y[/link]"))

    assert text.count("[bold red]x[/] :smile: [link=https://x.example]y[/link]") >= 10


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_that_knows_few_characters_gets_escapes(encoding: str) -> None:
    for options in ({}, {"force_terminal": True, "color_system": "standard"}):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
        console = Console(file=file, width=80, _environ={}, **options)  # type: ignore[arg-type]
        show_inspection(INSPECTION, console, examples=[INSPECTION.shown[3]])
        file.flush()
        text = file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        text = COLOUR.sub("", text)
        assert r"\u65e5\u672c\u8a9e" in text
        assert r"assistant\u21b5" in text
        assert ("Grüße" if encoding == "latin-1" else r"Gr\xfc\xdfe") in text


def test_inspection_of_nothing_is_shown() -> None:
    assert "Findings  none" in printed(EMPTY)


def test_example_without_a_last_newline_ends_its_line_once() -> None:
    shown = example(1, pieces=(Piece("Hi", 1, False, True),))

    assert printed(examples=[shown]).endswith("\n⟦Hi⟧\n")


# Pairs


def test_pair_is_side_by_side_under_its_prompt_with_what_differs_in_colour() -> None:
    text = on_terminal(examples=PAIRED)
    plain = COLOUR.sub("", text).splitlines()

    start = next(i for i, line in enumerate(plain) if line.startswith("── data/chat.jsonl:2"))
    assert plain[start].endswith("train, 12 tokens in common")
    titles = next(i for i, line in enumerate(plain) if line.startswith("chosen: 3 supervised"))
    assert "1 differ" in plain[titles] and plain[titles].index("rejected: 3 supervised") == 40
    assert plain[titles + 1].split() == ["19:30", "for", "4", "19:00", "for", "4"]
    assert "\x1b[1;30;42m30\x1b[0m" in text and "\x1b[1;37;41m00\x1b[0m" in text
    assert "── data/chat.jsonl:3  train, desirable, 13 tokens, 3 supervised" in plain


def test_pair_in_a_pipe_is_one_side_under_the_other_with_what_differs_quoted() -> None:
    for text in (printed(examples=PAIRED), printed(examples=PAIRED, width=50)):
        lines = text.splitlines()
        at = lines.index("chosen: 3 supervised, 1 differ")
        assert lines[at:][:4] == [
            "chosen: 3 supervised, 1 differ",
            "⟦19:«30» for 4⟧",
            "rejected: 3 supervised, 1 differ",
            "⟦19:«00» for 4⟧",
        ]


def test_pair_counts_as_one_of_the_rows_that_a_terminal_shows() -> None:
    pairs = [each for row in range(1, 6) for each in pair(row, ["yes"], ["no"])]
    assert rows_shown(printed(dataclasses.replace(INSPECTION, shown=tuple(pairs)))) == list("123")
