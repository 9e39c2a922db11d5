"""The charts of one run, and of several runs overlaid."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePath

import numpy as np

from mlxtune.core.formatting import byte_size, loss_text, pluralize
from mlxtune.core.run.extension import extensions_of
from mlxtune.core.run.metrics import (
    CLIPPED_RATIO,
    EQUAL_REWARDS,
    MASKED_ROWS,
    MEAN_LENGTH,
    REWARD,
    WITHOUT_REWARD,
    validation_measure,
)
from mlxtune.core.run.sampled_answers import (
    ANSWER_LABELS,
    FRACTION,
    metric_values,
    reward_keys,
    spread_key,
)
from mlxtune.core.run.stored_run import Run, number
from mlxtune.core.run.summary import REWARD_MEASURE, RunView, measure_of
from mlxtune.views.pages.axis import spans_much
from mlxtune.views.pages.charts import Chart, Series

# The numbers of colours and of dash patterns for runs: more runs repeat the colours with dashes.
COLORS, _DASHES = 8, 3
# A level is drawn if the highest value is between this and the inverse of its square times the
# level.
_LEVEL_RATIO = 0.4
_MAX_EPOCHS = 24
# On a logarithmic scale, values below this fraction of the lowest curve's highest are left out.
_MIN_VISIBLE_FRACTION = 0.01
_LOSS_UNIT = "nats per supervised token"


@dataclass(frozen=True)
class _StepMeasure:
    """A value to draw for each step. `averaged` adds its moving average, which is smoother."""

    title: str
    unit: str
    style: str
    values: Callable[[Run], Sequence[float]]
    averaged: bool = False
    from_zero: bool = False


def _measures(views: Sequence[RunView]) -> tuple[_StepMeasure, ...]:
    peak = max((view.peak_memory or 0 for view in views), default=0)
    size, unit = (1e9, "GB") if peak >= 1e9 else (1e6, "MB")

    def memory(run: Run) -> list[float]:
        """Return the peak memory of each step; NaN if it was not measured."""
        return [(value or math.nan) / size for value in run.column("memory")]

    rate, norm = (lambda run: run.column("learning_rate")), (lambda run: run.column("grad_norm"))
    at_peak = f"{unit} at the peak of each step"
    return (
        _StepMeasure("Learning rate", "", "lr", rate, from_zero=True),
        _StepMeasure("Gradient norm", "before clipping", "grad", norm, averaged=True),
        _StepMeasure("Speed", "tokens per second", "speed", _speeds, averaged=True, from_zero=True),
        _StepMeasure("Memory", at_peak, "memory", memory, from_zero=True),
    )


def charts_of(run: Run, view: RunView) -> list[Chart]:
    charts = [_chart(run, view, each) for each in _measures([view])]
    if view.is_rewarded:
        return [main_chart(run, view), *_sampled_charts(run), *charts]
    rewards = [_rewards_chart(run)] if any(step.metrics for step in run.progress.steps[:1]) else []
    return [main_chart(run, view), *rewards, *charts]


def main_chart(run: Run, view: RunView) -> Chart:
    """Return the chart that shows best what a run learned: of its rewards, or else its loss."""
    return _reward_chart(run) if view.is_rewarded else loss_chart(run, view)


def _rewards_chart(run: Run) -> Chart:
    """Return the chart of the rewards of chosen and rejected answers, with moving averages."""
    series, last = [], []
    for name, style in (("chosen", "train"), ("rejected", "val")):
        steps, values = metric_values(run, f"rewards/{name}")
        series += [
            Series(f"{name}, each step", style, steps, values, "faint"),
            Series(f"{name}, averaged", style, steps, smooth(values)),
        ]
        last += [f"{name} {values[-1]:.3g} at last"] if values else []
    return Chart("Rewards", "beta times the log-ratio", series, f"Rewards: {'; '.join(last)}")


def _reward_chart(run: Run) -> Chart:
    """Return the chart of the rewards of sampled answers, and of those to validation rows."""
    chart = _metric_chart(run, "Rewards", "mean of a step's answers", reward_keys(run))
    series = _validation("validation, greedy answers", "val", run)
    return replace(chart, series=[*chart.series, series], large=True, skipped=_skipped_steps(run))


def _sampled_charts(run: Run) -> list[Chart]:
    """Return the charts of what a run measures of its sampled answers."""
    spreads = {name: spread_key(key) for name, key in reward_keys(run).items()}
    fractions = {
        ANSWER_LABELS[key].removeprefix(FRACTION): key
        for key in (CLIPPED_RATIO, EQUAL_REWARDS, WITHOUT_REWARD, MASKED_ROWS)
    }
    ratios = {"largest": "ratio/max", "mean": "ratio/mean"}
    lengths = {ANSWER_LABELS[MEAN_LENGTH]: MEAN_LENGTH}
    length = _metric_chart(run, "Length", "tokens, mean of a step's answers", lengths)
    values = [value for curve in length.series for value in curve.y]
    limit = _level_near(values, number(run.config, "max_new_tokens"), "--max-new-tokens")
    charts = [
        _metric_chart(run, "Spread of rewards", "standard deviation in a step", spreads),
        replace(length, levels=limit),
        _metric_chart(run, "Fractions", "of a step", fractions),
        _metric_chart(run, "Training and sampling", "ratio of a token's two probabilities", ratios),
    ]
    if number(run.config, "kl"):
        charts.append(_metric_chart(run, "Divergence", "KL from the start", {"KL": "kl"}))
    return charts


def _metric_chart(run: Run, title: str, unit: str, keys: Mapping[str, str]) -> Chart:
    """Return the chart of metrics by their names: averaged, and a single one also step by step."""
    series, texts = list[Series](), []
    for i, (name, key) in enumerate(keys.items()):
        steps, values = metric_values(run, key)
        if not values or (key in (WITHOUT_REWARD, MASKED_ROWS) and not any(values)):
            continue
        style = style_of(i)
        if len(keys) == 1:
            series += _averaged("each step", "averaged", style, steps, values)
        else:
            series.append(Series(name, style, steps, smooth(values)))
        texts.append(f"{name} {values[0]:.3g} at first, {values[-1]:.3g} at last")
    if len(keys) > 1 and series:
        unit += f", averaged over {span_for(len(series[0].y))}"
    description = f"{title}: {'; '.join(texts) or 'not measured'}"
    return Chart(title, unit, series, description, from_zero=True)


def _skipped_steps(run: Run) -> list[int]:
    return [each.step for each in run.progress.skipped]


def _chart(run: Run, view: RunView, measure: _StepMeasure) -> Chart:
    steps, values, style = run.column("step"), measure.values(run), measure.style
    series, level, name = [Series(measure.title.lower(), style, steps, values)], None, ""
    if measure.averaged:
        series = _averaged("each step", "averaged", style, steps, values)
    if style == "grad" and (level := number(run.config, "max_grad_norm")):
        name = f"clipped at {level:g}"
    if style == "memory":
        predicted = view.predicted_memory or 0
        level = predicted / (1e9 if measure.unit.startswith("GB") else 1e6)
        name = f"predicted peak {byte_size(predicted)}"
        highest = np.fmax.accumulate(values).tolist()
        series = [
            Series("each step", style, steps, values, "faint"),
            Series("highest so far", style, steps, highest),
        ]
    description = _describe(
        f"{measure.title} ({measure.unit})" if measure.unit else measure.title, values
    )
    extensions = [each.step for each in extensions_of(run.metadata)] if style == "lr" else []
    unit = measure.unit
    if extensions:
        unit = f"extended after step {', '.join(f'{step:,}' for step in extensions)}"
        description += f"; {unit}"
    return Chart(
        measure.title,
        unit,
        series,
        description,
        from_zero=measure.from_zero,
        levels=_level_near(values, level, name),
        verticals=extensions,
    )


def loss_chart(run: Run, view: RunView) -> Chart:
    steps, losses = run.column("step"), run.column("loss")
    both = pairwise(zip(steps, run.column("epoch"), strict=True))
    ends = [step for (step, epoch), (_, following) in both if epoch != following]
    description = f"Loss over {pluralize(view.step, 'step')}"
    if losses:
        description += (
            f": training {loss_text(losses[0])} at first, {loss_text(losses[-1])} at last"
        )
    if view.initial_val_loss is not None:
        description += f"; validation {loss_text(view.initial_val_loss)} before"
        description += f", {loss_text(view.best_val_loss)} at best"
    return Chart(
        title="Training and validation",
        unit=_LOSS_UNIT if view.objective == "sft" else f"loss of {view.objective}",
        series=[
            *_averaged("training, each step", "training, averaged", "train", steps, losses),
            _validation("validation", "val", run),
            *_validation_by_file(run),
        ],
        description=description,
        verticals=ends if len(ends) <= _MAX_EPOCHS else (),
        skipped=_skipped_steps(run),
        large=True,
    )


def comparison_charts(runs: Sequence[Run], views: Sequence[RunView]) -> list[Chart]:
    """Return the charts of several runs, each run in its own colour; validation loss first."""
    named = [(view.name, style_of(i), runs[i], i) for i, view in enumerate(views)]
    best = (f"{each.name} {each.validation_text(each.best_val_loss)} at best" for each in views)
    validation = [_validation(*each) for each in named]
    measures = measure_of(views)
    title, rewarded = f"{measures[0].upper()}{measures[1:]}", measures == REWARD_MEASURE
    unit = "of greedy answers to validation rows" if rewarded else _LOSS_UNIT
    description = f"{title}: {'; '.join(best)}"
    charts = [Chart(title, unit, validation, description, large=True)]
    loss = _StepMeasure("Training loss", _LOSS_UNIT, "train", lambda run: run.column("loss"), True)
    if rewarded:
        loss = _StepMeasure("Reward", "of sampled answers", "train", _sampled_rewards, True)
    for measure in (loss, *_measures(views)):
        curves = [_smoothed(measure, run) for run in runs]
        wide = measure.from_zero and spans_much(list(filter(None, map(_highest, curves))))
        charts.append(
            Chart(
                measure.title,
                f"{measure.unit}, averaged" if measure.averaged else measure.unit,
                [
                    Series(name, style, run.column("step"), values, run=index)
                    for (name, style, run, index), values in zip(
                        named, _within_sight(curves) if wide else curves, strict=True
                    )
                ],
                f"{measure.title} of {pluralize(len(runs), 'run')}, step by step",
                from_zero=measure.from_zero and not wide,
                large=measure is loss,
                log=wide,
            )
        )
    return charts


def _sampled_rewards(run: Run) -> list[float]:
    return [metrics.get(REWARD, math.nan) for metrics in run.progress.steps.metrics]


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _within_sight(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return curves for a logarithmic scale without values near zero, which would stretch it."""
    least = _MIN_VISIBLE_FRACTION * min(filter(None, map(_highest, curves)))
    return [[value if value >= least else math.nan for value in curve] for curve in curves]


def _smoothed(measure: _StepMeasure, run: Run) -> Sequence[float]:
    values = measure.values(run)
    return smooth(values) if measure.averaged else values


def style_of(index: int) -> str:
    """Return the CSS classes for the colour and dash pattern of the nth run on the page."""
    dashes = index // COLORS % _DASHES
    return f"c{index % COLORS}" + (f" d{dashes}" if dashes else "")


def _validation(name: str, style: str, run: Run, index: int | None = None) -> Series:
    """Return the validations: losses, or mean rewards."""
    objective, validations = run.config.get("objective"), run.progress.validations
    steps, values = (
        [each.step for each in validations],
        [validation_measure(each.val_loss, objective)[1] for each in validations],
    )
    return Series(name, style, steps, values, "points", index)


def _validation_by_file(run: Run) -> list[Series]:
    """Return a curve of the validation loss for each file, if there are several files."""
    points: dict[str, tuple[list[float], list[float]]] = {}
    for validation in run.progress.validations:
        for file in validation.files:
            x, y = points.setdefault(file.path, ([], []))
            x.append(validation.step)
            y.append(file.val_loss)
    return [
        Series(f"validation, {PurePath(path).name}", style_of(index + 1), x, y, "points")
        for index, (path, (x, y)) in enumerate(points.items())
    ]


def _averaged(
    name: str, averaged: str, style: str, x: Sequence[float], y: Sequence[float]
) -> list[Series]:
    """Return the measured curve, drawn faint, and its moving average."""
    average = Series(f"{averaged} over {span_for(len(y))}", style, x, smooth(y))
    return [Series(name, style, x, y, "faint"), average]


def span_for(steps: int) -> int:
    """Return the number of steps to average over, for a curve of `steps` steps."""
    return min(max(10, round(steps / 50)), max(1, steps // 4))


def smooth(values: Sequence[float]) -> list[float]:
    """Return the moving average of the finite values, with NaN in place of other values.

    The average is exponential, with the centre of mass of a window of `span_for` values, and its
    start is corrected for bias as in Adam (arXiv:1412.6980, section 3).
    """
    span = span_for(len(values))
    keep = (span - 1) / (span + 1)
    total = weight = 0.0
    averages = []
    for value in values:
        if not math.isfinite(value):
            averages.append(math.nan)
            continue
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        averages.append(total / weight)
    return averages


def _level_near(values: Sequence[float], level: float | None, name: str) -> dict[str, float]:
    highest = max((value for value in values if math.isfinite(value)), default=0.0)
    if not level or not _LEVEL_RATIO * level <= highest <= level / _LEVEL_RATIO**2:
        return {}
    return {name: level}


def _describe(name: str, values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return f"{name}: not measured"
    return f"{name}: {finite[0]:.3g} at first, {finite[-1]:.3g} at last, {max(finite):.3g} at most"


def _speeds(run: Run) -> list[float]:
    """Return each step's speed in tokens per second, NaN if no time was measured."""
    pairs = zip(run.column("tokens"), run.column("seconds"), strict=True)
    return [tokens / seconds if seconds > 0 else math.nan for tokens, seconds in pairs]
