"""Timing both forms of a quantised product, on a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.models import layers, timed_products
from mlxtune.backend.models.layers import DequantizedLinear
from mlxtune.backend.models.loading import load_base, open_base, with_products
from mlxtune.backend.models.timed_products import TimedProducts, time_products
from mlxtune.config.base_options import BaseOptions
from tests.models import write_model


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A quantised model, opened as on a GPU."""
    folder = write_model(tmp_path / "model", "llama", quantize=4)
    monkeypatch.setattr(layers, "on_cpu", lambda: False)
    return open_base(folder, "float32").model


def clock(seconds: list[float]) -> Callable[[], float]:
    """Return a fake clock: the n-th timed run takes `seconds[n]`."""

    def ticks() -> Iterator[float]:
        now = 0.0
        for each in seconds:
            yield now
            now += each
            yield now

    return ticks().__next__


def test_median_after_warming_up_decides(base: nn.Module) -> None:
    runs = [90.0, 90.0, 3.0, 1.0, 2.0, 60.0, 1.5, 90.0, 90.0, 1.0, 1.4, 1.2, 1.3, 50.0]
    found = time_products(base, mx.float32, 24, clock(runs))
    assert found is not None
    assert (found.name, found.tokens) == ("mlp.up_proj", 24)
    assert (found.quantized, found.dequantized) == pytest.approx((2.0, 1.3))
    assert found.faster == "dequantized"
    assert found.describe() == (
        "dequantized products: 1.3 s for 24 tokens of mlp.up_proj, forward and backward; "
        "quantized: 2 s"
    )


def test_form_without_memory_is_taken_unless_the_other_gains() -> None:
    assert TimedProducts("", 1, 1.0, 0.96).faster == "quantized"
    assert TimedProducts("", 1, 1.0, 0.94).faster == "dequantized"


def test_products_timed_are_those_of_the_largest_matrix_and_of_training(
    base: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], mx.vjp

    def vjp(layer: nn.Module, x: list[mx.array], cotangent: list[mx.array]) -> object:
        seen.append((type(layer), x[0].shape, cotangent[0].shape, x[0].dtype))
        outputs, gradients = real(layer, x, cotangent)
        assert all(np.isfinite(np.array(each.astype(mx.float32))).all() for each in gradients)
        return outputs, gradients

    monkeypatch.setattr(mx, "vjp", vjp)
    state = [np.array(each) for each in mx.random.state]
    time_products(base, mx.bfloat16, 10)
    shapes = ((1, 10, 64), (1, 10, 96), mx.bfloat16)
    assert set(seen) == {(nn.QuantizedLinear, *shapes), (DequantizedLinear, *shapes)}
    assert all((np.array(a) == b).all() for a, b in zip(mx.random.state, state, strict=True))


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_stand_ins_compute_the_same_in_both_forms(mode: str) -> None:
    forms = timed_products._stand_ins(nn.QuantizedLinear(64, 32, bias=True, mode=mode))
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    one, other = (np.array(form(x)) for form in forms)
    assert np.abs(one).max() > 0
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_form_that_raises_is_not_taken(base: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("[quantized_matmul] has no CUDA implementation")

    monkeypatch.setattr(nn.QuantizedLinear, "__call__", broken)
    found = time_products(base, mx.float32, 8)
    assert found is not None
    assert found.faster == "dequantized"
    assert "quantized: not available" in found.describe()


def test_model_without_quantised_layers_has_no_choice(tmp_path: Path) -> None:
    model = open_base(write_model(tmp_path / "plain", "llama"), "float32").model
    assert time_products(model, mx.float32, 8) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_model_changes_its_form_in_place(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", architecture, quantize=4)
    for module in (layers, "mlxtune.backend.models.loading"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.on_cpu", lambda: False)
    before, after = open_base(folder, "float32"), load_base(folder, "float32")
    changed = with_products(before, "dequantized")
    expected = load_base(folder, "float32", BaseOptions(quantized_compute="dequantized"))
    kinds = [type(module) for _, module in changed.model.named_modules()]
    assert kinds == [type(module) for _, module in expected.model.named_modules()]
    assert changed.quantized_compute == "dequantized"
    assert with_products(after, "quantized") is after
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(changed.model(tokens), expected.model(tokens))
