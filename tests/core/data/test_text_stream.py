"""The text of an answer as its tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.data.text_stream import TextStream, text_of
from mlxtune.views.visible import escape_controls


def streamed(pieces: list[bytes], *stops: str) -> tuple[list[str], TextStream]:
    stream = TextStream(stops)
    return [*map(stream.add, pieces), stream.finish()], stream


def test_character_is_shown_once_all_its_bytes_have_come() -> None:
    euro = "€".encode()
    shown, _ = streamed([b"1 ", euro[:1], euro[1:2], euro[2:], b"!"])
    assert shown == ["1 ", "", "", "€", "!", ""]


def test_half_a_character_at_the_end_is_a_replacement_and_no_error() -> None:
    assert "".join(streamed([b"a", "€".encode()[:2]])[0]) == "a\ufffd"


def test_stop_over_several_tokens_is_never_shown() -> None:
    shown, stream = streamed([b"Hi", b"\n", b"Us", b"er", b": x"], "\nUser:")
    assert shown == ["Hi", "", "", "", "", ""]
    assert stream.stopped


def test_text_that_only_begins_like_a_stop_is_shown() -> None:
    shown, stream = streamed([b"Hi", b"\n", b"Us", b"ually", b"\nUse"], "\nUser:")
    assert shown == ["Hi", "", "", "\nUsually", "", "\nUse"]
    assert not stream.stopped


def test_earliest_stop_text_ends_the_answer() -> None:
    assert "".join(streamed([b"a###b", b"END"], "END", "##")[0]) == "a"


@given(st.text(max_size=30), st.lists(st.integers(1, 3), min_size=40, max_size=40), st.text("ab"))
def test_text_before_the_stop_is_complete_for_any_chunks(
    text: str, sizes: list[int], stop: str
) -> None:
    content, pieces = text.encode("utf-8", "ignore"), []
    for size in sizes:
        pieces.append(content[:size])
        content = content[size:]
    whole = text_of(pieces)
    expected = whole.partition(stop)[0] if stop else whole
    assert "".join(streamed(pieces, stop)[0]) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc", "a\nb\tc"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("\x9b2J\r\x00", "\\x9b2J\\r\\x00"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("naïve 日本　語 👩‍👩‍👧 e\u0301\u00a0", "naïve 日本　語 👩‍👩‍👧 e\u0301\u00a0"),
    ],
)
def test_nothing_that_a_terminal_acts_on_is_left(text: str, shown: str) -> None:
    assert escape_controls(text) == shown
