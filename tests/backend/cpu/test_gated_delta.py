"""The gated delta rule by kernels, against the one by MLX, which is compared with mlx-lm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.cpu import gated_delta
from mlxtune.backend.cpu.layers import KernelLayers
from mlxtune.backend.models.mixers.gated_delta import gated_delta_rule
from tests.backend.cpu.compared import assert_close, assert_same_function, random


def inputs(tokens: int, key_heads: int, channels: bool = False, size: int = 8) -> list[mx.array]:
    heads = 2 * key_heads
    k = random(2, tokens, key_heads, size)
    gates = random(2, tokens, heads, *([size] if channels else []), seed=1)
    return [
        random(2, tokens, key_heads, size, seed=2),
        k / mx.linalg.norm(k, axis=-1, keepdims=True),
        random(2, tokens, heads, 4, seed=3),
        -mx.exp(2 * gates),
        mx.sigmoid(random(2, tokens, heads, seed=4)),
        random(2, heads, 4, size, seed=5),
    ]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("tokens", "key_heads", "size"), [(1, 1, 8), (70, 2, 128), (300, 3, 8)])
def test_rule_and_its_gradients(tokens: int, key_heads: int, size: int, channels: bool) -> None:
    """Also past a kept state, and with gates of 0 and 1."""
    given = inputs(tokens, key_heads, channels, size)
    given[3][:, 5:60:9] = -mx.inf
    given[3][:, 6:60:7] = 0
    expected = gated_delta_rule(*given)
    cotangents = [random(*x.shape, seed=6) for x in expected]
    for x, y in zip(gated_delta.gated_delta_rule(*given), expected, strict=True):
        assert_close(x, y, 2e-6)
    found = mx.vjp(lambda *x: gated_delta.gated_delta_rule(*x), given, cotangents)[1]
    wanted = mx.vjp(lambda *x: gated_delta_rule(*x), given, cotangents)[1]
    for x, y in zip(found, wanted, strict=True):
        assert_close(x, y, 1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_queries_and_keys_are_normalized_as_by_mlx_lm(scale: float) -> None:
    def joined(normalize: Callable[..., Any]) -> Callable[..., mx.array]:
        return lambda q, k: mx.concatenate(normalize(q, k, inv_scale=16**-0.5, eps=1e-6))

    assert_same_function(
        joined(gated_delta.normalize_qk),
        joined(mlx_lm_gated_delta.normalize_qk),
        random(2, 5, 3, 16, scale=scale),
        random(2, 5, 3, 16, scale=scale, seed=1),
    )


def test_layer_that_keeps_its_products_runs_the_rule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = gated_delta._run
    monkeypatch.setattr(gated_delta, "_run", lambda *x: runs.append(x) or run(*x))
    given = inputs(70, 1)

    def layer(*x: mx.array) -> list[mx.array]:
        return [2 * mx.square(gated_delta.gated_delta_rule(*x)[0])]

    def gradients(keeps: bool) -> Any:
        layers, module = KernelLayers(keep_products=keeps), nn.Module()
        # Known from the second step on.
        for _ in range(2):
            runs.clear()
            found = mx.vjp(lambda *x: layers.run(module, [], layer, x), given, [given[2]])[1]
            mx.eval(found)
        return found

    for x, y in zip(gradients(True), mx.vjp(layer, given, [given[2]])[1], strict=True):
        assert_close(x, y, 1e-5)
    gradients(True)
    assert len(runs) == 1
    gradients(False)
    assert len(runs) == 2
