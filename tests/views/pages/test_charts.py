"""Charts: the points of the SVG match the values."""

from __future__ import annotations

import math
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.views.pages.charts import Chart, Series, decimate, draw


def chart(*series: Series, **changes: object) -> str:
    values = {"title": "Loss", "unit": "nats", "description": "Loss falls", **changes}
    return draw(Chart(series=series, **values), 0)[0]  # type: ignore[arg-type]


def paths(html: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, place.split())) for place in path.split("L")]  # type: ignore[misc]
        for path in re.findall(r' d="M([^"]*)"', html)
    ]


LINE = Series("training", "train", [0, 50, 100], [1.0, 2.0, 3.0])


def test_line_is_drawn_at_its_values() -> None:
    (points,) = paths(chart(LINE))
    assert [x for x, _ in points] == [0, 500, 1000]
    # The y axis goes from 0 to 3.15, on 500 units downwards.
    assert [y for _, y in points] == [round(500 * (1 - v / 3.15), 1) for v in (1, 2, 3)]


def test_levels_verticals_and_skipped_steps_are_drawn_at_their_values() -> None:
    html = chart(LINE, levels={"planned": 2.0}, verticals=[25.0], skipped=[75.0], large=True)
    at = f"{100 * (1 - 2 / 3.15):.2f}%"
    assert f'class="ref" x1="0" x2="100%" y1="{at}" y2="{at}"' in html
    assert 'class="vertical" x1="25.00%" x2="25.00%"' in html
    assert '<circle class="skip" cx="75.00%" cy="100%"' in html
    assert ">planned</li>" in html
    assert ">skipped step</li>" in html


def test_scale_is_logarithmic_unless_it_starts_at_zero() -> None:
    def labels(html: str) -> list[str]:
        return re.findall(r'<text class="y"[^>]*>([^<]*)<', html)

    far = Series("training", "train", [1, 2], [0.01, 1.0])
    assert labels(chart(far)) == ["0.01", "0.1", "1"]
    assert "nats, logarithmic scale" in chart(far)
    for html in (chart(far, from_zero=True), chart(LINE)):
        assert "0" in labels(html)
        assert "nats, linear scale" in html


def test_logarithmic_scale_leaves_out_zeros() -> None:
    each = Series("each step", "train", [0, 1, 2], [0.0, 1.0, 2.0], "faint")
    average = Series("average", "train", [0, 1, 2], [0.01, 1.0, 2.0])
    assert [len(points) for points in paths(chart(each, average))] == [2, 3]


def test_single_step_is_a_dot_and_no_step_a_note() -> None:
    (points,) = paths(chart(Series("training", "train", [1], [2.0])))
    assert points[0] == points[1] and len(points) == 2
    assert "Nothing was measured." in chart(Series("training", "train", [], []))


def test_three_points_are_joined_and_two_are_not() -> None:
    pair = chart(Series("validation", "val", [0, 10], [4.0, 1.0], "points"))
    assert pair.count("<circle") == 2
    assert not paths(pair)  # two validations are not joined by a line

    html = chart(Series("validation", "val", [0, 5, 10], [4.0, 2.0, 1.0], "points"))
    assert html.count("<circle") == 3
    assert len(paths(html)) == 1


def test_chart_has_a_description_and_names_its_axes() -> None:
    html = chart(LINE)
    assert '<svg role="img" aria-label="Loss falls">' in html
    assert re.search(r'<text class="x" x="100.00%"[^>]*>100</text>', html)
    assert re.search(r'<text class="y"[^>]*>3</text>', html)
    assert ">step</text>" in html
    assert "nats" in html


def test_names_are_escaped() -> None:
    html = chart(
        Series("<script>", "train", [0, 1], [1.0, 2.0]),
        LINE,
        title='"><b>',
        description="<i>",
        levels={"<u>": 1.0},
    )
    assert not re.search(r"<(script|b|i|u)>", html)


def test_values_for_the_script_have_six_digits() -> None:
    _, data = draw(Chart("Loss", "", [Series("a", "s", [1, 2], [1.23456789, 3.0])], "said"), 0)
    assert data["series"][0]["x"] == [1, 2]
    assert data["series"][0]["y"] == [1.23457, 3]


FLOATS = st.one_of(st.floats(-1e9, 1e9), st.just(math.nan), st.just(math.inf))


@given(st.lists(FLOATS, max_size=400), st.integers(4, 60))
def test_decimation_keeps_ends_and_extremes(values: list[float], points: int) -> None:
    chosen = decimate(values, points)
    there = [i for i, value in enumerate(values) if math.isfinite(value)]

    assert len(chosen) <= max(points, 4)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(there)
    if there:
        assert (chosen[0], chosen[-1]) == (there[0], there[-1])
        finite, kept = [values[i] for i in there], [values[i] for i in chosen]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    if len(there) <= points:
        assert chosen == there


def test_decimation_keeps_the_extremes_of_each_stretch() -> None:
    values = np.random.default_rng(0).normal(size=10_000).tolist()
    chosen = decimate(values, 1002)
    for number in range(500):
        part = range(number * 20, number * 20 + 20)
        kept = [values[i] for i in chosen if i in part]
        whole = [values[i] for i in part]
        assert (min(kept), max(kept)) == (min(whole), max(whole))
