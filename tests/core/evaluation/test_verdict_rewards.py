"""The verdict on rewards of answers, before and after training."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.evaluation.outcome import Evaluation, Unrewarded, parse_evaluation
from mlxtune.core.evaluation.verdict import JudgedRows, RowRewards, evaluate_rewards
from mlxtune.core.evaluation.verdict_text import verdict_lines


def evaluated(
    before: list[float], after: list[float], against: str | None = None
) -> Evaluation | None:
    """Evaluate rows with these rewards, which are also those of exact answers."""
    tokens, mask = np.arange(4, dtype=np.int32), np.array([0, 0, 1, 1], dtype=np.uint8)
    rows = Corpus.of([Example(row, tokens + row, mask) for row in range(len(before))]).select()
    judged = replace(JudgedRows.of(rows, np.zeros(0, dtype=np.uint64)), against=against)
    values = np.array(before), np.array(after)
    return evaluate_rewards(judged, [RowRewards(name, False, *values) for name in ("", "exact")], 0)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0], "helped"),
        ([1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], "hurt"),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], "cannot tell"),
        ([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], "cannot tell"),
        ([1.0, -1.0, 1.0, -1.0], [1.0, 1.0, 1.0, -1.0], "helped"),
        ([1.0, -1.0, 1.0, -1.0], [-1.0, -1.0, 1.0, -1.0], "hurt"),
    ],
)
def test_verdict_is_by_the_change_of_the_reward(
    before: list[float], after: list[float], verdict: str
) -> None:
    found = evaluated(before * 10, after * 10)
    assert found is not None and found.verdict == verdict
    assert parse_evaluation(json.loads(json.dumps(found.as_dict()))) == found


def test_rows_without_reward_are_excluded_and_exact_is_a_fraction() -> None:
    before, after = [0.0] * 8 + [math.nan, 0.0], [1.0, 1.0, 1.0, 1.0] * 2 + [1.0, math.nan]
    found = evaluated(before, [*after[:7], 0.0, *after[8:]], against="other")
    assert found is not None
    verdict, exact = verdict_lines(found)
    assert verdict.startswith(
        "the adapter is better than other: greedy answers to 8 rows get a mean reward of 0.875, "
        "0.000 with other (+0.875, 95% interval "
    )
    assert exact.startswith("exact greedy answers: 88%, 0% with other (+88 points, 95% interval +")
    assert evaluated([math.nan], [1.0]) is None


def test_verdict_counts_the_rows_that_it_leaves_out() -> None:
    found = evaluated([0.0, 1.0] * 4, [1.0] * 8)
    assert found is not None and "unrewarded" not in found.as_dict()
    found = replace(found, unrewarded=Unrewarded(12, 20, 1, 11, "a.jsonl:1: no"))
    assert parse_evaluation(json.loads(json.dumps(found.as_dict()))) == found
    line = verdict_lines(found)[0]
    assert "; 12 of 20 rows without a reward (1 before, 11 after) are left out, so the" in line
    # Readers of cards may not see the paths of files.
    assert "a.jsonl" not in "".join(verdict_lines(found))
