"""The averages in the charts of runs follow their formula."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtune.core.run.metrics import FileLoss, ValidationRecord
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.core.run.summary import RunView
from mlxtune.views.pages.charts import draw
from mlxtune.views.pages.run_charts import comparison_charts, loss_chart, smooth, span_for
from tests.runs import write_run


def test_moving_average_is_exponential_and_corrected_for_bias() -> None:
    values = [4.0, 2.0, 3.0, 1.0, 5.0, 2.0, 2.5, 9.0, 1.0, 1.0, 4.0, 0.5]
    span = span_for(len(values))
    assert span == 3
    keep = (span - 1) / (span + 1)
    # The mean of all values so far, with weights that decay by `keep`.
    expected = [
        sum(keep ** (i - j) * values[j] for j in range(i + 1))
        / sum(keep ** (i - j) for j in range(i + 1))
        for i in range(len(values))
    ]
    assert smooth(values) == pytest.approx(expected)
    assert smooth(values[:5]) == values[:5], "too few to average"
    assert smooth([]) == []


def test_moving_average_skips_missing_values() -> None:
    found = smooth([1.0, math.nan, 1.0, math.inf, 1.0, *[1.0] * 7])
    assert [found[i] for i in (0, 2, 4)] == pytest.approx([1.0, 1.0, 1.0])
    assert math.isnan(found[1])
    assert math.isnan(found[3])


def test_span_grows_with_the_run() -> None:
    assert [span_for(count) for count in (0, 1, 8, 40, 600, 20_000)] == [1, 1, 2, 10, 12, 400]


def test_validation_of_each_file_has_its_own_points(tmp_path: Path) -> None:
    records = [
        ValidationRecord(step, 3.0, 20.0, files=[FileLoss("x/a.jsonl", 1.0), FileLoss("b", 5.0)])
        for step in (0, 4)
    ]
    run = Run(tmp_path, {}, progress=Progress(records))

    series = loss_chart(run, RunView.of(run)).series

    own = {curve.name: (list(curve.x), list(curve.y)) for curve in series[-2:]}
    assert own == {
        "validation, a.jsonl": ([0, 4], [1.0, 1.0]),
        "validation, b": ([0, 4], [5.0, 5.0]),
    }
    assert len({curve.style for curve in series[-3:]}) == 3


@pytest.mark.parametrize(("factor", "scale"), [(2.0, "linear"), (300.0, "logarithmic")])
def test_rate_of_one_wild_run_does_not_flatten_the_others(
    tmp_path: Path, factor: float, scale: str
) -> None:
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    wild = Progress(
        replace(step, learning_rate=step.learning_rate * factor) for step in runs[1].progress.steps
    )
    # The last step of a cosine has the rate 0, which no logarithmic scale can show.
    last = wild.steps[len(wild.steps) - 1]
    wild.append(replace(last, step=last.step + 1, learning_rate=0.0))
    runs[1].progress = wild

    charts = comparison_charts(runs, [RunView.of(run) for run in runs])

    (chart,) = [each for each in charts if each.title == "Learning rate"]
    html, data = draw(chart, 0)
    assert f"{scale} scale" in html
    low, high = data["y"]
    assert (low > 1e-7) == (scale == "logarithmic")
    place = (lambda v: math.log(v / low) / math.log(high / low)) if low else (lambda v: v / high)
    assert place(1e-4) > 0.2, "the tame run's rate is seen"
