"""Functions with a custom gradient."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

# Takes `forward`, `backward` and the primals, and runs the function with its custom gradient in
# place of MLX. tests/long sets `EXPORTED` to count operations in graphs that MLX could not export
# otherwise.
Call = Callable[[Callable[..., Any], Callable[..., Any], tuple[mx.array, ...]], Any]
EXPORTED: ContextVar[Call | None] = ContextVar("custom gradients of exported graphs", default=None)


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays with the gradient `backward(primals, cotangents, outputs)`.

    A single primal, cotangent or output is passed and returned without a tuple. Call the function
    immediately: it depends on whether a graph is being exported now.
    """
    if (run := EXPORTED.get()) is not None:
        return lambda *primals: run(forward, backward, primals)
    function = mx.custom_function(forward)
    function.vjp(backward)
    return function


def is_exporting() -> bool:
    """Return whether a graph is being built to be exported."""
    return EXPORTED.get() is not None
