"""Losses of preferences against the papers' formulas, with numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mlxtune.config import ObjectiveConfig
from mlxtune.config.train_config import OPTIONS
from mlxtune.core.data.conversation import (
    CHOSEN,
    DESIRABLE,
    MISMATCHED,
    REJECTED,
    UNDESIRABLE,
    WHOLE,
)
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.losses import DPO_LOSSES, KTO_LOSSES, OTHER_LOSSES
from mlxtune.core.objectives.objective import Objective


def example(row: int, role: int, tokens: int, reference: float = 0.0) -> Example:
    mask = np.zeros(tokens + 3, dtype=np.uint8)
    mask[3:] = 1
    return Example(row, np.arange(tokens + 3, dtype=np.int32), mask, role=role, reference=reference)


# Log-probabilities of two pairs under the policy and the reference: ratios 2 and -1, then -1 and 1.
LOGPS = np.array([-10.0, -13.0, -21.0, -7.0])
PAIRS = [
    example(1, CHOSEN, 4, -12.0),
    example(1, REJECTED, 5, -12.0),
    example(2, CHOSEN, 10, -20.0),
    example(2, REJECTED, 2, -8.0),
]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def nls(x: float) -> float:
    """Return the negative logarithm of the sigmoid."""
    return math.log1p(math.exp(-x))


def objective(name: str, **options: Any) -> Objective:
    return Objective(ObjectiveConfig(objective=name, **options))


def loss(which: Objective, examples: list[Example], logps: np.ndarray[Any, Any]) -> float:
    return which.evaluate(examples, logps)[0]


# With beta 0.5: half the ratios of chosen and rejected, and half their differences 3 and -2.
EXPECTED = {
    "sigmoid": (nls(1.5) + nls(-1.0)) / 2,
    "hinge": (0.0 + 2.0) / 2,
    # Ratios per token: 2/4 + 1/5 and -1/10 - 1/2; 1 / (2 beta) is 1.
    "ipo": ((0.7 - 1) ** 2 + (-0.6 - 1) ** 2) / 2,
    "nca_pair": sum(nls(c) + 0.5 * nls(-c) + 0.5 * nls(-r) for c, r in ((1.0, -0.5), (-0.5, 0.5)))
    / 2,
    # 1 / (2 beta) is 1.
    "sppo_hard": ((2 - 1) ** 2 + (-1 + 1) ** 2 + (-1 - 1) ** 2 + (1 + 1) ** 2) / 2,
    "apo_zero": (1 - sigmoid(1.0) + sigmoid(-0.5) + 1 - sigmoid(-0.5) + sigmoid(0.5)) / 2,
    "apo_down": (sigmoid(1.0) + 1 - sigmoid(1.5) + sigmoid(-0.5) + 1 - sigmoid(-1.0)) / 2,
    # Sorted, policy: -14, 3; reference: -12, 0.
    "aot": (nls(-1.0) + nls(1.5)) / 2,
    # Sorted, chosen: -1, 2; rejected: -1, 1.
    "aot_unpaired": (nls(0.0) + nls(0.5)) / 2,
    "discopop": sum(
        nls(x) * (1 - sigmoid(x / 0.05)) + math.exp(-x) * sigmoid(x / 0.05) for x in (1.5, -1.0)
    )
    / 2,
    "sigmoid_norm": (nls(0.35) + nls(-0.3)) / 2,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_dpo_loss_is_its_formula(name: str) -> None:
    found = loss(objective("dpo", beta=0.5, dpo_loss=name), PAIRS, LOGPS)
    assert found == pytest.approx(EXPECTED[name], rel=1e-12)


def test_losses_with_label_smoothing_are_their_formulas() -> None:
    smoothed = {"beta": 0.5, "label_smoothing": 0.1}
    found = loss(objective("dpo", dpo_loss="robust", **smoothed), PAIRS, LOGPS)
    wanted = [(0.9 * nls(x) - 0.1 * nls(-x)) / 0.8 for x in (1.5, -1.0)]
    assert found == pytest.approx(sum(wanted) / 2)
    found = loss(objective("dpo", dpo_loss="exo_pair", **smoothed), PAIRS, LOGPS)
    wanted = [
        sigmoid(x) * (-nls(x) - math.log(0.9)) + sigmoid(-x) * (-nls(-x) - math.log(0.1))
        for x in (1.5, -1.0)
    ]
    assert found == pytest.approx(sum(wanted) / 2)
    found = loss(objective("dpo", dpo_loss="aot", **smoothed), PAIRS, LOGPS)
    assert found == pytest.approx(sum(0.9 * nls(x) + 0.1 * nls(-x) for x in (-1.0, 1.5)) / 2)
    found = loss(objective("cpo", cpo_alpha=0, **smoothed), PAIRS, LOGPS)
    assert found == pytest.approx(sum(0.9 * nls(x) + 0.1 * nls(-x) for x in (1.5, -7.0)) / 2)


def test_chosen_answers_add_their_mean_loss() -> None:
    plain = loss(objective("dpo", beta=0.5), PAIRS, LOGPS)
    # 31 nats over 14 tokens.
    found = loss(objective("dpo", beta=0.5, sft_weight=2), PAIRS, LOGPS)
    assert found == pytest.approx(plain + 2 * 31 / 14)
    found = loss(objective("cpo", beta=0.5), PAIRS, LOGPS)
    assert found == pytest.approx((nls(1.5) + nls(-7.0)) / 2 + 31 / 14)


def test_orpo_is_the_odds_ratio_and_the_loss_of_the_chosen_answer() -> None:
    def odds(mean: float) -> float:
        return math.exp(mean) / (1 - math.exp(mean))

    ratios = [math.log(odds(a) / odds(b)) for a, b in ((-2.5, -2.6), (-2.1, -3.5))]
    wanted = 31 / 14 + 0.1 * sum(map(nls, ratios)) / 2
    assert loss(objective("orpo"), PAIRS, LOGPS) == pytest.approx(wanted)


def test_orpo_takes_the_prompt_too_where_that_is_asked_for() -> None:
    whole = [example(1, WHOLE, 6), example(2, WHOLE, 12)]
    logps = np.append(LOGPS, [-15.0, -30.0])
    answer = loss(objective("orpo"), PAIRS, LOGPS)
    found = loss(objective("orpo", orpo_nll="prompt"), PAIRS + whole, logps)
    assert found == pytest.approx(answer - 31 / 14 + 45 / 18)


def test_simpo_has_a_margin_and_means() -> None:
    # SimPO's default beta is 2.0: 2 (-2.5 + 2.6) - 1 and 2 (-2.1 + 3.5) - 1.
    wanted = (nls(-0.8) + nls(1.8)) / 2
    assert loss(objective("simpo"), PAIRS, LOGPS) == pytest.approx(wanted)


LABELED = [
    example(1, DESIRABLE, 4, -12.0),
    example(2, UNDESIRABLE, 4, -6.0),
    example(3, DESIRABLE, 4, -20.0),
]


def test_kto_is_its_formula() -> None:
    logps = np.array([-10.0, -5.0, -21.0])
    others = [example(row, MISMATCHED, 3, -30.0) for row in (1, 2, 3)]
    weights = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    # The divergence is (1 + 2 + 0) / 3.
    found = loss(objective("kto", **weights), LABELED + others, np.append(logps, [-29, -28, -30]))
    good = [2 * (1 - sigmoid(0.5 * (2 - 1))), 2 * (1 - sigmoid(0.5 * (-1 - 1)))]
    bad = 3 * (1 - sigmoid(0.5 * (1 - 1)))
    assert found == pytest.approx((sum(good) + bad) / 3)
    # A negative divergence counts as 0.
    found = loss(objective("kto", **weights), LABELED + others, np.append(logps, [-31, -30, -33]))
    good = [2 * (1 - sigmoid(1.0)), 2 * (1 - sigmoid(-0.5))]
    assert found == pytest.approx((sum(good) + 3 * (1 - sigmoid(-0.5))) / 3)
    without = objective("kto", kto_loss="apo_zero_unpaired", beta=0.5)
    wanted = (1 - sigmoid(1.0) + 1 - sigmoid(-0.5) + sigmoid(0.5)) / 3
    assert loss(without, LABELED, logps) == pytest.approx(wanted)


def test_metrics_have_the_names_of_trl() -> None:
    found = objective("dpo", beta=0.5).evaluate(PAIRS, LOGPS)[1]
    assert found == pytest.approx(
        {
            "rewards/chosen": 0.25,
            "rewards/rejected": 0.0,
            "rewards/accuracies": 0.5,
            "rewards/margins": 0.25,
            "logps/chosen": -15.5,
            "logps/rejected": -10.0,
        }
    )
    kto = objective("kto", kto_loss="apo_zero_unpaired", beta=0.5)
    found = kto.evaluate(LABELED, np.array([-10.0, -5.0, -21.0]))[1]
    assert found == pytest.approx(
        {
            "rewards/chosen": 0.25,
            "logps/chosen": -15.5,
            "rewards/rejected": 0.5,
            "logps/rejected": -5.0,
            "rewards/margins": -0.25,
        }
    )


def test_answer_of_several_turns_is_the_sum_of_its_examples() -> None:
    turns = [
        example(1, CHOSEN, 1, -2.0),
        example(1, CHOSEN, 3, -10.0),
        *PAIRS[1:],
    ]
    which = objective("dpo", beta=0.5)
    logps = np.array([-1.0, -9.0, *LOGPS[1:]])
    assert loss(which, turns, logps) == loss(which, PAIRS, LOGPS)


def test_first_loss_of_dpo_is_the_logarithm_of_two() -> None:
    which = objective("dpo")
    assert which.expected_first_loss(which.lay_out(PAIRS)) == pytest.approx(math.log(2))


def test_every_loss_can_be_chosen() -> None:
    assert OPTIONS["dpo_loss"].choices == tuple(DPO_LOSSES)
    assert OPTIONS["kto_loss"].choices == tuple(KTO_LOSSES)
    assert {*OPTIONS["objective"].choices} == {"sft", "dpo", "kto", "grpo", *OTHER_LOSSES}
