"""Traces the graph of a model's layers, forward and backward, without its weights.

Nothing is computed: the arrays are placeholders, and MLX's export hands over the operations with
the shapes of their arrays. Such a shape is a function of the load: the sizes of the load that is
traced are primes that divide nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.base import create_causal_mask

from mlxtune.backend.device.device import on_cpu
from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.forward.operations import MLX, run_again
from mlxtune.backend.forward.side_by_side import Mixers
from mlxtune.backend.lora import targets
from mlxtune.backend.lora.apply import add_lora
from mlxtune.backend.lora.layers import DropoutKeys
from mlxtune.backend.memory.placeholders import forget, placeholder
from mlxtune.backend.memory.stand_ins import stand_ins
from mlxtune.backend.models.autograd import ExportableVjp
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.mixers.delta_chunks import SIZE as CHUNK
from mlxtune.backend.models.packed import Layout, LineCache, laid_out
from mlxtune.config import InstructConfig
from mlxtune.config.ranks import target_ranks
from mlxtune.core.steps.execution import LayersUse
from mlxtune.core.steps.liveness import IN_PLACE, NEW, VIEW, Operation, Size, followed, held, tie
from mlxtune.core.steps.pack import Segment

# The load that is traced: lines, and their width and all their tokens, both prime.
_LINES, _LOADS = 3, ((83, 241), (101, 293), (107, 317), (113, 337), (137, 409), (149, 443))
# How many columns may be added to a width, as for sinks.
_ADDED = 8
# Layers of a kind that are traced; each keeps the mean of theirs.
_TRACED = 2
# A layer of so many operations is a loop over its tokens.
_LOOP = 1500
# How far a device is behind; see `liveness.held`. MLX's CPU has some 10 tasks of 10 dispatches in
# flight. A GPU has as many command buffers, each with 40 MB of arrays or more: a few operations.
_CPU_LAG, _GPU_LAG = 95, 44
# Operations that never copy, that copy what is not contiguous, and that may work in place.
_SCATTERS = frozenset(("AsStrided", "Broadcast", "BroadcastAxes", "Slice", "Split", "Transpose"))
_VIEWS = _SCATTERS | {"Copy", "Depends", "ExpandDims", "Squeeze", "StopGradient", "View"}
_RESHAPES = frozenset(("Flatten", "Reshape", "Unflatten"))
_IN_PLACE = (
    {"Abs", "Add", "AsType", "Cos", "Divide", "Erf", "Exp", "Log", "Log1p", "Maximum", "Minimum"}
    | {"Multiply", "Negative", "Power", "Select", "Sigmoid", "Sin", "Softmax", "Sqrt", "Square"}
    | {"AddMM", "Subtract", "Tanh"}
)


@dataclass(frozen=True)
class _Call:
    """What a layer is given after its hidden states, which are like `x`."""

    x: mx.array
    args: Sequence[Any]
    options: Mapping[str, Any]

    @property
    def mask(self) -> str:
        """What tells its masks from others."""
        given = (*self.args, *self.options.values())
        arrays = [each.shape for each in given if isinstance(each, mx.array)]
        return str((arrays, [each for each in given if isinstance(each, str)]))


class TracedLayers:
    """What the layers of one model take, for any load.

    Raises ModelError if LoRA cannot be applied.
    """

    def __init__(
        self,
        base: BaseModel,
        config: InstructConfig,
        prepare: Callable[[nn.Module], Any] = MLX.prepare,
    ) -> None:
        layers, chosen = list(base.model.layers), targets.choose_targets(base.model, config)
        keys = chosen.keys
        names = {id(module): name for name, module in base.model.named_modules()}
        self._kinds = [_kind(layer) for layer in layers]
        ranks = {config.lora_rank, *target_ranks(config.target_rank).values()}
        self._load = _load(layers, ranks)
        self._dropout, self._drops = DropoutKeys(), config.dropout > 0
        self._windows: set[int] = set()
        self._calls: dict[tuple[bool, frozenset[int]], list[_Call]] = {}
        self._known: dict[Any, LayersUse] = {}
        self._copies: dict[int, nn.Module] = {}
        untrained = len(layers) - len(chosen.layers)
        self._first = next(
            i for i in range(untrained, len(layers)) if keys & set(targets.projections(layers[i]))
        )
        try:
            self._record(base.model)
        # Of any kind: layers that are not called like most are not traced.
        except Exception:  # noqa: BLE001
            self._calls = {}
        for i in {i for calls in self._calls.values() for i in _last(self._alike(calls))}:
            layer = self._copies[i] = placeholder(layers[i], getattr(mx, base.dtype))
            layer.freeze()
            if i >= untrained:
                add_lora(layer, names[id(layers[i])], keys, config, self._dropout)
                forget(layer)
            prepare(layer)

    def __call__(self, packs: bool, width: int) -> Sequence[LayersUse]:
        """Return what each kind of layers takes, for examples of this width.

        Nothing if the architecture does not let its layers be traced.
        """
        passed = frozenset(window for window in self._windows if width > window)
        calls = self._calls.get((packs, passed), [])
        found = []
        for key, layers in self._alike(calls).items():
            if (packs, key) not in self._known:
                try:
                    self._known[packs, key] = self._use(packs, layers, calls[layers[-1]])
                # Of any kind: MLX cannot export some operations.
                except Exception:  # noqa: BLE001
                    return []
            found.append(replace(self._known[packs, key], layers=len(layers)))
        return found

    def _alike(self, calls: Sequence[_Call]) -> dict[Any, list[int]]:
        """Return the layers that take the same, of those with a backward pass."""
        alike: dict[Any, list[int]] = {}
        for i in range(self._first, len(calls)):
            alike.setdefault((self._kinds[i], calls[i].mask), []).append(i)
        return alike

    def _record(self, model: nn.Module) -> None:
        """Find what the layers are given, for examples packed or not, which pass some windows."""
        layers = list(model.layers)
        calls: list[_Call] = []

        def call(_: nn.Module, x: mx.array, *args: Any, **options: Any) -> mx.array:
            calls.append(_Call(x, args, options))
            return x

        restore = intercept(model, layers, [call] * len(layers))
        try:
            for packs in (True, False):
                wider: list[frozenset[int]] = [frozenset()]
                for passed in wider:
                    calls.clear()
                    cache = _Cache(self._load[0], passed, self._windows)
                    with self._lines(packs) as tokens:
                        model(tokens, cache=[cache] * len(layers))
                    self._calls[packs, passed] = list(calls)
                    left = sorted(self._windows - passed)
                    wider += [passed | {left[0]}] if left else []
        finally:
            restore()

    @contextmanager
    def _lines(self, packs: bool) -> Iterator[mx.array]:
        """Lay out the load that is traced; yield its tokens."""
        width, tokens = self._load
        ends = [*range(0, tokens, width), tokens]
        segments = [Segment(a, b, 0, -1) for a, b in pairwise(ends)]
        lines = (1, tokens) if packs else (_LINES, width)
        if self._drops:
            positions = mx.zeros(lines[1:], mx.uint32)
            self._dropout.set(mx.zeros(lines, mx.uint32), positions)
        with laid_out(Layout(segments) if packs else None):
            yield mx.zeros(lines, mx.int32)

    def _use(self, packs: bool, layers: Sequence[int], call: _Call) -> LayersUse:
        """Return what layers take that are alike."""
        lag, traced = _CPU_LAG if on_cpu() else _GPU_LAG, _last({None: layers})
        hidden = self._size(call.x.shape, call.x.dtype)
        with self._lines(packs), stand_ins():
            both = held(*self._graph(traced, call, _forward_and_backward), lag)
            one = held(*self._graph(traced[-1:], call, _backward), lag)
        # The input of the first layer is not counted, the output of the last one is.
        kept, working = both.at_top / len(traced), both.moments + hidden - both.at_top
        return LayersUse(len(layers), kept, working, one.moments + hidden)

    def _graph(
        self, numbers: Sequence[int], call: _Call, gradients: Callable[..., list[mx.array]]
    ) -> tuple[list[Operation], list[str], str]:
        """Return the operations of some layers, their outputs, and the hidden states at the end."""
        stack = _Stack([self._copies[i] for i in numbers], call)
        mixers = Mixers(stack, by_segments=False)
        every = dict(tree_flatten(stack.parameters()))
        trained = [name for name, _ in tree_flatten(stack.trainable_parameters())]
        names = [*trained, *(name for name in every if name not in set(trained))]
        count = len(trained)

        def traced(x: mx.array, cotangent: mx.array, *values: mx.array) -> list[mx.array]:
            stack.set(names[count:], values[count:])

            def layers(x: mx.array, *values: mx.array) -> mx.array:
                stack.set(trained, values)
                return stack(x)

            vjp = ExportableVjp()
            found = gradients(vjp, layers, [x, *values[:count]], cotangent)
            return [*found, *(each for pair in vjp.tied for each in pair)]

        seen: list[dict[str, Any]] = []
        try:
            arrays = [call.x, call.x, *(every[name] for name in names)]
            mx.export_function(seen.append, traced, *(mx.zeros(a.shape, a.dtype) for a in arrays))
        finally:
            mixers.restore()
            stack.set(list(every), list(every.values()))
        ends = next(each["outputs"] for each in seen if each["type"] == "outputs")
        outputs = [name for name, *_ in ends]
        # The gradients of the input and of what is trained, and the top.
        end = count + 2
        tied = dict(zip(outputs[end::2], outputs[end + 1 :: 2], strict=True))
        graph = tie(_operations(seen, self._size), tied)
        *outputs, top = [followed(name, tied) for name in outputs[:end]]
        if len(graph) > _LOOP * len(numbers):
            x = next(each["inputs"][0][0] for each in seen if each["type"] == "inputs")
            graph = self._unrolled(graph, x)
        return graph, outputs, top

    def _unrolled(self, graph: Sequence[Operation], x: str) -> list[Operation]:
        """Return the operations of a loop over tokens, whose number grows with these."""
        of_x, unrolled = {x}, []
        for each in graph:
            if not of_x.isdisjoint(each.inputs):
                of_x.update(each.outputs)
                share = np.array([0, 0, 1 / (_LINES * self._load[0]), 0])
                sizes = tuple(size * (0, 1, 1, 1) + size[0] * share for size in each.sizes)
                each = replace(each, sizes=sizes)
            unrolled.append(each)
        return unrolled

    def _size(self, shape: Sequence[int], dtype: mx.Dtype) -> Size:
        """Return the size of an array as the factors of `liveness.terms`."""
        size, (width, tokens) = math.prod(shape) * dtype.size, self._load
        wide, found = sum(_is_wide(n, width) for n in shape), np.zeros(4)
        if any(n % tokens == 0 for n in shape):
            found[1] = size / tokens
        elif wide > 1:
            # A mask may be that of all lines.
            found[3] = size / width**2 / (1 if size % _LINES else _LINES)
        elif wide:
            found[2] = size / (_LINES * width)
        elif _is_chunked(shape, width):
            # Of short lines, padding is a larger share than of those that are traced.
            found[2] = size / (_LINES * (-(-width // CHUNK) - 0.25) * CHUNK)
        else:
            found[0] = size
        return found


class _Stack(nn.Module):
    """Some layers, one after the other, that are given the same."""

    def __init__(self, layers: Sequence[nn.Module], call: _Call) -> None:
        super().__init__()
        self.layers = list(layers)
        object.__setattr__(self, "_given", call)

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x, *self._given.args, **self._given.options)
        return x

    def set(self, names: Sequence[str], values: Sequence[mx.array]) -> None:
        """Set parameters by their names."""
        self.update(tree_unflatten(list(zip(names, values, strict=True))))


def _last(alike: Mapping[Any, Sequence[int]]) -> list[int]:
    """Return the layers of each kind that are traced."""
    return [i for layers in alike.values() for i in layers[-_TRACED:]]


def _load(layers: Sequence[nn.Module], ranks: Collection[int]) -> tuple[int, int]:
    """Return a width and a number of tokens that show in the shapes of arrays."""
    arrays = [value for layer in layers for _, value in tree_flatten(layer.parameters())]
    sizes = {*ranks, *(size for array in arrays for size in array.shape)}
    return next(
        (width, tokens)
        for width, tokens in _LOADS
        if not any(_is_wide(n, width) or n % tokens == 0 for n in sizes)
    )


def _forward_and_backward(
    vjp: ExportableVjp, layers: Callable[..., mx.array], primals: list[mx.array], _: mx.array
) -> list[mx.array]:
    """Return the gradients of layers whose cotangent is known after their forward pass."""
    output = primals[0]

    def loss(*primals: mx.array) -> list[mx.array]:
        nonlocal output
        output = layers(*primals)
        return [mx.square(output).sum()]

    gradients = vjp(loss, primals, [mx.array(1, output.dtype)])[1]
    return [*gradients, output]


def _backward(
    vjp: ExportableVjp,
    layers: Callable[..., mx.array],
    primals: list[mx.array],
    cotangent: mx.array,
) -> list[mx.array]:
    """Return the gradients of a layer that runs again in the backward pass."""
    return [*run_again(lambda *each: [layers(*each)], primals, [cotangent], vjp), cotangent]


def _is_wide(size: int, width: int) -> bool:
    return size % width == 0 or width < size <= width + _ADDED


def _is_chunked(shape: Sequence[int], width: int) -> bool:
    """Tell whether an array is that of all chunks of a recurrence, or of one, in every line."""
    chunks, start = -(-width // CHUNK), tuple(shape[:2])
    return (
        (len(shape) > 4 and (start in ((1, _LINES), (chunks, _LINES)) or shape[0] == _LINES))
        or (len(shape) == 4 and start == (_LINES, chunks * CHUNK))
        or (len(shape) == 1 and shape[0] % (_LINES * chunks * CHUNK) == 0)
    )


class _Cache(LineCache):
    """Takes the place of a layer's cache, for examples that are wider than some windows."""

    def __init__(self, width: int, passed: Collection[int], seen: set[int]) -> None:
        self._width, self._passed, self._seen = width, passed, seen

    def make_mask(self, length: int, **options: Any) -> Any:
        """Return a mask like that of such examples."""
        if not options:
            return None
        if window := options.get("window_size"):
            self._seen.add(window)
        if options.get("return_array") or window in self._passed:
            return create_causal_mask(self._width, window_size=window)
        return "causal"


def _kind(layer: nn.Module) -> str:
    """Return what tells a layer from those that compute otherwise: its modules and their shapes."""
    modules = [(name, type(module).__name__) for name, module in layer.named_modules()]
    return str((modules, [(k, v.shape, v.dtype) for k, v in tree_flatten(layer.parameters())]))


def _operations(
    seen: Sequence[dict[str, Any]], size: Callable[[Sequence[int], mx.Dtype], Size]
) -> list[Operation]:
    """Return the operations that MLX exported."""
    scattered: set[str] = set()
    graph = []
    for each in seen:
        if each["type"] != "primitive":
            continue
        name, inputs = each["name"], tuple(given[0] for given in each["inputs"])
        outputs = tuple(given[0] for given in each["outputs"])
        kind = IN_PLACE if name in _IN_PLACE else NEW
        if inputs and (name in _VIEWS or name in _RESHAPES):
            moved = inputs[0] in scattered
            # A reshape of what is not contiguous copies it.
            kind = NEW if moved and name in _RESHAPES else VIEW
            if kind == VIEW and (moved or name in _SCATTERS):
                scattered.update(outputs)
        sizes = tuple(size(shape, dtype) for _, shape, dtype in each["outputs"])
        graph.append(Operation(kind, inputs, outputs, sizes))
    return graph
