"""SwiGLU's Metal kernels: their sources, their grid, and the fallback if they fail."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama

from mlxtune.backend.forward import gate_kernels, gates
from mlxtune.backend.forward.gate_kernels import GROUP, PER_THREAD, GateKernels, sources
from mlxtune.backend.forward.gates import plain_swiglu, swiglu
from tests.long.counts import launches

DTYPES = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


def silu_parts(gate: Any) -> tuple[Any, Any]:
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    return sigmoid, gate * sigmoid


class FakeDevice:
    """Makes fake kernels that compute the formulas in numpy, and records their calls."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.factor = factor

    def make(
        self, *, name: str, input_names: list[str], output_names: list[str], source: str
    ) -> Any:
        assert all(f"{each}[i]" in source for each in (*input_names, *output_names))

        def run(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            self.calls.append({"name": name, "inputs": inputs, **options})
            assert all(each.ndim == 1 for each in inputs)
            assert len(inputs) == len(input_names)
            gate, up, *cotangent = (np.array(each.astype(mx.float32)) for each in inputs)
            sigmoid, silu = silu_parts(gate)
            found = [silu * up]
            if cotangent:
                slope = sigmoid + silu * (1 - sigmoid)
                found = [cotangent[0] * up * slope, self.factor * cotangent[0] * silu]
            assert [each.shape for each in found] == list(options["output_shapes"])
            dtypes = options["output_dtypes"]
            return [
                mx.array(x.astype(np.float32)).astype(d) for x, d in zip(found, dtypes, strict=True)
            ]

        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A fake Apple GPU whose kernels work."""
    fake = FakeDevice()
    as_on_gpu(monkeypatch, fake.make)
    yield fake
    gate_kernels._tried.cache_clear()


def as_on_gpu(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], metal: bool = True
) -> None:
    gate_kernels._tried.cache_clear()
    monkeypatch.setattr(gate_kernels, "on_cpu", lambda: False)
    monkeypatch.setattr(gate_kernels, "has_metal", lambda: metal)
    monkeypatch.setattr(mx.fast, "metal_kernel" if metal else "cuda_kernel", make)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_swiglu_and_its_gradient(dtype: mx.Dtype, device: FakeDevice) -> None:
    assert gate_kernels.gate_kernels_problem() == ""
    keys = mx.random.split(mx.random.key(1), 3)
    gate, up, cotangent = (mx.random.normal((2, 5, 7), dtype, key=key) for key in keys)
    device.calls.clear()
    found = gate_kernels._with_gradients(swiglu, gate, up, cotangent)
    expected = gate_kernels._with_gradients(plain_swiglu, gate, up, cotangent)
    assert [each["name"] for each in device.calls] == ["mlxtune_swiglu", "mlxtune_swiglu_vjp"]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        assert one.shape == (2, 5, 7)
        largest = mx.abs(other.astype(mx.float32)).max()
        apart = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max()
        assert apart <= 3 * DTYPES[dtype] * largest


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1023, 1024, 1025, 5000])
def test_grid_has_a_thread_for_each_element(size: int, device: FakeDevice) -> None:
    kernels = gate_kernels.gate_kernels()
    assert kernels is not None
    kernels.swiglu(mx.ones(size), mx.ones(size))
    call = device.calls[-1]
    threads, *others = call["grid"]
    assert others == [1, 1]
    assert threads == math.ceil(size / PER_THREAD)
    assert call["threadgroup"] == (GROUP, 1, 1)
    assert dict(call["template"]) == {"T": mx.float32, "PER_THREAD": PER_THREAD}


def mlp_model() -> nn.Module:
    model = nn.Module()
    model.mlp = llama.MLP(llama.ModelArgs("llama", 16, 1, 24, 2, 1e-6, 50))
    return model


def test_model_on_a_gpu_runs_the_kernels(device: FakeDevice) -> None:
    model, x = mlp_model(), mx.random.normal((1, 3, 16), key=mx.random.key(1))
    expected = model.mlp(x)
    gates.replace_gates(model)
    device.calls.clear()
    assert mx.allclose(model.mlp(x), expected, rtol=1e-5, atol=1e-6)
    assert [each["name"] for each in device.calls] == ["mlxtune_swiglu"]


def raising(**_: Any) -> Any:
    def run(**options: Any) -> Any:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: 1")

    return run


@pytest.mark.parametrize("metal", [True, False])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (raising, "Unable to build metal library from source"),
        (FakeDevice(1.02).make, "in float32, the gradient of up differs by 0.02"),
    ],
    ids=["no compiler", "wrong by 2%"],
)
def test_kernels_that_fail_are_not_used_and_say_why(
    make: Callable[..., Any], problem: str, metal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_gpu(monkeypatch, make, metal)
    assert gate_kernels.gate_kernels() is None
    assert problem in gate_kernels.gate_kernels_problem()
    assert "\n" not in gate_kernels.gate_kernels_problem()
    assert mx.array_equal(swiglu(mx.ones(3), mx.ones(3)), plain_swiglu(mx.ones(3), mx.ones(3)))
    gate_kernels._tried.cache_clear()


def test_cpu_makes_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_kernels, "_tried", None)
    assert gate_kernels.gate_kernels() is None
    assert gate_kernels.gate_kernels_problem() == ""


def test_arrays_that_kernels_do_not_serve_run_plainly(device: FakeDevice) -> None:
    gate_kernels.gate_kernels()
    device.calls.clear()
    swiglu(mx.ones((2, 3), mx.bfloat16), mx.ones((2, 3)))
    swiglu(mx.ones((2, 3)), mx.ones(3))
    swiglu(mx.ones((0, 3)), mx.ones((0, 3)))
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


SHIM = """
#include <cmath>
#include <cstdint>
using uint = unsigned int;
struct Dim3 { uint x, y, z; };
static Dim3 blockIdx, blockDim, threadIdx, thread_position_in_grid;
namespace metal { namespace precise { static float exp(float x) { return expf(x); } } }
template <typename T, int PER_THREAD>
static void kernel(%s, const int* gate_shape, %s) {
%s
}
extern "C" void run(%s, int size, %s, uint group, uint groups) {
    for (uint b = 0; b < groups; ++b) for (uint t = 0; t < group; ++t) {
        blockIdx.x = b; blockDim.x = group; threadIdx.x = t;
        thread_position_in_grid.x = b * group + t;
        kernel<float, %d>(%s, &size, %s);
    }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the sources")
@pytest.mark.parametrize("metal", [True, False], ids=["metal", "cuda"])
def test_sources_compute_the_formulas_as_cpp(metal: bool, tmp_path: Path) -> None:
    rng, size = np.random.default_rng(0), GROUP * PER_THREAD + 5
    gate, up, cotangent = (4 * rng.standard_normal(size).astype(np.float32) for _ in range(3))
    sigmoid, silu = silu_parts(gate)
    expected = [
        [silu * up],
        [cotangent * up * (sigmoid + silu * (1 - sigmoid)), cotangent * silu],
    ]
    inputs, outputs = ["gate", "up", "cotangent"], [["output"], ["d_gate", "d_up"]]
    for i, source in enumerate(sources(metal)):
        given, made = inputs[: 2 + i], outputs[i]
        types = ["const T* " + each for each in given], ["T* " + each for each in made]
        floats = [", ".join(each).replace("T*", "float*") for each in types]
        code = SHIM % (
            *(", ".join(types[0]), ", ".join(types[1]), source),
            *(floats[0], floats[1], PER_THREAD, ", ".join(given), ", ".join(made)),
        )
        file, library = tmp_path / f"{i}.cpp", tmp_path / f"{i}.so"
        file.write_text(code)
        command = ["g++", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused", str(file)]
        subprocess.run([*command, "-o", str(library)], check=True, timeout=60)
        found = [np.full(size + 1, 7, np.float32) for _ in made]
        pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in (gate, up, cotangent)[: 2 + i]]
        results = [each.ctypes.data_as(ctypes.c_void_p) for each in found]
        threads = math.ceil(size / PER_THREAD)
        groups = math.ceil(threads / GROUP)
        ctypes.CDLL(str(library)).run(*pointers, size, *results, GROUP, groups)
        for one, other in zip(found, expected[i], strict=True):
            np.testing.assert_allclose(one[:size], other, rtol=2e-5, atol=1e-6)
            assert one[size] == 7  # nothing is written past the end
