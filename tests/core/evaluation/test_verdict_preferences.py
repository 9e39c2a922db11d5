"""The verdict on preferences: a model's choices on held-out rows, before and after."""

from __future__ import annotations

import json
import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from mlxtune.config import ObjectiveConfig
from mlxtune.core.data.conversation import CHOSEN, DESIRABLE, REJECTED
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.evaluation.interval import paired_fraction_interval, rank_interval
from mlxtune.core.evaluation.outcome import Evaluation, parse_evaluation
from mlxtune.core.evaluation.row_losses import AnswerLossSums, RowLossSums
from mlxtune.core.evaluation.verdict import JudgedRows, _win_rate_per_answer, evaluate_preferences
from mlxtune.core.evaluation.verdict_text import file_verdict_lines, verdict_lines
from mlxtune.core.objectives.objective import Objective


def evaluated(before: list[float], after: list[float], files: tuple[int, ...] = ()) -> Evaluation:
    """Evaluate pairs with these margins, in nats per token; `files` has the file of each pair."""
    tokens, mask = np.arange(6, dtype=np.int32), np.array([0, 0, 1, 1, 1, 1], dtype=np.uint8)
    examples = [
        Example(row, tokens + row, mask, files[row - 1] if files else 0, role)
        for row in range(1, len(before) + 1)
        for role in (CHOSEN, REJECTED)
    ]
    rows, counts = Corpus.of(examples).select(), np.full(len(before), 4)

    def sums(margins: list[float]) -> AnswerLossSums:
        good, bad = np.full(len(margins), 8.0), 8.0 + 4 * np.array(margins)
        return AnswerLossSums(
            RowLossSums(good, counts), RowLossSums(bad, counts), np.ones(len(margins))
        )

    judged: Any = JudgedRows.of(rows, np.zeros(0, dtype=np.uint64))
    dpo = Objective(ObjectiveConfig(objective="dpo"))
    return evaluate_preferences(judged, dpo, sums(before), sums(after), 0)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "low", "high"),
    [
        # Wilson's bound for none of 10 rows: z^2 / (10 + z^2) = 28%, for one side or for both.
        ([1.0], [2.0], "cannot tell", -0.2775, 0.2775),
        ([-1.0], [2.0], "helped", 1 - math.sqrt(2) * 0.2775, 1.0),
        ([1.0], [-2.0], "hurt", -1.0, math.sqrt(2) * 0.2775 - 1),
    ],
)
def test_interval_of_equal_changes_is_not_a_point(
    before: list[float], after: list[float], verdict: str, low: float, high: float
) -> None:
    found = evaluated(before * 10, after * 10)

    assert found.preference is not None
    assert found.verdict == verdict
    assert found.preference.low == pytest.approx(low, abs=1e-3)
    assert found.preference.high == pytest.approx(high, abs=1e-3)


def test_few_changed_pairs_give_no_verdict() -> None:
    # The exact sign test has p = 0.25 for three changes alike, and p = 0.03 for six.
    for changed, verdict in ((3, "cannot tell"), (6, "helped")):
        before = [-1.0] * changed + [1.0] * 100 + [-1.0] * (100 - changed)
        assert (
            evaluated(before, [1.0] * (100 + changed) + before[100 + changed :]).verdict == verdict
        )


@pytest.mark.parametrize(("rows", "fraction"), [(50, 0.05), (200, 0.01), (200, 0.25)])
def test_noise_in_pairs_is_seldom_called_a_change(rows: int, fraction: float) -> None:
    draw = np.random.default_rng(7)
    outside = 0
    for _ in range(1000):
        # The same fraction of pairs is lost and gained; half of the other pairs are preferred both
        # times.
        place = draw.random(rows)
        kept = place >= (1 + 2 * fraction) / 2
        low, high = paired_fraction_interval(
            (place < fraction) | kept, (place >= fraction) & (place < 2 * fraction) | kept
        )
        assert -1 <= low <= high <= 1
        outside += not low <= 0 <= high
    assert outside <= 60


def test_points_decide_whether_an_adapter_hardly_helped() -> None:
    found = evaluated([1.0] * 300 + [-1.0] * 100, [1.0] * 400)

    # The loss of the chosen answers does not change.
    assert (found.verdict, found.hardly) == ("helped", False)
    assert verdict_lines(found)[0].startswith("the adapter helped: it prefers the chosen answer")


def test_each_file_has_a_verdict_on_what_is_preferred() -> None:
    found = evaluated([-1.0] * 10 + [1.0] * 10, [2.0] * 10 + [-2.0] * 10, (0,) * 10 + (1,) * 10)

    better, worse = found.files
    assert (better.verdict, better.preferred_before, better.preferred_after) == ("helped", 0, 1)
    assert (worse.verdict, worse.preferred_before, worse.preferred_after) == ("hurt", 1, 0)
    assert file_verdict_lines(found)[0] == (
        "file 1: helped, prefers 0% to 100%, loss 2.0000 to 2.0000 on 10 rows"
    )
    assert parse_evaluation(json.loads(json.dumps(found.as_dict()))) == found


def test_noise_in_labeled_answers_is_seldom_called_a_change() -> None:
    """The interval excludes 0.5, no change, exactly when the Mann-Whitney test rejects it."""
    draw, outside = np.random.default_rng(0), 0
    for good, bad in [(10, 40), (25, 25), (6, 60)] * 100:
        gains = draw.standard_normal(good + bad)
        area = float(_win_rate_per_answer(gains, np.arange(good + bad) < good).mean())
        low, high = rank_interval(area, good, bad)
        deviation = abs(area - 0.5) / math.sqrt((good + bad + 1) / (12 * good * bad))
        assert (low <= 0.5 <= high) == (deviation <= NormalDist().inv_cdf(0.975))
        assert 0 <= low <= area <= high <= 1
        outside += not low <= 0.5 <= high
    assert outside < 0.08 * 300


def labeled(good: int, after: np.ndarray) -> Evaluation:
    """Evaluate 60 answers, of which the first `good` are good, with these losses; 8.0 before."""
    tokens, mask = np.arange(6, dtype=np.int32), np.array([0, 0, 1, 1, 1, 1], dtype=np.uint8)
    examples = [Example(row, tokens + row, mask, 0, DESIRABLE) for row in range(1, 61)]
    labels = np.array([1.0] * good + [0.0] * (60 - good))

    def sums(losses: np.ndarray) -> AnswerLossSums:
        none = RowLossSums(np.zeros(60), np.zeros(60, dtype=np.int64))
        return AnswerLossSums(RowLossSums(losses, np.full(60, 4)), none, labels)

    judged: Any = JudgedRows.of(Corpus.of(examples).select(), np.zeros(0, dtype=np.uint64))
    kto = Objective(ObjectiveConfig(objective="kto"))
    return evaluate_preferences(judged, kto, sums(np.full(60, 8.0)), sums(after), 0)


@pytest.mark.parametrize(("gain", "hardly"), [(0.07, True), (0.09, False)])
def test_gain_of_labeled_answers_below_a_percent_of_the_loss_hardly_helps(
    gain: float, hardly: bool
) -> None:
    found = labeled(30, np.array([8.0 - gain] * 30 + [8.0] * 30))
    assert (found.verdict, found.hardly) == ("helped", hardly)


def test_few_answers_of_a_label_show_nothing() -> None:
    assert rank_interval(1.0, 0, 60) == (0.0, 1.0)
    found = labeled(1, 8 - np.arange(60)[::-1] / 60)
    assert (found.verdict, found.preference and found.preference.fewest) == ("cannot tell", 1)
    assert "at least 6 answers of each label are needed" in verdict_lines(found)[0]
