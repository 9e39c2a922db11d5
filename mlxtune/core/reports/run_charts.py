"""The charts of one run, and of several overlaid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from mlxtune.core.reports.charts import Chart, Level, Series
from mlxtune.core.reports.curves import decimate, smooth, span_for
from mlxtune.core.runs.run import Run, number
from mlxtune.core.runs.summary import RunSummary
from mlxtune.core.text import byte_size, count, loss_text

# Points of a curve on the page of one run, and of several.
_POINTS, _POINTS_OF_SEVERAL = 1000, 400
# The number of colours for runs; after these they repeat with other dashes.
COLOURS, _DASHES = 8, 3
# A level is drawn if the highest value comes this close to it.
_NEAR = 0.4
_MOST_EPOCHS = 24
_LOSS_UNIT = "nats per supervised token"


def charts_of(run: Run, summary: RunSummary) -> list[Chart]:
    """Return the charts of one run, that of the loss first."""
    steps = run.column("step")
    grad_norm, clip = run.column("grad_norm"), number(run.config, "max_grad_norm")
    size, unit = _memory_unit([summary])
    memory = _memory(run, size)
    predicted = summary.predicted_memory or 0
    return [
        _loss_chart(run, summary),
        Chart(
            title="Learning rate",
            unit="",
            series=[_curve("learning rate", "lr", steps, run.column("learning_rate"))],
            description=_describe("Learning rate", run.column("learning_rate")),
            from_zero=True,
        ),
        Chart(
            title="Gradient norm",
            unit="before clipping",
            series=_averaged("grad", steps, grad_norm),
            description=_describe("Gradient norm", grad_norm),
            choose_scale=True,
            levels=_near(grad_norm, clip, f"clipped at {clip:g}" if clip else ""),
        ),
        Chart(
            title="Speed",
            unit="tokens a second",
            series=_averaged("speed", steps, _speeds(run)),
            description=_describe("Tokens a second", _speeds(run)),
            from_zero=True,
        ),
        Chart(
            title="Memory",
            unit=f"{unit} at the peak of each step",
            series=[
                _curve("each step", "memory", steps, memory, draw="faint"),
                _curve("highest so far", "memory", steps, memory, highest=True),
            ],
            description=_describe(f"Memory in {unit}", memory),
            from_zero=True,
            levels=_near(memory, predicted / size, f"predicted peak {byte_size(predicted)}"),
        ),
    ]


def _loss_chart(run: Run, summary: RunSummary) -> Chart:
    steps, losses = run.column("step"), run.column("loss")
    span, shown = span_for(len(steps)), decimate(losses, _POINTS)
    both = pairwise(zip(steps, run.column("epoch"), strict=True))
    ends = [step for (step, epoch), (_, following) in both if epoch != following]
    description = f"Loss over {count(summary.step, 'step')}"
    if losses:
        description += (
            f": training {loss_text(losses[0])} at first, {loss_text(losses[-1])} at last"
        )
    if summary.initial_val_loss is not None:
        description += f"; validation {loss_text(summary.initial_val_loss)} before"
        description += f", {loss_text(summary.best_val_loss)} at best"
    return Chart(
        title="Training and validation",
        unit=_LOSS_UNIT,
        series=[
            _at(shown, "training, each step", "train", steps, losses, draw="faint"),
            _at(shown, f"training, averaged over {span}", "train", steps, smooth(losses, span)),
            _validation("validation", "val", run),
        ],
        description=description,
        choose_scale=True,
        verticals=ends if len(ends) <= _MOST_EPOCHS else (),
        skipped=[each.step for each in run.progress.skipped],
        large=True,
    )


def _validation(name: str, style: str, run: Run, place: int | None = None) -> Series:
    validations = run.progress.validations
    steps, losses = [each.step for each in validations], [each.val_loss for each in validations]
    return Series(name, style, steps, losses, "points", place, sparse=True)


def _curve(
    name: str,
    style: str,
    x: Sequence[float],
    y: Sequence[float],
    *,
    draw: str = "line",
    highest: bool = False,
    points: int = _POINTS,
    run: int | None = None,
) -> Series:
    """Return the points of a curve that are worth drawing, or those of its running maximum."""
    shown = decimate(y, points)
    values = [y[i] for i in shown]
    values = list(accumulate(values, max)) if highest else values
    return Series(name, style, [x[i] for i in shown], values, draw, run)


def _at(
    shown: Sequence[int],
    name: str,
    style: str,
    x: Sequence[float],
    y: Sequence[float],
    draw: str = "line",
) -> Series:
    return Series(name, style, [x[i] for i in shown], [y[i] for i in shown], draw)


def _averaged(style: str, x: Sequence[float], y: Sequence[float]) -> list[Series]:
    """Return a curve as measured, drawn faint, and its moving average."""
    shown, span = decimate(y, _POINTS), span_for(len(y))
    average = _at(shown, f"averaged over {span}", style, x, smooth(y, span))
    return [_at(shown, "each step", style, x, y, draw="faint"), average]


def _near(values: Sequence[float], level: float | None, name: str) -> tuple[Level, ...]:
    highest = max((value for value in values if math.isfinite(value)), default=0.0)
    if not level or not _NEAR * level <= highest <= level / _NEAR**2:
        return ()
    return (Level(level, name),)


def _describe(name: str, values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return f"{name}: not measured"
    return f"{name}: {finite[0]:.3g} at first, {finite[-1]:.3g} at last, {max(finite):.3g} at most"


def _speeds(run: Run) -> list[float]:
    """Return the tokens a second of each step, NaN if no time was measured."""
    pairs = zip(run.column("tokens"), run.column("seconds"), strict=True)
    return [tokens / seconds if seconds > 0 else math.nan for tokens, seconds in pairs]


def _memory_unit(summaries: Sequence[RunSummary]) -> tuple[float, str]:
    peak = max((summary.peak_memory or 0 for summary in summaries), default=0)
    return (1e9, "GB") if peak >= 1e9 else (1e6, "MB")


def _memory(run: Run, size: float) -> list[float]:
    """Return the peak of each step in units of `size` bytes; 0 means that it was not measured."""
    return [(value or math.nan) / size for value in run.column("memory")]


# Several runs


def comparison_charts(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> list[Chart]:
    """Return the charts of several runs, each in its own colour; validation loss first."""
    names = [summary.name for summary in summaries]
    size, unit = _memory_unit(summaries)

    def chart(
        title: str, unit: str, values: Sequence[Sequence[float]], smoothed: bool, **shape: bool
    ) -> Chart:
        curves = []
        for i, (name, run, y) in enumerate(zip(names, runs, values, strict=True)):
            y = smooth(y, span_for(len(y))) if smoothed else y
            x, style = run.column("step"), style_of(i)
            curves.append(_curve(name, style, x, y, points=_POINTS_OF_SEVERAL, run=i))
        description = f"{title} of {len(runs)} runs, step by step"
        return Chart(title, unit, curves, description, **shape)  # type: ignore[arg-type]

    def column(name: str) -> list[Sequence[float]]:
        return [run.column(name) for run in runs]

    best = (f"{each.name} {loss_text(each.best_val_loss)} at best" for each in summaries)
    speeds, peaks = [_speeds(run) for run in runs], [_memory(run, size) for run in runs]
    averaged_loss = f"{_LOSS_UNIT}, averaged"
    return [
        Chart(
            title="Validation loss",
            unit=_LOSS_UNIT,
            series=[_validation(names[i], style_of(i), run, i) for i, run in enumerate(runs)],
            description=f"Validation loss: {'; '.join(best)}",
            choose_scale=True,
            large=True,
            x_high=max((each.step for each in summaries), default=None),
        ),
        chart("Training loss", averaged_loss, column("loss"), True, choose_scale=True, large=True),
        chart("Learning rate", "", column("learning_rate"), False, from_zero=True),
        chart("Gradient norm", "averaged", column("grad_norm"), True, choose_scale=True),
        chart("Speed", "tokens a second, averaged", speeds, True, from_zero=True),
        chart("Memory", f"{unit} at the peak of each step", peaks, False, from_zero=True),
    ]


def style_of(place: int) -> str:
    """Return the CSS classes of the colour and dashes of a run, by its place on the page."""
    dashes = place // COLOURS % _DASHES
    return f"c{place % COLOURS}" + (f" d{dashes}" if dashes else "")
