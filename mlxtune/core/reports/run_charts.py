"""Which charts are drawn of a run, and of several, one over the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from mlxtune.core.reports.charts import Chart, Level, Series
from mlxtune.core.reports.curves import decimate, smooth, span_for
from mlxtune.core.runs.run import Run, number
from mlxtune.core.runs.summary import RunSummary
from mlxtune.core.text import count, loss_text

# Points of a curve on the page of one run, and of several.
_POINTS, _POINTS_OF_SEVERAL = 1000, 400
# Colours that the page has for runs; after these they come again.
COLOURS = 8
# What is compared with is drawn where the curves come as near to it.
_NEAR = 0.4
_MOST_EPOCHS = 24
Curve = tuple[list[float], list[float]]


def charts_of(run: Run, summary: RunSummary) -> list[Chart]:
    """Return the charts of one run, that of the loss first."""
    return [_loss(run, summary), *_course(run, summary)]


def _loss(run: Run, summary: RunSummary) -> Chart:
    steps, span = run.steps, span_for(len(run.steps))
    shown = decimate(steps["loss"], _POINTS)
    x = [steps["step"][i] for i in shown]
    averages = smooth(steps["loss"], span)
    validation = _validation(run)
    both = pairwise(zip(steps["step"], steps["epoch"], strict=True))
    ends = [step for (step, epoch), (_, following) in both if epoch != following]
    return Chart(
        title="Training and validation",
        unit="nats a supervised token",
        series=(
            Series("training, each step", "train", x, [steps["loss"][i] for i in shown], "faint"),
            Series(f"training, averaged over {span}", "train", x, [averages[i] for i in shown]),
            Series("validation", "val", *validation, "points", sparse=True),
        ),
        said=_said_of_loss(summary, steps["loss"]),
        choose_scale=True,
        verticals=ends if len(ends) <= _MOST_EPOCHS else (),
        skipped=_skipped(run),
        large=True,
    )


def _said_of_loss(summary: RunSummary, losses: Sequence[float]) -> str:
    said = f"Loss over {count(summary.step, 'step')}"
    if losses:
        said += f": training {loss_text(losses[0])} at first, {loss_text(losses[-1])} at last"
    if summary.initial_val_loss is not None:
        said += f"; validation {loss_text(summary.initial_val_loss)} before"
        said += f", {loss_text(summary.best_val_loss)} at best"
    return said


def _skipped(run: Run) -> list[float]:
    return [step for each in run.skipped if (step := number(each, "step")) is not None]


def _validation(run: Run) -> Curve:
    return [float(step) for step, _ in run.validations], [loss for _, loss in run.validations]


def _course(run: Run, summary: RunSummary) -> list[Chart]:
    """Return the charts of what is not the loss."""
    steps = run.steps
    grad_norm, clip = steps["grad_norm"], number(run.config, "max_grad_norm")
    size, unit = memory_unit(summary.peak_memory or 0)
    used = [value / size for value in steps.measured("memory")]
    predicted = (summary.predicted_memory or 0) / size
    return [
        Chart(
            title="Learning rate",
            unit="",
            series=(_curve("learning rate", "lr", steps["step"], steps["learning_rate"]),),
            said=_said("Learning rate", steps["learning_rate"]),
            from_zero=True,
        ),
        Chart(
            title="Gradient norm",
            unit="before clipping",
            series=_both("gradient norm", "grad", steps["step"], grad_norm),
            said=_said("Gradient norm", grad_norm),
            choose_scale=True,
            levels=_near(grad_norm, clip, f"clipped at {clip:g}" if clip else ""),
        ),
        Chart(
            title="Speed",
            unit="tokens a second",
            series=_both("tokens a second", "speed", steps["step"], speeds(run)),
            said=_said("Tokens a second", speeds(run)),
            from_zero=True,
        ),
        Chart(
            title="Memory",
            unit=f"{unit} at the peak of each step",
            series=_with_highest("memory", steps["step"], used),
            said=_said(f"Memory in {unit}", used),
            from_zero=True,
            levels=_near(used, predicted, f"predicted peak {predicted:.3g} {unit}"),
        ),
    ]


def _near(values: Sequence[float], level: float | None, name: str) -> tuple[Level, ...]:
    highest = max((value for value in values if math.isfinite(value)), default=0.0)
    if not level or not _NEAR * level <= highest <= level / _NEAR**2:
        return ()
    return (Level(level, name),)


def _said(name: str, values: Sequence[float]) -> str:
    there = [value for value in values if math.isfinite(value)]
    if not there:
        return f"{name}: not measured"
    return f"{name}: {there[0]:.3g} at first, {there[-1]:.3g} at last, {max(there):.3g} at most"


def _curve(
    name: str,
    style: str,
    x: Sequence[float],
    y: Sequence[float],
    *,
    points: int = _POINTS,
    run: int | None = None,
) -> Series:
    shown = decimate(y, points)
    return Series(name, style, [x[i] for i in shown], [y[i] for i in shown], run=run)


def _both(name: str, style: str, x: Sequence[float], y: Sequence[float]) -> tuple[Series, ...]:
    """Return a curve as it is, faint, and its average."""
    shown, span = decimate(y, _POINTS), span_for(len(y))
    averages, at = smooth(y, span), [x[i] for i in shown]
    return (
        Series("each step", style, at, [y[i] for i in shown], "faint"),
        Series(f"averaged over {span}", style, at, [averages[i] for i in shown]),
    )


def _with_highest(style: str, x: Sequence[float], y: Sequence[float]) -> tuple[Series, ...]:
    """Return a curve as it is, faint, and the highest value so far."""
    shown = decimate(y, _POINTS)
    highest = list(accumulate((y[i] for i in shown), max))
    at = [x[i] for i in shown]
    return (
        Series("each step", style, at, [y[i] for i in shown], "faint"),
        Series("highest so far", style, at, highest),
    )


def speeds(run: Run) -> list[float]:
    """Return the tokens a second of each step, NaN where no time was measured."""
    pairs = zip(run.steps["tokens"], run.steps["seconds"], strict=True)
    return [tokens / seconds if seconds > 0 else math.nan for tokens, seconds in pairs]


def memory_unit(peak: float) -> tuple[float, str]:
    """Return the unit in which so many bytes are told."""
    return (1e9, "GB") if peak >= 1e9 else (1e6, "MB")


# Several runs


def comparison_charts(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> list[Chart]:
    """Return the charts of several runs, each a colour of its own."""
    peak = max((summary.peak_memory or 0 for summary in summaries), default=0)
    size, unit = memory_unit(peak)
    both = list(zip(runs, summaries, strict=True))

    def chart(
        title: str, unit: str, values: Callable[[Run], Sequence[float]], **options: bool
    ) -> Chart:
        averaged = title != "Learning rate" and title != "Memory"
        curves = []
        for number_, (run, summary) in enumerate(both):
            y, name = list(values(run)), summary.name
            y = smooth(y, span_for(len(y))) if averaged else y
            style, x = style_of(number_), run.steps["step"]
            curves.append(_curve(name, style, x, y, points=_POINTS_OF_SEVERAL, run=number_))
        said = f"{title} of {len(both)} runs, step by step"
        return Chart(title, unit, curves, said, **options)  # type: ignore[arg-type]

    validation = Chart(
        title="Validation loss",
        unit="nats a supervised token",
        series=[
            Series(summary.name, style_of(i), *_validation(run), "points", run=i, sparse=True)
            for i, (run, summary) in enumerate(both)
        ],
        said="Validation loss: "
        + "; ".join(f"{each.name} {loss_text(each.best_val_loss)} at best" for each in summaries),
        choose_scale=True,
        large=True,
        x_high=max((each.step for each in summaries), default=None),
    )
    averaged = "averaged"
    return [
        validation,
        chart(
            "Training loss",
            f"nats a supervised token, {averaged}",
            lambda run: run.steps["loss"],
            choose_scale=True,
            large=True,
        ),
        chart("Learning rate", "", lambda run: run.steps["learning_rate"], from_zero=True),
        chart("Gradient norm", averaged, lambda run: run.steps["grad_norm"], choose_scale=True),
        chart("Speed", f"tokens a second, {averaged}", speeds, from_zero=True),
        chart(
            "Memory",
            f"{unit} at the peak of each step",
            lambda run: [value / size for value in run.steps.measured("memory")],
            from_zero=True,
        ),
    ]


def style_of(number_: int) -> str:
    """Return the class of a run's colour, by its number on the page."""
    again = number_ // COLOURS % 3
    return f"c{number_ % COLOURS}" + (f" d{again}" if again else "")
