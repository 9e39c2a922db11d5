"""Layers that are evaluated immediately, and keep their products for the backward pass.

Recomputation is selective, as in arXiv:2205.05198, section 5: matmuls take most of the time, the
values between them most of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3

from mlxtune.backend.cpu.arrays import detached
from mlxtune.backend.lora.lora_layers import DoRALinear, LoRALinear
from mlxtune.backend.models.autograd import differentiable
from mlxtune.core.steps.graph_memory import GRADIENTS, LOGITS
from mlxtune.core.steps.memory_terms import (
    BatchLoad,
    Entries,
    MemoryOptions,
    ModelShapes,
    head_states,
    held_logits,
)

# Layers in which only o_proj reads attention's output, and only down_proj the gate's output.
_SINGLE_READER_LAYERS = (
    *(llama.TransformerBlock, qwen2.TransformerBlock, qwen3.TransformerBlock),
    gemma3_text.TransformerBlock,
)
# Layers that add the MLP's output to the residual without a norm in between.
_MLP_RESIDUAL_LAYERS = (llama.TransformerBlock, qwen2.TransformerBlock, qwen3.TransformerBlock)
# The number of vocabulary rows that the head casts in one block, and the number of blocks held.
_VOCABULARY_BLOCK, _HELD_BLOCKS = 4096, 2
# The number of copies of a chunk's logits that cross-entropy and its gradient hold.
_CPU_LOGITS = 2
# The number of scores in a block of attention, over all threads, and the number of queries per head
# in such a block. The backward pass holds _NUMPY_SCORES copies of these scores in numpy, and
# _NUMPY_WIDTHS arrays that are as wide as all heads.
ATTENTION_SCORES, ATTENTION_QUERIES = 1 << 21, 128
_NUMPY_SCORES, _NUMPY_WIDTHS = 2, 3
# DoRA adds two arrays: its scaled products, and their gradients.
_DORA_ARRAYS = 2
# The number of arrays as wide as a layer's convolution that the layer's backward pass holds.
_CONVOLUTION_ARRAYS = 8


class FrozenMatmul(nn.Module):
    """A linear layer whose backward pass does not read its input, as its weight is frozen.

    LoRA on the layer does read the input: the gradient of A is a matmul with it.
    """


@dataclass(frozen=True)
class BackwardReads:
    """Whether a layer's backward pass reads the outputs of its attention, gate and last product."""

    attention: bool = True
    gate: bool = True
    last: bool = True

    @classmethod
    def of(cls, layer: nn.Module) -> BackwardReads:
        """Return the flags of a layer, from its mlx-lm class and the projections with LoRA."""
        if not isinstance(layer, _SINGLE_READER_LAYERS):
            return cls()
        output, down = layer.self_attn.o_proj, layer.mlp.down_proj
        # The gradient of DoRA's magnitudes reads the product that they scale.
        with_lora = isinstance(down, LoRALinear) and not isinstance(down, DoRALinear)
        is_kept = isinstance(down.linear if with_lora else down, FrozenMatmul)
        return cls(
            attention=not isinstance(output, FrozenMatmul),
            gate=not isinstance(down, FrozenMatmul),
            last=not (isinstance(layer, _MLP_RESIDUAL_LAYERS) and is_kept),
        )


class KeptMatmuls:
    """The products of one layer, kept in the order in which they are computed."""

    def __init__(self, reads: BackwardReads) -> None:
        self.reads = reads
        self.replays = False
        self._made: list[mx.array] = []
        self._taken = 0

    @contextmanager
    def running(self, *, replays: bool) -> Iterator[None]:
        """Keep the products computed inside the block, or replay the kept products in order."""
        self.replays, self._taken = replays, 0
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)
        if not replays and self._made and not self.reads.last:
            self._made[-1] = nan_placeholder(*self._made[-1].shape)

    def clear(self) -> None:
        """Free all products."""
        self._made.clear()

    def matmul(self, make: Callable[[], mx.array]) -> mx.array:
        """Return the next product: computed and kept, or replayed."""
        if not self.replays:
            self._made.append(make())
            return self._made[-1]
        self._taken += 1
        return self._made[self._taken - 1]


# The kept products of the running layer, None if it keeps none.
_running: ContextVar[KeptMatmuls | None] = ContextVar("kept products", default=None)


def matmul(make: Callable[[], mx.array]) -> mx.array:
    """Return the running layer's next product, computed by `make` unless it is kept."""
    kept = _running.get()
    return make() if kept is None else kept.matmul(make)


def reads_attention() -> bool:
    """Return whether the running pass needs attention's output, not only its gradient."""
    kept = _running.get()
    return kept is None or not kept.replays or kept.reads.attention


def reads_gate() -> bool:
    """Return whether the running pass needs the gate's output, not only its gradient."""
    kept = _running.get()
    return kept is None or not kept.replays or kept.reads.gate


def nan_placeholder(*shape: int) -> mx.array:
    """Return NaNs that take no memory, in place of a value that a backward pass never reads.

    If a layer did read them, the run's first step would fail with an error.
    """
    return mx.broadcast_to(mx.array(math.nan), shape)


class KernelLayers:
    """The `LayerPasses` of the CPU. Without `keep_matmuls`, layers keep their inputs only."""

    def __init__(self, *, keep_matmuls: bool) -> None:
        self._keep_matmuls = keep_matmuls

    def run(
        self, layer: nn.Module, function: Callable[..., list[mx.array]], inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        """Return the outputs of a layer, with a backward pass that replays any kept products."""
        kept = KeptMatmuls(BackwardReads.of(layer)) if self._keep_matmuls else None

        def forward(*arguments: mx.array) -> list[mx.array]:
            with kept.running(replays=False) if kept else nullcontext():
                return _detached(function(*_detached(arguments)))

        def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            # MLX passes a single array without a list, as for a layer with no trained parameters.
            primals = _detached([primals] if isinstance(primals, mx.array) else primals)
            with kept.running(replays=True) if kept else nullcontext():
                gradients = _detached(mx.vjp(function, primals, list(cotangents))[1])
            if kept is not None:
                kept.clear()
            return gradients

        return list(differentiable(forward, backward)(*inputs))

    def run_frozen(self, output: Any) -> Any:
        """Return the output of a layer below the first trained layer, without a gradient."""
        return tree_map(lambda leaf: detached(leaf) if _is_floating(leaf) else leaf, output)


class KernelMemory:
    """The `MemoryUse` of the CPU's kernels, which keep each layer's products."""

    casts_quantized = True
    head_copies = 1

    def kept_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> Entries:
        """Return the entries that all layers keep: products, or inputs with `recompute`."""
        if execution.recompute:
            return Entries(0, load.tokens * shapes.inputs, 0)
        return Entries(0, load.tokens * shapes.matmuls + load.repeated * shapes.mixed, 0)

    def layer_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> Entries:
        """Return the entries of one layer's backward pass, in addition to the kept entries."""
        # The recomputed values between the products take about as much memory as the products.
        widths = shapes.layer_matmuls * (2 if execution.recompute else 1) + shapes.hidden
        widths += GRADIENTS * (shapes.widest_matmul + shapes.hidden)
        widths += _DORA_ARRAYS * shapes.updated if shapes.scaled else 0
        mixed = _CONVOLUTION_ARRAYS * shapes.layer_mixed * load.repeated
        scores = shapes.held_scores * load.scores
        return Entries(shapes.largest_cast, load.tokens * widths + mixed, scores)

    def unmeasured_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> int:
        """Return the entries of numpy arrays in attention, which MLX does not count."""
        width = shapes.heads * shapes.head_size
        scores = min(ATTENTION_SCORES, shapes.heads * ATTENTION_QUERIES * load.width)
        return _NUMPY_SCORES * scores + _NUMPY_WIDTHS * load.tokens * width

    def head_entries(self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad) -> int:
        """Return the working entries of the head; a split single-matmul head holds no logits."""
        positions, hidden = head_states(shapes, execution, load)
        if execution.separate_head and shapes.plain_head:
            return hidden + (
                _HELD_BLOCKS * _VOCABULARY_BLOCK * shapes.hidden if shapes.head_cast else 0
            )
        copies = _CPU_LOGITS if shapes.stored_itemsize else LOGITS
        return hidden + shapes.head_cast + copies * held_logits(execution, positions, shapes)

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head holds logits; a single-matmul head does not."""
        return not shapes.plain_head


def _detached(arrays: Sequence[mx.array]) -> list[mx.array]:
    return [detached(x) for x in arrays]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
