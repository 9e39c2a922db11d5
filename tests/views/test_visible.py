"""Invisible characters are made visible, and other text stays unchanged."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.data.inspection import Piece
from mlxtune.views.visible import escape, middle_of, stretches


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ~ text", "plain ~ text"),
        ("Grüße, 日本語、مرحبا 👍🏽 e\u0301", "Grüße, 日本語、مرحبا 👍🏽 e\u0301"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x00\x1b[31m\x7f\x9b", r"\x00\x1b[31m\x7f\x9b"),
        ("\u202eabc\u202c\u2066\u200f", r"\u202eabc\u202c\u2066\u200f"),
        ("a\u200bb\u200dc\ufeff\u00ad", r"a\u200bb\u200dc\ufeff\xad"),
        ("a\u00a0b\u202fc\u2003d", r"a\xa0b\u202fc\u2003d"),
        ("\ud800x\udcff", r"\ud800x\udcff"),
        ("\u2028\u2029\ue000", r"\u2028\u2029\ue000"),
        ("\U000e0041\U000e0101\u3164\u2800", r"\U000e0041\U000e0101\u3164\u2800"),
        ("全角\u3000空白", "全角\u3000空白"),
    ],
)
def test_invisible_characters_are_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_no_control_format_or_surrogate_character_remains(text: str) -> None:
    shown = escape(text) + "".join(
        words
        for _, parts in stretches([Piece(text, 1, False, False)])
        for kind, words in parts
        if kind in ("plain", "escape")
    )

    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs"}
    shown.encode("utf-8")


@given(st.text(st.sampled_from("ab \n\té日")))
def test_stretches_of_text_without_unseen_characters_join_to_the_text(text: str) -> None:
    ((_, parts),) = stretches([Piece(text, 1, False, False)])

    assert "".join(words for _, words in parts) == text
    assert all(set(words) == {" "} for kind, words in parts if kind == "space")
    assert all(" \n" not in words for kind, words in parts if kind == "plain")


def marked(*pieces: Piece) -> str:
    """Return the whole text, with `·` for each space that is made visible."""
    return "".join(
        "·" * len(words) if kind == "space" else words
        for _, parts in stretches(pieces)
        for kind, words in parts
    )


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["one two"], "one two"),
        (["one", " two"], "one two"),
        (["one ", "two"], "one two"),
        (["one ", " two"], "one··two"),
        (["one   two"], "one···two"),
        ([" one"], "·one"),
        (["one "], "one·"),
        (["one ", "\n", " two"], "one·\n·two"),
    ],
)
def test_spaces_that_are_easy_to_overlook_are_marked(texts: list[str], shown: str) -> None:
    assert marked(*(Piece(text, 1, False, False) for text in texts)) == shown


def test_space_next_to_a_control_token_or_a_supervised_span_is_marked() -> None:
    assert (
        marked(
            Piece("[INST]", 1, True, False),
            Piece(" Hi", 1, False, False),
            Piece(" there:", 1, False, False),
            Piece(" Hello", 1, False, True),
            Piece(" you ", 1, False, True),
            Piece("</s>", 1, True, True),
        )
        == "[INST]·Hi there:·Hello you·</s>"
    )


def test_only_a_long_middle_is_folded() -> None:
    pieces = [Piece("x", 1, False, False)] * 100

    assert middle_of(pieces, head=20, tail=10) == (20, 90)
    assert middle_of(pieces, head=60, tail=30) == (100, 100)
    assert middle_of(pieces, head=400, tail=120) == (100, 100)
    assert middle_of([], head=400, tail=120) == (0, 0)
