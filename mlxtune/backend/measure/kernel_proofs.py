"""Kernels of a device beside the CPU's plain operations, for `mlxtune doctor --prove`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, gpt_oss, qwen3

from mlxtune.backend.mixers import gated_delta
from mlxtune.backend.step.operations import best_execution
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example

_VOCABULARY = 96
_SHAPE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": _VOCABULARY},
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e4},
}


@dataclass(frozen=True)
class Attends:
    """A model of random weights and the lengths of examples that take a certain kernel."""

    name: str
    module: Any
    lengths: Sequence[int]
    changes: dict[str, Any]

    def model(self) -> nn.Module:
        """Return the model, with the same weights each time."""
        mx.random.seed(0)
        config = {**_SHAPE, **self.changes, "model_type": self.module.__name__.split(".")[-1]}
        return self.module.Model(self.module.ModelArgs.from_dict(config))

    def examples(self) -> list[Example]:
        """Return examples of random tokens, all supervised but the first."""
        rng, found = np.random.default_rng(0), []
        for row, length in enumerate(self.lengths, 1):
            mask = np.ones(length, np.uint8)
            mask[0] = 0
            found.append(Example(row, rng.integers(0, _VOCABULARY, length).astype(np.int32), mask))
        return found


_WINDOW = {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
ATTENTION = (
    Attends("texts of 2 and 3 tokens", qwen3, (3, 2, 3), {"tie_word_embeddings": True}),
    Attends("attention with sinks", gpt_oss, (40, 23, 31), _EXPERTS),
    # Longer than two blocks.
    Attends("attention in windows", gemma3_text, (1100, 40), _WINDOW),
)


def kernel_differences() -> Iterator[tuple[str, float, float]]:
    """Yield each kernel, and how far loss and gradients are from the CPU's, in float32.

    Losses are relative, gradients are relative to their largest entry.
    """
    for each in ATTENTION:
        expected_loss, expected = _step(each, "plain")
        loss, found = _step(each, "gpu")
        yield each.name, abs(loss / expected_loss - 1), _apart(found, expected)
    yield "gated delta rule", *_gated_delta()


def _step(each: Attends, kind: str) -> tuple[float, list[mx.array]]:
    before = mx.default_device()
    if kind == "plain":
        mx.set_default_device(mx.cpu)
    try:
        execution = replace(best_execution(0, kind=kind), micro_batch_tokens=10**6)
        config = InstructConfig(targets=("q_proj", "v_proj"), lora_rank=4)
        pipeline = InstructPipeline(each.model(), config, execution=execution)
        # At zero, as B starts, the gradient of A would be zero too.
        for name, module in pipeline.model.named_modules():
            if "lora_b" in module:
                key = mx.random.key(len(name))
                module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape, key=key)
        found = pipeline.loss_and_gradients(each.examples())
        gradients = [value for _, value in sorted(tree_flatten(found.gradients))]
        mx.eval(gradients)
        return found.loss, gradients
    finally:
        mx.set_default_device(before)


def _gated_delta() -> tuple[float, float]:
    """Return how far MLX's own gated delta rule is from the chunks, at a shape of its kernels."""
    keys = mx.random.split(mx.random.key(0), 6)
    shape = (1, 70, 16, 128)
    q, k = (mx.random.normal(shape, key=key) / 128**0.5 for key in keys[:2])
    v, weight = (mx.random.normal((1, 70, 32, 128), key=key) for key in keys[2:4])
    log_gates = -mx.abs(mx.random.normal((1, 70, 32), key=keys[4]))
    beta = mx.sigmoid(mx.random.normal((1, 70, 32), key=keys[5]))

    def by(rule: Callable[..., Any]) -> tuple[mx.array, list[mx.array]]:
        def summed(*arrays: mx.array) -> mx.array:
            y, _ = rule(*arrays, mx.zeros((1, 32, 128, 128)))
            return mx.square(y * weight).sum()

        return mx.value_and_grad(summed, argnums=list(range(5)))(q, k, v, log_gates, beta)

    (expected_loss, expected), (loss, found) = (
        by(rule) for rule in (gated_delta.gated_delta_rule, gated_delta.kernel_rule)
    )
    return abs(loss.item() / expected_loss.item() - 1), _apart(found, expected)


def _apart(found: Sequence[mx.array], expected: Sequence[mx.array]) -> float:
    """Return the largest difference of some arrays as a share of the largest expected entry."""
    wanted = [np.array(each) for each in expected]
    largest = max(np.abs(each).max() for each in wanted)
    # Python's max may pass over a NaN.
    differences = [np.abs(np.array(a) - b).max() for a, b in zip(found, wanted, strict=True)]
    return float(np.max(differences) / largest)
