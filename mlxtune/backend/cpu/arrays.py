"""MLX arrays as numpy sees them, and kernels run on their rows by two threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# With fewer elements, waking a second thread takes longer than it saves.
_WORTH_SHARING = 1 << 17


def view(x: mx.array) -> Floats:
    """Return an array's memory as numpy sees it, evaluated, not copied."""
    return np.array(x, copy=False)


def empty(*shape: int) -> tuple[mx.array, Floats]:
    """Return a new float32 array, and the same memory for numpy to write."""
    made = mx.zeros(shape)
    mx.eval(made)
    return made, view(made)


def unread(*shape: int) -> mx.array:
    """Return NaNs, at no cost, in the place of a value that nothing should read."""
    return mx.broadcast_to(mx.array(math.nan), shape)


def detached(x: mx.array) -> mx.array:
    """Return a copy that no gradient is traced through."""
    return mx.array(view(x))


def has_nan(arrays: Iterable[mx.array]) -> bool:
    """Return whether any array has a NaN."""
    return any(math.isnan(np.vdot(x, x)) for x in map(view, arrays))


def matrix(x: mx.array) -> Floats:
    """Return the memory of an array (..., n) as contiguous rows (m, n)."""
    return np.ascontiguousarray(view(x)).reshape(-1, x.shape[-1])


def computes(*arrays: Any) -> bool:
    """Return whether the kernels can take these: float32 arrays that are not empty."""
    return all(isinstance(x, mx.array) and x.dtype == mx.float32 and x.size for x in arrays)


@lru_cache(maxsize=1)
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlxtune")


def by_rows(kernel: Callable[..., None], rows: int, elements: int, *args: Any) -> None:
    """Call a kernel that takes (start, end, *args) for all rows."""
    if elements < _WORTH_SHARING or rows < 2:
        kernel(0, rows, *args)
        return
    half = rows // 2
    other = _second_thread().submit(kernel, half, rows, *args)
    kernel(0, half, *args)
    other.result()
