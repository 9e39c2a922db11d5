"""NF4, against the paper's derivation and a reference in numpy."""

from __future__ import annotations

from statistics import NormalDist

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.models import nf4

WEIGHT = (np.random.default_rng(0).standard_normal((48, 256)) * 0.02).astype(np.float32)


def reference() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes (out, in), scales (out, in / 64) and the dequantised weight, by definition."""
    levels = np.array(nf4.LEVELS, dtype=np.float32)
    blocks = WEIGHT.reshape(48, -1, 64)
    scales = np.abs(blocks).max(axis=-1)
    shares = blocks / scales[..., None]
    codes = np.abs(shares[..., None] - levels).argmin(axis=-1)
    return codes.reshape(48, 256), scales, (levels[codes] * scales[..., None]).reshape(48, 256)


def test_levels_are_quantiles_of_the_normal_distribution() -> None:
    # The paper's appendix E, as its authors compute it: 8 quantiles above zero and 7 below.
    tail = 0.9677083
    above = [NormalDist().inv_cdf(p) for p in np.linspace(tail, 0.5, 9)[:-1]]
    below = [-NormalDist().inv_cdf(p) for p in np.linspace(tail, 0.5, 8)[:-1]]
    levels = np.sort([*above, 0.0, *below]) / max(above)
    np.testing.assert_allclose(nf4.LEVELS, levels, atol=1e-6)


def test_weight_is_quantized_to_the_nearest_levels() -> None:
    codes, scales = nf4.quantize(mx.array(WEIGHT))
    expected, expected_scales, weight = reference()
    # A byte holds two codes, the first in its high half.
    packed = (expected[:, ::2] << 4 | expected[:, 1::2]).astype(np.uint8)
    assert np.array_equal(np.array(codes.view(mx.uint8)), packed)
    assert np.array_equal(np.array(scales), expected_scales)
    assert np.array_equal(np.array(nf4.dequantize(codes, scales)), weight)


def test_block_of_zeros_stays_zero() -> None:
    codes, scales = nf4.quantize(mx.zeros((2, 64)))
    assert not np.array(nf4.dequantize(codes, scales)).any()


def test_scales_are_quantized_around_their_mean() -> None:
    scales = np.random.default_rng(1).uniform(0.03, 0.07, (40, 10)).astype(np.float32)
    codes, nested, mean = nf4.quantize_scales(mx.array(scales))
    assert (codes.dtype, codes.shape, nested.shape) == (mx.uint8, (40, 10), (2,))
    assert mean.item() == pytest.approx(scales.mean(), rel=1e-6)
    levels = nf4.scale_levels().astype(np.float64)
    flat = np.pad((scales - np.float32(mean.item())).reshape(-1), (0, 112)).reshape(2, 256)
    largest = np.abs(flat).max(axis=1, keepdims=True)
    nearest = np.abs((flat / largest)[..., None] - levels).argmin(axis=-1)
    expected = (levels[nearest] * largest).reshape(-1)[:400].reshape(40, 10) + mean.item()
    found = np.array(nf4.dequantize_scales(codes, nested, mean))
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert np.abs(found - scales).max() < 0.02 * np.abs(flat).max()


def test_scale_levels_are_a_sign_an_exponent_and_a_fraction() -> None:
    levels = nf4.scale_levels()
    assert len(levels) == len(set(levels.tolist())) == 256
    assert (levels.min(), levels.max()) == (pytest.approx(-0.99297, abs=1e-5), 1.0)
    # The smallest exponent has one fraction; each larger exponent has twice as many as the one
    # before.
    counts = [int(((levels >= 10.0**e) & (levels < 10.0 ** (e + 1))).sum()) for e in range(-7, 0)]
    assert counts == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("double_quant", [False, True])
def test_layer_computes_with_the_unpacked_weight(double_quant: bool) -> None:
    linear = nn.Linear(256, 48)
    linear.weight = mx.array(WEIGHT)
    layer = nf4.NF4Linear(linear, double_quant=double_quant)
    weight = layer.unpacked(mx.float32)
    if not double_quant:
        assert np.array_equal(np.array(weight), reference()[2])
    x = mx.random.normal((3, 5, 256), key=mx.random.key(0))
    plain = x @ weight.T + linear.bias
    assert mx.allclose(layer(x), plain, rtol=1e-5, atol=1e-6)
    ours = mx.grad(lambda x: (layer(x) ** 2).sum())(x)
    theirs = mx.grad(lambda x: ((x @ weight.T + linear.bias) ** 2).sum())(x)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    # Rows unpacked alone equal the rows of the whole matrix.
    assert mx.array_equal(layer.unpacked(mx.float32, index=slice(7, 20)), weight[7:20])
    assert not layer.trainable_parameters()
