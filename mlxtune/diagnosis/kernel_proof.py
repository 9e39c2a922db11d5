"""Compares a device's kernels with the CPU's plain operations, for `mlxtune doctor --prove`.

Each kernel runs separately, so that an error in one does not affect the others.
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

from mlxtune.backend.device.default_device import has_metal, on_cpu
from mlxtune.backend.forward.gates import plain_swiglu
from mlxtune.backend.forward.kernels.attention_kernels import AttentionKernels, HeadSizes
from mlxtune.backend.forward.kernels.attention_trial import TRIAL_TOKENS, trial_heads, trial_of
from mlxtune.backend.forward.kernels.device_kernels import device_language
from mlxtune.backend.forward.kernels.gate_kernels import device_kernels
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.models.mixers.gated_delta import by_chunks
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.diagnosis.checks import DTYPE, GRADIENTS, ProofCheck, Step, check_step, failed_check
from mlxtune.errors import one_line

_VOCABULARY = 96
# Metal's fused attention has a gradient for heads of width 64 and, as used below, 128.
_SHAPE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": _VOCABULARY},
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e4},
}
_GEMMA = gemma3_text.Model
Arrays = Sequence[npt.NDArray[Any]]


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Compute on the CPU inside the block."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


@dataclass(frozen=True)
class Kernel:
    """A kernel; `compute(dtype, kind)` runs it if `kind` is `gpu`, or its reference if `plain`."""

    name: str
    compute: Callable[[mx.Dtype, str], Step]
    exists: Callable[[mx.Dtype], bool] = lambda dtype: True

    def check(self, dtype: str) -> ProofCheck:
        """Compare the kernel on the device with the CPU's plain operations in float32."""
        kind, name = GRADIENTS, self.name
        if dtype != "float32":
            kind, name = DTYPE, f"{name}, {dtype}"
        try:
            with on_the_cpu():
                expected = self.compute(mx.float32, "plain")
            computed = self.compute(getattr(mx, dtype), "gpu")
        except Exception as error:  # noqa: BLE001
            # Any error fails the check of this kernel.
            return failed_check(kind, name, one_line(error))
        return check_step(name, dtype, computed, expected)


def step_of(pipeline: InstructPipeline, examples: Sequence[Example]) -> Step:
    """Return a step's loss and gradients after filling the LoRA matrices with seeded values."""
    # With B = 0, as at the start of training, the gradient of A would be zero.
    _fill(pipeline.model.trainable_parameters(), pipeline.model, mx.float32)
    result = pipeline.loss_and_gradients(examples, step=1)
    gradients = {name: np.array(value) for name, value in tree_flatten(result.gradients)}
    return result.loss, gradients


def _fill(parameters: Any, model: nn.Module, dtype: mx.Dtype) -> None:
    """Fill a model with NumPy's random weights: MLX's differ in the last bits between devices.

    The weights are exact in bfloat16. Attention sinks and LoRA's B, which start at zero, are filled
    too.
    """
    rng, filled = np.random.default_rng(1), []
    for name, value in tree_flatten(parameters):
        # Norm weights are near 1; Gemma adds the 1 itself.
        center = float("norm" in name and value.ndim == 1 and not isinstance(model, _GEMMA))
        scale = 0.1 if value.ndim == 1 or "lora_b" in name else value.shape[-1] ** -0.5
        if "lora_a" in name and value.ndim == 2:
            # A gets the standard deviation of its usual initial values.
            scale = (3 * len(value)) ** -0.5
        weight = mx.array(center + scale * rng.standard_normal(value.shape), dtype=mx.float32)
        filled.append((name, weight.astype(mx.bfloat16).astype(dtype)))
    model.load_weights(filled, strict=False)


def _model_step(
    module: Any, lengths: Sequence[int], changes: Mapping[str, Any], dtype: mx.Dtype, kind: str
) -> Step:
    """Return the loss and gradients of a small random model on examples of these lengths."""
    config = {**_SHAPE, **changes, "model_type": module.__name__.split(".")[-1]}
    model = module.Model(module.ModelArgs.from_dict(config))
    _fill(model.parameters(), model, dtype)
    execution = replace(best_execution(0, kind=kind), micro_batch_tokens=10**6)
    lora = InstructConfig(targets=("q_proj", "v_proj"), rank=4, alpha=32.0)
    rng, examples = np.random.default_rng(0), []
    for row, length in enumerate(lengths, 1):
        # All tokens except the first are supervised.
        mask = (np.arange(length) > 0).astype(np.uint8)
        tokens = rng.integers(0, _VOCABULARY, length).astype(np.int32)
        examples.append(Example(row, tokens, mask))
    return step_of(InstructPipeline(model, lora, execution=execution), examples)


def _function_step(
    functions: Mapping[str, Callable[..., mx.array]],
    inputs: Callable[[np.random.Generator], Arrays],
    dtype: mx.Dtype,
    kind: str,
) -> Step:
    """Return the sum of squares of a function's result, and the sum's gradient for each input."""
    # The numbers are exact in bfloat16, so that all dtypes get equal inputs.
    samples = inputs(np.random.default_rng(0))
    arrays = [mx.array(x, dtype=mx.bfloat16).astype(dtype) for x in samples]

    def summed(*arrays: mx.array) -> mx.array:
        return mx.square(functions[kind](*arrays).astype(mx.float32)).sum()

    loss, gradients = mx.value_and_grad(summed, argnums=list(range(len(arrays))))(*arrays)
    named = {f"input {i}": np.array(x.astype(mx.float32)) for i, x in enumerate(gradients)}
    return float(loss), named


def _gated_delta_inputs(rng: np.random.Generator) -> Arrays:
    """Draw q, k, v, log-gates and beta for two chunks, in a shape that Metal's kernels support."""
    tokens, keys, values, size = 70, 16, 32, 128
    q, k = (rng.standard_normal((1, tokens, keys, size)) / size**0.5 for _ in range(2))
    v = rng.standard_normal((1, tokens, values, size))
    log_gates = -np.abs(rng.standard_normal((1, tokens, values)))
    beta = 1 / (1 + np.exp(-rng.standard_normal((1, tokens, values))))
    return [q, k, v, log_gates, beta]


def _gate_inputs(rng: np.random.Generator) -> Arrays:
    """Draw gate and up, in a size that fills several groups of threads and a part of another."""
    return [2 * rng.standard_normal((3, 1031)) for _ in range(2)]


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return device_kernels().swiglu(gate, up)


def _attention_inputs(length: int, rng: np.random.Generator) -> Arrays:
    """Draw q, k and v of a real model's attention: 32 query heads and 8 key heads of 128."""
    return [rng.standard_normal((1, heads, length, 128)) for heads in (32, 8, 8)]


def _causal_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Return causal attention by MLX's own function."""
    scale = q.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")


def _plain_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Return the same attention by plain operations."""
    size, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (mx.repeat(each, size, axis=1) for each in (k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    after = mx.arange(length)[None] > mx.arange(length)[:, None]
    weights = mx.softmax(mx.where(after, -mx.inf, scores), axis=-1, precise=True)
    return weights @ v


def _around_attention(kind: str, *projected: mx.array) -> mx.array:
    """Return all results of the work around attention, joined, by kernels or by operations."""
    kernels = AttentionKernels(*device_language())
    tried = trial_of(kernels, trial_heads(_HEADS, normalized=True))
    form = tried.plain if kind == "plain" else tried.forms["kernels"]
    return mx.concatenate([each.reshape(-1) for each in form(*projected)])


def _projections(rng: np.random.Generator) -> Arrays:
    """Draw queries, keys and values of a packed sequence whose examples share a prefix."""
    return [rng.standard_normal((1, TRIAL_TOKENS, count * _HEADS.size)) for count in _HEADS.counts]


def _gated_delta_kernel(*arrays: mx.array) -> mx.array:
    q, k, v, log_gates, beta = arrays
    y, _ = mx.fast.gated_delta_update(q, k, v, mx.exp(log_gates), beta, _delta_state())
    return y


def _gated_delta_by_chunks(*arrays: mx.array) -> mx.array:
    y, _ = by_chunks(*arrays, _delta_state())
    return y


def _delta_state() -> mx.array:
    return mx.zeros((1, 32, 128, 128))


_WINDOW = {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
# Every token uses all experts: in 16 bits, a router might choose different experts.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 16}
_TIED_HEAD = {"tie_word_embeddings": True}
_ATTENTION = {"gpu": _causal_attention, "plain": _plain_attention}
_HEADS = HeadSizes(queries=2, keys=1, size=64, rotated=64)
_AROUND = {kind: partial(_around_attention, kind) for kind in ("gpu", "plain")}
_DELTA = {"gpu": _gated_delta_kernel, "plain": _gated_delta_by_chunks}
# Add an entry for each new kernel.
KERNELS: tuple[Kernel, ...] = (
    Kernel("texts of 2 and 3 tokens", partial(_model_step, qwen3, (3, 2, 3) * 8, _TIED_HEAD)),
    # The longest example's length is not a multiple of a kernel's block.
    Kernel(
        "attention, heads of 128",
        partial(_model_step, qwen3, (300, 131, 40), _TIED_HEAD | {"head_dim": 128}),
    ),
    Kernel(
        "attention with sinks",
        partial(_model_step, gpt_oss, (40, 23, 31), _EXPERTS),
        # On the CPU, experts compute in float32 only.
        lambda dtype: dtype == mx.float32 or not on_cpu(),
    ),
    # 1100 tokens exceed two blocks, so attention runs in blocks.
    Kernel("attention in windows", partial(_model_step, gemma3_text, (1100, 40), _WINDOW)),
    # 300 is not a multiple of a kernel's block. On the CPU, MLX's 16-bit matmuls take seconds.
    *(
        Kernel(
            f"32 heads, {length} tokens",
            partial(_function_step, _ATTENTION, partial(_attention_inputs, length)),
            lambda dtype: dtype == mx.float32 or not on_cpu(),
        )
        for length in (300, 512)
    ),
    Kernel(
        "gated delta rule",
        partial(_function_step, _DELTA, _gated_delta_inputs),
        # CUDA's library says "has no CUDA implementation"; the CPU's version is mlx-lm's loop.
        lambda dtype: on_cpu() or has_metal(),
    ),
    Kernel(
        "SwiGLU",
        partial(_function_step, {"gpu": _swiglu, "plain": plain_swiglu}, _gate_inputs),
        lambda dtype: not on_cpu(),
    ),
    Kernel(
        "norms and rotary embedding around attention",
        partial(_function_step, _AROUND, _projections),
        lambda dtype: not on_cpu(),
    ),
)


def kernel_checks(dtype: str) -> Iterator[ProofCheck]:
    """Yield a check of each kernel that the device supports in a dtype."""
    for kernel in KERNELS:
        if kernel.exists(getattr(mx, dtype)):
            yield kernel.check(dtype)
