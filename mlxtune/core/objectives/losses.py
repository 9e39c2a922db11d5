"""Preference losses as formulas over log-probabilities.

Each function takes the `AnswerLogps` of a step's rows and the options, and returns the loss of each
row. `xp` is the array module: numpy, or mlx.core if a gradient is needed.

Sources: TRL 1.16 (`DPOTrainer`, `KTOTrainer`, `CPOTrainer` and `ORPOTrainer`) and the papers that
it cites; the losses have TRL's names.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxtune.config.objective_config import ObjectiveConfig


@dataclass(frozen=True)
class AnswerLogps:
    """The log-probabilities of a step's rows, as arrays (R,).

    A row has a chosen and a rejected answer, or only the answer in `chosen`, with the label 1 or 0
    in `desirable`. `count_…` are numbers of supervised tokens. `reference_…` are log-probabilities
    under the model before its first step, zeros if the objective needs none. `kl` is the step's
    estimate of the divergence from the reference, in nats.
    """

    chosen: Any
    rejected: Any
    reference_chosen: Any
    reference_rejected: Any
    count_chosen: Any
    count_rejected: Any
    desirable: Any
    kl: Any = 0.0

    @property
    def chosen_ratio(self) -> Any:
        """The log-ratio of the chosen answer's probabilities: trained model over reference."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Any:
        return self.rejected - self.reference_rejected

    @property
    def delta(self) -> Any:
        return self.chosen_ratio - self.rejected_ratio

    @property
    def mean_delta(self) -> Any:
        """The difference between the per-token log-ratios, which IPO's authors confirmed to TRL."""
        chosen = self.chosen_ratio / self.count_chosen
        return chosen - self.rejected_ratio / self.count_rejected


Loss = Callable[[AnswerLogps, ObjectiveConfig, Any], Any]


def _log_sigmoid(xp: Any, x: Any) -> Any:
    return -xp.logaddexp(0.0 * x, -x)


def _sigmoid(xp: Any, x: Any) -> Any:
    return xp.exp(_log_sigmoid(xp, x))


def _smoothed(xp: Any, x: Any, smoothing: float) -> Any:
    """Return -log sigmoid(x), smoothed as if a fraction `smoothing` of the labels were swapped."""
    loss = -_log_sigmoid(xp, x)
    return loss if not smoothing else (1 - smoothing) * loss - smoothing * _log_sigmoid(xp, -x)


# DPO


def _sigmoid_loss(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return -_log_sigmoid(xp, o.effective_beta * s.delta)


def _hinge(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return xp.maximum(1 - o.effective_beta * s.delta, 0.0)


def _ipo(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return xp.square(s.mean_delta - 1 / (2 * o.effective_beta))


def _exo_pair(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    x, smoothing = o.effective_beta * s.delta, o.label_smoothing
    log_win, log_lose = _log_sigmoid(xp, x), _log_sigmoid(xp, -x)
    return xp.exp(log_win) * (log_win - math.log1p(-smoothing)) + xp.exp(log_lose) * (
        log_lose - math.log(smoothing)
    )


def _nca_pair(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    chosen, rejected = o.effective_beta * s.chosen_ratio, o.effective_beta * s.rejected_ratio
    unlikely = _log_sigmoid(xp, -chosen) + _log_sigmoid(xp, -rejected)
    return -_log_sigmoid(xp, chosen) - 0.5 * unlikely


def _robust(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    x, smoothing = o.effective_beta * s.delta, o.label_smoothing
    clean = -(1 - smoothing) * _log_sigmoid(xp, x)
    return (clean + smoothing * _log_sigmoid(xp, -x)) / (1 - 2 * smoothing)


def _sppo_hard(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    half = 0.5 / o.effective_beta
    return xp.square(s.chosen_ratio - half) + xp.square(s.rejected_ratio + half)


def _apo_zero(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    rejected = _sigmoid(xp, o.effective_beta * s.rejected_ratio)
    return 1 - _sigmoid(xp, o.effective_beta * s.chosen_ratio) + rejected


def _apo_down(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    chosen = _sigmoid(xp, o.effective_beta * s.chosen_ratio)
    return chosen + 1 - _sigmoid(xp, o.effective_beta * s.delta)


def _aot(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    policy = xp.sort(s.chosen - s.rejected)
    reference = xp.sort(s.reference_chosen - s.reference_rejected)
    return _smoothed(xp, o.effective_beta * (policy - reference), o.label_smoothing)


def _aot_unpaired(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    delta = xp.sort(s.chosen_ratio) - xp.sort(s.rejected_ratio)
    return _smoothed(xp, o.effective_beta * delta, o.label_smoothing)


# TRL's default temperature for blending the two losses of DiscoPOP.
_DISCOPOP_TAU = 0.05


def _discopop(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    x = o.effective_beta * s.delta
    blend = _sigmoid(xp, x / _DISCOPOP_TAU)
    return -_log_sigmoid(xp, x) * (1 - blend) + xp.exp(-x) * blend


def _sigmoid_norm(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return -_log_sigmoid(xp, o.effective_beta * s.mean_delta)


# Without a reference


def _orpo(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return -o.effective_beta * _log_sigmoid(xp, log_odds_ratio(s, xp))


def log_odds_ratio(s: AnswerLogps, xp: Any) -> Any:
    """Return log(odds(chosen) / odds(rejected)) per token; Hong et al. 2024, equation 4."""
    chosen, rejected = s.chosen / s.count_chosen, s.rejected / s.count_rejected
    return (chosen - rejected) - (_log1mexp(xp, chosen) - _log1mexp(xp, rejected))


def _log1mexp(xp: Any, x: Any) -> Any:
    """Return log(1 - exp(x)) for x < 0."""
    return xp.log(-xp.expm1(x))


def _cpo(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return _smoothed(xp, o.effective_beta * (s.chosen - s.rejected), o.label_smoothing)


def _simpo(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    delta = s.chosen / s.count_chosen - s.rejected / s.count_rejected
    return _smoothed(xp, o.effective_beta * delta - o.gamma, o.label_smoothing)


# Answers with a label


def _kto(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return _unpaired(s, o, xp, s.kl)


def _apo_zero_unpaired(s: AnswerLogps, o: ObjectiveConfig, xp: Any) -> Any:
    return _unpaired(s, o, xp, 0.0)


def _unpaired(s: AnswerLogps, o: ObjectiveConfig, xp: Any, kl: Any) -> Any:
    gain = o.effective_beta * (s.chosen_ratio - kl)
    good = o.desirable_weight * (1 - _sigmoid(xp, gain))
    bad = o.undesirable_weight * (1 - _sigmoid(xp, -gain))
    return s.desirable * good + (1 - s.desirable) * bad


DPO_LOSSES: Mapping[str, Loss] = {
    "sigmoid": _sigmoid_loss,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}
KTO_LOSSES: Mapping[str, Loss] = {"kto": _kto, "apo_zero_unpaired": _apo_zero_unpaired}
OTHER_LOSSES: Mapping[str, Loss] = {"orpo": _orpo, "cpo": _cpo, "simpo": _simpo}
# DPO losses in which a row's loss depends on the other rows of its step.
CROSS_ROW_LOSSES = ("aot", "aot_unpaired")
