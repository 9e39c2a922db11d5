"""The loss of sampled answers against the papers' formulas, with numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mlxtune.config.fields import part_of
from mlxtune.config.objective_config import LossConfig, ObjectiveConfig, PolicyConfig
from mlxtune.core.objectives.objective import SFT, Objective
from mlxtune.core.objectives.policy import (
    PolicyObjective,
    SampledExample,
    SampleTotals,
    TokenLogps,
    advantages_of,
    objective_of,
)
from tests.configs import config

Logps = npt.NDArray[Any]


def sample(answer: int, advantage: float, **given: Any) -> SampledExample:
    """Return a sample of `answer` tokens behind a prompt of three."""
    mask = np.zeros(answer + 3, dtype=np.uint8)
    mask[3:] = 1
    given = {"logps": np.full(answer, -1.0, dtype=np.float32), **given}
    return SampledExample(
        1, np.arange(answer + 3, dtype=np.int32), mask, advantage=advantage, **given
    )


def loss(examples: list[SampledExample], trained: Logps, **options: Any) -> float:
    """Return the loss of samples whose trained log-probabilities are (S, A)."""
    objective = PolicyObjective(PolicyConfig(**options))
    learned = [each for each in examples if each.has_gradient]
    logps = TokenLogps.of(learned).with_trained(trained, trained)
    return float(objective.loss(logps, SampleTotals.of(examples)))


def test_objective_from_options_equals_objective_from_record() -> None:
    pairs = {"objective": "dpo", "dpo_loss": "ipo", "beta": 0.2}
    rewards = {"objective": "grpo", "grpo_loss": "gspo", "kl": 0.1, "reward": ("exact",)}
    for options, expected in (
        (pairs, Objective(ObjectiveConfig(**pairs))),
        (rewards, PolicyObjective(PolicyConfig(grpo_loss="gspo", kl=0.1))),
        ({}, SFT),
    ):
        run = config(**options)
        assert objective_of(run) == objective_of(part_of(vars(run), LossConfig)) == expected


def old(*logps: float) -> npt.NDArray[np.float32]:
    return np.array(logps, dtype=np.float32)


# Answers of 2 and 1 tokens, with ratios 2, 1 and 1/2 and advantages 1 and -1. Clipping to
# [0.8, 1.2] leaves -1.2, -1 and, as the clipped ratio is the worse, 0.8.
SAMPLES = [sample(2, 1.0, old_logps=old(-2, -3)), sample(1, -1.0, old_logps=old(-1))]
TRAINED = np.array([[math.log(2) - 2, -3.0], [-1 - math.log(2), 0.0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dapo", (-1.2 - 1 + 0.8) / 3),
        ("grpo", ((-1.2 - 1) / 2 + 0.8) / 2),
        ("dr_grpo", (-1.2 - 1 + 0.8) / (2 * 10)),
        # One ratio per answer: the square root of 2, clipped, and 1/2, clipped.
        ("gspo", (-1.2 + 0.8) / 2),
    ],
)
def test_each_loss_is_the_papers(name: str, expected: float) -> None:
    found = loss(SAMPLES, TRAINED, grpo_loss=name, max_new_tokens=10)
    assert found == pytest.approx(expected)


def test_bounds_of_the_ratio_are_separate() -> None:
    found = loss(SAMPLES, TRAINED, clip_low=0.6, clip_high=0.5)
    assert found == pytest.approx((-1.5 - 1 + 0.5) / 3)


def test_ratio_is_one_before_the_first_update() -> None:
    samples = [sample(2, 1.0), sample(1, -1.0)]
    assert loss(samples, TRAINED) == pytest.approx((-1 - 1 + 1) / 3)


def test_divergence_is_k3() -> None:
    samples = [
        sample(2, 1.0, reference_logps=old(-2, -3)),
        sample(1, 0.0, reference_logps=old(-1)),
    ]
    # The differences of reference and trained model are -ln 2, 0 and ln 2.
    k3 = (0.5 + math.log(2) - 1) + 0 + (2 - math.log(2) - 1)
    assert loss(samples, TRAINED, kl=0.1) == pytest.approx((-1 - 1 - 0 + 0.1 * k3) / 3)


def test_divergence_is_weighted_by_the_ratio() -> None:
    """As in TRL, whose weight makes the gradient that of the reverse divergence."""
    given = {"old_logps": old(-3), "reference_logps": old(-1)}
    found = loss([sample(1, 0.0, **given)], np.array([[-2.0]]), kl=0.5)
    assert found == pytest.approx(0.5 * math.e * (math.e - 1 - 1))


def test_correction_is_truncated() -> None:
    samples = [sample(2, 1.0, logps=old(-4, -3.5)), sample(1, -1.0, logps=old(-1))]
    trained = np.array([[-2.0, -3.0], [-1 - math.log(2), 0.0]])
    # exp(2) becomes 3; exp(0.5) and 1/2 stay.
    expected = (-3 - math.exp(0.5) + 0.5) / 3
    assert loss(samples, trained, correct=True) == pytest.approx(expected)


def test_masked_sample_counts_as_an_answer_without_tokens() -> None:
    samples = [*SAMPLES, sample(7, 1.0, masked=True)]
    assert loss(samples, TRAINED) == pytest.approx((-1.2 - 1 + 0.8) / 3)
    found = loss(samples, TRAINED, grpo_loss="grpo")
    assert found == pytest.approx(((-1.2 - 1) / 2 + 0.8) / 3)


def test_sample_without_an_advantage_has_a_gradient_only_with_a_divergence() -> None:
    assert not sample(2, 0.0).has_gradient
    assert sample(2, 0.0, reference_logps=old(-1, -1)).has_gradient
    assert not sample(2, 1.0, masked=True).has_gradient


def test_tokens_of_samples_without_an_advantage_count() -> None:
    samples = [*SAMPLES, sample(5, 0.0)]
    assert loss(samples, TRAINED) == pytest.approx((-1.2 - 1 + 0.8) / 8)


def test_metrics_count_clipped_tokens_and_compare_with_sampling() -> None:
    objective, totals = PolicyObjective(PolicyConfig()), SampleTotals.of(SAMPLES)
    found = objective.metrics(TokenLogps.of(SAMPLES).with_trained(TRAINED, TRAINED), totals)
    assert found["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert found["clip_ratio/high_mean"] == pytest.approx(1 / 3)
    # The old log-probabilities differ by 1, 2 and 0 from those in sampling.
    assert found["ratio/mean"] == pytest.approx(math.e)
    assert found["ratio/max"] == pytest.approx(math.e**2)
    by_answer = PolicyObjective(PolicyConfig(grpo_loss="gspo"))
    found = by_answer.metrics(TokenLogps.of(SAMPLES).with_trained(TRAINED, TRAINED), totals)
    assert found["clip_ratio/low_mean"] == found["clip_ratio/high_mean"] == 1 / 2


def test_step_without_a_gradient_has_no_metrics() -> None:
    logps, none = TokenLogps.of([]), np.zeros((0, 1))
    found = PolicyObjective(PolicyConfig()).metrics(
        logps.with_trained(none, none), SampleTotals(4, 9)
    )
    assert found == {}


GROUPS = [[1.0, 0.0, 0.0, 1.0], [2.0, None, 5.0], [0.1, 0.1, 0.1], [None, 3.0]]


def test_advantages_are_relative_to_the_group() -> None:
    spread = math.sqrt(1 / 3)
    found = advantages_of(GROUPS)
    assert found[0] == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / (spread + 1e-4))
    wide = math.sqrt(4.5) + 1e-4
    assert found[1] == [pytest.approx(-1.5 / wide), 0.0, pytest.approx(1.5 / wide)]
    assert found[2:] == [[0.0] * 3, [0.0] * 2]


def test_advantages_are_divided_by_the_deviation_of_the_step_or_not_at_all() -> None:
    none = advantages_of(GROUPS, "none")
    assert none == [[0.5, -0.5, -0.5, 0.5], [-1.5, 0.0, 1.5], [0.0] * 3, [0.0] * 2]
    every = [reward for group in GROUPS for reward in group if reward is not None]
    divisor = float(np.std(every, ddof=1)) + 1e-4
    for found, expected in zip(advantages_of(GROUPS, "batch"), none, strict=True):
        assert found == pytest.approx(np.array(expected) / divisor)


def test_no_group_has_an_advantage_if_no_sample_has_a_reward() -> None:
    assert advantages_of([[None, None], []], "batch") == [[0.0, 0.0], []]
