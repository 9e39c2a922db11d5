"""Runs projections with the same input together: one product with all their A matrices."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.lora.layers import LoRALinear, summed_products
from mlxtune.backend.models.autograd import differentiable, exporting
from mlxtune.backend.models.layers import frozen_gradient, is_plain

# The maximum number of columns of joined A matrices. A GPU multiplies tiles of this width, so
# padding each B with zeros costs no time.
MOST_COLUMNS = 64


class SharedInput:
    """Projections that a layer calls one after the other with the same input.

    The first call computes all outputs, and keeps those of the other projections for the next
    calls. `members` are the projections with LoRA. In a step, the first member's `lora_a` (in, R)
    holds all their A matrices side by side, and each `lora_b` (R, out) has zeros in the other
    members' rows:

        A  = (A1 | A2)      B1' = (B1 / 0)      B2' = (0 / B2)      y1 = W1 x + scale * (x A) B1'
    """

    def __init__(self, projections: Sequence[nn.Module]) -> None:
        self.projections = list(projections)
        self.members = [each for each in projections if isinstance(each, LoRALinear)]
        self._columns = sum(each.lora_a.shape[1] for each in self.members)
        self._run = differentiable(self._forward, self._backward)
        self._x: mx.array | None = None
        self._kept: dict[int, mx.array] = {}

    @property
    def runs(self) -> bool:
        """Whether all projections run together: A matrices are joined, or at most one has LoRA."""
        return len(self.members) < 2 or self.members[0].lora_a.shape[1] == self._columns

    def output(self, number: int, x: mx.array) -> mx.array:
        """Return the output of projection `number` for x (..., in)."""
        if self._x is not x or number not in self._kept:
            self._x, self._kept = x, dict(enumerate(self._outputs(x)))
        output = self._kept.pop(number)
        if not self._kept:
            self._x = None
        return output

    def _outputs(self, x: mx.array) -> list[mx.array]:
        first = self.members[0].lora_a if self.members else None
        trained = [] if first is None else [first, *(each.lora_b for each in self.members)]
        # A function made outside an export has no gradient inside it.
        run = differentiable(self._forward, self._backward) if exporting() else self._run
        outputs = run(x, *(each.astype(x.dtype) for each in trained))
        return list(outputs[: len(self.projections)])

    def _forward(self, x: mx.array, *trained: mx.array) -> list[mx.array]:
        if not trained:
            return [each(x) for each in self.projections]
        narrow, bs = x @ trained[0], iter(trained[1:])
        outputs = [
            mx.addmm(each.linear(x), narrow, next(bs), alpha=each.scale)
            if isinstance(each, LoRALinear)
            else each(x)
            for each in self.projections
        ]
        return [*outputs, narrow]

    def _backward(self, primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        # MLX passes a single array without a list.
        x, *trained = [primals] if isinstance(primals, mx.array) else primals
        # The last cotangent belongs to `narrow`, which only this backward pass reads.
        pairs = list(zip(self.projections, cotangents, strict=False))
        first, cotangent = pairs[0]
        d_x = frozen_gradient(_frozen(first), x, cotangent)
        for each, cotangent in pairs[1:]:
            d_x = _plus_gradient(d_x, each, cotangent, x)
        if not trained:
            return [d_x]
        (a, *bs), narrow, scale = trained, outputs[-1], self.members[0].scale
        updated = [cotangent for each, cotangent in pairs if isinstance(each, LoRALinear)]
        d_narrow = updated[0] @ bs[0].T
        for cotangent, b in zip(updated[1:], bs[1:], strict=True):
            d_narrow = mx.addmm(d_narrow, cotangent, b.T)
        return [
            mx.addmm(d_x, d_narrow, a.T, alpha=scale),
            summed_products(x, d_narrow, scale),
            *(summed_products(narrow, cotangent, scale) for cotangent in updated),
        ]


def _frozen(projection: nn.Module) -> nn.Module:
    return projection.linear if isinstance(projection, LoRALinear) else projection


def _plus_gradient(
    total: mx.array, projection: nn.Module, cotangent: mx.array, x: mx.array
) -> mx.array:
    """Return `total` plus the gradient with respect to x through the frozen layer."""
    linear = _frozen(projection)
    if is_plain(linear, x.dtype):
        return mx.addmm(total, cotangent, linear.weight)
    return total + frozen_gradient(linear, x, cotangent)
