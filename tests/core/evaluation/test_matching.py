"""Comparisons of answers with the data's answers."""

from __future__ import annotations

import pytest

from mlxtune.core.evaluation import matching
from mlxtune.core.evaluation.matching import matcher


@pytest.mark.parametrize(
    ("by", "answer", "expected", "same"),
    [
        ("json", '{"a": 1, "b": [2]}', '{"b":[2],"a":1}', True),
        ("json", '{"a": 1}', '{"a": true}', False),
        ("json", "{", "{", False),
        ("json", "[" * 10_000, "[]", False),
        ("contains", "The answer is 42.", " 42\n", True),
        ("contains", "The answer is 41.", "42", False),
        ("regex=#### (.+)", "So it is\n#### 42", "#### 42", True),
        ("regex=#### (.+)", "42", "42", False),
        ("regex=[0-9]+", "about 42 or 43", "42", True),
        ("regex=(a)|b", "b", "b", False),
    ],
)
def test_answer_matches_by_json_part_or_pattern(
    by: str, answer: str, expected: str, same: bool
) -> None:
    assert matcher(by)(answer, expected) is same


def test_pattern_without_end_finds_nothing_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_SEARCH_SECONDS", 0.01)
    warnings: list[str] = []
    same = matcher("regex=(x|x)+y", warnings.append)
    assert same("xy", "xy")
    assert not any(same("x" * 40, "xy") for _ in range(9))
    assert not same("xy", "xy")
    assert warnings == [
        "--match 'regex=(x|x)+y': takes too long on some answers, which count as wrong",
        "--match 'regex=(x|x)+y': the remaining answers are not searched",
    ]
