"""The charts of one run, and of several overlaid."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from mlxtune.core.run.run import Run, number
from mlxtune.core.run.summary import RunView
from mlxtune.core.text import byte_size, count, loss_text
from mlxtune.views.pages.charts import Chart, Series

# The number of colours for runs; after these they repeat with other dashes.
COLOURS, _DASHES = 8, 3
# A level is drawn if the highest value comes this close to it.
_NEAR = 0.4
_MOST_EPOCHS = 24
_LOSS_UNIT = "nats per supervised token"


def charts_of(run: Run, view: RunView) -> list[Chart]:
    """Return the charts of one run, the loss first."""
    steps, rates = run.column("step"), run.column("learning_rate")
    grad_norm, clip = run.column("grad_norm"), number(run.config, "max_grad_norm")
    size, unit = _memory_unit([view])
    memory = _memory(run, size)
    predicted = view.predicted_memory or 0
    return [
        loss_chart(run, view),
        Chart(
            title="Learning rate",
            unit="",
            series=[Series("learning rate", "lr", steps, rates)],
            description=_describe("Learning rate", rates),
            from_zero=True,
        ),
        Chart(
            title="Gradient norm",
            unit="before clipping",
            series=_averaged("each step", "averaged", "grad", steps, grad_norm),
            description=_describe("Gradient norm", grad_norm),
            levels=_level_near(grad_norm, clip, f"clipped at {clip:g}" if clip else ""),
        ),
        Chart(
            title="Speed",
            unit="tokens a second",
            series=_averaged("each step", "averaged", "speed", steps, _speeds(run)),
            description=_describe("Tokens a second", _speeds(run)),
            from_zero=True,
        ),
        Chart(
            title="Memory",
            unit=f"{unit} at the peak of each step",
            series=[
                Series("each step", "memory", steps, memory, "faint"),
                Series("highest so far", "memory", steps, np.fmax.accumulate(memory).tolist()),
            ],
            description=_describe(f"Memory in {unit}", memory),
            from_zero=True,
            levels=_level_near(memory, predicted / size, f"predicted peak {byte_size(predicted)}"),
        ),
    ]


def loss_chart(run: Run, view: RunView) -> Chart:
    """Return the chart of the training and validation loss."""
    steps, losses = run.column("step"), run.column("loss")
    both = pairwise(zip(steps, run.column("epoch"), strict=True))
    ends = [step for (step, epoch), (_, following) in both if epoch != following]
    description = f"Loss over {count(view.step, 'step')}"
    if losses:
        description += (
            f": training {loss_text(losses[0])} at first, {loss_text(losses[-1])} at last"
        )
    if view.initial_val_loss is not None:
        description += f"; validation {loss_text(view.initial_val_loss)} before"
        description += f", {loss_text(view.best_val_loss)} at best"
    return Chart(
        title="Training and validation",
        unit=_LOSS_UNIT,
        series=[
            *_averaged("training, each step", "training, averaged", "train", steps, losses),
            _validation("validation", "val", run),
        ],
        description=description,
        verticals=ends if len(ends) <= _MOST_EPOCHS else (),
        skipped=[each.step for each in run.progress.skipped],
        large=True,
    )


def _validation(name: str, style: str, run: Run, place: int | None = None) -> Series:
    validations = run.progress.validations
    steps, losses = [each.step for each in validations], [each.val_loss for each in validations]
    return Series(name, style, steps, losses, "points", place)


def _averaged(
    name: str, averaged: str, style: str, x: Sequence[float], y: Sequence[float]
) -> list[Series]:
    """Return a curve as measured, drawn faint, and its moving average."""
    average = Series(f"{averaged} over {span_for(len(y))}", style, x, smooth(y))
    return [Series(name, style, x, y, "faint"), average]


def span_for(steps: int) -> int:
    """Return the number of steps to average over, for a curve of this many."""
    return min(max(10, round(steps / 50)), max(1, steps // 4))


def smooth(values: Sequence[float]) -> list[float]:
    """Return the moving average of the finite values, NaN in place of the others.

    It is exponential, with the centre of mass of a window of `span_for` values, and corrects the
    bias of its start as Adam does (arXiv:1412.6980, section 3).
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
    if not level or not _NEAR * level <= highest <= level / _NEAR**2:
        return {}
    return {name: level}


def _describe(name: str, values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return f"{name}: not measured"
    return f"{name}: {finite[0]:.3g} at first, {finite[-1]:.3g} at last, {max(finite):.3g} at most"


def _speeds(run: Run) -> list[float]:
    """Return the tokens a second of each step, NaN if no time was measured."""
    pairs = zip(run.column("tokens"), run.column("seconds"), strict=True)
    return [tokens / seconds if seconds > 0 else math.nan for tokens, seconds in pairs]


def _memory_unit(views: Sequence[RunView]) -> tuple[float, str]:
    peak = max((view.peak_memory or 0 for view in views), default=0)
    return (1e9, "GB") if peak >= 1e9 else (1e6, "MB")


def _memory(run: Run, size: float) -> list[float]:
    """Return the peak of each step in units of `size` bytes; 0 means that it was not measured."""
    return [(value or math.nan) / size for value in run.column("memory")]


def comparison_charts(runs: Sequence[Run], views: Sequence[RunView]) -> list[Chart]:
    """Return the charts of several runs, each in its own colour; validation loss first."""
    names = [view.name for view in views]
    size, memory_unit = _memory_unit(views)
    best = (f"{each.name} {loss_text(each.best_val_loss)} at best" for each in views)

    def chart(
        title: str,
        unit: str,
        values: Callable[[Run], Sequence[float]],
        *,
        from_zero: bool = False,
        large: bool = False,
    ) -> Chart:
        series = [
            Series(names[i], style_of(i), run.column("step"), values(run), run=i)
            for i, run in enumerate(runs)
        ]
        description = f"{title} of {count(len(runs), 'run')}, step by step"
        return Chart(title, unit, series, description, from_zero=from_zero, large=large)

    return [
        Chart(
            title="Validation loss",
            unit=_LOSS_UNIT,
            series=[_validation(names[i], style_of(i), run, i) for i, run in enumerate(runs)],
            description=f"Validation loss: {'; '.join(best)}",
            large=True,
        ),
        chart(
            "Training loss",
            f"{_LOSS_UNIT}, averaged",
            lambda run: smooth(run.column("loss")),
            large=True,
        ),
        chart("Learning rate", "", lambda run: run.column("learning_rate"), from_zero=True),
        chart("Gradient norm", "averaged", lambda run: smooth(run.column("grad_norm"))),
        chart(
            "Speed",
            "tokens a second, averaged",
            lambda run: smooth(_speeds(run)),
            from_zero=True,
        ),
        chart(
            "Memory",
            f"{memory_unit} at the peak of each step",
            lambda run: _memory(run, size),
            from_zero=True,
        ),
    ]


def style_of(place: int) -> str:
    """Return the CSS classes of the colour and dashes of a run, by its place on the page."""
    dashes = place // COLOURS % _DASHES
    return f"c{place % COLOURS}" + (f" d{dashes}" if dashes else "")
