"""Numpy views of MLX arrays, and work divided among threads."""

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def _thread_count() -> int:
    """Return the number of threads: OMP_NUM_THREADS, as for BLAS, or else one per CPU."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    if variable.isdigit() and int(variable):
        return int(variable)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


THREADS = _thread_count()
# With fewer elements, waking another thread costs more time than it saves.
_MIN_THREADED_SIZE = 1 << 17
# The same threshold for matmuls, as a number of multiplications.
MIN_THREADED_MULTIPLICATIONS = 1 << 23
_ZEROS = np.zeros(1 << 19, dtype=np.float32)
_POOL = ThreadPoolExecutor(max(THREADS - 1, 1), thread_name_prefix="mlxtune")
# Marks threads that are running a part of shared work.
_inside = threading.local()


def view(x: mx.array) -> Floats:
    """Evaluate an array, and return a numpy view of its memory."""
    return np.array(x, copy=False)


def empty(*shape: int) -> mx.array:
    """Return a new float32 array that numpy can write to through `view`."""
    size = math.prod(shape)
    if size <= _ZEROS.size:
        # Copying the zeros avoids waking MLX's own thread.
        return mx.array(_ZEROS[:size].reshape(shape))
    array = mx.zeros(shape)
    mx.eval(array)
    return array


def copied(x: mx.array) -> mx.array:
    """Return a contiguous copy that numpy can write to through `view`."""
    copy = empty(*x.shape)
    view(copy)[...] = view(x)
    return copy


def detached(x: mx.array) -> mx.array:
    """Return a copy that has the same memory layout and passes on no gradient."""
    return mx.array(view(x))


def matrix(x: mx.array) -> Floats:
    """Return an array (..., n) as contiguous rows (m, n): a view if it is contiguous already."""
    return np.ascontiguousarray(view(x)).reshape(-1, x.shape[-1])


def unshared_matmuls() -> Callable[[], None]:
    """Make numpy run each matmul on one thread; return a function that undoes the change.

    OpenBLAS's own threads spin until the next matmul, and so take processor time from the threads
    of `in_parts`.
    """
    # The extra `cpu` installs threadpoolctl and numba.
    from threadpoolctl import ThreadpoolController

    limit = ThreadpoolController().select(internal_api="openblas").limit(limits=1)
    undo: Callable[[], None] = limit.restore_original_limits
    return undo


def multiply(a: Floats, b: Floats, out: Floats) -> None:
    """Set `out` (..., m, n) to a (..., m, k) times b (..., k, n)."""
    if out.size * a.shape[-1] < MIN_THREADED_MULTIPLICATIONS:
        np.matmul(a, b, out=out)
        return

    def run(_: int, start: int, end: int) -> None:
        np.matmul(a, b[..., start:end], out=out[..., start:end])

    on_threads(run, out.shape[-1])


def multiplied(a: Floats, b: Floats) -> Floats:
    """Return a (..., m, k) times b (..., k, n)."""
    out = np.empty((*a.shape[:-1], b.shape[-1]), dtype=np.float32)
    multiply(a, b, out)
    return out


def computes(*arrays: Any) -> bool:
    """Return whether the kernels support these arrays: float32 arrays that are not empty."""
    return all(isinstance(x, mx.array) and x.dtype == mx.float32 and x.size for x in arrays)


def in_blocks(
    kernel: Callable[..., None], x: npt.NDArray[Any], *args: Any, count: int | None = None
) -> None:
    """Call a kernel that takes (start, end, x, *args) for all `count`, by default the rows of x."""
    count = len(x) if count is None else count
    if x.size < _MIN_THREADED_SIZE:
        kernel(0, count, x, *args)
    else:
        on_threads(lambda _, start, end: kernel(start, end, x, *args), count)


def on_threads(work: Callable[[int, int, int], None], count: int) -> None:
    """Divide `count` items into a part for each thread, which calls `work(part, start, end)`.

    A call from inside a part does all its work on the calling thread.
    """
    parts = min(THREADS, count)
    if parts < 2 or getattr(_inside, "part", False):
        work(0, 0, count)
        return
    ends = [count * part // parts for part in range(parts + 1)]

    def run(part: int) -> None:
        _inside.part = True
        try:
            work(part, ends[part], ends[part + 1])
        finally:
            _inside.part = False

    others = [_POOL.submit(run, part) for part in range(1, parts)]
    try:
        run(0)
    finally:
        failed = [error for other in others if (error := other.exception())]
    if failed:
        raise failed[0]
