"""Layers run at once, with the products of their forward passes kept for their backward passes.

Selective recomputation as in arXiv:2205.05198, section 5: products take most of the time, what lies
between them most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxtune.backend.cpu.arrays import detached, has_nan
from mlxtune.backend.cpu.kept import KeptProducts, Reads
from mlxtune.backend.model.autograd import differentiable

# Projections of what comes before the attention.
_FIRST = ("q_", "k_", "v_", "qkv")
Run = Callable[..., list[mx.array]]


class KernelLayers:
    """The `LayerPasses` of the CPU. Without `keep_products`, layers keep their inputs only."""

    def __init__(self, *, keep_products: bool) -> None:
        self._keep_products = keep_products
        # What the backward pass of a layer turned out to read, by the layer's identity.
        self.reads: dict[int, Reads] = {}

    def run(
        self, layer: nn.Module, names: Sequence[str], function: Run, inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        """Return the outputs of a layer, with a backward pass that replays kept products."""
        kept = KeptProducts(self._reads_of(layer, names)) if self._keep_products else None

        def forward(*given: mx.array) -> list[mx.array]:
            with kept.recording() if kept else nullcontext():
                return _detached(function(*_detached(given)))

        def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            # A lone array is passed by itself, as to a layer with no trained parameters.
            primals = _detached([primals] if isinstance(primals, mx.array) else primals)
            if kept is None:
                return _detached(mx.vjp(function, primals, list(cotangents))[1])
            while True:
                with kept.replaying():
                    gradients = _detached(mx.vjp(function, primals, list(cotangents))[1])
                # Nothing shows whether an array was read except its values: products that are not
                # made again are NaN, which reaches the gradients if they are read after all. A NaN
                # that remains when all products are made is the model's.
                more = kept.reads.more if has_nan(gradients) else None
                if more is None:
                    break
                kept.reads = more
            if not has_nan(gradients):
                self.reads[id(layer)] = kept.reads_next
            kept.clear()
            return gradients

        return list(differentiable(forward, backward)(*inputs))

    def run_frozen(self, output: Any) -> Any:
        """Return the output of a layer below the first that is trained, with no gradient."""
        return tree_map(lambda leaf: detached(leaf) if _is_floating(leaf) else leaf, output)

    def _reads_of(self, layer: nn.Module, names: Sequence[str]) -> Reads:
        """Return what the backward pass of a layer reads, as far as is known."""
        behind = not all(name.split(".")[-2:][0].startswith(_FIRST) for name in names)
        return self.reads.get(id(layer), Reads(inputs=behind))


def _detached(arrays: Sequence[mx.array]) -> list[mx.array]:
    return [detached(x) for x in arrays]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
