"""What a benchmark measures of memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend import measure, memory

SIZE = 50_000_000


def use() -> None:
    mx.eval(mx.ones(SIZE // 4) + 1)


def test_peak_is_that_since_the_reset() -> None:
    use()
    measure.reset_peak()
    before = measure.peak_memory()
    use()
    assert before + SIZE <= measure.peak_memory() < before + 3 * SIZE
    measure.reset_peak()
    assert measure.peak_memory() < before + SIZE


def test_peak_is_kept_when_a_step_has_it_judged_anew() -> None:
    measure.reset_peak()
    use()
    peak = measure.peak_memory()
    memory.start_peak()
    assert measure.peak_memory() == peak


def test_memory_that_is_held_counts_though_nothing_new_is_taken() -> None:
    held = mx.ones(SIZE // 4)
    mx.eval(held)
    measure.reset_peak()
    assert measure.peak_memory() >= SIZE
    del held


def test_peak_of_the_process_counts_what_mlx_does_not() -> None:
    before = measure.peak_rss()
    held = np.ones(10 * before // 8)
    assert measure.peak_rss() >= 10 * before
    del held


def test_peak_of_the_process_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = measure.peak_rss()
    monkeypatch.setattr(measure, "Path", lambda path: Missing())
    assert 0.5 < measure.peak_rss() / ours < 2


class Missing:
    def read_text(self) -> str:
        raise FileNotFoundError
