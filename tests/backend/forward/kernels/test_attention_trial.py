"""The choice between kernels around attention and MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxtune.backend.forward.kernels import attention_trial, device_kernels
from mlxtune.backend.forward.kernels.attention_kernels import AttentionKernels, Heads, HeadSizes
from mlxtune.backend.forward.kernels.attention_trial import kernels_for, trial_heads
from mlxtune.backend.forward.kernels.device_kernels import METAL
from tests.backend.forward.kernels.kernel_compilers import FakeDevice


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A GPU whose kernels run as C++, and on which no kernel was tried."""
    device = FakeDevice(language=METAL)
    monkeypatch.setattr(attention_trial, "on_cpu", lambda: False)
    monkeypatch.setattr(attention_trial, "_choosers", {})
    kernels = AttentionKernels(METAL, device.make)
    monkeypatch.setattr(attention_trial, "_device_kernels", lambda: kernels)
    return device


def heads() -> Heads:
    return trial_heads(HeadSizes(1, 1, 6, 6), normalized=False)


def choice(
    monkeypatch: pytest.MonkeyPatch, by_kernels: float, by_operations: float
) -> AttentionKernels | None:
    """Return the kernels to use if runs by kernels and by MLX's operations take these seconds."""
    times = iter([by_kernels, by_operations])
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: False)
    monkeypatch.setattr(device_kernels, "fastest_seconds", lambda *_: next(times))
    choose = kernels_for(mx.float32)
    assert choose is not None
    return choose(heads())


@pytest.mark.slow
@pytest.mark.parametrize("faster", [True, False])
def test_kernels_are_used_where_they_are_faster(
    faster: bool, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = choice(monkeypatch, 1.0, 2.0 if faster else 0.5)
    assert (found is not None) is faster
    assert attention_trial.attention_kernels_problem() == ""


@pytest.mark.slow
def test_wrong_kernels_are_not_used_and_the_problem_is_reported(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.factor = 1.01
    assert choice(monkeypatch, 1.0, 2.0) is None
    assert "differs by 0.01" in attention_trial.attention_kernels_problem()


def test_cpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_trial, "on_cpu", lambda: True)
    assert kernels_for(mx.float32) is None
