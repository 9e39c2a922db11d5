"""The JSON of an evaluation is read as it was written, and nothing else is."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlxtune.core.evaluation.outcome import (
    Evaluation,
    ExactMatch,
    Generated,
    Loss,
    Matches,
    Sample,
    parse_evaluation,
)
from tests.core.evaluation.evaluations import evaluated


@pytest.mark.parametrize("adapted", [True, False])
def test_evaluation_survives_its_json(adapted: bool) -> None:
    found = evaluated([-1.0, -1.2] * 20)
    samples = [Sample("a.jsonl", 1, "2 + 2?", "4", "5", "4" if adapted else None)]
    found = replace(found, generated=Generated(1, ExactMatch(0, int(adapted)), samples))
    assert parse_evaluation(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": "40"},
        {"rows": True},
        {"base": None},
        {"base": {"loss": 1.0}},
        {"base": {"loss": "1", "perplexity": 2.0}},
        {"gained": "chat"},
        {"gained": [7]},
        {"verdict": "odd"},
        {"another": 1},
    ],
)
def test_invalid_json_is_not_an_evaluation(changes: dict[str, Any]) -> None:
    values = json.loads(json.dumps(evaluated([-1.0, -1.2] * 20).as_dict()))
    parse_evaluation(values)
    with pytest.raises(ValueError, match=r"^its |^it has |no such verdict"):
        parse_evaluation(values | changes)


def test_matches_are_reported_only_if_counted() -> None:
    plain = Generated(8, ExactMatch(1, 6), [])
    counted = replace(plain, matches=Matches("json", 2, 7))
    values = Evaluation(8, 80, Loss(4.0, 54.6), generated=plain).as_dict()
    assert "matches" not in values["generated"]
    values = Evaluation(8, 80, Loss(4.0, 54.6), generated=counted).as_dict()
    assert values["generated"]["matches"] == {"by": "json", "base": 2, "adapted": 7}
    assert parse_evaluation(json.loads(json.dumps(values))).generated == counted
