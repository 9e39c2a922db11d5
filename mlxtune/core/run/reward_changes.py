"""How the rewards of sampled answers, and the answers, changed in the course of a run."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlxtune.config.objective_config import REWARDED
from mlxtune.core.run.stored_run import Run

# The fewest steps of a third that show a change.
_MIN_STEPS = 3
SUM = "sum of rewards"
_REWARDS, _MEAN = "rewards/", "/mean"
_SHARE = "share of "
_WITHOUT_GRADIENT = "share of rows without a gradient"
# What a run measures of its answers besides rewards.
_MEASURES = {
    "completions/mean_length": "tokens per answer",
    "completions/clipped_ratio": "share of truncated answers",
    "frac_reward_zero_std": _WITHOUT_GRADIENT,
    "completions/without_reward": "share of answers without a reward",
    "kl": "divergence from the start (KL)",
}
_NEGATIVE_WEIGHT = re.compile(r"=-[\d.eE+-]+$")
Kind = Literal["reward", "sum", "answers"]


@dataclass(frozen=True)
class MetricChange:
    """The means of a metric over the first and the last third of a run's steps.

    `spreads` are the mean standard deviations of a reward within a step. `moved` is 1 or -1 if the
    metric rose or fell by more than twice the standard error of the difference, else 0. A `penalty`
    is a reward with a negative weight.
    """

    label: str
    first: float
    last: float
    moved: int
    kind: Kind
    penalty: bool = False
    spreads: Sequence[float] = ()

    @property
    def texts(self) -> list[str]:
        """Both means, with their spreads."""
        spreads = [f" ± {each:.3g}" for each in self.spreads] or ["", ""]
        means = map(self._text, (self.first, self.last))
        return [mean + spread for mean, spread in zip(means, spreads, strict=True)]

    def _text(self, mean: float) -> str:
        return f"{mean:.1%}" if self.label.startswith(_SHARE) else mean_text(mean)

    @property
    def verb(self) -> str:
        return {1: "rose", 0: "did not clearly change", -1: "fell"}[self.moved]

    @property
    def sentence(self) -> str:
        return (
            f"{self.label} {self.verb}: {self._text(self.first)} in the first third of the steps, "
            f"{self._text(self.last)} in the last"
        )


def mean_text(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def reward_keys(run: Run) -> dict[str, str]:
    """Return the metrics of a run's rewards by name, in the order of its options; their sum first.

    A single reward has no sum.
    """
    every = dict.fromkeys(name for step in run.progress.steps.metrics for name in step)
    found = (key for key in every if key.startswith(_REWARDS) and key.endswith(_MEAN))
    keys = {key.removeprefix(_REWARDS).removesuffix(_MEAN): key for key in found}
    return {SUM: "reward", **keys} if len(keys) > 1 else keys


def spread_key(key: str) -> str:
    """Return the metric of a reward's spread, given that of its mean."""
    return f"{key}_std" if key == "reward" else key.removesuffix(_MEAN) + "/std"


def metric_values(run: Run, key: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a metric, and its values."""
    steps, values = [], []
    for step, metrics in zip(run.column("step"), run.progress.steps.metrics, strict=True):
        if key in metrics:
            steps.append(step)
            values.append(metrics[key])
    return steps, values


def metric_changes(run: Run) -> list[MetricChange]:
    """Return the changes of a run's rewards and of its answers.

    Empty for a run that does not learn from rewards, or has too few steps.
    """
    if run.config.get("objective") not in REWARDED:
        return []
    keys, options = reward_keys(run), run.config.get("reward")
    names = [name for name in keys if name != SUM]
    options = options if isinstance(options, list) and len(options) == len(names) else names
    texts = dict(zip(names, map(str, options), strict=True))
    changes = [
        _change(run, key, name, "reward", bool(_NEGATIVE_WEIGHT.search(texts[name])))
        if name in texts
        else _change(run, key, name, "sum")
        for name, key in keys.items()
    ]
    changes += [_change(run, key, label, "answers") for key, label in _MEASURES.items()]
    found = (change for change in changes if change is not None)
    return [each for each in found if each.kind != "answers" or each.first or each.last]


def _change(
    run: Run, key: str, label: str, kind: Kind, penalty: bool = False
) -> MetricChange | None:
    _, values = metric_values(run, key)
    if (third := len(values) // 3) < _MIN_STEPS:
        return None
    first, last = (float(np.mean(each)) for each in (values[:third], values[-third:]))
    scatter = np.var(values[:third], ddof=1) + np.var(values[-third:], ddof=1)
    # Steps have different rows, so a change within their noise is not significant.
    change, error = last - first, math.sqrt(scatter / third)
    moved = (change > 2 * error) - (change < -2 * error)
    _, deviations = metric_values(run, spread_key(key)) if kind != "answers" else ([], [])
    spreads = [float(np.mean(each)) for each in (deviations[:third], deviations[-third:]) if each]
    return MetricChange(label, first, last, moved, kind, penalty, spreads)


def gradient_warning(changes: Sequence[MetricChange]) -> Iterator[str]:
    """Yield a sentence if most rows of the last third had no gradient."""
    for each in changes:
        if each.label == _WITHOUT_GRADIENT and each.last > 0.5:
            yield (
                f"In the last third, {each.last:.0%} of the rows taught nothing, because all their "
                "answers had the same reward."
            )


def opposites(changes: Sequence[MetricChange]) -> list[tuple[MetricChange, MetricChange]]:
    """Return pairs of rewards of which the first got better while the second got worse."""
    rewards = [each for each in changes if each.kind == "reward"]
    toward = {each.label: -each.moved if each.penalty else each.moved for each in rewards}
    better = [each for each in rewards if toward[each.label] > 0]
    worse = [each for each in rewards if toward[each.label] < 0]
    return [(one, other) for one in better for other in worse]
