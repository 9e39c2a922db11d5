"""Benchmarks made of plain numbers, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxtune.benchmark.result import Benchmark, BenchmarkRun, ContestantResult, TimedStep


def step(seconds: float = 1.0, loss: float = 2.0, **changes: Any) -> TimedStep:
    fields = {
        "tokens": 110,
        "supervised_tokens": 50,
        "tokens_run": 100,
        "padding": 10,
        "peak_memory": 3_000_000_000,
    }
    return TimedStep(seconds=seconds, loss=loss, **fields | changes)


def run(*steps: TimedStep, **changes: Any) -> BenchmarkRun:
    fields = {
        "process_s": 3.0,
        "weights_s": 1.0,
        "startup_s": 0.5,
        "warm_up_s": 1.0,
        "peak_rss": 4_000_000_000,
    }
    return BenchmarkRun(steps=list(steps), **fields | changes)


def benchmark(
    ours: Sequence[BenchmarkRun], theirs: Sequence[BenchmarkRun] | None, **changes: Any
) -> Benchmark:
    fields: dict[str, Any] = {
        "model": "a/model",
        "device": "a device (gpu)",
        "dtype": "float32",
        "rows": 8,
        "examples": 9,
        "batch_size": 4,
        "options": {},
        "versions": {},
    }
    peer = None if theirs is None else ContestantResult("mlx-lm", list(theirs))
    return Benchmark(
        **fields | {"ours": ContestantResult("mlxtune", list(ours)), "theirs": peer} | changes
    )
