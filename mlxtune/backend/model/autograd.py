"""Functions with a gradient of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays with its gradient.

    `backward(primals, cotangents, outputs)` returns those with respect to the primals; where there
    is one of any, it stands there by itself.
    """
    function = mx.custom_function(forward)
    function.vjp(backward)
    return cast(Callable[..., Any], function)
