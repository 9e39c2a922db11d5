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
    measured_plan_values,
    option_text,
    option_texts,
)
from tests.core.run.listed_runs import listed, runs
from tests.runs import as_lines, metrics, step_line, write_run

__all__ = ["runs"]


def summary(folder: Path, **changes: Any) -> RunView:
    return RunView.of(read_run(write_run(folder / "out", **changes)))


def test_summary_equals_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_headline_shows_the_result(tmp_path: Path, changes: dict[str, Any], headline: str) -> None:
    assert summary(tmp_path, **changes).headline == headline


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (8, "8 steps (0.2 epochs)"),
        (1, "1 step (0.03 epochs)"),
        (60, "60 steps (1.5 epochs)"),
        (40, "1 epoch"),
    ],
)
def test_headline_names_training_data_and_partial_epochs(
    tmp_path: Path, steps: int, text: str
) -> None:
    folder = write_run(tmp_path / "out", validation=False)
    ledger = json.loads((folder / "ledger.json").read_text())[0]
    rows = ledger["rows_train"] + ledger["rows_validation"]
    held_out = ledger | {"path": "test.jsonl", "rows_train": 0, "rows_validation": rows}
    (folder / "ledger.json").write_text(json.dumps([ledger, held_out]))
    ended = {"kind": "epoch", "train_loss": 1.5, "train_perplexity": 2.0, "val_loss": None}
    ended |= {"epoch": 1 + (steps - 1) // 40, "val_perplexity": None, "learning_rate": 1e-4}
    ended |= {"epoch_time_ms": 8000, "samples_per_sec": 20.0}
    records = [step_line(step, 40) for step in range(1, steps + 1)]
    if steps > 40:
        records.insert(40, ended | {"epoch": 1})
    (folder / "metrics.jsonl").write_bytes(as_lines([*records, ended]))
    view = RunView.of(read_run(folder))
    assert view.headline == f"{text} on chat.jsonl brought tiny to a training loss of 1.50"
    assert view.data == ("chat.jsonl", "test.jsonl")


def test_headline_notes_a_run_that_did_not_improve(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    records = metrics(2, 40)
    for record in records:
        if record["kind"] in ("validation", "epoch"):
            epochs = record["epoch"] if record["kind"] == "epoch" else record["step"] / 40
            record["val_loss"] = 4.0 + epochs
    (folder / "metrics.jsonl").write_bytes(as_lines(records))
    view = RunView.of(read_run(folder))
    headline = view.headline
    assert view.verdict.text.endswith("Its adapter, of epoch 1, is worse than the starting model:")
    assert view.verdict.code == view.adapter
    assert headline.startswith("2 epochs on chat.jsonl did not improve tiny: ")
    assert "4.00 before, 5.00 at best" in headline


def test_unfinished_run_names_the_command_that_resumes(
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


def test_peak_memory_is_the_highest_of_steps_and_result(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    lines = [step_line(1, 9, memory=0), step_line(2, 9, memory=90 * 10**6)]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    assert RunView.of(read_run(folder)).peak_memory == 90 * 10**6


@pytest.mark.parametrize(
    ("metrics", "mean"),
    # Over supervised tokens, but over rows for preferences.
    [({}, (4 * 30 + 1 * 10) / 40), ({"rewards/accuracies": 0.5}, (4 * 2 + 1 * 6) / 8)],
)
def test_training_loss_before_an_epoch_ends_is_weighted(
    tmp_path: Path, metrics: dict[str, float], mean: float
) -> None:
    folder = write_run(tmp_path / "out", finished=False)
    lines = [
        step_line(1, 9, loss=4.0, supervised_tokens=30, rows=2, metrics=metrics),
        step_line(2, 9, loss=1.0, supervised_tokens=10, rows=6, metrics=metrics),
    ]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    assert RunView.of(read_run(folder)).train_loss == pytest.approx(mean)


def test_micro_batches_and_padding_are_measured_over_all_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    lines = [
        step_line(1, 9, tokens=100, run_tokens=120, padding=30, micro_batches=1),
        step_line(2, 9, tokens=300, run_tokens=280, padding=10, micro_batches=4),
        # A step without measurements.
        {**step_line(3, 9, tokens=0), "run_tokens": 0, "padding": 0, "micro_batches": 0},
    ]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    assert measured_plan_values(read_run(folder)) == {
        "micro_batches_per_step": 2.5,
        "padding_share": 0.1,
        "run_share": 1.0,
    }


# The curve


@given(st.lists(st.floats(-1e9, 1e9), max_size=50), st.integers(1, 12))
def test_bucket_means_are_few_and_between_the_extremes(values: list[float], most: int) -> None:
    found = bucket_means(values, most)
    assert len(found) == min(most, len(values))
    if values:
        margin = 1e-6 * max(1.0, *map(abs, values))
        assert all(min(values) - margin <= mean <= max(values) + margin for mean in found)


def test_bucket_mean_is_the_mean_of_its_values() -> None:
    assert bucket_means([1, 3, 5, 7], 2) == [2, 6]


def test_curve_shows_validation_or_else_training_losses(tmp_path: Path) -> None:
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


def test_options_off_their_default_come_first(tmp_path: Path) -> None:
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

    newer = Run(tmp_path, about={"config": {"new_option": 7}})
    assert option_texts(newer) == {"--new-option": ("7", "–", True)}


def test_differing_options_exclude_paths(tmp_path: Path) -> None:
    first = read_run(write_run(tmp_path / "a", options={"output": "a/adapters.safetensors"}))
    other = {"output": "b/adapters.safetensors", "rank": 4, "lr": 2e-4}
    second = read_run(write_run(tmp_path / "b", options=other))
    assert differing_options([first, second]) == {
        "--rank": ["8", "4"],
        "--lr": ["0.0001", "0.0002"],
    }
    assert differing_options([first, first]) == {}

    moved = read_run(write_run(tmp_path / "c", options={"model_path": "/elsewhere/tiny"}))
    unmoved = read_run(write_run(tmp_path / "d"))
    assert differing_options([unmoved, moved]) == {}, "one model by two paths"
    moved.metadata = {"base_hash": "sha256:other"}
    assert "--model-path" in differing_options([unmoved, moved])


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
def test_option_value_is_as_typed(value: Any, text: str) -> None:
    assert option_text(value) == text


@pytest.mark.parametrize(
    "started",
    [
        *("\x1b[31m", "yesterday", 7),
        *("0001-01-01T00:00:00+14:00", "0001-01-01", "9999-12-31T23:59:59-12:00"),
    ],
)
def test_invalid_start_time_is_absent(tmp_path: Path, started: Any) -> None:
    found = summary(tmp_path, about={"started_at": started})
    assert found.started == ""
    assert sorted([found, found], key=SORTS["when"]) == [found, found]


def test_speed_over_a_tiny_time_is_absent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", validation=False)
    (folder / "metrics.jsonl").write_bytes(as_lines([step_line(1, 1, seconds=5e-324)]))
    found = RunView.of(read_run(folder))
    assert (found.tokens_per_second, found.rows_per_second) == (None, None)
    json.dumps(found.as_dict(), allow_nan=False)
