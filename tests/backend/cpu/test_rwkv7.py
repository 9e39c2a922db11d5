"""RWKV 7's recurrence by kernels; see the tests of the mixers for its values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import rwkv7 as mlx_lm_rwkv7

from mlxtune.backend.cpu import rwkv7
from mlxtune.backend.cpu.layers import KernelLayers
from mlxtune.backend.cpu.model import make_fast
from tests.backend.cpu.compared import assert_close, random


def inputs(tokens: int) -> list[mx.array]:
    """Return r, w, k, v, a, b and a state, with the fastest decay."""
    r, k, v, removed = (random(1, tokens, 2, 8, seed=i) for i in range(4))
    removed = removed / mx.linalg.norm(removed, axis=-1, keepdims=True)
    w = mx.full(r.shape, float(np.exp(-0.606531)))
    return [r, w, k, v, -removed, removed / 2, random(1, 2, 8, 8)]


def test_layer_that_keeps_its_products_runs_the_recurrence_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    run = rwkv7._run
    monkeypatch.setattr(rwkv7, "_run", lambda *x: runs.append(x) or run(*x))
    given = inputs(70)

    def layer(*x: mx.array) -> list[mx.array]:
        return [2 * mx.square(rwkv7.wkv7(*x)[0])]

    def gradients(keeps: bool) -> Any:
        layers, module = KernelLayers(keep_products=keeps), nn.Module()
        # Known from the second step on.
        for _ in range(2):
            runs.clear()
            found = mx.vjp(lambda *x: layers.run(module, [], layer, x), given, [given[3]])[1]
            mx.eval(found)
        return found

    for x, y in zip(gradients(True), mx.vjp(layer, given, [given[3]])[1], strict=True):
        assert_close(x, y, 1e-5)
    gradients(True)
    assert len(runs) == 1
    gradients(False)
    assert len(runs) == 2


def test_fast_layers_call_it_for_float32_only(monkeypatch: pytest.MonkeyPatch) -> None:
    mixing = mlx_lm_rwkv7.Rwkv7TimeMixing(
        mlx_lm_rwkv7.ModelArgs("rwkv7", 50, 16, 32, 1e-5, 8, 1, 4, 4, 4, 4), 0
    )
    make_fast(mixing)
    *given, _ = inputs(5)
    runs = []
    run = rwkv7._run
    monkeypatch.setattr(rwkv7, "_run", lambda *x: runs.append(x) or run(*x))
    y, _ = mixing._wkv7(*given, None)
    assert len(runs) == 1
    half, _ = mixing._wkv7(*(x.astype(mx.bfloat16) for x in given), None)
    assert len(runs) == 1
    assert half.dtype == mx.bfloat16
    assert_close(half.astype(mx.float32), y, 0.05)
