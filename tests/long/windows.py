"""Measure the time and peak memory of one layer's windowed attention, whole and in blocks.

    python -m tests.long.windows [--lengths 4096 8192] [--heads 4] [--repeats 3]

Runs forward and backward passes in float32 on one row, with `--heads` query heads and one key head,
in the shapes of Gemma 3 1B (head size 256, window 512) and gpt-oss (head size 64, window 128,
sinks). Whole attention is MLX's own, with the mask as an array. Prints a table; takes some minutes
and 6 GB.

Results: docs/performance.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from mlxtune.backend.models.mixers.attention import scaled_dot_product_attention
from mlxtune.backend.models.packed import window_mask

import mlx.core as mx  # isort: skip

# The size of a head, the size of the window, and whether the model has sinks.
SHAPES = {"Gemma 3 1B, window 512": (256, 512, False), "gpt-oss, window 128": (64, 128, True)}


def layer(heads: int, length: int, size: int, *, has_sinks: bool) -> list[mx.array]:
    """Return queries, keys, values, and sinks if there are any."""
    shapes = [(1, heads, length, size), *[(1, 1, length, size)] * 2, (heads,)]
    keys = mx.random.split(mx.random.key(0), 4)
    arrays = [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]
    return arrays[: 3 + has_sinks]


def measured(run: Callable[..., mx.array], given: list[mx.array], repeats: int) -> list[float]:
    """Return the shortest time of a forward and backward pass in seconds, and its peak in GB."""
    gradient = mx.grad(lambda *each: run(*each).sum(), argnums=list(range(len(given))))
    mx.eval(given)
    seconds = []
    for _ in range(repeats):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        mx.eval(gradient(*given))
        seconds.append(time.perf_counter() - started)
    return [min(seconds), (mx.get_peak_memory() - before) / 1e9]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print("| | tokens | whole, s | blocks, s | whole, GB | blocks, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (size, window, has_sinks) in SHAPES.items():
        for length in given.lengths:
            arrays = layer(given.heads, length, size, has_sinks=has_sinks)
            known = window_mask(length, window)
            found = []
            # `&` makes a mask that is not recognised as a window, so attention is computed whole.
            for mask in (known & known, known):

                def run(
                    q: mx.array,
                    k: mx.array,
                    v: mx.array,
                    sinks: mx.array | None = None,
                    mask: mx.array = mask,
                    scale: float = size**-0.5,
                ) -> mx.array:
                    return scaled_dot_product_attention(q, k, v, None, scale, mask, sinks)

                found.append(measured(run, arrays, given.repeats))
            (whole, whole_gb), (blocks, blocks_gb) = found
            cells = f"{whole:.2f} | {blocks:.2f} | {whole_gb:.2f} | {blocks_gb:.2f}"
            print(f"| {name} | {length:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
