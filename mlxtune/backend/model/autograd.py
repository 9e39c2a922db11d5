"""Functions with a custom gradient."""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays with the gradient `backward(primals, cotangents, outputs)`.

    Single primals, cotangents and outputs are passed and returned without a tuple.
    """
    function = mx.custom_function(forward)
    function.vjp(backward)
    return cast(Callable[..., Any], function)
