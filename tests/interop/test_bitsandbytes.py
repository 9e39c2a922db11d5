"""NF4 against bitsandbytes, the library of QLoRA's authors."""

from __future__ import annotations

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.models import nf4

torch = pytest.importorskip("torch", reason="needs torch, for bitsandbytes")
functional = pytest.importorskip(
    "bitsandbytes.functional", reason="needs bitsandbytes, to compare NF4 with"
)

WEIGHT = (np.random.default_rng(0).standard_normal((128, 512)) * 0.02).astype(np.float32)


def test_codes_scales_and_weights_are_the_same_to_the_bit() -> None:
    packed, state = functional.quantize_4bit(
        torch.tensor(WEIGHT), quant_type="nf4", blocksize=64, compress_statistics=False
    )
    codes, scales = nf4.quantize(mx.array(WEIGHT))
    assert np.array_equal(np.array(codes.view(mx.uint8)).reshape(-1), packed.numpy().reshape(-1))
    assert np.array_equal(np.array(scales).reshape(-1), state.absmax.numpy())
    again = functional.dequantize_4bit(packed, state).numpy()
    assert np.array_equal(np.array(nf4.dequantize(codes, scales)), again)


def test_nf4_levels_equal_bitsandbytes() -> None:
    levels = functional.get_4bit_type("nf4", device="cpu").numpy()
    assert np.array_equal(levels, np.array(nf4.LEVELS, dtype=np.float32))
    dynamic = functional.create_dynamic_map().numpy()
    np.testing.assert_allclose(nf4.scale_levels(), dynamic, atol=1e-7)


def test_double_quantization_differs_by_no_more_than_a_level() -> None:
    """On the CPU, bitsandbytes does not always choose the nearest level; mlxtune does."""
    _, state = functional.quantize_4bit(
        torch.tensor(WEIGHT), quant_type="nf4", blocksize=64, compress_statistics=True
    )
    codes, nested, mean = nf4.quantize_scales(nf4.quantize(mx.array(WEIGHT))[1])
    assert mean.item() == pytest.approx(float(state.offset), rel=1e-5)
    np.testing.assert_allclose(np.array(nested), state.state2.absmax.numpy(), rtol=1e-5)
    ours, theirs = np.array(codes).reshape(-1).astype(int), state.absmax.numpy().astype(int)
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).mean() < 0.01
