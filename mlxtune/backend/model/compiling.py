"""Compiled functions, and how often they were traced."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

from mlxtune.backend.model.device import on_cpu

_traces = [0]


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
    return not on_cpu()


def traces() -> int:
    """Return how many signatures have been compiled so far."""
    return _traces[0]
