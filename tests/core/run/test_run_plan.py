"""A run's speed, as measured and kept for later plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.core.run.metrics import StepRecord
from mlxtune.core.run.run_plan import FILE, Speed, read_speed, save_speed, speed_of


def steps(*seconds: float) -> list[StepRecord]:
    return [StepRecord(i, 1, 1.0, 1e-4, 1.0, 1.0, 100, 50, 4, s) for i, s in enumerate(seconds, 1)]


def test_speed_leaves_out_the_first_step_and_needs_three_and_a_second() -> None:
    assert speed_of(steps(99.0, 2.0, 3.0), "2026-01-02") == Speed(40.0, "2026-01-02")
    assert speed_of(steps(1.0, 1.0), "2026-01-02") is None
    assert speed_of(steps(1.0, 0.01, 0.02, 0.9), "2026-01-02") is None


def test_speed_is_read_back_by_its_key_and_the_latest_counts(tmp_path: Path) -> None:
    cache = tmp_path / "new"
    save_speed(cache, "a", Speed(1.5, "2026-01-01"))
    save_speed(cache, "b", Speed(2.5, "2026-01-02"))
    save_speed(cache, "a", Speed(3.5, "2026-01-03"))
    assert read_speed(cache, "a") == Speed(3.5, "2026-01-03")
    assert read_speed(cache, "b") == Speed(2.5, "2026-01-02")
    assert read_speed(cache, "c") is None
    assert [path.name for path in cache.iterdir()] == [FILE]


def test_without_a_cache_nothing_is_kept() -> None:
    save_speed(None, "a", Speed(1.5, "2026-01-01"))
    assert read_speed(None, "a") is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"a": 3}', '{"a": {"tokens_per_s": "x", "measured": "y"}}']
)
def test_broken_file_counts_as_missing_and_is_rewritten(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert read_speed(tmp_path, "a") is None
    save_speed(tmp_path, "a", Speed(1.5, "2026-01-01"))
    assert read_speed(tmp_path, "a") == Speed(1.5, "2026-01-01")


def test_folder_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save_speed(tmp_path / "file" / "cache", "a", Speed(1.5, "2026-01-01"))
