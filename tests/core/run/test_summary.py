"""A run in a few numbers and one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.files.lock import Lock
from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.core.run.summary import (
    SORTS,
    RunView,
    bucket_means,
    differing_options,
    measured_shares,
    option_text,
    option_texts,
)
from tests.core.run.listed_runs import listed, runs
from tests.runs import as_lines, metrics, step_line, write_run

__all__ = ["runs"]


def summary(folder: Path, **changes: Any) -> RunView:
    return RunView.of(read_run(write_run(folder / "out", **changes)))


def test_numbers_are_those_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = summary(Path())

    assert (found.name, found.model, found.data) == ("out", "tiny", ("chat.jsonl",))
    assert (found.status, found.finished) == ("finished", True)
    assert (found.step, found.total_steps, found.epoch, found.epochs) == (80, 80, 2, 2)
    losses = (found.initial_val_loss, found.best_val_loss, found.best_epoch, found.train_loss)
    assert losses == (4.0, 1.0, 2, 1.5)
    assert found.best_step == 80
    assert found.tokens_per_second == pytest.approx(400 / 0.2)
    assert (found.peak_memory, found.predicted_memory) == (27 * 10**6, 26 * 10**6)
    assert found.seconds == 16
    assert found.started == "2026-03-04T05:06:07+00:00"
    assert found.adapter == "out/adapters.safetensors"
    assert found.resume == ""
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({}, "2 epochs on chat.jsonl took tiny’s validation loss from 4.00 to 1.00"),
        ({"validation": False}, "2 epochs on chat.jsonl brought tiny to a training loss of 1.50"),
        (
            {"finished": False},
            "tiny on chat.jsonl stopped at step 60 of 80; validation loss 4.00 before, "
            "2.00 at best",
        ),
        (
            {"finished": False, "validation": False},
            "tiny on chat.jsonl stopped at step 60 of 80",
        ),
    ],
)
def test_headline_says_what_came_of_it(
    tmp_path: Path, changes: dict[str, Any], headline: str
) -> None:
    assert summary(tmp_path, **changes).headline == headline


def test_headline_of_a_run_that_made_nothing_better_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    records = metrics(2, 40)
    for record in records:
        if record["kind"] in ("validation", "epoch"):
            epochs = record["epoch"] if record["kind"] == "epoch" else record["step"] / 40
            record["val_loss"] = 4.0 + epochs
    (folder / "metrics.jsonl").write_bytes(as_lines(records))
    headline = RunView.of(read_run(folder)).headline
    assert headline.startswith("2 epochs on chat.jsonl did not improve tiny: ")
    assert "4.00 before, 5.00 at best" in headline


def test_unfinished_run_says_how_to_go_on_and_one_under_way_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(Path("my run"), finished=False)
    found = RunView.of(read_run(folder))
    assert (found.status, found.finished) == ("unfinished", False)
    assert found.resume == "mlxtune train --resume 'my run'"

    lock = Lock(folder / ".mlxtune.lock")
    try:
        going = RunView.of(read_run(folder))
    finally:
        lock.release()
    assert (going.status, going.resume) == ("running", "")
    assert "is at step 60" in going.headline


def test_peak_is_the_highest_of_the_steps_and_of_the_result(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    lines = [step_line(1, 9, memory=0), step_line(2, 9, memory=90 * 10**6)]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    assert RunView.of(read_run(folder)).peak_memory == 90 * 10**6


def test_training_loss_before_an_epoch_ends_is_that_over_all_supervised_tokens(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "out", finished=False)
    lines = [
        step_line(1, 9, loss=4.0, supervised_tokens=30),
        step_line(2, 9, loss=1.0, supervised_tokens=10),
    ]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    assert RunView.of(read_run(folder)).train_loss == pytest.approx((4 * 30 + 1 * 10) / 40)


def test_training_loss_of_preferences_before_an_epoch_ends_is_over_all_rows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", finished=False)
    metrics = {"rewards/accuracies": 0.5}
    lines = [
        step_line(1, 9, loss=0.6, supervised_tokens=30, rows=2, metrics=metrics),
        step_line(2, 9, loss=0.1, supervised_tokens=10, rows=6, metrics=metrics),
    ]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    assert RunView.of(read_run(folder)).train_loss == pytest.approx((2 * 0.6 + 6 * 0.1) / 8)


def test_what_came_of_the_plan_is_measured_over_all_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    lines = [
        step_line(1, 9, tokens=100, run_tokens=120, padding=30, micro_batches=1),
        step_line(2, 9, tokens=300, run_tokens=280, padding=10, micro_batches=4),
        # A step without measurements.
        {**step_line(3, 9, tokens=0), "run_tokens": 0, "padding": 0, "micro_batches": 0},
    ]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    assert measured_shares(read_run(folder)) == {
        "micro_batches_per_step": 2.5,
        "padding_share": 0.1,
        "run_share": 1.0,
    }


@pytest.mark.parametrize("started", ["\x1b[31m", "yesterday", 7])
def test_time_that_is_none_is_left_out(tmp_path: Path, started: Any) -> None:
    assert summary(tmp_path, about={"started_at": started}).started == ""


# The curve


@given(st.lists(st.floats(-1e9, 1e9), max_size=50), st.integers(1, 12))
def test_means_of_stretches_are_few_and_between_the_extremes(
    values: list[float], most: int
) -> None:
    found = bucket_means(values, most)
    assert len(found) == min(most, len(values))
    if values:
        margin = 1e-6 * max(1.0, *map(abs, values))
        assert all(min(values) - margin <= mean <= max(values) + margin for mean in found)


def test_mean_of_a_stretch_is_that_of_its_values() -> None:
    assert bucket_means([1, 3, 5, 7], 2) == [2, 6]


def test_curve_is_of_validation_or_else_of_training(tmp_path: Path) -> None:
    assert listed(tmp_path / "a", epochs=3).curve == (4.0, 2.0, 1.0, pytest.approx(2 / 3))
    assert len(listed(tmp_path / "b", epochs=1).curve) == 12, "two losses are no curve"
    assert len(listed(tmp_path / "c", validation=False).curve) == 12


# The order


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("when", ["third", "second", "first"]),
        ("name", ["first", "second", "third"]),
        ("val", ["first", "second", "third"]),
        ("train", ["first", "second", "third"]),
        ("speed", ["first", "second", "third"]),
        ("steps", ["first", "second", "third"]),
    ],
)
def test_runs_are_sorted_by_any_column(runs: list[RunView], sort: str, names: list[str]) -> None:
    mixed = [runs[2], runs[0], runs[1]]
    if sort == "speed":
        mixed = [
            replace(run, tokens_per_second=speed)
            for run, speed in zip(mixed, (None, 900.0, 20.0), strict=True)
        ]
    assert [run.name for run in sorted(mixed, key=SORTS[sort])] == names


# Options


def test_options_that_are_not_the_default_come_first(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "out", options={"lr": 5e-3, "targets": ("all",)}))
    options = option_texts(run)
    differ = {name: both for name, (*both, differs) in options.items() if differs}

    assert differ == {
        "--model-path": ["models/tiny", "–"],
        "--data": ["data/chat.jsonl", "–"],
        "--epochs": ["2", "1"],
        "--lr": ["0.005", "0.0001"],
        "--targets": ["all", "q_proj, v_proj"],
    }
    assert list(options)[: len(differ)] == list(differ)
    assert options["--rank"] == ("8", "8", False)


def test_option_of_another_version_is_shown(tmp_path: Path) -> None:
    run = Run(tmp_path, about={"config": {"new_option": 7}})
    assert option_texts(run) == {"--new-option": ("7", "–", True)}


def test_options_that_differ_between_runs_leave_out_where_things_are(tmp_path: Path) -> None:
    first = read_run(write_run(tmp_path / "a", options={"output": "a/adapters.safetensors"}))
    other = {"output": "b/adapters.safetensors", "rank": 4, "lr": 2e-4}
    second = read_run(write_run(tmp_path / "b", options=other))
    assert differing_options([first, second]) == {
        "--rank": ["8", "4"],
        "--lr": ["0.0001", "0.0002"],
    }
    assert differing_options([first, first]) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("", "–"),
        ([], "–"),
        (True, "on"),
        (False, "off"),
        (1e-4, "0.0001"),
        (2.0, "2"),
        (["q_proj", "v_proj"], "q_proj, v_proj"),
    ],
)
def test_value_of_an_option_is_as_one_would_type_it(value: Any, text: str) -> None:
    assert option_text(value) == text


@pytest.mark.parametrize(
    "started", ["0001-01-01T00:00:00+14:00", "0001-01-01", "9999-12-31T23:59:59-12:00"]
)
def test_time_that_no_clock_has_is_absent(tmp_path: Path, started: str) -> None:
    found = summary(tmp_path, about={"started_at": started})
    assert found.started == ""
    assert sorted([found, found], key=SORTS["when"]) == [found, found]


def test_speed_in_no_time_is_absent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", validation=False)
    (folder / "metrics.jsonl").write_bytes(as_lines([step_line(1, 1, seconds=5e-324)]))
    found = RunView.of(read_run(folder))
    assert (found.tokens_per_second, found.rows_per_second) == (None, None)
    json.dumps(found.as_dict(), allow_nan=False)
