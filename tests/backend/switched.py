"""Compare mlx-lm's layers of experts with their replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.lora import LoRASwitchLinear

from tests.backend.cpu.compared import assert_same_function, random

WIDTH, HIDDEN = 64, 32


def experts(
    kind: Any = SwitchGLU, count: int = 5, activation: Any = None, *, bias: bool = False
) -> nn.Module:
    given = {} if activation is None else {"activation": activation}
    made = kind(WIDTH, HIDDEN, count, bias=bias, **given)
    names = tree_flatten(made.parameters())
    made.update(tree_unflatten([(name, random(*x.shape, scale=0.2)) for name, x in names]))
    made.freeze()
    return made


def with_lora(made: nn.Module, *names: str) -> nn.Module:
    for seed, name in enumerate(names):
        layer = LoRASwitchLinear.from_base(made[name], r=3, scale=2.0)
        layer.lora_b = random(*layer.lora_b.shape, seed=seed)
        made[name] = layer
    return made


def indices(tokens: int, per_token: int, count: int, seed: int = 0) -> mx.array:
    """Return the experts of each token as (1, tokens, per_token), all different, as from top-k."""
    order = np.random.default_rng(seed).random((1, tokens, count)).argsort(axis=-1)
    return mx.array(order[..., :per_token].astype(np.uint32))


def assert_same(
    made: nn.Module, chosen: mx.array, prepare: Callable[[nn.Module], Callable[[], None]]
) -> None:
    """Compare outputs and gradients of mlx-lm's experts before and after `prepare`."""
    names = [name for name, _ in tree_flatten(made.trainable_parameters())]
    trained = [value for _, value in tree_flatten(made.trainable_parameters())]

    def function(x: mx.array, *values: mx.array) -> mx.array:
        made.update(tree_unflatten(list(zip(names, values, strict=True))))
        return made(x, chosen)

    def fast(*arrays: mx.array) -> mx.array:
        undo = prepare(made)
        try:
            return function(*arrays)
        finally:
            undo()

    x = random(*chosen.shape[:-1], WIDTH)
    assert_same_function(fast, function, x, *trained, tolerance=1e-5)
