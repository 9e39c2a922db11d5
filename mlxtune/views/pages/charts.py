"""Charts as inline SVG that fits any width, needs no script, and has a description in words.

Positions are fractions of the plot, so lines stretch with it while text and strokes do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from mlxtune.views.pages.axis import Axis, linear_axis, log_axis, spans_much, tick_label
from mlxtune.views.pages.page import render

# The width and height of a plot, in the units of its lines.
_PLOT_WIDTH, _PLOT_HEIGHT = 1000, 500
# The maximum number of points that are drawn for a curve.
_POINTS = 1000


@dataclass(frozen=True)
class Series:
    """A curve: its points, and whether it is drawn as a `line`, as a `faint` line or as `points`.

    `style` is a CSS class, `run` the number of the curve's run in a comparison.
    """

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float]
    draw: str = "line"
    run: int | None = None


@dataclass(frozen=True)
class Chart:
    """The contents of a chart. `description` is the chart in words.

    `levels` are values to compare the curves with, by name; `verticals` are steps to mark,
    `skipped` the steps that were not applied. The scale is logarithmic if values are far apart,
    unless it starts `from_zero`; else it is linear. With `log`, it is logarithmic in any case.
    """

    title: str
    unit: str
    series: Sequence[Series]
    description: str
    from_zero: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    verticals: Sequence[float] = ()
    skipped: Sequence[float] = ()
    large: bool = False
    log: bool = False


def draw_all(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the figures of a page's large and small charts, and the values for its script."""
    drawings = [draw(chart, number) for number, chart in enumerate(charts)]
    figures = [(figure, chart.large) for chart, (figure, _) in zip(charts, drawings, strict=True)]
    return {
        "large": [figure for figure, is_large in figures if is_large],
        "small": [figure for figure, is_large in figures if not is_large],
        "chart_data": [data for _, data in drawings],
    }


def draw(chart: Chart, number: int) -> tuple[Markup, dict[str, Any]]:
    """Return a chart as a figure, and its values for the script that shows them.

    `number` is the index of the chart on its page.
    """
    series = [each for each in map(_thinned, chart.series) if len(each.y)]
    x_axis = Axis(0.0, max((x for curve in series for x in curve.x), default=0.0) or 1.0)
    y_axis = _y_axis(chart, series)
    if y_axis.log:
        series = [_positive(curve) for curve in series]
    html = render(
        "chart.html",
        chart=chart,
        number=number,
        curves=[
            # A line between two points would suggest values that were not measured.
            (curve, "" if _is_pair(curve) else _path(curve, x_axis, y_axis))
            for curve in series
        ],
        scale="logarithmic" if y_axis.log else "linear",
        legend=len(series) > 1 or chart.levels or (chart.large and (series or chart.skipped)),
        across=lambda x: _percent(x_axis.fraction(x)),
        down=lambda y: _percent(1 - y_axis.fraction(y)),
        x_ticks=[(x, tick_label(x)) for x in x_axis.ticks(6) if x == int(x)],
        y_ticks=[(y, tick_label(y)) for y in y_axis.ticks()],
    )
    data = {
        "high": x_axis.high,
        "y": [y_axis.low, y_axis.high],
        "log": y_axis.log,
        "series": [_data(curve) for curve in series],
    }
    return html, data


def _y_axis(chart: Chart, series: Sequence[Series]) -> Axis:
    values = [y for curve in series for y in curve.y] + list(chart.levels.values())
    main = [y for curve in series if curve.draw != "faint" for y in curve.y]
    if any(y > 0 for y in values) if chart.log else not chart.from_zero and spans_much(main):
        return log_axis(values)
    return linear_axis(values, from_zero=chart.from_zero)


def _thinned(series: Series) -> Series:
    return _points_at(series, decimate(series.y))


def _positive(series: Series) -> Series:
    return _points_at(series, [i for i, y in enumerate(series.y) if y > 0])


def _is_pair(series: Series) -> bool:
    return series.draw == "points" and len(series.y) == 2


def _points_at(series: Series, shown: Sequence[int]) -> Series:
    return replace(series, x=[series.x[i] for i in shown], y=[series.y[i] for i in shown])


def decimate(values: Sequence[float], points: int = _POINTS) -> list[int]:
    """Return the indices of at most `points` finite values whose curve looks the same.

    Keeps the first and the last value, and the minimum and maximum of each bucket, so that no peak
    is lost.
    """
    every = np.asarray(values, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(every))
    if len(finite) <= points:
        return list(map(int, finite))
    selected = {int(finite[0]), int(finite[-1])}
    for part in np.array_split(finite, max(1, (points - 2) // 2)):
        selected.add(int(part[every[part].argmin()]))
        selected.add(int(part[every[part].argmax()]))
    return sorted(selected)


def _path(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    points = [
        f"{_PLOT_WIDTH * x_axis.fraction(x):.1f} {_PLOT_HEIGHT * (1 - y_axis.fraction(y)):.1f}"
        for x, y in zip(series.x, series.y, strict=True)
    ]
    if len(points) == 1:
        # Double the point: a line of zero length with round ends is drawn as a dot.
        points *= 2
    return "M" + "L".join(points)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def _data(series: Series) -> dict[str, Any]:
    shown = {name: getattr(series, name) for name in ("name", "style", "draw", "run")}
    return {**shown, "x": list(map(_rounded, series.x)), "y": list(map(_rounded, series.y))}


def _rounded(value: float) -> float | int:
    """Round to six significant digits, one more than the page shows; keep integers below 1e9."""
    if value == int(value) and abs(value) < 1e9:
        return int(value)
    return float(f"{value:.6g}")
