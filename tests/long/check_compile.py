"""Compare steps whose graph MLX compiles with the plain path, on a tiny model.

    python -m tests.long.check_compile

Too slow for a test where the CPU compiles: MLX builds C++ for each shape.

Results: tests/long/README.md.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mlxtune.backend.step.operations import MLX
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import (
    PLAIN,
    assert_same,
    computed,
    fixed_step,
    fresh,
    model_folder,
)


def main() -> None:
    """Take a few steps both ways and compare loss and gradients after each."""
    architecture = sys.argv[1] if len(sys.argv) > 1 else "qwen3"
    folder = model_folder(architecture, overrides=(("num_hidden_layers", 1),))
    for member in ({}, {"dora": True}, {"init": "pissa"}):
        _compare(folder, {"targets": ("q_proj", "v_proj"), "dropout": 0.1, **member})


def _compare(folder: Path, options: dict[str, Any]) -> None:
    compiled = fresh(folder, Execution(MLX, compile=True), 10_000, **options)
    plain = fresh(folder, PLAIN, **options)
    for step in range(1, 4):
        started = time.perf_counter()
        found = computed(compiled, fixed_step())
        seconds = time.perf_counter() - started
        assert_same(found, computed(plain, fixed_step()))
        print(
            f"{options}, step {step}: the same, {seconds:.1f} s, loss {found.loss:.6f}", flush=True
        )
        for each in (compiled, plain):
            each.train_batch(fixed_step(), step=step, learning_rate=1e-3)


if __name__ == "__main__":
    main()
