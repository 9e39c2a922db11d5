"""The averages in the charts of runs follow their formula."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mlxtune.core.run.metrics import FileLoss, ValidationRecord
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.stored_run import Run
from mlxtune.core.run.summary import RunView
from mlxtune.views.pages.run_charts import loss_chart, smooth, span_for


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

    own = {each.name: (list(each.x), list(each.y)) for each in series[-2:]}
    assert own == {
        "validation, a.jsonl": ([0, 4], [1.0, 1.0]),
        "validation, b": ([0, 4], [5.0, 5.0]),
    }
    assert len({each.style for each in series[-3:]}) == 3
