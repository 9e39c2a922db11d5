"""Layers run at once, with the products of their forward passes kept for their backward passes.

Selective recomputation as in arXiv:2205.05198, section 5: products take most of the time, what lies
between them most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxtune.backend.cpu.arrays import detached, has_nan, unread
from mlxtune.backend.models.autograd import differentiable
from mlxtune.core.steps.execution import SLICE

# Projections of what comes before the attention.
_FIRST = ("q_", "k_", "v_", "qkv")
Run = Callable[..., list[mx.array]]


@dataclass(frozen=True)
class Reads:
    """What the backward pass of a layer reads beyond the products that are kept.

    `inputs`: the inputs of projections behind the attention, which those with LoRA read. `last`:
    the last product, which a norm behind it reads. What is not read is neither recomputed nor kept.
    """

    inputs: bool
    last: bool = False

    @property
    def more(self) -> Reads | None:
        """What to read when this was not enough; None if this is everything."""
        if not self.last:
            return replace(self, last=True)
        return None if self.inputs else replace(self, inputs=True)


class KeptProducts:
    """The products of one layer, in their order."""

    def __init__(self, reads: Reads) -> None:
        self.reads = self._at_first = reads
        self._made: list[mx.array | None] = []
        self._shape: tuple[int, ...] = ()
        self._taken = 0
        self.replays = False

    @property
    def reads_next(self) -> Reads:
        """What to start from next time.

        Where the last product had to be made again, and with it what it reads, keeping it may do.
        """
        remade = bool(self._made) and self._made[-1] is None and self.reads.last
        return replace(self._at_first, last=True) if remade else self.reads

    @contextmanager
    def running(self, *, replays: bool) -> Iterator[None]:
        """Keep the products made in here, or replay those that were kept, in their order."""
        global _running
        self.replays, self._taken = replays, 0
        before, _running = _running, self
        try:
            yield
        finally:
            _running = before
        if not replays and self._made and not self.reads.last:
            self._made[-1] = None

    def clear(self) -> None:
        """Free all products."""
        self._made.clear()

    def product(self, make: Callable[[], mx.array]) -> mx.array:
        """Return the next product: made and kept, or taken again."""
        if not self.replays:
            made = make()
            self._made.append(made)
            self._shape = made.shape
            return made
        self._taken += 1
        kept = self._made[self._taken - 1]
        if kept is None:
            return make() if self.reads.last else unread(*self._shape)
        return kept


# The products of the layer that is running, if it keeps any.
_running: KeptProducts | None = None


def product(make: Callable[[], mx.array]) -> mx.array:
    """Return a product of the layer that is running, made again only if it is not kept."""
    return make() if _running is None else _running.product(make)


def values_needed() -> bool:
    """Return whether the value of a projection's input is needed, not only its gradient."""
    return _running is None or _running.reads.inputs or not _running.replays


class KernelLayers:
    """The `LayerPasses` of the CPU. Without `keep_products`, layers keep their inputs only.

    Then their MLPs run on `slice` tokens at a time; 0 for all.
    """

    def __init__(self, *, keep_products: bool) -> None:
        self.slice = 0 if keep_products else SLICE
        self._keep_products = keep_products
        # What the backward pass of a layer turned out to read, by the layer's identity.
        self.reads: dict[int, Reads] = {}

    def run(
        self, layer: nn.Module, names: Sequence[str], function: Run, inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        """Return the outputs of a layer, with a backward pass that replays kept products."""
        kept = KeptProducts(self._reads_of(layer, names)) if self._keep_products else None

        def forward(*given: mx.array) -> list[mx.array]:
            with kept.running(replays=False) if kept else nullcontext():
                return _detached(function(*_detached(given)))

        def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            # A lone array is passed by itself, as to a layer with no trained parameters.
            primals = _detached([primals] if isinstance(primals, mx.array) else primals)
            if kept is None:
                return _detached(mx.vjp(function, primals, list(cotangents))[1])
            while True:
                with kept.running(replays=True):
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

    def run_in_slices(self, function: Run, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return what a function gives for x (1, T, ·), the first of its inputs, by slices of x.

        Each runs again for its gradients, so that no more is held than one slice takes.
        """
        starts = range(0, inputs[0].shape[1], self.slice)

        def part(x: mx.array, start: int) -> mx.array:
            return detached(x[:, start : start + self.slice])

        def forward(x: mx.array, *others: mx.array) -> mx.array:
            parts = [_detached(function(part(x, start), *others))[0] for start in starts]
            return detached(mx.concatenate(parts, axis=1))

        def backward(primals: Any, cotangent: mx.array, output: Any) -> list[mx.array]:
            x, *others = [primals] if isinstance(primals, mx.array) else primals
            parts, total = [], [mx.zeros_like(other) for other in others]
            for start in starts:
                given = [part(x, start), *others]
                first, *rest = _detached(mx.vjp(function, given, [part(cotangent, start)])[1])
                parts.append(first)
                total = _detached([a + b for a, b in zip(total, rest, strict=True)])
            return [detached(mx.concatenate(parts, axis=1)), *total]

        return [differentiable(forward, backward)(*inputs)]

    def run_frozen(self, output: Any) -> Any:
        """Return the output of a layer below the first that is trained, with no gradient."""
        return tree_map(lambda leaf: detached(leaf) if _is_floating(leaf) else leaf, output)

    def _reads_of(self, layer: nn.Module, names: Sequence[str]) -> Reads:
        behind = not all(name.split(".")[-2:][0].startswith(_FIRST) for name in names)
        return self.reads.get(id(layer), Reads(inputs=behind))


def _detached(arrays: Sequence[mx.array]) -> list[mx.array]:
    return [detached(x) for x in arrays]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
