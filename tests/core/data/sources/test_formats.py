"""Formats are recognised by their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import OPTIONS
from mlxtune.core.data.sources.formats import FORMATS, label_of, preference_kind, recognize
from mlxtune.core.data.sources.keys import _BOOLEANS, as_bool
from tests.core.data.rows import (
    ALPACA,
    CHAT,
    PROMPT,
    ROWS,
    SHAREGPT,
    TEXT,
    read,
)


def test_formats_are_the_choices_of_their_option() -> None:
    assert sorted(OPTIONS["format"].choices or ()) == sorted(["auto", *FORMATS])


@pytest.mark.parametrize("name", ROWS)
def test_format_is_recognized_by_its_keys(tmp_path: Path, name: str) -> None:
    assert recognize(ROWS[name]) == name
    assert recognize(ROWS[name] | {"id": 1}) == name
    for key in FORMATS[name].keys:
        assert recognize({k: v for k, v in ROWS[name].items() if k != key}) is None
        assert recognize(ROWS[name] | {key: None}) is None
    (one,), _ = read(tmp_path, ROWS[name])
    assert read(tmp_path, ROWS[name], format=name)[0] == [one]


def test_row_with_the_keys_of_several_formats_has_the_first_of_them() -> None:
    order = ["text", "alpaca", "prompt", "sharegpt", "chat"]
    row: dict[str, Any] = {}
    for name in order:
        row |= ROWS[name]
        assert recognize(row) == name


@pytest.mark.parametrize("row", [{}, {"prompt": "a"}, {"completion": "a"}, {"input": "a"}])
def test_row_without_known_keys_has_no_format(row: dict[str, Any]) -> None:
    assert recognize(row) is None


@pytest.mark.parametrize("row", [CHAT, PROMPT, SHAREGPT, ALPACA, TEXT])
def test_unlearned_answer_is_skipped_with_its_reason(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = [row, *(row | {"label": label} for label in (True, False, "False", "spam", 0))]
    pair = row | {"chosen": "yes", "rejected": "no"}

    good, skipped = read(tmp_path, *rows, pair, pair | {"rejected": None})

    assert [one.row for one in good] == [1, 2, 5, *[6] * (row is TEXT), 8]
    assert [str(problem) for problem in skipped.problems.values()] == [
        *["an answer labelled as bad ('label' is false: use --objective kto)"] * 2,
        *[
            "an answer labelled as bad ('label' is 0: use --objective kto, or --field label= if it "
            "is a class)"
        ]
        * (row is not TEXT),
        "a preference pair ('chosen' and 'rejected': use --objective dpo)",
    ]


def test_words_for_true_and_false_mean_the_same_in_marks_and_labels() -> None:
    assert {*_BOOLEANS.values()} == {True, False}
    for word, meant in _BOOLEANS.items():
        for text in (word, word.upper(), f" {word} "):
            assert as_bool(text) is label_of({"label": text}) is meant
    assert as_bool("good") is None
    assert label_of({"label": "good"}) == "good"


def test_preference_is_recognized_by_its_keys() -> None:
    assert preference_kind({"chosen": [], "rejected": []}) == "pair"
    assert preference_kind({"completion": "a", "label": True}) == "labelled"
    assert preference_kind({"completion": "a", "label": "spam"}) is None
    assert {preference_kind({"text": "a", "label": each}) for each in (0, 0.0, "1.0")} == {None}
    assert preference_kind({"chosen": "a"}) is None
