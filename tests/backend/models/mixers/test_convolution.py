"""Depthwise convolution and its gradients, against MLX's own."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX, PLAIN, Operations
from mlxtune.backend.models.mixers import recurrences
from mlxtune.backend.models.mixers.replacements import KINDS
from tests.backend.cpu.compared import assert_close, random


class Model(nn.Module):
    def __init__(self, **options: int) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(6, 6, **{"kernel_size": 4, "groups": 6, **options})


def gradient(layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    weight = random(*layer(x).shape, seed=1)
    return mx.grad(lambda x: (layer(x) * weight).sum())(x)


@pytest.mark.parametrize(
    ("on_cpu", "operations"), [(True, CPU), (True, MLX), (False, MLX)], ids=["cpu", "mlx", "gpu"]
)
@pytest.mark.parametrize(
    ("options", "length"),
    [({}, 9), ({}, 4), ({"bias": False}, 12), ({"kernel_size": 1}, 3), ({"kernel_size": 8}, 8)],
)
def test_depthwise_convolution_and_its_gradient(
    options: dict[str, int],
    length: int,
    on_cpu: bool,
    operations: Operations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrences, "on_cpu", lambda: on_cpu)
    model, x = Model(**options), random(2, length, 6)
    wanted = model.conv1d(x), gradient(model.conv1d, x)
    undo = operations.prepare(model)
    assert recurrences._is_depthwise(model.conv1d, x)
    assert_close(model.conv1d(x), wanted[0], 1e-6)
    assert_close(gradient(model.conv1d, x), wanted[1], 1e-6)
    undo()
    assert type(model.conv1d) is nn.Conv1d


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"groups": 3},
        {"stride": 2},
        {"padding": 3},
        {"dilation": 2},
        {"kernel_size": 9},
    ],
)
def test_other_convolutions_are_left_to_mlx(options: dict[str, int]) -> None:
    model, x = Model(**options), random(2, 12, 6)
    wanted = model.conv1d(x), gradient(model.conv1d, x)
    MLX.prepare(model)
    assert not recurrences._is_depthwise(model.conv1d, x)
    assert mx.array_equal(model.conv1d(x), wanted[0])
    assert mx.array_equal(gradient(model.conv1d, x), wanted[1])


def test_16_bits_stay_and_are_summed_in_float32() -> None:
    model, x = Model(), random(2, 9, 6)
    model.set_dtype(mx.bfloat16)
    wanted = model.conv1d(x.astype(mx.bfloat16))
    MLX.prepare(model)
    found = model.conv1d(x.astype(mx.bfloat16))
    assert found.dtype == mx.bfloat16
    assert_close(found.astype(mx.float32), wanted.astype(mx.float32), 1e-2)


def test_plain_model_keeps_mlx_lms_own() -> None:
    model = Model()
    PLAIN.prepare(model)
    assert type(model.conv1d) not in KINDS.values()
