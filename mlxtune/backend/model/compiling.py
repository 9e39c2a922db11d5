"""Compiled functions, and how often they were traced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx

from mlxtune.backend.model.device import on_cpu

_traces = [0]
_as_on_gpu = False


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function compiled by `mx.compile` with these options."""

    @wraps(function)
    def traced(*args: Any, **keywords: Any) -> Any:
        # MLX calls it once for each signature.
        _traces[0] += 1
        return function(*args, **keywords)

    return mx.compile(traced, **options)


def compiles() -> bool:
    """Return whether compiling pays: on the CPU, MLX compiles with a C++ compiler, for no gain."""
    return _as_on_gpu or not on_cpu()


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Make graphs inside the block those of a GPU, to count them where there is none."""
    global _as_on_gpu
    before, _as_on_gpu = _as_on_gpu, True
    try:
        yield
    finally:
        _as_on_gpu = before


def traces() -> int:
    """Return how many signatures have been compiled so far."""
    return _traces[0]
