"""SwiGLU's kernels: their values, their grid, the choice of a form, and the fallback."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama

from mlxtune.backend.forward import gates
from mlxtune.backend.forward.gates import swiglu
from mlxtune.backend.forward.kernels import device_kernels, gate_kernels
from mlxtune.backend.forward.kernels.device_kernels import CUDA, METAL, Chooser, Language
from mlxtune.backend.forward.kernels.gate_kernels import GROUP, GateKernels, plain_swiglu
from tests.backend.forward.kernels.kernel_compilers import FakeDevice
from tests.long.counts import launches
from tests.slow import long, slow_except

DTYPES = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
BOTH = ["mlxtune_swiglu", "mlxtune_swiglu_vjp"]


def with_gradients(
    function: Callable[..., mx.array], gate: mx.array, up: mx.array, cotangent: mx.array
) -> list[mx.array]:
    values, gradients = mx.vjp(function, [gate, up], [cotangent])
    return [*values, *gradients]


def in_float64(gate: mx.array, up: mx.array, cotangent: mx.array) -> list[Any]:
    """Return SwiGLU and its gradients by numpy."""
    g, u, c = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (gate, up, cotangent))
    sigmoid = 1 / (1 + np.exp(-g))
    silu = g * sigmoid
    return [silu * u, c * u * (sigmoid + silu * (1 - sigmoid)), c * silu]


@pytest.fixture(params=[METAL, CUDA], ids=["metal", "cuda"])
def language(request: pytest.FixtureRequest) -> Language:
    selected: Language = request.param
    return selected


@pytest.fixture
def device(language: Language, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A fake GPU whose kernels work, and are as fast as MLX's operations."""
    fake = FakeDevice(language=language)
    as_on_gpu(monkeypatch, fake.make, language)
    return fake


def as_on_gpu(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Any],
    language: Language,
    seconds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
) -> None:
    """Fake a GPU on which the forms of SwiGLU take these times."""
    times = iter(seconds)
    metal = language is METAL
    monkeypatch.setattr(device_kernels, "fastest_seconds", lambda *_: next(times))
    monkeypatch.setattr(gate_kernels, "SWIGLU", Chooser(gate_kernels._trial))
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: False)
    monkeypatch.setattr(device_kernels, "has_metal", lambda: metal)
    monkeypatch.setattr(mx.fast, "metal_kernel" if metal else "cuda_kernel", make)


@pytest.mark.parametrize("dtype", slow_except(DTYPES, mx.float32))
def test_kernels_are_swiglu_and_its_gradient(dtype: mx.Dtype, device: FakeDevice) -> None:
    assert gate_kernels.gate_kernels(dtype) is not None
    assert gate_kernels.gate_kernels_problem() == ""
    keys = mx.random.split(mx.random.key(1), 3)
    gate, up, cotangent = (4 * mx.random.normal((2, 5, 7), dtype, key=key) for key in keys)
    device.calls.clear()
    found = with_gradients(swiglu, gate, up, cotangent)
    assert [call["name"] for call in device.calls] == BOTH
    for one, other in zip(found, in_float64(gate, up, cotangent), strict=True):
        assert one.dtype == dtype
        assert one.shape == (2, 5, 7)
        apart = np.abs(np.array(one.astype(mx.float32)) - other).max()
        assert apart <= DTYPES[dtype] * np.abs(other).max()


# Around one Pack of 2 to 8 values, and around a group of threads.
@pytest.mark.parametrize("size", [8, 9, 11, 16, 17, 2 * GROUP + 1, long(8 * GROUP - 1)])
@pytest.mark.parametrize("offset", [0, 1])
def test_sizes_and_slices_that_do_not_fill_packs(
    size: int, offset: int, language: Language
) -> None:
    """The fake device fails if an access is misaligned, or if a guard is overwritten."""
    fake = FakeDevice(language=language, offset=offset)
    kernels = GateKernels(fake.make, metal=language is METAL)
    arrays = [mx.random.normal((size,), key=mx.random.key(i)) for i in range(3)]
    for one, other in zip(
        with_gradients(kernels.swiglu, *arrays), in_float64(*arrays), strict=True
    ):
        np.testing.assert_allclose(np.array(one), other, rtol=2e-5, atol=1e-6)


def test_columns_of_a_matrix_are_made_contiguous(language: Language) -> None:
    kernels = GateKernels(FakeDevice(language=language).make, metal=language is METAL)
    both = mx.random.normal((6, 10), key=mx.random.key(1))
    gate, up = both[:, :5], both[:, 5:]
    np.testing.assert_allclose(kernels.swiglu(gate, up), plain_swiglu(gate, up), 2e-5, 1e-6)


@pytest.mark.parametrize("dtype", slow_except(DTYPES, mx.bfloat16))
def test_a_thread_reads_neighboring_values(dtype: mx.Dtype, device: FakeDevice) -> None:
    """MLX's Metal kernels read 8 bytes a thread; CUDA's widest load has 16."""
    values = (8 if device.language is METAL else 16) // dtype.size
    kernels = gate_kernels.device_kernels()
    for size in (8, 9, 1023, 1025):
        kernels.swiglu(mx.ones(size, dtype), mx.ones(size, dtype))
        call = device.calls[-1]
        assert call["grid"] == (math.ceil(size / values), 1, 1)
        assert call["threadgroup"] == (GROUP, 1, 1)
        assert dict(call["template"]) == {"T": dtype, "WIDTH": values}


def mlp_model() -> nn.Module:
    model = nn.Module()
    model.mlp = llama.MLP(llama.ModelArgs("llama", 16, 1, 24, 2, 1e-6, 50))
    return model


def test_model_on_a_gpu_runs_the_kernels(device: FakeDevice) -> None:
    model, x = mlp_model(), mx.random.normal((1, 3, 16), key=mx.random.key(1))
    expected = model.mlp(x)
    gates.replace_gates(model)
    # The model may never use its first dtype, so nothing is tried yet.
    assert device.calls == []
    gate_kernels.gate_kernels(mx.float32)
    device.calls.clear()
    assert mx.allclose(model.mlp(x), expected, rtol=1e-5, atol=1e-6)
    assert [call["name"] for call in device.calls] == BOTH[:1]


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ((1.0, 0.5, 1.0, 1.0), BOTH[1:]),
        ((1.0, 1.0, 0.5, 1.0), BOTH[:1]),
        # Of four forms, MLX's operations are last.
        ((1.0, 1.0, 1.0, 0.5), []),
    ],
    ids=["gradient kernel", "forward kernel", "no kernel"],
)
def test_slower_kernels_are_skipped_without_a_problem(
    seconds: tuple[float, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDevice()
    as_on_gpu(monkeypatch, fake.make, METAL, seconds)
    gate_kernels.gate_kernels(mx.float32)
    assert gate_kernels.gate_kernels_problem() == ""
    fake.calls.clear()
    arrays = [mx.random.normal((4, 6), key=mx.random.key(i)) for i in range(3)]
    found = with_gradients(swiglu, *arrays)
    assert [call["name"] for call in fake.calls] == names
    for one, other in zip(found, in_float64(*arrays), strict=True):
        np.testing.assert_allclose(np.array(one), other, rtol=2e-5, atol=1e-6)


def raising(**_: Any) -> Any:
    def run(**options: Any) -> Any:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: 1")

    return run


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda language: raising, "Unable to build metal library from source"),
        (
            lambda language: FakeDevice(1.02, language=language).make,
            "in float32, the output differs by 0.02",
        ),
    ],
    ids=["no compiler", "wrong by 2%"],
)
def test_kernels_that_fail_are_not_used_and_say_why(
    make: Callable[[Language], Callable[..., Any]],
    problem: str,
    language: Language,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_gpu(monkeypatch, make(language), language)
    assert gate_kernels.gate_kernels(mx.float32) is None
    assert problem in gate_kernels.gate_kernels_problem()
    assert mx.array_equal(swiglu(mx.ones(8), mx.ones(8)), plain_swiglu(mx.ones(8), mx.ones(8)))


def test_cpu_makes_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_kernels, "SWIGLU", Chooser(gate_kernels.device_kernels))
    # The machine that runs the tests may have a GPU.
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: True)
    assert gate_kernels.gate_kernels(mx.float32) is None
    assert gate_kernels.gate_kernels_problem() == ""


def test_arrays_that_kernels_do_not_serve_run_plainly(device: FakeDevice) -> None:
    swiglu(mx.ones((2, 8), mx.bfloat16), mx.ones((2, 8)))
    swiglu(mx.ones((2, 8)), mx.ones(8))
    swiglu(mx.ones((0, 8)), mx.ones((0, 8)))
    # Metal passes fewer than 8 values in another address space.
    swiglu(mx.ones(7), mx.ones(7))
    assert device.calls == []


def test_mlp_launches_seven_kernels_less() -> None:
    """Each kernel is faked by an MLX function that counts as one launch."""

    def make(*, output_names: list[str], **_: Any) -> Any:
        def run(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            if len(output_names) == 1:
                return [mx.logaddexp(*inputs)]
            return list(mx.divmod(inputs[0], inputs[2]))

        return run

    x, weight = mx.zeros((8, 16)), mx.zeros((16, 32))

    def launched(function: Callable[..., mx.array]) -> int:
        def loss(gate: mx.array, up: mx.array) -> mx.array:
            return (function(x @ gate, x @ up) @ weight.T).sum()

        found = launches(mx.value_and_grad(loss, argnums=(0, 1))(weight, weight * 2))
        return sum(found.values())

    kernels = GateKernels(make, metal=True)
    assert launched(plain_swiglu) - launched(kernels.swiglu) == 7
