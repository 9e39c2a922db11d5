"""Print the speed of mlx and numpy at multiplying 1024x1024 float32 matrices, in one process.

    python -m tests.long.check_blas

A measurement, not a test: run it on an idle machine.

Results: tests/long/README.md.
"""

from __future__ import annotations

from mlxtune.backend import BLAS  # isort: split

import time
from collections.abc import Callable
from statistics import median

import mlx.core as mx
import numpy as np

SIZE = 1024


def gflops(product: Callable[[], object], repeats: int = 21) -> float:
    """Return the median speed of a product, in GFLOP/s."""
    product()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    return 2 * SIZE**3 / median(seconds) / 1e9


def main() -> None:
    left = np.random.default_rng(0).random((SIZE, SIZE), dtype=np.float32)
    right = mx.array(left)
    mx.eval(right)
    theirs = gflops(lambda: left @ left)
    ours = gflops(lambda: mx.eval(right @ right))
    print(f"BLAS {BLAS}: mlx {ours:.0f} GFLOP/s, numpy {theirs:.0f}, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
