"""Functions with a custom gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

# Whether MLX derives gradients itself.
_derived = False
# What custom gradients computed while `recorded_backward` runs.
_recorded: list[mx.array] | None = None


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays with the gradient `backward(primals, cotangents, outputs)`.

    Single primals, cotangents and outputs are passed and returned without a tuple.
    """
    function = mx.custom_function(forward)
    function.vjp(backward)

    def call(*primals: mx.array) -> Any:
        if _derived:
            return forward(*primals)
        if _recorded is None:
            return function(*primals)
        return _unrolled(_recorded, forward, backward, primals)

    return call


@contextmanager
def derived_gradients() -> Iterator[None]:
    """Have MLX derive all gradients inside the block, for it exports no custom ones."""
    global _derived
    before, _derived = _derived, True
    try:
        yield
    finally:
        _derived = before


@contextmanager
def recorded_backward() -> Iterator[list[mx.array]]:
    """Have custom gradients computed with the function itself inside the block; yield them.

    For counting what a step computes: MLX exports no graph that has functions with a custom
    gradient. Values are wrong; operations and shapes are those of a step, and gradients that
    nothing reads are among them.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def _unrolled(
    recorded: list[mx.array],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    primals: tuple[mx.array, ...],
) -> Any:
    fixed = [mx.stop_gradient(primal) for primal in primals]
    outputs = forward(*fixed)
    cotangents = tree_map(mx.ones_like, outputs)
    gradients = backward(fixed[0] if len(fixed) == 1 else fixed, cotangents, outputs)
    recorded += [gradients] if isinstance(gradients, mx.array) else gradients
    # Lets MLX's own gradients flow on to what comes before, at the cost of no product.
    floating = [each for each in primals if mx.issubdtype(each.dtype, mx.floating)]
    link = mx.array(0.0) + sum((0.0 * each).astype(mx.float32).sum() for each in floating)
    return tree_map(lambda each: mx.stop_gradient(each) + link.astype(each.dtype), outputs)
