"""SwiGLU and its gradient as one kernel each, for Metal and CUDA.

The kernels are used only if a trial succeeds. `mx.compile` cannot fuse these functions, because MLX
inlines compiled functions to compute gradients.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from mlxtune.backend.device.device import has_metal, on_cpu
from mlxtune.backend.models.autograd import differentiable
from mlxtune.errors import one_line

# Elements per thread, and threads per group.
PER_THREAD, GROUP = 4, 256
# Kernels index elements with 32-bit integers.
_MOST = 2**31 - GROUP * PER_THREAD
# The largest allowed difference from MLX's operations in float32, as a share of the largest value.
_TOLERANCES = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}

# All inputs are flat. CUDA rounds a grid up to whole groups, so some threads may be idle. {thread}
# and {exp} are replaced with expressions in the device's language.
_SOURCE = """
    uint first = {thread} * PER_THREAD;
    uint size = gate_shape[0];
    for (uint i = first; i < first + PER_THREAD && i < size; ++i) {{
        float g = static_cast<float>(gate[i]);
        float u = static_cast<float>(up[i]);
        float sigmoid = 1.0f / (1.0f + {exp}(-g));
        float silu = g * sigmoid;
{body}
    }}
"""
_FORWARD = """        output[i] = static_cast<T>(silu * u);"""
_BACKWARD = """\
        float c = static_cast<float>(cotangent[i]);
        d_gate[i] = static_cast<T>(c * u * (sigmoid + silu * (1.0f - sigmoid)));
        d_up[i] = static_cast<T>(c * silu);"""
_METAL = {"thread": "thread_position_in_grid.x", "exp": "metal::precise::exp"}
_CUDA = {"thread": "(blockIdx.x * blockDim.x + threadIdx.x)", "exp": "expf"}


def sources(metal: bool) -> tuple[str, str]:
    """Return the sources of the forward and backward kernels for Metal or, if not `metal`, CUDA."""
    language = _METAL if metal else _CUDA
    return tuple(_SOURCE.format(**language, body=body) for body in (_FORWARD, _BACKWARD))  # type: ignore[return-value]


class GateKernels:
    """SwiGLU's two kernels, made by `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`."""

    def __init__(self, make: Callable[..., Any], *, metal: bool) -> None:
        forward, backward = sources(metal)
        inputs = ["gate", "up"]
        self._forward = make(
            name="mlxtune_swiglu", input_names=inputs, output_names=["output"], source=forward
        )
        self._backward = make(
            name="mlxtune_swiglu_vjp",
            input_names=[*inputs, "cotangent"],
            output_names=["d_gate", "d_up"],
            source=backward,
        )

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        """Return silu(gate) * up, arXiv:2002.05202, section 2, in the dtype of the inputs."""

        def forward(gate: mx.array, up: mx.array) -> mx.array:
            return self._run(self._forward, [gate, up], 1)[0]

        def backward(primals: Any, cotangent: mx.array, output: mx.array) -> list[mx.array]:
            return self._run(self._backward, [*primals, cotangent.astype(gate.dtype)], 2)

        result: mx.array = differentiable(forward, backward)(gate, up)
        return result

    def _run(self, kernel: Any, arrays: Sequence[mx.array], outputs: int) -> list[mx.array]:
        like = arrays[0]
        found = kernel(
            inputs=[each.reshape(-1) for each in arrays],
            template=[("T", like.dtype), ("PER_THREAD", PER_THREAD)],
            grid=(-(-like.size // PER_THREAD), 1, 1),
            threadgroup=(GROUP, 1, 1),
            output_shapes=[(like.size,)] * outputs,
            output_dtypes=[like.dtype] * outputs,
        )
        return [each.reshape(like.shape) for each in found]


def serves(gate: mx.array, up: mx.array) -> bool:
    """Return whether the kernels support these arrays."""
    same = gate.shape == up.shape and gate.dtype == up.dtype
    return same and gate.dtype in _TOLERANCES and 0 < gate.size < _MOST


def gate_kernels() -> GateKernels | None:
    """Return the device's kernels; None on the CPU, or if they failed the trial."""
    return None if on_cpu() else _tried()[0]


def gate_kernels_problem() -> str:
    """Return why the device's kernels are not used; empty if they are used, or on the CPU."""
    return "" if on_cpu() else _tried()[1]


def device_kernels() -> GateKernels:
    """Return the device's kernels without a trial. Raises MLX's error if they cannot be built."""
    metal = has_metal()
    return GateKernels(mx.fast.metal_kernel if metal else mx.fast.cuda_kernel, metal=metal)


@cache
def _tried() -> tuple[GateKernels | None, str]:
    try:
        kernels = device_kernels()
        problem = _problem(kernels)
    # Any error may occur: a compiler may be missing, or reject the source.
    except Exception as error:  # noqa: BLE001
        return None, one_line(error)
    return (None, problem) if problem else (kernels, "")


def _problem(kernels: GateKernels) -> str:
    """Return how values or gradients differ from MLX's by more than rounding; empty if none do."""
    # With this size, the last group of threads and the last thread are only partly used.
    size = GROUP * PER_THREAD + PER_THREAD + 1
    key = mx.random.key(0)
    arrays = [4 * mx.random.normal((1, size), key=each) for each in mx.random.split(key, 3)]
    for dtype, tolerance in _TOLERANCES.items():
        gate, up, cotangent = (each.astype(dtype) for each in arrays)
        found = _with_gradients(kernels.swiglu, gate, up, cotangent)
        exact = [each.astype(mx.float32) for each in (gate, up, cotangent)]
        expected = _with_gradients(lambda g, u: g * mx.sigmoid(g) * u, *exact)
        for name, one, other in zip(("value", "gate", "up"), found, expected, strict=True):
            apart = mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max()
            difference = float(apart)
            if one.dtype != dtype or not difference <= tolerance:
                what = "the output" if name == "value" else f"the gradient of {name}"
                return f"in {_name(dtype)}, {what} differs by {difference:.2g}"
    return ""


def _with_gradients(
    function: Callable[..., mx.array], gate: mx.array, up: mx.array, cotangent: mx.array
) -> list[mx.array]:
    values, gradients = mx.vjp(function, [gate, up], [cotangent])
    return [*values, *gradients]


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
