"""Charts as inline SVG that fits any width, needs no script, and says what it shows.

Positions are shares of the plot, so that lines stretch with it while text and strokes do not. For a
script that wants to tell values, `Drawing.data` holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxtune.core.reports.axis import Axis, linear_axis, log_axis, spans_much, tick_label
from mlxtune.core.reports.page_parts import html_text

# Into what a plot's width and height are divided for its lines.
_WIDE, _HIGH = 1000, 500


@dataclass(frozen=True)
class Series:
    """A curve: its points, how it is drawn (`line`, `faint` or `points`), and whose it is.

    `style` is a class of the page's style, `run` the number of the run in a comparison. `sparse`
    tells that few steps have a value, which a read-out says then.
    """

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float]
    draw: str = "line"
    run: int | None = None
    sparse: bool = False
    in_legend: bool = True


@dataclass(frozen=True)
class Level:
    """A horizontal line at a value that is to be compared with."""

    value: float
    name: str


@dataclass(frozen=True)
class Chart:
    """What is drawn. `scales` are those to choose from; the first that fits the values is shown.

    `verticals` are steps to mark, `skipped` those that were not applied; `unit` stands beside the
    title, `said` is what the chart says for who cannot see it.
    """

    title: str
    unit: str
    series: Sequence[Series]
    said: str
    x_name: str = "step"
    x_high: float | None = None
    choose_scale: bool = False
    from_zero: bool = False
    levels: Sequence[Level] = ()
    verticals: Sequence[float] = ()
    skipped: Sequence[float] = ()
    large: bool = False
    note: str = ""


@dataclass(frozen=True)
class Drawing:
    """A chart as HTML, and its values for the read-out."""

    html: str
    data: dict[str, Any] = field(default_factory=dict)


def draw(chart: Chart, number: int) -> Drawing:
    """Return a chart as a figure; `number` is its place among those of the page."""
    values = [y for each in chart.series for y in each.y] + [each.value for each in chart.levels]
    if not any(len(each.y) for each in chart.series):
        body = '<p class="note">Nothing was measured.</p>'
        return Drawing(f'<figure class="chart">{_caption(chart, False)}{body}</figure>')
    x_axis = _x_axis(chart)
    axes = {"linear": linear_axis(values, from_zero=chart.from_zero)}
    logarithmic = log_axis(values) if chart.choose_scale else None
    if logarithmic is not None:
        axes["log"] = logarithmic
    telling = [y for each in chart.series if each.draw != "faint" for y in each.y]
    shown = "log" if logarithmic is not None and spans_much(telling) else "linear"
    groups = "".join(
        f'<g class="{name}"{"" if name == shown else " hidden"}>{_plot(chart, x_axis, axis)}</g>'
        for name, axis in axes.items()
    )
    style = "plot large" if chart.large else "plot"
    figure = (
        f'<figure class="chart" data-chart="{number}" data-scale="{shown}">'
        f"{_caption(chart, logarithmic is not None, shown)}"
        f'<div class="{style}" tabindex="0" role="group" aria-label="{html_text(chart.title)}: '
        'arrow keys tell values">'
        f'<svg role="img" aria-label="{html_text(chart.said)}">{groups}{_x_ticks(chart, x_axis)}'
        '<g class="pointer" hidden></g></svg><div class="tip" role="status" hidden></div></div>'
        "</figure>"
    )
    return Drawing(figure, _data(chart, x_axis, axes))


def _x_axis(chart: Chart) -> Axis:
    high = max([x for each in chart.series for x in each.x], default=1.0)
    low = min([x for each in chart.series for x in each.x], default=0.0)
    high = max(high, chart.x_high or 0.0)
    return Axis(0.0 if low < 0.2 * high else low, high if high > low else low + 1.0)


def _caption(chart: Chart, choice: bool, shown: str = "linear") -> str:
    named = [each for each in chart.series if each.in_legend and len(each.y)]
    keys = "".join(
        f'<li class="key {each.draw} {each.style}"'
        f"{'' if each.run is None else f' data-run={chr(34)}{each.run}{chr(34)}'}>"
        f"{html_text(each.name)}</li>"
        for each in named
    ) + "".join(f'<li class="key ref">{html_text(level.name)}</li>' for level in chart.levels)
    if chart.skipped:
        keys += '<li class="key skip">skipped step</li>'
    legend = (
        f'<ul class="keys">{keys}</ul>'
        if keys and (len(named) > 1 or chart.levels or chart.large)
        else ""
    )
    scale = ""
    if choice:
        scale = (
            '<fieldset class="scale" hidden><legend>Scale</legend>'
            + "".join(
                f'<label><input type="radio" name="scale-{html_text(chart.title)}" value="{name}"'
                f"{' checked' if name == shown else ''}><span>{name}</span></label>"
                for name in ("linear", "log")
            )
            + "</fieldset>"
        )
    note = f'<p class="note">{html_text(chart.note)}</p>' if chart.note else ""
    return (
        f"<figcaption><h3>{html_text(chart.title)} "
        f'<span class="unit">{html_text(chart.unit)}</span></h3>{scale}{legend}{note}</figcaption>'
    )


def _plot(chart: Chart, x_axis: Axis, y_axis: Axis) -> str:
    """Return what is drawn on one scale, from the back to the front."""
    parts = []
    for value, label in y_axis.ticks():
        at = _percent(1 - y_axis.place(value))
        parts.append(
            f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>'
            f'<text class="y" x="-8" y="{at}" dy=".32em">{label}</text>'
        )
    for x in chart.verticals:
        at = _percent(x_axis.place(x))
        parts.append(f'<line class="vertical" x1="{at}" x2="{at}" y1="0" y2="100%"/>')
    for level in chart.levels:
        if not y_axis.log or level.value > 0:
            at = _percent(1 - y_axis.place(level.value))
            parts.append(f'<line class="ref" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
    lines = "".join(_line(each, x_axis, y_axis) for each in chart.series if each.draw != "points")
    parts.append(
        f'<svg class="lines" width="100%" height="100%" viewBox="0 0 {_WIDE} {_HIGH}" '
        f'preserveAspectRatio="none">{lines}</svg>'
    )
    parts.extend(_points(each, x_axis, y_axis) for each in chart.series if each.draw == "points")
    for x in chart.skipped:
        parts.append(f'<circle class="skip" cx="{_percent(x_axis.place(x))}" cy="100%" r="3.5"/>')
    return "".join(parts)


def _line(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    places = [
        f"{_WIDE * x_axis.place(x):.1f} {_HIGH * (1 - y_axis.place(y)):.1f}"
        for x, y in _drawn(series, y_axis)
    ]
    if not places:
        return ""
    # A single point is a line of no length, which has round ends.
    path = "M" + "L".join(places if len(places) > 1 else places * 2)
    return f'<path class="{series.draw} {series.style}"{_of_run(series)} d="{path}"/>'


def _points(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    places = [(x_axis.place(x), 1 - y_axis.place(y)) for x, y in _drawn(series, y_axis)]
    joined = "L".join(f"{_WIDE * x:.1f} {_HIGH * y:.1f}" for x, y in places)
    line = (
        f'<svg class="lines" width="100%" height="100%" viewBox="0 0 {_WIDE} {_HIGH}" '
        f'preserveAspectRatio="none"><path class="line {series.style}" d="M{joined}"/></svg>'
        if len(places) > 1
        else ""
    )
    dots = "".join(
        f'<circle class="{series.style}" cx="{_percent(x)}" cy="{_percent(y)}" r="3.5"/>'
        for x, y in places
        if len(places) <= 60
    )
    return f"<g{_of_run(series)}>{line}{dots}</g>"


def _drawn(series: Series, y_axis: Axis) -> Iterator[tuple[float, float]]:
    for x, y in zip(series.x, series.y, strict=True):
        if math.isfinite(y) and (y > 0 or not y_axis.log):
            yield x, y


def _of_run(series: Series) -> str:
    return "" if series.run is None else f' data-run="{series.run}"'


def _x_ticks(chart: Chart, axis: Axis) -> str:
    ticks = [tick for tick in axis.ticks(6) if tick[0] == int(tick[0])]
    texts = "".join(
        f'<text class="x" x="{_percent(axis.place(value))}" y="100%" dy="1.5em">{label}</text>'
        for value, label in ticks
    )
    return (
        '<line class="base" x1="0" x2="100%" y1="100%" y2="100%"/>'
        f'{texts}<text class="name" x="100%" y="100%" dy="2.9em">{html_text(chart.x_name)}</text>'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _data(chart: Chart, x_axis: Axis, axes: dict[str, Axis]) -> dict[str, Any]:
    return {
        "x": [x_axis.low, x_axis.high],
        "name": chart.x_name,
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
            for each in chart.series
            if len(each.y)
        ],
    }


def _short(value: float) -> float | int:
    """Return a number in six digits, which a read-out can tell apart."""
    if value == int(value) and abs(value) < 1e9:
        return int(value)
    return float(f"{value:.6g}")


def draw_bars(
    title: str, unit: str, start: int, width: int, counts: Sequence[int], noun: str, style: str
) -> str:
    """Return a histogram as a figure: bars of one width, the first of which begins at `start`."""
    end = start + width * len(counts)
    highest, whole = max(counts), sum(counts)
    x_axis, y_axis = Axis(float(start), float(end)), Axis(0.0, highest * 1.05)
    parts = []
    for value, label in y_axis.ticks(3):
        if value == int(value):
            at = _percent(1 - y_axis.place(value))
            parts.append(
                f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>'
                f'<text class="y" x="-8" y="{at}" dy=".32em">{label}</text>'
            )
    for number, count in enumerate(counts):
        if count:
            low = start + width * number
            range_ = f"{low:,}" if width == 1 else f"{low:,} to {low + width - 1:,}"
            top = 1 - y_axis.place(count)
            parts.append(
                f'<rect class="{style}" x="{_percent((number + 0.06) / len(counts))}" '
                f'width="{_percent(0.88 / len(counts))}" y="{_percent(top)}" '
                f'height="{_percent(1 - top)}"><title>{range_} {html_text(unit)}: '
                f"{count:,} {html_text(noun)}</title></rect>"
            )
    for value, _ in x_axis.ticks(6):
        if value == int(value):
            parts.append(
                f'<text class="x" x="{_percent(x_axis.place(value))}" y="100%" dy="1.5em">'
                f"{tick_label(value, 1)}</text>"
            )
    said = f"{title}: {whole:,} {noun} of {start:,} to {end:,} {unit}"
    return (
        f'<figure class="chart bars"><figcaption><h3>{html_text(title)} '
        f'<span class="unit">{html_text(noun)} by {html_text(unit)}</span></h3></figcaption>'
        f'<div class="plot small"><svg role="img" aria-label="{html_text(said)}">{"".join(parts)}'
        '<line class="base" x1="0" x2="100%" y1="100%" y2="100%"/></svg></div></figure>'
    )
