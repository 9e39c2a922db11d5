"""Keeps packed examples separate, for any operations and almost any model.

Norms, projections, MLPs and experts compute each token independently, so they run on the sequence,
without padding. A layer's mixers (attention, convolutions, recurrences) combine tokens, so they run
on the examples side by side:

    sequence            a b c d x p q       x continues a b, as c d does
    side by side    a b c d
                    a b x .
                    p q . .             `.` is padding, which no token before it sees
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxtune.backend.forward.attention_heads import KernelAttention, kernel_attention
from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.forward.kernels.attention_trial import KernelsFor
from mlxtune.backend.lora.lora_layers import LoRALinear
from mlxtune.backend.lora.targets import PROJECTIONS
from mlxtune.backend.models import packed
from mlxtune.backend.models.autograd import differentiable, is_exporting
from mlxtune.backend.models.gather import gathered


class Mixers:
    """The mixers of one model, which run on the examples of a sequence side by side.

    With `by_segments`, purely causal attention runs on the sequence itself, and the operations keep
    its segments separate. The `kernels` do the work around attention in the layers that they
    support. `restore` undoes the changes to the model. `count` is the number of mixers.
    """

    def __init__(
        self, model: nn.Module, *, by_segments: bool, kernels: KernelsFor | None = None
    ) -> None:
        self.by_segments = by_segments
        self._recorded: list[mx.array] | None = None
        modules = [mixer for layer in model.layers for mixer in _find(layer)]
        self.count = len(modules)
        self._by_kernels = {} if kernels is None else _by_kernels(modules, kernels)
        self.restore = intercept(model, modules, [self._call] * len(modules))

    @contextmanager
    def recording(self, outputs: list[mx.array] | None) -> Iterator[None]:
        """Append the mixers' outputs inside the block to `outputs`, in order, unless it is None."""
        self._recorded = outputs
        try:
            yield
        finally:
            self._recorded = None

    def _call(self, mixer: nn.Module, *args: Any, **options: Any) -> Any:
        output = self._run(mixer, *args, **options)
        if self._recorded is not None:
            self._recorded += [array for _, array in tree_flatten([output])]
        return output

    def _run(self, mixer: nn.Module, *args: Any, **options: Any) -> Any:
        layout = packed.layout()
        if layout is None:
            return mixer(*args, **options)
        causal = any(isinstance(option, str) for option in (*args, *options.values()))
        if causal and self.by_segments:
            try:
                return mixer(*args, **options)
            except packed.CannotPackError:
                self.by_segments = False
        if id(mixer) in self._by_kernels and not is_exporting():
            output = self._by_kernels[id(mixer)].run(mixer, layout, *args, **options)
            if output is not None:
                return output
        repacking = _Repacking(layout)
        projections = {
            name: part
            for name, part in mixer.children().items()
            if isinstance(part, (LoRALinear, *PROJECTIONS))
        }
        try:
            for name, projection in projections.items():
                mixer[name] = _OnPacked(projection, repacking)
            args, options = tree_map(repacking.pad, (args, options))
            with packed.laid_out(None):
                output = mixer(*args, **options)
        finally:
            for name, projection in projections.items():
                mixer[name] = projection
        return tree_map(repacking.pack, output)


def _by_kernels(mixers: Sequence[nn.Module], kernels: KernelsFor) -> dict[int, KernelAttention]:
    """Return the mixers that kernels can run, by their `id`."""
    kernels_of = {id(mixer): kernel_attention(mixer, kernels) for mixer in mixers}
    return {key: each for key, each in kernels_of.items() if each is not None}


def _find(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in a layer that take a cache."""
    mixers: list[nn.Module] = []
    for part in layer.children().values():
        for module in part if isinstance(part, list) else [part]:
            if isinstance(module, nn.Module):
                takes = "cache" in inspect.signature(type(module).__call__).parameters
                mixers += [module] if takes else _find(module)
    return mixers


class _OnPacked(nn.Module):
    """Runs a mixer's projection on the sequence, given inputs that are side by side."""

    def __init__(self, projection: nn.Module, repacking: _Repacking) -> None:
        super().__init__()
        # If the projection were a child, the names of the model's parameters would change.
        object.__setattr__(self, "_projection", projection)
        object.__setattr__(self, "_repacking", repacking)

    def __call__(self, x: mx.array) -> mx.array:
        return self._repacking.pad(self._projection(self._repacking.pack(x)))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_projection"), name)


class _Repacking:
    """The arrays of one call of a mixer: on the sequence (1, N, ·), and side by side (B, T, ·)."""

    def __init__(self, layout: packed.Layout) -> None:
        self._layout = layout
        self._packed_arrays: list[tuple[mx.array, mx.array]] = []

    def pad(self, packed: Any) -> Any:
        """Return an array of the sequence with its examples side by side; other values
        unchanged.
        """
        length = len(self._layout.positions)
        if not isinstance(packed, mx.array) or packed.ndim != 3 or packed.shape[:2] != (1, length):
            return packed
        beside = self._gather(packed)
        self._packed_arrays.append((beside, packed))
        return beside

    def _gather(self, packed: mx.array) -> mx.array:
        """Return the examples of a sequence (1, N, C) side by side, (B, T, C).

        The gradient gathers too, whereas MLX's own adds into zeros, in varying order on a GPU.
        """
        layout = self._layout

        def gather(packed: mx.array) -> mx.array:
            return gathered(packed.reshape(-1, packed.shape[-1]), layout.padded_indices)

        def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
            flat = cotangent.reshape(-1, cotangent.shape[-1])
            if layout.shared is None:
                return gathered(flat, layout.flat_indices)[None]
            tokens, indices = layout.shared
            # The gradients of padding are zeros.
            total, each = mx.split(gathered(flat, indices), [len(layout.positions)])
            total[tokens] = each.reshape(len(tokens), -1, each.shape[-1]).sum(axis=1)
            return total[None]

        return differentiable(gather, gradient)(packed)

    def pack(self, padded: Any) -> Any:
        """Return an array of examples side by side as a sequence; other values unchanged.

        An array that `pad` gathered from the sequence maps back to its source, so that MLX does not
        compute the gathered form if nothing else needs it.
        """
        for unpacked, source in self._packed_arrays:
            if unpacked is padded:
                return source
        rows = self._layout.padded_indices
        if not isinstance(padded, mx.array) or padded.ndim != 3 or padded.shape[:2] != rows.shape:
            return padded
        return self._layout.to_packed.gather(padded.reshape(rows.size, -1))[None]
