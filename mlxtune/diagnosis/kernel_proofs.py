"""Kernels of a device beside the CPU's plain operations, for `mlxtune doctor --prove`.

Each kernel is computed on its own, so that one that raises leaves the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, gpt_oss, qwen3

from mlxtune.backend.device.device import has_metal, on_cpu
from mlxtune.backend.forward.gate_kernels import device_kernels
from mlxtune.backend.forward.gates import plain_swiglu
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.models.mixers import gated_delta
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.diagnosis.apart import cosine_and_ratio, largest_difference
from mlxtune.errors import one_line

_VOCABULARY = 96
# Metal's fused attention has a gradient for this head size, and for 128 and 256.
_SHAPE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": _VOCABULARY},
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e4},
}
_GEMMA = gemma3_text.Model
# A loss, and the gradient of each matrix.
Found = tuple[float, dict[str, npt.NDArray[Any]]]


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


@dataclass(frozen=True)
class Attends:
    """A model of random weights and the lengths of examples that take a certain kernel."""

    name: str
    module: Any
    lengths: Sequence[int]
    changes: Mapping[str, Any]

    def exists(self, dtype: mx.Dtype) -> bool:
        """Return whether the device computes it; on the CPU, experts are float32's."""
        return self.module is not gpt_oss or dtype == mx.float32 or not on_cpu()

    def found(self, dtype: mx.Dtype) -> Found:
        """Return what a step on the device computes."""
        return self._step(dtype, "gpu")

    def expected(self) -> Found:
        """Return what the CPU's plain operations compute in float32."""
        with _on_the_cpu():
            return self._step(mx.float32, "plain")

    def _step(self, dtype: mx.Dtype, kind: str) -> Found:
        execution = replace(best_execution(0, kind=kind), micro_batch_tokens=10**6)
        config = InstructConfig(targets=("q_proj", "v_proj"), lora_rank=4)
        pipeline = InstructPipeline(self._model(dtype), config, execution=execution)
        # At zero, as B starts, the gradient of A would be zero too.
        _fill(pipeline.model.trainable_parameters(), pipeline.model, mx.float32)
        result = pipeline.loss_and_gradients(self.examples())
        gradients = {name: np.array(value) for name, value in tree_flatten(result.gradients)}
        return result.loss, gradients

    def _model(self, dtype: mx.Dtype) -> nn.Module:
        """Return the model, with the same weights each time, also in 16 bits."""
        config = {**_SHAPE, **self.changes, "model_type": self.module.__name__.split(".")[-1]}
        model = self.module.Model(self.module.ModelArgs.from_dict(config))
        _fill(model.parameters(), model, dtype)
        return model

    def examples(self) -> list[Example]:
        """Return examples of random tokens, all supervised but the first."""
        rng, found = np.random.default_rng(0), []
        for row, length in enumerate(self.lengths, 1):
            mask = np.ones(length, np.uint8)
            mask[0] = 0
            found.append(Example(row, rng.integers(0, _VOCABULARY, length).astype(np.int32), mask))
        return found


def _fill(parameters: Any, model: nn.Module, dtype: mx.Dtype) -> None:
    """Give a model random weights, the same on every device: MLX's differ in their last bits.

    They are numbers of bfloat16. None is zero, as sinks and B would be.
    """
    rng, filled = np.random.default_rng(1), []
    for name, value in tree_flatten(parameters):
        # Gemma adds 1 to its norms' weights.
        centre = float("norm" in name and value.ndim == 1 and not isinstance(model, _GEMMA))
        scale = 0.1 if value.ndim == 1 or "lora" in name else value.shape[-1] ** -0.5
        weight = mx.array(centre + scale * rng.standard_normal(value.shape), dtype=mx.float32)
        filled.append((name, weight.astype(mx.bfloat16).astype(dtype)))
    model.load_weights(filled, strict=False)


@dataclass(frozen=True)
class Pair:
    """A kernel, and what computes the same from MLX's plain operations.

    Both take the arrays that `inputs` draws, and return one. `serves` tells whether the device has
    the kernel.
    """

    name: str
    kernel: Callable[..., mx.array]
    reference: Callable[..., mx.array]
    inputs: Callable[[np.random.Generator], Sequence[npt.NDArray[Any]]]
    serves: Callable[[], bool]

    def exists(self, dtype: mx.Dtype) -> bool:
        """Return whether the device has the kernel, in any dtype."""
        return self.serves()

    def found(self, dtype: mx.Dtype) -> Found:
        """Return what the kernel computes on the device."""
        return self._computed(self.kernel, dtype)

    def expected(self) -> Found:
        """Return what the reference computes in float32 on the CPU."""
        with _on_the_cpu():
            return self._computed(self.reference, mx.float32)

    def _computed(self, function: Callable[..., mx.array], dtype: mx.Dtype) -> Found:
        rng = np.random.default_rng(0)
        # Numbers of bfloat16, so that all dtypes get the same.
        drawn = [mx.array(x, dtype=mx.bfloat16).astype(dtype) for x in self.inputs(rng)]

        def summed(*arrays: mx.array) -> mx.array:
            return mx.square(function(*arrays).astype(mx.float32)).sum()

        every = list(range(len(drawn)))
        loss, gradients = mx.value_and_grad(summed, argnums=every)(*drawn)
        named = {f"input {i}": np.array(x.astype(mx.float32)) for i, x in enumerate(gradients)}
        return float(loss), named


def _gated_delta_inputs(rng: np.random.Generator) -> list[npt.NDArray[Any]]:
    """Draw q, k, v, log-gates and beta, in a shape of Metal's kernels, for two chunks."""
    tokens, keys, values, size = 70, 16, 32, 128
    q, k = (rng.standard_normal((1, tokens, keys, size)) / size**0.5 for _ in range(2))
    v = rng.standard_normal((1, tokens, values, size))
    log_gates = -np.abs(rng.standard_normal((1, tokens, values)))
    beta = 1 / (1 + np.exp(-rng.standard_normal((1, tokens, values))))
    return [q, k, v, log_gates, beta]


def _gate_inputs(rng: np.random.Generator) -> list[npt.NDArray[Any]]:
    """Draw gate and up for some groups of threads and a part of one."""
    return [2 * rng.standard_normal((3, 1031)) for _ in range(2)]


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return device_kernels().swiglu(gate, up)


def _gated_delta(rule: str, q: mx.array, *arrays: mx.array) -> mx.array:
    y, _ = getattr(gated_delta, rule)(q, *arrays, mx.zeros((1, 32, 128, 128)))
    return y


_WINDOW = {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
# All experts are used: in 16 bits, a router may choose others.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 16}
_TIED = {"tie_word_embeddings": True}
# A new kernel is one more entry. `found` and `expected` compute it.
KERNELS: tuple[Attends | Pair, ...] = (
    Attends("texts of 2 and 3 tokens", qwen3, (3, 2, 3) * 8, _TIED),
    # Not a multiple of a kernel's block.
    Attends("attention, heads of 128", qwen3, (300, 131, 40), _TIED | {"head_dim": 128}),
    Attends("attention with sinks", gpt_oss, (40, 23, 31), _EXPERTS),
    # Longer than two blocks.
    Attends("attention in windows", gemma3_text, (1100, 40), _WINDOW),
    Pair(
        "gated delta rule",
        partial(_gated_delta, "kernel_rule"),
        partial(_gated_delta, "gated_delta_rule"),
        _gated_delta_inputs,
        # CUDA's library says "has no CUDA implementation"; on the CPU it is mlx-lm's loop.
        lambda: on_cpu() or has_metal(),
    ),
    Pair("SwiGLU", _swiglu, plain_swiglu, _gate_inputs, lambda: not on_cpu()),
)


def kernel_differences(dtype: str) -> Iterator[dict[str, Any]]:
    """Yield for each kernel of the device how far loss and gradients are from the CPU's in float32.

    In float32: `loss`, relative, and `gradient`, relative to the largest entry. In 16 bits:
    `cosine` and `norm`, the ratio of norms, of the matrix that is farthest. Or `error`, if
    computing raised one.
    """
    computed = getattr(mx, dtype)
    for kernel in KERNELS:
        if not kernel.exists(computed):
            continue
        way = kernel.name if computed == mx.float32 else f"{kernel.name}, {dtype}"
        try:
            expected_loss, expected = kernel.expected()
            loss, found = kernel.found(computed)
        except Exception as error:  # noqa: BLE001
            # Whatever MLX raises is the result of this kernel.
            yield {"way": way, "error": one_line(error)}
            continue
        if computed == mx.float32:
            apart = largest_difference(found, expected)
            yield {"way": way, "loss": abs(loss / expected_loss - 1), "gradient": apart}
        else:
            cosine, norm = cosine_and_ratio(found, expected)
            yield {"way": way, "cosine": cosine, "norm": norm}
