"""Comparisons of answers with the data's answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlxtune.core.evaluation import matching
from mlxtune.core.evaluation.matching import count_exact, count_matches, matcher
from mlxtune.core.evaluation.outcome import (
    ExactMatch,
    Generated,
    KeyMatches,
    Sample,
    parse_evaluation,
)
from mlxtune.views.run_text import evaluation_lines
from tests.core.evaluation.evaluations import evaluated


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


def test_endless_pattern_search_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_SEARCH_SECONDS", 0.01)
    warnings: list[str] = []
    same = matcher("regex=(x|x)+y", warnings.append)
    assert same("xy", "xy")
    assert not any(same("x" * 40, "xy") for _ in range(9))
    assert not same("xy", "xy")
    assert warnings == [
        "--match 'regex=(x|x)+y' takes too long on some answers, which count as wrong",
        "--match 'regex=(x|x)+y': the remaining answers are not searched",
    ]


def sample(expected: str, base: str, adapted: str | None, against: str | None = None) -> Sample:
    same = matcher("json")
    right = same(base if adapted is None else adapted, expected)
    other = None if against is None else same(against, expected)
    return Sample("a.jsonl", 1, "?", expected, base, adapted, right, against, other)


def test_json_answers_are_scored_key_by_key_and_invalid_ones_are_counted() -> None:
    samples = [
        sample('{"name": "Ann", "size": 2}', "no", '{"size": 2, "name": "Ann"}'),
        sample('{"name": "Bob", "size": 1}', '{"name": "Bob"}', '{"name": "Bob", "size": true}'),
        sample('{"name": "Cy"}', "{", '{"name": "Cy"'),
    ]
    found = count_matches(samples, "json", matcher("json"))
    assert (found.base, found.adapted, found.against) == (0, 1, None)
    assert found.invalid == ExactMatch(2, 1)
    assert found.keys == (KeyMatches("name", 3, 1, 2), KeyMatches("size", 2, 0, 1))
    assert count_exact(samples) == ExactMatch(0, 0)


def test_answers_of_two_adapters_are_counted_beside_each_other() -> None:
    samples = [sample("1", "2", "1", "2"), sample("3", "3", "4", "3"), sample("5", "5", "5", "5")]
    found = count_matches(samples, "json", matcher("json"))
    assert (found.base, found.adapted, found.against) == (2, 2, 2)
    generated = Generated(3, count_exact(samples), samples, found)
    assert [each.expected for each in generated.wrong] == ["3"]
    assert [each.expected for each in generated.differing] == ["1", "3"]
    evaluation = replace(evaluated([-1.0] * 8), generated=generated, against="other")
    lines = evaluation_lines(evaluation)
    assert "Differ      2 answers: 1 only the adapter has right, 1 only other" in lines
    assert "Listed      all 2 differing answers" in lines
    assert parse_evaluation(json.loads(json.dumps(evaluation.as_dict()))) == evaluation


def test_wrong_answers_are_listed_and_a_verdict_says_if_none_is_right() -> None:
    samples = [sample(str(i), "no", "none") for i in range(12)]
    generated = Generated(12, count_exact(samples), samples)
    lines = evaluation_lines(replace(evaluated([-1.0] * 8), generated=generated))
    assert lines[2].startswith(
        "Verdict     the adapter helped, but none of its 12 answers is exact: it takes "
    )
    assert "Listed      the first 10 of 12 wrong answers" in lines
    assert sum(line == "a.jsonl:1" for line in lines) == 10
