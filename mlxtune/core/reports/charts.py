"""Charts as inline SVG that fits any width, needs no script, and describes itself in words.

Positions are shares of the plot, so lines stretch with it while text and strokes do not.
`Drawing.data` holds the values for a script that shows them on request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxtune.core.reports.axis import Axis, linear_axis, log_axis, spans_much, tick_label
from mlxtune.core.reports.page import render

# The units that a plot's width and height are divided into for its lines.
_WIDE, _HIGH = 1000, 500
# Above this many points, a curve is drawn as a line without dots.
_MOST_DOTS = 60


@dataclass(frozen=True)
class Series:
    """A curve: its points and how it is drawn (`line`, `faint` or `points`).

    `style` is a CSS class, `run` the number of its run in a comparison. `sparse` means that few
    steps have a value.
    """

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float]
    draw: str = "line"
    run: int | None = None
    sparse: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line at a value to compare with."""

    value: float
    name: str


@dataclass(frozen=True)
class Chart:
    """What to draw. `description` is the chart in words.

    `verticals` are steps to mark, `skipped` those that were not applied. With `choose_scale`, the
    reader can switch between a linear and a logarithmic scale.
    """

    title: str
    unit: str
    series: Sequence[Series]
    description: str
    x_high: float | None = None
    choose_scale: bool = False
    from_zero: bool = False
    levels: Sequence[Level] = ()
    verticals: Sequence[float] = ()
    skipped: Sequence[float] = ()
    large: bool = False


@dataclass(frozen=True)
class Drawing:
    """A chart as markup, and its values as JSON-ready data."""

    html: str
    data: dict[str, Any] = field(default_factory=dict)


def draw(chart: Chart, number: int) -> Drawing:
    """Return a chart as a figure; `number` is its place among those of the page."""
    named = [each for each in chart.series if len(each.y)]
    values = [y for each in named for y in each.y] + [each.value for each in chart.levels]
    x_axis = _x_axis(chart)
    axes = {"linear": linear_axis(values, from_zero=chart.from_zero)} if named else {}
    logarithmic = log_axis(values) if named and chart.choose_scale else None
    if logarithmic is not None:
        axes["log"] = logarithmic
    main = [y for each in named if each.draw != "faint" for y in each.y]
    html = render(
        "chart.html",
        chart=chart,
        number=number,
        named=named,
        legend=len(named) > 1 or chart.levels or (chart.large and (named or chart.skipped)),
        shown="log" if logarithmic is not None and spans_much(main) else "linear",
        scales=[_scale(chart, name, x_axis, axis) for name, axis in axes.items()],
        verticals=[_percent(x_axis.place(x)) for x in chart.verticals],
        skipped=[_percent(x_axis.place(x)) for x in chart.skipped],
        x_ticks=_whole_ticks(x_axis),
    )
    return Drawing(html, _data(named, x_axis, axes) if named else {})


def _x_axis(chart: Chart) -> Axis:
    high = max([x for each in chart.series for x in each.x], default=1.0)
    low = min([x for each in chart.series for x in each.x], default=0.0)
    high = max(high, chart.x_high or 0.0)
    return Axis(0.0 if low < 0.2 * high else low, high if high > low else low + 1.0)


def _whole_ticks(axis: Axis) -> list[tuple[str, str]]:
    return [(_percent(axis.place(x)), label) for x, label in axis.ticks(6) if x == int(x)]


def _scale(chart: Chart, name: str, x_axis: Axis, y_axis: Axis) -> dict[str, Any]:
    """Return the positions of everything drawn on one scale."""
    return {
        "name": name,
        "ticks": [(_percent(1 - y_axis.place(y)), label) for y, label in y_axis.ticks()],
        "levels": [
            _percent(1 - y_axis.place(level.value))
            for level in chart.levels
            if not y_axis.log or level.value > 0
        ],
        "curves": [_curve(each, x_axis, y_axis) for each in chart.series],
    }


def _curve(series: Series, x_axis: Axis, y_axis: Axis) -> dict[str, Any]:
    places = list(_places(series, x_axis, y_axis))
    points = [f"{_WIDE * x:.1f} {_HIGH * y:.1f}" for x, y in places]
    dots = []
    if series.draw == "points" and len(places) <= _MOST_DOTS:
        dots = [(_percent(x), _percent(y)) for x, y in places]
    if len(points) == 1:
        # A line of no length has round ends; a dot needs none.
        points = [] if dots else points * 2
    return {"series": series, "path": "M" + "L".join(points) if points else "", "dots": dots}


def _places(series: Series, x_axis: Axis, y_axis: Axis) -> Iterator[tuple[float, float]]:
    """Yield the points that a scale can show as shares of the plot's width and height."""
    for x, y in zip(series.x, series.y, strict=True):
        if math.isfinite(y) and (y > 0 or not y_axis.log):
            yield x_axis.place(x), 1 - y_axis.place(y)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _data(series: Sequence[Series], x_axis: Axis, axes: dict[str, Axis]) -> dict[str, Any]:
    return {
        "x": [x_axis.low, x_axis.high],
        "name": "step",
        "axes": {name: [axis.low, axis.high] for name, axis in axes.items()},
        "series": [
            {
                "name": each.name,
                "style": each.style,
                "draw": each.draw,
                "run": each.run,
                "sparse": each.sparse,
                "x": list(map(_short, each.x)),
                "y": list(map(_short, each.y)),
            }
            for each in series
        ],
    }


def _short(value: float) -> float | int:
    """Return a number in six digits, one more than shown."""
    if value == int(value) and abs(value) < 1e9:
        return int(value)
    return float(f"{value:.6g}")


def draw_bars(
    title: str, unit: str, start: int, width: int, counts: Sequence[int], noun: str, style: str
) -> str:
    """Return a histogram as a figure: bars of one width, the first from `start`."""
    end = start + width * len(counts)
    x_axis, y_axis = Axis(float(start), float(end)), Axis(0.0, max(counts) * 1.05)
    bars = []
    for number, count in enumerate(counts):
        if count:
            low, height = start + width * number, y_axis.place(count)
            bars.append(
                {
                    "range": f"{low:,}" if width == 1 else f"{low:,} to {low + width - 1:,}",
                    "count": count,
                    "x": _percent((number + 0.06) / len(counts)),
                    "width": _percent(0.88 / len(counts)),
                    "y": _percent(1 - height),
                    "height": _percent(height),
                }
            )
    return render(
        "bars.html",
        **{"title": title, "unit": unit, "noun": noun, "style": style},
        **{"start": start, "end": end, "counts": counts, "bars": bars},
        y_ticks=[
            (_percent(1 - y_axis.place(y)), label) for y, label in y_axis.ticks(3) if y == int(y)
        ],
        x_ticks=[
            (_percent(x_axis.place(x)), tick_label(x, 1)) for x, _ in x_axis.ticks(6) if x == int(x)
        ],
    )
