"""Work that is divided among threads."""

from __future__ import annotations

import numpy as np
import pytest

from mlxtune.backend.cpu import CPU, arrays
from tests.backend.cpu.test_fast_model import model_of


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_each_thing_is_in_one_part(
    monkeypatch: pytest.MonkeyPatch, threads: int, count: int
) -> None:
    monkeypatch.setattr(arrays, "THREADS", threads)
    seen = np.zeros(count, int)

    def work(part: int, start: int, end: int) -> None:
        assert part < threads
        seen[start:end] += 1

    arrays.on_threads(work, count)
    assert (seen == 1).all()


def test_nested_parallel_work_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "THREADS", 2)
    inner: list[tuple[int, int, int]] = []

    def work(part: int, start: int, end: int) -> None:
        arrays.on_threads(lambda *given: inner.append(given), 4)

    # Inner work stays undivided in its thread; waiting for other threads would hang.
    arrays.on_threads(work, 4)
    assert inner == [(0, 0, 4)] * 2
    arrays.on_threads(lambda *given: inner.append(given), 4)
    assert sorted(inner[2:]) == [(0, 0, 2), (1, 2, 4)]


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    monkeypatch.setattr(arrays, "THREADS", 2)

    def work(part: int, start: int, end: int) -> None:
        if part == failing:
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        arrays.on_threads(work, 2)


@pytest.mark.parametrize("worth", [0, 1 << 60], ids=["shared", "whole"])
def test_products_equal_numpys(monkeypatch: pytest.MonkeyPatch, worth: int) -> None:
    monkeypatch.setattr(arrays, "MIN_THREADED_MULTIPLICATIONS", worth)
    random = np.random.default_rng(0)
    a, b = (random.random(shape, np.float32) for shape in ((3, 5, 7), (3, 7, 11)))
    np.testing.assert_allclose(arrays.multiplied(a, b), a @ b, rtol=1e-6)
    out = np.empty((5, 20), np.float32)[:, 2:13]
    arrays.multiply(a[0], b[0], out)
    np.testing.assert_allclose(out, a[0] @ b[0], rtol=1e-6)


def test_numpy_matmul_uses_one_thread_while_a_model_is_prepared() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="is of the extra cpu")

    def threads() -> list[int]:
        return [
            each["num_threads"]
            for each in threadpoolctl.threadpool_info()
            if each["internal_api"] == "openblas"
        ]

    before = threads()
    undo = CPU.prepare(model_of("qwen3"))
    assert set(threads()) <= {1}
    undo()
    assert threads() == before
