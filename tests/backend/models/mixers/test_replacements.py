"""Replacements for mlx-lm's layers whose Metal kernels have no gradient."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import rwkv7

from mlxtune.backend.models.mixers.replacements import MIXERS
from tests.backend.cpu.compared import assert_close, random


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("begins", [True, False])
def test_rwkv_7_never_trains_by_the_kernel_without_a_gradient(
    length: int, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = rwkv7.ModelArgs("rwkv7", 50, 16, 32, 1e-5, 8, 1, 4, 4, 4, 4)
    mixing = rwkv7.Rwkv7TimeMixing(args, 0)
    given = [random(2, length, 2, 8, seed=i, scale=0.3) for i in range(6)]
    state = None if begins else random(2, 2, 8, 8)
    wanted = mixing._wkv7(*given, state)
    MIXERS.apply(mixing)
    if length > 1:
        monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    for found, expected in zip(mixing._wkv7(*given, state), wanted, strict=True):
        assert_close(found, expected, 1e-5)
