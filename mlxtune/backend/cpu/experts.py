"""Mixtures of experts on the CPU: one product per expert, over the tokens that it got.

The indices are known by the time that the experts run, so each expert's rows are gathered and
scattered around its product, and weights in fewer bits are cast one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.switch_layers import SwiGLU
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxtune.backend.cpu import elementwise, products
from mlxtune.backend.cpu.arrays import Floats, computes, empty, in_parts, matrix, view
from mlxtune.backend.cpu.layers import product, values_needed
from mlxtune.backend.lora.targets import EXPERTS
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.layers import dequantized_expert

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Routes:
    """Which tokens go to which experts, `per_token` of them each.

    experts of tokens 0, 1, 2    2 0 | 2 1 | 0 2
    places                       0 1 | 2 3 | 4 5
    order                        1 4 | 3 | 0 2 5      places by expert
    ends                         2     3   6
    """

    per_token: int
    order: Places
    ends: Places

    @classmethod
    def of(cls, indices: mx.array, experts: int) -> Routes:
        """Return the routes of indices (..., k)."""
        flat = np.array(indices).reshape(-1)
        ends = np.cumsum(np.bincount(flat, minlength=experts))
        return cls(indices.shape[-1], np.argsort(flat, kind="stable"), ends)

    def for_each(self, run: Callable[[int, slice, Places], None], *, shared: bool) -> None:
        """Call `run(expert, at, places)` for experts that get tokens; threads may share them.

        `at` is where the expert's tokens are in `order`, `places` what stands there.
        """

        def run_those(_: int, first: int, last: int) -> None:
            start = 0
            for expert, end in enumerate(self.ends.tolist()):
                if first <= start < min(end, last):
                    run(expert, slice(start, end), self.order[start:end])
                start = end

        count = len(self.order)
        in_parts(run_those, count) if shared else run_those(0, 0, count)


class _Layer:
    """A layer of experts; `trained` are LoRA's A (experts, rank, in) and B (experts, out, rank)."""

    def __init__(self, module: nn.Module) -> None:
        has_lora = "lora_a" in module
        self._linear = linear = module.linear if has_lora else module
        # Slices of MLX would be an evaluation for each expert.
        self._narrow = linear.weight.dtype == mx.bfloat16
        self._weights = view(linear.weight.view(mx.uint16) if self._narrow else linear.weight)
        self._bias = view(linear.bias.astype(mx.float32)) if "bias" in linear else None
        self._scale = np.float32(module.scale if has_lora else 0)
        self.trained = [module.lora_a, module.lora_b] if has_lora else []
        self.outputs = linear.weight.shape[1]

    def forward(self, x: Floats, expert: int, trained: Sequence[Floats]) -> Floats:
        """Return an expert's outputs (m, out) for x (m, in)."""
        y: Floats = x @ self._weight(expert).T
        if self._bias is not None:
            y += self._bias[expert]
        if trained:
            a, b = (each[expert] for each in trained)
            y += (x @ a.T * self._scale) @ b.T
        return y

    def backward(
        self, d: Floats, x: Floats, expert: int, trained: Sequence[Floats], out: Sequence[Floats]
    ) -> Floats:
        """Return the gradient of x, of which nothing is read without LoRA; set those of A and B."""
        d_x: Floats = d @ self._weight(expert)
        if trained:
            a, b = (each[expert] for each in trained)
            low = d @ b * self._scale
            d_x += low @ a
            np.matmul(low.T, x, out=out[0][expert])
            np.matmul(d.T, x @ a.T * self._scale, out=out[1][expert])
        return d_x

    def _weight(self, expert: int) -> Floats:
        """Return the weight (out, in) of an expert, until the next call."""
        if "scales" in self._linear:
            return view(dequantized_expert(self._linear, expert))
        if self._narrow:
            return products.widened(self._weights[expert])
        return self._weights[expert].astype(np.float32, copy=False)


def expert_products(
    x: mx.array, routes: Routes, modules: Sequence[nn.Module], *, spreads: bool
) -> list[mx.array]:
    """Return what layers of experts give for x, with gradients for x and LoRA.

    x has the tokens (N, in) if it `spreads`, and the outputs (N k, out) are in the order of the
    routes; else x (N k, in) is in that order, and the outputs in that of the places.
    """
    layers = [_Layer(module) for module in modules]
    count, k = len(routes.order), routes.per_token
    # MLX evaluates for one thread at a time.
    shared = all("scales" not in module.get("linear", module) for module in modules)

    def forward(x: Floats, trained: Sequence[Floats]) -> list[mx.array]:
        made = [empty(count, layer.outputs) for layer in layers]
        outs = [view(out) for out in made]

        def run(expert: int, at: slice, places: Places) -> None:
            rows = x[places // k if spreads else at]
            for out, layer, own in zip(outs, layers, by_layer(trained), strict=True):
                out[at if spreads else places] = layer.forward(rows, expert, own)

        routes.for_each(run, shared=shared)
        return made

    def run(x: mx.array, *trained: mx.array) -> list[mx.array]:
        @cache
        def made() -> list[mx.array]:
            return forward(matrix(x), [view(each) for each in trained])

        # The first that is asked for makes all of them.
        return [product(partial(lambda i: made()[i], i)) for i in range(len(layers))]

    def gradient(primals: Any, cotangents: Any, outputs: Any) -> Any:
        x, *trained = [primals] if isinstance(primals, mx.array) else primals
        d_x, d = empty(count, x.shape[-1]), [matrix(each) for each in cotangents]
        # Of experts that get no tokens, zeros.
        found = [mx.zeros(each.shape) for each in trained]
        mx.eval(found)
        values, sums = ([view(each) for each in arrays] for arrays in (trained, found))
        made = view(d_x)
        inputs = matrix(x) if trained else made

        def run(expert: int, at: slice, places: Places) -> None:
            rows = inputs[places // k if spreads else at]
            made[places if spreads else at] = sum(
                layer.backward(part[at if spreads else places], rows, expert, own, out)
                for layer, part, own, out in zip(
                    layers, d, by_layer(values), by_layer(sums), strict=True
                )
            )

        routes.for_each(run, shared=shared)
        if spreads:
            d_x = mx.array(view(d_x).reshape(-1, k, x.shape[-1]).sum(axis=1))
        return [d_x, *found] if trained else d_x

    def by_layer(trained: Sequence[Floats]) -> list[Sequence[Floats]]:
        rest = iter(trained)
        return [[next(rest) for _ in layer.trained] for layer in layers]

    trained = [each for layer in layers for each in layer.trained]
    return list(differentiable(run, gradient)(x, *trained))


class ExpertsGLU(nn.Module):
    """The gated experts of mlx-lm's SwitchGLU."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        layers = self.gate_proj, self.up_proj, self.down_proj
        if not _serves(x, indices, layers):
            return super().__call__(x, indices)
        routes = Routes.of(indices, _experts(self.up_proj))
        rows = x.reshape(-1, x.shape[-1])
        gate, up = expert_products(rows, routes, layers[:2], spreads=True)
        # This activation is one object for all models, and cannot be replaced in one of them.
        if type(self.activation) is SwiGLU:
            hidden = elementwise.swiglu(gate, up, needed=values_needed())
        else:
            hidden = self.activation(up, gate)
        (y,) = expert_products(hidden, routes, layers[2:], spreads=False)
        return y.reshape(*indices.shape, -1)


class ExpertsMLP(nn.Module):
    """The experts of mlx-lm's SwitchMLP."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if not _serves(x, indices, (self.fc1, self.fc2)):
            return super().__call__(x, indices)
        routes = Routes.of(indices, _experts(self.fc1))
        rows = x.reshape(-1, x.shape[-1])
        (hidden,) = expert_products(rows, routes, [self.fc1], spreads=True)
        (y,) = expert_products(self.activation(hidden), routes, [self.fc2], spreads=False)
        return y.reshape(*indices.shape, -1)


def _serves(x: mx.array, indices: mx.array, layers: Sequence[nn.Module]) -> bool:
    known = all(isinstance(layer, (*EXPERTS, LoRASwitchLinear)) for layer in layers)
    return known and computes(x) and x.shape[:-1] == indices.shape[:-1]


def _experts(layer: nn.Module) -> int:
    return int((layer.linear if "lora_a" in layer else layer).weight.shape[0])
