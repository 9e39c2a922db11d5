"""SwiGLU and its gradient as one kernel each, for Metal and CUDA.

`mx.compile` cannot fuse these functions, because MLX inlines compiled functions to compute
gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxtune.backend.forward.kernels.device_kernels import (
    CUDA,
    METAL,
    MIN_SIZE,
    TOLERANCES,
    Chooser,
    Function,
    KernelSource,
    Make,
    Trial,
    TrialInputs,
    device_language,
)
from mlxtune.backend.models.autograd import differentiable

# Threads per group.
GROUP = 256
# Kernels index elements with 32-bit integers.
_MAX_ELEMENTS = 2**31
# Tokens and width of the MLP whose time decides between the kernels and MLX's operations.
_TRIAL_SHAPE = (1024, 8192)

# All inputs have three axes. Each thread computes WIDTH neighbouring values, so that the threads of
# a group read neighbouring Packs. CUDA rounds a grid up to whole groups, so some threads are idle.
_LOAD = """
    const unsigned int size = gate_shape[0] * gate_shape[1] * gate_shape[2];
    const unsigned int first = $thread * WIDTH;
    if (first >= size) {
        return;
    }
    const mlxtune::Pack<T, WIDTH> gates = mlxtune::load<WIDTH>(gate, first, size);
    const mlxtune::Pack<T, WIDTH> ups = mlxtune::load<WIDTH>(up, first, size);
"""
_SIGMOID = """
        const float g = static_cast<float>(gates.at[i]);
        const float u = static_cast<float>(ups.at[i]);
        const float sigmoid = 1.0f / (1.0f + mlxtune::exp(-g));
        const float silu = g * sigmoid;
"""
FORWARD = KernelSource(
    "mlxtune_swiglu",
    ("gate", "up"),
    ("output",),
    f"""{_LOAD}
    mlxtune::Pack<T, WIDTH> outputs;
    for (int i = 0; i < WIDTH; ++i) {{{_SIGMOID}
        outputs.at[i] = static_cast<T>(silu * u);
    }}
    mlxtune::store<WIDTH>(output, first, size, outputs);
""",
)
GRADIENT = KernelSource(
    "mlxtune_swiglu_vjp",
    ("gate", "up", "cotangent"),
    ("d_gate", "d_up"),
    f"""{_LOAD}
    const mlxtune::Pack<T, WIDTH> cotangents = mlxtune::load<WIDTH>(cotangent, first, size);
    mlxtune::Pack<T, WIDTH> d_gates, d_ups;
    for (int i = 0; i < WIDTH; ++i) {{{_SIGMOID}
        const float c = static_cast<float>(cotangents.at[i]);
        d_gates.at[i] = static_cast<T>(c * u * (sigmoid + silu * (1.0f - sigmoid)));
        d_ups.at[i] = static_cast<T>(c * silu);
    }}
    mlxtune::store<WIDTH>(d_gate, first, size, d_gates);
    mlxtune::store<WIDTH>(d_up, first, size, d_ups);
""",
)


class GateKernels:
    """SwiGLU's two kernels for Metal or, if not `metal`, CUDA."""

    def __init__(self, make: Make, *, metal: bool) -> None:
        self._language = METAL if metal else CUDA
        self._forward = FORWARD.make(self._language, make)
        self._gradient = GRADIENT.make(self._language, make)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        """Return silu(gate) * up, arXiv:2002.05202, section 2, in the dtype of the inputs."""
        return _differentiable(self.forward, self.gradients, gate, up)

    def forms(self) -> dict[str, Function]:
        """Return SwiGLU by both kernels, and by each of them with MLX's operations."""
        return {
            "kernels": self.swiglu,
            "gradient kernel": lambda *arrays: _differentiable(_silu_up, self.gradients, *arrays),
            "forward kernel": lambda *arrays: _differentiable(self.forward, _gradients, *arrays),
        }

    def forward(self, gate: mx.array, up: mx.array) -> mx.array:
        """Return silu(gate) * up without a gradient."""
        return self._run(self._forward, [gate, up], 1)[0]

    def gradients(self, gate: mx.array, up: mx.array, cotangent: mx.array) -> list[mx.array]:
        """Return the gradients of gate and up."""
        return self._run(self._gradient, [gate, up, cotangent.astype(gate.dtype)], 2)

    def _run(self, kernel: Any, arrays: Sequence[mx.array], outputs: int) -> list[mx.array]:
        like = arrays[0]
        if like.ndim != 3:
            flat = self._run(kernel, [array.reshape(1, 1, -1) for array in arrays], outputs)
            return [array.reshape(like.shape) for array in flat]
        width = self._language.width // like.dtype.size
        result: list[mx.array] = kernel(
            inputs=list(arrays),
            template=[("T", like.dtype), ("WIDTH", width)],
            grid=(-(-like.size // width), 1, 1),
            threadgroup=(GROUP, 1, 1),
            output_shapes=[like.shape] * outputs,
            output_dtypes=[like.dtype] * outputs,
        )
        return result


def plain_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, computed by MLX's operations."""

    def forward(gate: mx.array, up: mx.array) -> list[mx.array]:
        sigmoid = mx.sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid + silu * (1 - sigmoid)
        # The gradients are the cotangent times the last two outputs, so gate and up are not kept.
        return [silu * up, up * slope, silu]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        return [cotangents[0] * outputs[1], cotangents[0] * outputs[2]]

    return differentiable(forward, backward)(gate, up)[0]


def supports_gates(gate: mx.array, up: mx.array) -> bool:
    """Return whether the kernels support these arrays."""
    same = gate.shape == up.shape and gate.dtype == up.dtype
    return same and gate.dtype in TOLERANCES and MIN_SIZE <= gate.size < _MAX_ELEMENTS


def gate_kernels(dtype: mx.Dtype) -> Function | None:
    """Return SwiGLU by the device's kernels.

    None on the CPU, or if the kernels failed their trial or MLX's operations are faster.
    """
    return SWIGLU.form(dtype)


def gate_kernels_problem() -> str:
    """Return why the device's kernels cannot be used; empty if they can, or on the CPU."""
    return SWIGLU.problem()


def device_kernels() -> GateKernels:
    """Return the device's kernels without a trial. Raises MLX's error if they cannot be built."""
    language, make = device_language()
    return GateKernels(make, metal=language is METAL)


def _trial() -> Trial:
    return Trial(
        device_kernels().forms(),
        plain_swiglu,
        # With this size, the last group of threads and the last thread are only partly used.
        small=lambda: _case((1, 8 * GROUP + 5)),
        realistic=lambda: _case(_TRIAL_SHAPE),
        names=("the output", "the gradient of gate", "the gradient of up"),
    )


def _case(shape: tuple[int, ...]) -> TrialInputs:
    keys = mx.random.split(mx.random.key(0), 3)
    gate, up, cotangent = (4 * mx.random.normal(shape, key=key) for key in keys)
    return TrialInputs([gate, up], [cotangent])


def _differentiable(
    forward: Callable[..., mx.array],
    gradients: Callable[..., list[mx.array]],
    gate: mx.array,
    up: mx.array,
) -> mx.array:
    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> list[mx.array]:
        return gradients(*primals, cotangent)

    result: mx.array = differentiable(forward, backward)(gate, up)
    return result


def _silu_up(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _gradients(gate: mx.array, up: mx.array, cotangent: mx.array) -> list[mx.array]:
    sigmoid = mx.sigmoid(gate)
    silu = gate * sigmoid
    return [cotangent * up * (sigmoid + silu * (1 - sigmoid)), cotangent * silu]


SWIGLU = Chooser(_trial)
