"""The kernels around attention, compiled as C++, against MLX's operations."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest

from mlxtune.backend.forward import attention_kernels, device_kernels
from mlxtune.backend.forward.attention_kernels import (
    AttentionKernels,
    Heads,
    HeadSizes,
    kernels_for,
    serves,
    trial_heads,
    trial_of,
)
from mlxtune.backend.forward.device_kernels import CUDA, METAL, TOLERANCES, Language, Trial
from tests.backend.forward.kernel_compilers import FakeDevice
from tests.backend.models.test_packed import FOREST
from tests.slow import slow

WHOLE = HeadSizes(queries=2, keys=1, size=128, rotated=128)
PARTLY_ROTATED = HeadSizes(queries=3, keys=1, size=64, rotated=32)
# Lanes read several times, or are partly idle, or read one entry at a time.
WIDE, ODD, NARROW = (HeadSizes(1, 1, size, size) for size in (256, 80, 6))


def trial(device: FakeDevice, sizes: HeadSizes, normalised: bool) -> Trial:
    kernels = AttentionKernels(device.language, device.make)
    return trial_of(kernels, trial_heads(sizes, normalised=normalised))


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
    ("language", "sizes", "normalised"),
    [
        slow(METAL, WHOLE, True),
        slow(CUDA, PARTLY_ROTATED, True),
        *(slow(CUDA, sizes, True) for sizes in (WHOLE, WIDE, ODD, NARROW)),
        slow(CUDA, NARROW, False),
        *(slow(METAL, sizes, False) for sizes in (PARTLY_ROTATED, WIDE, ODD)),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "size", None),
)
def test_kernels_compute_what_mlx_computes(
    language: Language, sizes: HeadSizes, normalised: bool
) -> None:
    tried = trial(FakeDevice(language=language), sizes, normalised)
    assert max(differences(tried, mx.float32)) < 2e-6


@pytest.mark.parametrize("dtype", [slow(mx.bfloat16), slow(mx.float16)], ids=str)
def test_kernels_round_to_the_dtype_of_their_inputs(dtype: mx.Dtype) -> None:
    tried = trial(FakeDevice(language=CUDA), PARTLY_ROTATED, True)
    assert 1e-5 < max(differences(tried, dtype)) < TOLERANCES[dtype]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A GPU whose kernels run as C++, and on which no kernel was tried."""
    device = FakeDevice(language=METAL)
    monkeypatch.setattr(attention_kernels, "on_cpu", lambda: False)
    monkeypatch.setattr(attention_kernels, "_CHOOSERS", {})
    kernels = AttentionKernels(METAL, device.make)
    monkeypatch.setattr(attention_kernels, "_device_kernels", lambda: kernels)
    return device


def heads(sizes: HeadSizes = NARROW) -> Heads:
    return trial_heads(sizes, normalised=False)


def choice(
    monkeypatch: pytest.MonkeyPatch, by_kernels: float, by_operations: float
) -> AttentionKernels | None:
    """Return the kernels to use if runs by kernels and by MLX's operations take these seconds."""
    times = iter([by_kernels, by_operations])
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: False)
    monkeypatch.setattr(device_kernels, "seconds", lambda *_: next(times))
    choose = kernels_for(mx.float32)
    assert choose is not None
    return choose(heads())


@pytest.mark.parametrize("faster", [True, False])
def test_kernels_are_used_where_they_are_faster(
    faster: bool, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = choice(monkeypatch, 1.0, 2.0 if faster else 0.5)
    assert (found is not None) is faster
    assert attention_kernels.attention_kernels_problem() == ""


def test_wrong_kernels_are_not_used_and_the_problem_is_reported(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.factor = 1.01
    assert choice(monkeypatch, 1.0, 2.0) is None
    assert "differs by 0.01" in attention_kernels.attention_kernels_problem()


def test_cpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "on_cpu", lambda: True)
    assert kernels_for(mx.float32) is None


def test_arrays_that_kernels_do_not_serve() -> None:
    q, k = mx.zeros((1, 27, 6)), mx.zeros((1, 27, 6))
    fits = partial(serves, heads(), FOREST)
    assert fits([q, k, k])
    assert not fits([q.astype(mx.bfloat16), k, k])
    assert not fits([each.astype(mx.int32) for each in (q, k, k)])
    large = Heads(HeadSizes(2**20, 2**20, 256, 256), ())
    assert not serves(large, FOREST, [q, k, k])
    assert not HeadSizes(1, 1, 512, 512).served
    assert not HeadSizes(1, 1, 64, 33).served
