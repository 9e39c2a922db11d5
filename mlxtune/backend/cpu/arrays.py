"""MLX arrays as numpy sees them, and kernels run on their rows by two threads."""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# With fewer elements, waking a second thread takes longer than it saves.
_WORTH_SHARING = 1 << 17
_SECOND_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlxtune")


def view(x: mx.array) -> Floats:
    """Return an array's memory as numpy sees it, evaluated, not copied."""
    return np.array(x, copy=False)


def empty(*shape: int) -> mx.array:
    """Return a new float32 array, in whose memory numpy can write."""
    made = mx.zeros(shape)
    mx.eval(made)
    return made


def copied(x: mx.array) -> mx.array:
    """Return a contiguous copy, in whose memory numpy can write."""
    made = empty(*x.shape)
    view(made)[...] = view(x)
    return made


def unread(*shape: int) -> mx.array:
    """Return NaNs, at no cost, in the place of a value that nothing should read."""
    return mx.broadcast_to(mx.array(math.nan), shape)


def detached(x: mx.array) -> mx.array:
    """Return a copy, laid out alike, that no gradient is traced through."""
    return mx.array(view(x))


def has_nan(arrays: Iterable[mx.array]) -> bool:
    """Return whether any array has a NaN."""
    return any(math.isnan(np.vdot(x, x)) for x in map(view, arrays))


def matrix(x: mx.array) -> Floats:
    """Return an array (..., n) as contiguous rows (m, n): its own memory if that is contiguous."""
    return np.ascontiguousarray(view(x)).reshape(-1, x.shape[-1])


def computes(*arrays: Any) -> bool:
    """Return whether the kernels can take these: float32 arrays that are not empty."""
    return all(isinstance(x, mx.array) and x.dtype == mx.float32 and x.size for x in arrays)


def by_rows(
    kernel: Callable[..., None], x: npt.NDArray[Any], *args: Any, rows: int | None = None
) -> None:
    """Call a kernel that takes (start, end, x, *args) for all `rows`, by default those of x."""
    rows = len(x) if rows is None else rows
    if x.size < _WORTH_SHARING:
        kernel(0, rows, x, *args)
    else:
        by_halves(lambda start, end: kernel(start, end, x, *args), rows)


def by_halves(work: Callable[[int, int], None], count: int) -> None:
    """Call `work(start, end)` for two halves of `count` things, at once."""
    half = count // 2
    other = _SECOND_THREAD.submit(work, 0, half) if half else None
    work(half, count)
    if other:
        other.result()
