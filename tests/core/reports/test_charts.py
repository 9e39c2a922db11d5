"""Charts: what stands in the SVG is where the values are."""

from __future__ import annotations

import re

from mlxtune.core.reports.charts import Chart, Level, Series, draw, draw_bars


def chart(*series: Series, **changes: object) -> str:
    values = {"title": "Loss", "unit": "nats", "description": "Loss falls", **changes}
    return draw(Chart(series=series, **values), 0).html  # type: ignore[arg-type]


def paths(html: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, place.split())) for place in path.split("L")]  # type: ignore[misc]
        for path in re.findall(r' d="M([^"]*)"', html)
    ]


LINE = Series("training", "train", [0, 50, 100], [1.0, 2.0, 3.0])


def test_line_stands_where_its_values_are() -> None:
    (points,) = paths(chart(LINE))
    assert [x for x, _ in points] == [0, 500, 1000]
    # From 0 to 3 and a twentieth more, 500 high and downwards.
    assert [y for _, y in points] == [round(500 * (1 - v / 3.15), 1) for v in (1, 2, 3)]


def test_marks_and_lines_to_compare_with_are_at_their_places() -> None:
    html = chart(LINE, levels=[Level(2.0, "planned")], verticals=[25.0], skipped=[75.0], large=True)
    at = f"{100 * (1 - 2 / 3.15):.2f}%"
    assert f'class="ref" x1="0" x2="100%" y1="{at}" y2="{at}"' in html
    assert 'class="vertical" x1="25.00%" x2="25.00%"' in html
    assert '<circle class="skip" cx="75.00%" cy="100%"' in html
    assert ">planned</li>" in html
    assert ">skipped step</li>" in html


def test_both_scales_are_drawn_and_the_better_one_is_shown() -> None:
    far = Series("training", "train", [1, 2], [0.001, 4.0])
    html = chart(far, choose_scale=True)
    assert '<g class="linear" hidden>' in html
    assert '<g class="log">' in html
    assert len(paths(html)) == 2
    near = chart(LINE, choose_scale=True)
    assert '<g class="linear">' in near
    assert '<g class="log" hidden>' in near
    assert 'class="log"' not in chart(far)


def test_value_that_a_logarithmic_scale_has_no_place_for_is_left_out_there_alone() -> None:
    html = chart(Series("training", "train", [0, 1, 2], [0.0, 1.0, 2.0]), choose_scale=True)
    assert [len(points) for points in paths(html)] == [3, 2]


def test_single_step_is_a_dot_and_none_says_so() -> None:
    (points,) = paths(chart(Series("training", "train", [1], [2.0])))
    assert len(points) == 2
    assert points[0] == points[1]
    assert "Nothing was measured." in chart(Series("training", "train", [], []))


def test_points_are_joined_and_each_has_a_circle() -> None:
    html = chart(Series("validation", "val", [0, 10], [4.0, 1.0], "points"))
    assert html.count("<circle") == 2
    assert len(paths(html)) == 1


def test_chart_says_what_it_shows_and_what_its_axes_are() -> None:
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
        levels=[Level(1.0, "<u>")],
    )
    assert not re.search(r"<(script|b|i|u)>", html)


def test_readout_has_the_values_in_six_digits() -> None:
    data = draw(Chart("Loss", "", [Series("a", "s", [1, 2], [1.23456789, 3.0])], "said"), 0).data
    assert data["series"][0]["x"] == [1, 2]
    assert data["series"][0]["y"] == [1.23457, 3]


def test_bars_are_as_high_as_their_counts() -> None:
    html = draw_bars("Length", "tokens", 20, 10, [5, 0, 10], "examples", "supervised")
    heights = [float(h) for h in re.findall(r'height="([\d.]+)%"', html)]
    assert len(heights) == 2
    assert round(heights[1] / heights[0], 2) == 2
    assert "<title>40 to 49 tokens: 10 examples</title>" in html
    assert "15 examples of 20 to 50 tokens" in html
