"""The backward pass layer by layer: what is kept of each layer's forward pass, and what is redone.

A layer keeps its input, and on the CPU its products, which take most of the time; what lies between
is computed again when the backward pass comes to the layer, and freed when it leaves. Selective
recomputation as in arXiv:2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxtune.backend.cpu import packed
from mlxtune.backend.cpu.arrays import detached, has_nan
from mlxtune.backend.cpu.kept import KeptProducts, Reads
from mlxtune.backend.lora.layers import DropoutKeys
from mlxtune.backend.model.autograd import differentiable
from mlxtune.backend.step.prefix import PrefixCache

# Projections of what is before the attention.
_FIRST = ("q_", "k_", "v_", "qkv")
Run = Callable[..., list[mx.array]]


class Layerwise:
    """Has the layers of one model run this way, within `running()`.

    Only these instances change, by a child of their class: other models in the process keep theirs.
    `eager` evaluates each layer where it is called, as the CPU's functions do.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        dropout: DropoutKeys,
        *,
        eager: bool,
        keep_products: bool,
    ) -> None:
        self.eager = eager
        self.keep_products = keep_products
        self._dropout = dropout
        self._running = False
        # What the backward pass of a layer turned out to read, by the layer's identity.
        self._reads: dict[int, Reads] = {}
        trained = [bool(tree_flatten(layer.trainable_parameters())) for layer in layers]
        first = trained.index(True)
        for layer in layers[first:]:
            intercept(layer, self._call)
        # Below the first that is trained there is no backward pass, and nothing to keep.
        for layer in layers[:first] if eager else ():
            intercept(layer, self._call_below)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the forward passes in here prepare for their backward passes this way."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _call_below(
        self, layer: nn.Module, plain: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        y = plain(*args, **options)
        if not self._running:
            return y
        return tree_map(lambda leaf: detached(leaf) if _is_floating(leaf) else leaf, y)

    def _call(self, layer: nn.Module, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not self._running:
            return plain(*args, **options)
        call = LayerCall(layer, plain, self._dropout, args, options)
        outputs = self._whole(layer, call.names, call.run, [*call.given, *call.trained, *call.kept])
        return call.result(outputs)

    def _whole(
        self, layer: nn.Module, names: Sequence[str], run: Run, given: list[mx.array]
    ) -> list[mx.array]:
        """Run a layer as one function, with its backward pass."""
        kept = KeptProducts(self._reads_of(layer, names)) if self.keep_products else None

        def cut(arrays: Sequence[mx.array]) -> list[mx.array]:
            return [detached(x) for x in arrays] if self.eager else list(arrays)

        def whole(*inputs: mx.array) -> list[mx.array]:
            with kept.recording() if kept else nullcontext():
                return cut(run(*cut(inputs)))

        def gradient(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            # A lone array stands by itself: a layer that nothing in is trained has no other.
            primals = cut([primals] if isinstance(primals, mx.array) else primals)
            if kept is None:
                return cut(mx.vjp(run, primals, list(cotangents))[1])
            while True:
                with kept.replaying():
                    gradients = cut(mx.vjp(run, primals, list(cotangents))[1])
                # What is not made stands as NaN. One of another origin stays with all that is made.
                more = kept.reads.more if has_nan(gradients) else None
                if more is None:
                    break
                kept.reads = more
            if not has_nan(gradients):
                self._reads[id(layer)] = kept.reads_next
            kept.clear()
            return gradients

        return list(differentiable(whole, gradient)(*given))

    def _reads_of(self, layer: nn.Module, names: Sequence[str]) -> Reads:
        """Return what the backward pass of a layer reads, as far as is known."""
        behind = not all(name.split(".")[-2:][0].startswith(_FIRST) for name in names)
        return self._reads.get(id(layer), Reads(inputs=behind))


class LayerCall:
    """A call of a layer as a function of arrays alone, which a gradient may flow through.

    `run` takes the arrays `given` to the layer, its own that are `trained`, which have `names`, and
    the keys and values `kept` of a prefix that ran before; `result` makes of what it returns what
    the layer returns.
    """

    def __init__(
        self,
        layer: nn.Module,
        plain: Callable[..., Any],
        dropout: DropoutKeys,
        args: Any,
        options: Any,
    ) -> None:
        self.given = _floating((args, options))
        trained = tree_flatten(layer.trainable_parameters())
        self.names = [name for name, _ in trained]
        self.trained = [value for _, value in trained]
        caches = (c for c in (*args, *options.values()) if isinstance(c, PrefixCache))
        self._cache = next(caches, None)
        self.kept: list[mx.array] = list(self._cache.given) if self._cache else []
        self._layer, self._plain = layer, plain
        self._args, self._options = args, options
        self._dropout, self._keys, self._layout = dropout, replace(dropout), packed.layout()
        self._made: Any = None

    def run(self, *inputs: mx.array) -> list[mx.array]:
        """Run the layer on its arrays; return those that it gives, and those that are recorded."""
        # By the backward pass, another pass through the model may have set its own.
        self._dropout.set(self._keys.rows, self._keys.positions)
        cache, count = self._cache, len(self.given)
        own = inputs[count : count + len(self.names)]
        self._update(own)
        args, options = _filled((self._args, self._options), inputs)
        standing_in = cache.standing_in(inputs[count + len(own) :]) if cache else None
        with standing_in or nullcontext(), packed.laid_out(self._layout):
            y = self._plain(*args, **options)
            # Of what a layer gives, the arrays alone are kept: by the function's outputs.
            self._made = tree_map(lambda leaf: _ARRAY if _is_floating(leaf) else leaf, y)
            return [*_floating(y), *(cache.recorded if cache and not cache.given else ())]

    def result(self, outputs: list[mx.array]) -> Any:
        """Return what the layer gives; it has its own arrays again."""
        self._update(self.trained)
        if self._cache is not None and not self._cache.given:
            self._cache.recorded = outputs[len(_floating(self._made)) :]
        return _filled(self._made, outputs)

    def _update(self, own: Sequence[mx.array]) -> None:
        self._layer.update(tree_unflatten(list(zip(self.names, own, strict=True))))


# Stands where an array was, in what a layer takes or gives.
_ARRAY = mx.array(0.0)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _floating(tree: Any) -> list[mx.array]:
    """Return the arrays in a tree that a gradient may flow through, in order."""
    found: list[mx.array] = []
    tree_map(lambda leaf: found.append(leaf) if _is_floating(leaf) else None, tree)
    return found


def _filled(tree: Any, arrays: Sequence[mx.array]) -> Any:
    """Return a tree with these in the place of such arrays."""
    left = iter(arrays)
    return tree_map(lambda leaf: next(left) if _is_floating(leaf) else leaf, tree)


def intercept(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have `call(module, plain, *args, **options)` run in the place of a module's own call."""
    kind = type(module)

    def instead(self: nn.Module, *args: Any, **options: Any) -> Any:
        return call(self, lambda *a, **o: kind.__call__(self, *a, **o), *args, **options)

    own = {"__call__": instead, "__module__": kind.__module__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), own)
