"""Time each part of a step alone, in the step's shapes, as MLX computes it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.forward.gates import swiglu
from mlxtune.backend.forward.loss import VocabularyBlocks
from mlxtune.backend.lora.layers import LoRALinear
from mlxtune.backend.models.mixers.attention import scaled_dot_product_attention
from mlxtune.backend.models.packed import Layout, LineCache, laid_out
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.pack import Pack

_REPEATS = 2


def seconds_of(function: Callable[..., mx.array], *given: mx.array) -> float:
    """Return the shortest time of a function's forward and backward pass, in seconds."""
    (output,) = mx.vjp(lambda *each: [function(*each)], list(given), [function(*given)])[0]
    cotangent = mx.random.normal(output.shape).astype(output.dtype)
    mx.eval(*given, cotangent)
    found = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        mx.eval(mx.vjp(lambda *each: [function(*each)], list(given), [cotangent]))
        found.append(time.perf_counter() - started)
    return min(found)


class StepParts:
    """Times the parts of one pipeline's steps, on Qwen3's architecture with packed examples.

    `seconds` sums the time of each part over all steps given to `add`.
    """

    def __init__(self, pipeline: InstructPipeline) -> None:
        self._pipeline = pipeline
        self._model: Any = pipeline.model
        self.seconds: Counter[str] = Counter()

    def add(self, examples: Sequence[Example]) -> None:
        for _, batch in self._pipeline.engine.batches.of(list(examples)):
            assert isinstance(batch, Pack), "the examples are padded"
            layers = self._model.layers
            for part, seconds in self._layer(batch).items():
                self.seconds[part] += len(layers) * seconds
            self._head(len(batch.places))

    def _layer(self, batch: Pack) -> Counter[str]:
        layer = self._model.layers[-1]
        attention, mlp = layer.self_attn, layer.mlp
        layout = Layout(batch.segments, self._pipeline.forward.execution.rounding)
        rows, length = layout.rows.shape
        line = (1, batch.inputs.size)
        found: Counter[str] = Counter()
        for module in (attention, mlp):
            for _, each in module.named_modules():
                if isinstance(each, LoRALinear):
                    whole, plain = _projection(each, line), _projection(each.linear, line)
                    found["LoRA"] += max(whole - plain, 0)
                    found["projections"] += plain
                elif isinstance(each, nn.Linear) and not _is_inside_lora(module, each):
                    found["projections"] += _projection(each, line)
        heads, groups = attention.n_heads, attention.n_kv_heads
        size = attention.q_norm.weight.size
        q = mx.random.normal((rows, heads, length, size))
        k, v = (mx.random.normal((rows, groups, length, size)) for _ in range(2))
        found["attention"] = seconds_of(
            lambda q, k, v: scaled_dot_product_attention(
                q, k, v, LineCache(), attention.scale, "causal"
            ),
            *(q, k, v),
        )
        found["rotary"] = seconds_of(attention.rope, q) + seconds_of(attention.rope, k)
        hidden = mx.random.normal((*line, layer.input_layernorm.weight.size))
        wide = mx.random.normal((*line, _outputs(mlp.gate_proj)))
        found["norms"] = (
            2 * seconds_of(layer.input_layernorm, hidden)
            + seconds_of(attention.q_norm, q)
            + seconds_of(attention.k_norm, k)
        )
        found["SwiGLU"] = seconds_of(swiglu, wide, wide + 1)
        found["residuals"] = seconds_of(lambda x, y: x + y + 2 * y, hidden, hidden)
        whole = self._whole_layer(layer, layout, hidden)
        found["examples side by side, and what is between"] = max(whole - found.total(), 0)
        return found

    def _whole_layer(self, layer: Any, layout: Layout, hidden: mx.array) -> float:
        trained = tree_flatten(layer.trainable_parameters())
        names = [name for name, _ in trained]

        def run(x: mx.array, *values: mx.array) -> mx.array:
            layer.update(tree_unflatten(list(zip(names, values, strict=True))))
            with laid_out(layout):
                output: mx.array = layer(x, "causal", LineCache())
            return output

        values = [value for _, value in trained]
        try:
            return seconds_of(run, hidden, *values)
        finally:
            layer.update(tree_unflatten(trained))

    def _head(self, count: int) -> None:
        weight = self._model.model.embed_tokens.weight
        hidden = mx.random.normal((count, weight.shape[1]))
        targets = mx.zeros(count, mx.int32)
        product = seconds_of(lambda x: x @ weight.astype(mx.float32).T, hidden)
        losses = partial(VocabularyBlocks.trained_head_losses, weight, targets=targets)
        whole = seconds_of(lambda x: losses(x).sum(), hidden)
        self.seconds["head"] += product
        self.seconds["head, softmax"] += max(whole - product, 0)


def _projection(module: Any, line: tuple[int, int]) -> float:
    linear = module.linear if isinstance(module, LoRALinear) else module
    return seconds_of(module, mx.random.normal((*line, linear.weight.shape[1])))


def _is_inside_lora(module: nn.Module, linear: nn.Module) -> bool:
    return any(
        isinstance(each, LoRALinear) and each.linear is linear for _, each in module.named_modules()
    )


def _outputs(module: Any) -> int:
    linear = module.linear if isinstance(module, LoRALinear) else module
    return int(linear.weight.shape[0])
