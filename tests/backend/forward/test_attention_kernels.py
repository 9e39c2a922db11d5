"""The kernels around attention, compiled as C++, against MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxtune.backend.forward import attention_kernels, device_kernels
from mlxtune.backend.forward.attention_kernels import AttentionKernels, HeadSizes, trial_heads
from mlxtune.backend.forward.device_kernels import CUDA, METAL, Case, Language
from tests.backend.forward.kernel_compilers import FakeDevice

SIZES = [
    HeadSizes(queries=2, keys=1, size=128, rotated=128),
    HeadSizes(queries=1, keys=1, size=80, rotated=80),
    HeadSizes(queries=3, keys=1, size=64, rotated=32),
    HeadSizes(queries=1, keys=1, size=256, rotated=256),
    HeadSizes(queries=2, keys=2, size=6, rotated=6),
]


def kernels(language: Language) -> AttentionKernels:
    return AttentionKernels(language, FakeDevice(language=language).make)


def differences(case: Case, dtype: mx.Dtype, tried: device_kernels.Trial) -> list[float]:
    """Return each value's and gradient's largest difference, as a fraction of the largest value."""
    (form,) = tried.forms.values()
    found, expected = case.astype(dtype).run(form), case.astype(dtype).astype(mx.float32)
    return [
        float(mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max())
        for one, other in zip(found, expected.run(tried.plain), strict=True)
    ]


@pytest.mark.parametrize("normalised", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes.size}/{sizes.rotated}")
@pytest.mark.parametrize("language", [METAL, CUDA], ids=lambda language: language.name)
def test_kernels_compute_what_mlx_computes(
    language: Language, sizes: HeadSizes, normalised: bool
) -> None:
    tried = attention_kernels.trial_of(kernels(language), trial_heads(sizes, normalised=normalised))
    assert max(differences(tried.small(), mx.float32, tried)) < 2e-6
