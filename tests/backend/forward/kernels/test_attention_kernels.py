"""The kernels around attention, compiled as C++, against MLX's operations."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest

from mlxtune.backend.forward.kernels.attention_kernels import (
    AttentionKernels,
    Heads,
    HeadSizes,
    supports_attention,
)
from mlxtune.backend.forward.kernels.attention_trial import trial_heads, trial_of
from mlxtune.backend.forward.kernels.device_kernels import CUDA, METAL, TOLERANCES, Language, Trial
from tests.backend.forward.kernels.kernel_compilers import FakeDevice
from tests.backend.models.test_packed import FOREST
from tests.slow import long, slow

WHOLE = HeadSizes(queries=2, keys=1, size=128, rotated=128)
PARTLY_ROTATED = HeadSizes(queries=3, keys=1, size=64, rotated=32)
# Lanes read several times, or are partly idle, or read one entry at a time.
WIDE, ODD, NARROW = (HeadSizes(1, 1, size, size) for size in (256, 80, 6))


def trial(device: FakeDevice, sizes: HeadSizes, normalized: bool) -> Trial:
    kernels = AttentionKernels(device.language, device.make)
    return trial_of(kernels, trial_heads(sizes, normalized=normalized))


def differences(tried: Trial, dtype: mx.Dtype) -> list[float]:
    """Return each value's and gradient's largest difference, as a fraction of the largest value."""
    (form,) = tried.forms.values()
    case = tried.small().astype(dtype)
    expected = case.astype(mx.float32).run(tried.plain)
    return [
        float(mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max())
        for one, other in zip(case.run(form), expected, strict=True)
    ]


@pytest.mark.parametrize(
    ("language", "sizes", "normalized"),
    [
        slow(CUDA, PARTLY_ROTATED, True),
        slow(METAL, ODD, False),
        *(long(CUDA, sizes, True) for sizes in (WHOLE, ODD, WIDE, NARROW)),
        *(long(METAL, sizes, False) for sizes in (PARTLY_ROTATED, WIDE)),
        *(long(METAL, WHOLE, True), long(CUDA, NARROW, False)),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "size", None),
)
def test_kernels_compute_what_mlx_computes(
    language: Language, sizes: HeadSizes, normalized: bool
) -> None:
    tried = trial(FakeDevice(language=language), sizes, normalized)
    assert max(differences(tried, mx.float32)) < 2e-6


@pytest.mark.parametrize("dtype", [slow(mx.bfloat16), long(mx.float16)], ids=str)
def test_kernels_round_to_the_dtype_of_their_inputs(dtype: mx.Dtype) -> None:
    tried = trial(FakeDevice(language=CUDA), PARTLY_ROTATED, True)
    assert 1e-5 < max(differences(tried, dtype)) < TOLERANCES[dtype]


def test_arrays_that_kernels_do_not_serve() -> None:
    q, k = mx.zeros((1, 27, 6)), mx.zeros((1, 27, 6))
    fits = partial(supports_attention, trial_heads(NARROW, normalized=False), FOREST)
    assert fits([q, k, k])
    assert not fits([q.astype(mx.bfloat16), k, k])
    assert not fits([each.astype(mx.int32) for each in (q, k, k)])
    large = Heads(HeadSizes(2**20, 2**20, 256, 256), ())
    assert not supports_attention(large, FOREST, [q, k, k])
    assert not HeadSizes(1, 1, 512, 512).is_supported
    assert not HeadSizes(1, 1, 64, 33).is_supported
