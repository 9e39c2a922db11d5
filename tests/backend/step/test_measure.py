"""What a benchmark measures of memory."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest

from mlxtune.backend.model import memory
from mlxtune.backend.step import measure

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
    # In a process of its own: this one has had more than is good to be had again.
    code = (
        "import numpy as np\n"
        "from mlxtune.backend.step import measure\n"
        "before = measure.peak_rss()\n"
        "held = np.ones(2 * before // 8)\n"
        "assert measure.peak_rss() >= before + held.nbytes // 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_peak_of_the_process_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = measure.peak_rss()
    monkeypatch.setattr(measure, "Path", lambda path: Missing())
    assert 0.5 < measure.peak_rss() / ours < 2


class Missing:
    def read_text(self) -> str:
        raise FileNotFoundError
