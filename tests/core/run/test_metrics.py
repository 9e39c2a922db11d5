"""The measurements of each step and epoch, and values derived from them."""

from __future__ import annotations

import ast
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.config.objective_config import OBJECTIVES, REWARD_OBJECTIVES
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.run.metrics import (
    CLIPPED_RATIO,
    EQUAL_REWARDS,
    MASKED_ROWS,
    MEAN_LENGTH,
    ROWS_WITHOUT_REWARD,
    WITHOUT_REWARD,
    TrainingMetrics,
    validation_measure,
)
from mlxtune.core.run.sampled_answers import ANSWER_LABELS, FRACTION
from tests.core.training.records import step_record
from tests.sources import PACKAGE, nodes_of


def history(*losses: float, max_steps: int = 10) -> TrainingMetrics:
    records = [step_record(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    return TrainingMetrics(max_steps, records)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1.0) == pytest.approx(2.718281828459045, rel=1e-15)
    assert perplexity(math.log(151_936)) == pytest.approx(151_936, rel=1e-12)


@pytest.mark.parametrize("loss", [13.9, 710.0, 1e9, 1e308, math.inf])
def test_perplexity_is_capped_at_a_million_and_never_overflows(loss: float) -> None:
    assert perplexity(loss) == 1e6


def test_perplexity_of_nan_is_nan() -> None:
    assert math.isnan(perplexity(math.nan))


@settings(deadline=None)
@given(st.floats(min_value=0), st.floats(min_value=0))
def test_perplexity_never_falls_as_the_loss_rises(one: float, other: float) -> None:
    low, high = sorted([one, other])

    assert 1.0 <= perplexity(low) <= perplexity(high) <= 1e6


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10_000)), min_size=1, max_size=20))
def test_average_loss_weighs_each_step_by_its_supervised_tokens(
    steps: list[tuple[float, int]],
) -> None:
    records = [
        step_record(step, loss=loss, supervised_tokens=tokens)
        for step, (loss, tokens) in enumerate(steps, start=1)
    ]
    metrics = TrainingMetrics(len(steps), records)

    total = sum(Fraction(loss) * tokens for loss, tokens in steps)
    expected = float(total / sum(tokens for _, tokens in steps))
    assert metrics.average_loss() == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_average_loss_is_not_a_mean_of_means() -> None:
    records = [
        step_record(1, loss=1.0, supervised_tokens=30),
        step_record(2, loss=5.0, supervised_tokens=10),
    ]

    metrics = TrainingMetrics(2, records)
    assert metrics.average_loss() == 2.0


def test_loss_is_none_before_the_first_step() -> None:
    metrics = TrainingMetrics(10)

    assert metrics.average_loss() is None
    assert metrics.convergence_rate() is None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([4.0, 9.0, 1.0], 0.75),
        ([2.0, 3.0], -0.5),
        ([2.0, 2.0], 0.0),
        ([2.0, 0.0], 1.0),
        ([2.0], None),
        ([], None),
        ([0.0, 1.0], None),
    ],
)
def test_convergence_rate_is_the_lost_fraction_of_the_first_loss(
    losses: list[float], expected: float | None
) -> None:
    assert history(*losses).convergence_rate() == expected


def test_run_is_complete_at_max_steps() -> None:
    assert not history(1.0, max_steps=2).is_complete()
    assert history(1.0, 1.0, max_steps=2).is_complete()


def test_each_metric_of_answers_has_one_name_and_one_label() -> None:
    keys = {
        *(MEAN_LENGTH, CLIPPED_RATIO, WITHOUT_REWARD),
        *(EQUAL_REWARDS, ROWS_WITHOUT_REWARD, MASKED_ROWS),
    }
    texts = {*keys, *(ANSWER_LABELS[key].removeprefix(FRACTION) for key in keys)}
    written = [
        (path.name, text)
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (text := node.value.removeprefix(FRACTION)) in texts
    ]
    assert sorted(text for _, text in written) == sorted(texts)
    assert {name for name, _ in written} == {"metrics.py", "sampled_answers.py"}


def test_loss_of_a_run_with_rewards_is_the_negative_mean_reward() -> None:
    found = {objective: validation_measure(-0.5, objective) for objective in OBJECTIVES}
    for objective, measure in found.items():
        assert measure == (("reward", 0.5) if objective in REWARD_OBJECTIVES else ("loss", -0.5))
