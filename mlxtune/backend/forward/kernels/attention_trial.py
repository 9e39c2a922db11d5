"""The choice between kernels around attention and MLX's operations, tried in a model's sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx
import numpy as np

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.forward.kernels.attention_kernels import (
    AttentionKernels,
    Heads,
    HeadSizes,
    plain_packed,
    plain_padded,
)
from mlxtune.backend.forward.kernels.device_kernels import (
    TOLERANCES,
    Chooser,
    Function,
    Trial,
    TrialInputs,
    device_language,
)
from mlxtune.backend.models.packed import Layout
from mlxtune.core.steps.pack import Segment

# Returns the kernels to use for heads; None to use MLX's operations.
KernelsFor = Callable[[Heads], AttentionKernels | None]


def kernels_for(dtype: mx.Dtype | None) -> KernelsFor | None:
    """Return the choice of kernels for queries, keys and values of a dtype; None on the CPU."""
    return None if on_cpu() or dtype not in TOLERANCES else partial(_usable_kernels, dtype)


def attention_kernels_problem() -> str:
    """Return why kernels that were tried cannot be used; empty if all can."""
    return next(filter(None, (chooser.problem() for chooser in _choosers.values())), "")


# Kernels are tried in the sizes of a model's heads, as each size is compiled anew.
_choosers: dict[tuple[HeadSizes, bool], Chooser] = {}


def _usable_kernels(dtype: mx.Dtype, heads: Heads) -> AttentionKernels | None:
    """Return the device's kernels; None if their trial failed or MLX's operations are faster."""
    sizes, normalized = heads.sizes, heads.norms is not None
    key = sizes, normalized
    if key not in _choosers:
        tried = partial(_device_trial, sizes, normalized)
        _choosers[key] = Chooser(tried)
    return None if _choosers[key].form(dtype) is None else _device_kernels()


@cache
def _device_kernels() -> AttentionKernels:
    return AttentionKernels(*device_language())


def _device_trial(sizes: HeadSizes, normalized: bool) -> Trial:
    return trial_of(_device_kernels(), trial_heads(sizes, normalized=normalized))


def trial_heads(sizes: HeadSizes, *, normalized: bool = True) -> Heads:
    """Return heads with random norms."""
    pairs = np.arange(sizes.rotated // 2)
    frequencies = tuple(map(float, 1e4 ** (-2 * pairs / sizes.rotated)))
    weights = mx.random.uniform(0.5, 1.5, (2 * sizes.size,), key=mx.random.key(1))
    norms = mx.concatenate([weights, mx.array([1e-6, 1e-5])])
    return Heads(sizes, frequencies, norms if normalized else None)


# The number of tokens in a trial's small case.
TRIAL_TOKENS = 13


def trial_of(kernels: AttentionKernels, heads: Heads) -> Trial:
    """Return a trial of kernels on examples that share a prefix, and on examples of real length."""
    small = Layout(
        [
            Segment(0, 2, 0, -1),
            Segment(2, 5, 2, 0),
            Segment(5, 6, 2, 0),
            Segment(6, TRIAL_TOKENS, 0, -1),
        ]
    )
    lengths = 81, 109, 137, 165, 193, 221, 249, 253
    ends = list(itertools.accumulate(lengths))
    many = Layout([Segment(end - n, end, 0, -1) for n, end in zip(lengths, ends, strict=True)])

    def case(layout: Layout) -> TrialInputs:
        """Return random projections of a sequence, and cotangents of their values side by side."""
        sizes, tokens, counts = heads.sizes, len(layout.positions), heads.sizes.counts
        projected = [(1, tokens, count * sizes.size) for count in counts]
        rows, length = layout.shape
        moved = [(rows, count, length, sizes.size) for count in counts]
        shapes = [*projected, *moved, projected[0]]
        keys = mx.random.split(mx.random.key(0), len(shapes))
        arrays = [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]
        return TrialInputs(arrays[:3], arrays[3:])

    def form(side_by_side: Function, packed: Function) -> Function:
        def run(*projected: mx.array) -> list[mx.array]:
            layout = small if projected[0].shape[1] == TRIAL_TOKENS else many
            moved = side_by_side(heads, layout, *projected)
            rows, length = layout.shape
            # Nothing reads padding in training, so it has no gradient.
            real = layout.real.reshape(rows, 1, length, 1).astype(projected[0].dtype)
            return [*(array * real for array in moved), packed(layout, moved[0])]

        return run

    names = "queries", "keys", "values"
    return Trial(
        {"kernels": form(kernels.padded, kernels.packed)},
        form(plain_padded, plain_packed),
        small=lambda: case(small),
        realistic=lambda: case(many),
        names=[*names, "the output", *(f"the gradient of {name}" for name in names)],
    )
