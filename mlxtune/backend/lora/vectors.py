"""Joins a model's trained matrices into vectors, and converts these for a step or a file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxtune.backend.lora.apply import adapted_modules
from mlxtune.backend.lora.lora_layers import LoRALinear

# Vectors are padded with zeros to a multiple of this many entries.
MULTIPLE = 1024


@dataclass(frozen=True)
class _Part:
    """A part of a vector: one matrix, or several A matrices side by side as one matrix (in, R).

    A step casts the matrix to `dtype` and pads it with rows of zeros: `above` before it, and
    `below` after it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: mx.Dtype = mx.float32
    above: int = 0
    below: int = 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        *rows, _ = self.shapes[0]
        return (*rows, sum(shape[-1] for shape in self.shapes))

    @property
    def is_padded(self) -> bool:
        return bool(self.above or self.below)


class LoRAVectorLayout:
    """The layout of a model's trained matrices in float32 vectors.

    There is one vector or, if `separate`, one for all A matrices and one for the rest. The A
    matrices of a `SharedInput` are side by side, and B matrices with equal padding are adjacent, so
    that few operations turn the vectors into a step's matrices. A file keeps the model's order.
    """

    def __init__(self, model: nn.Module, *, separate: bool) -> None:
        named = tree_flatten(model.trainable_parameters())
        a, rest = ([n for n, _ in named if n.endswith("lora_a") == is_a] for is_a in (True, False))
        self._names = [a, rest] if separate else [a + rest]
        self._shapes = {name: value.shape for name, value in named}
        parts = _parts(model, self._shapes)
        self._parts = [
            # The sort is stable: only parts with padding move.
            sorted(
                (parts[name] for name in names if name in parts),
                key=lambda part: (part.above, part.below, part.shapes if part.is_padded else ()),
            )
            for names in self._names
        ]
        # The parts of each vector that one operation turns into a step's matrices.
        self._groups = [
            [list(group) for _, group in groupby(parts, _padding_key)] for parts in self._parts
        ]

    def join(self, tree: Any) -> list[mx.array]:
        """Return the vectors that hold matrices, given by name or as a tree."""
        arrays = dict(tree_flatten(tree))
        return [
            _join([_beside([arrays[name] for name in part.names]) for part in parts])
            for parts in self._parts
        ]

    def matrices(self, vectors: Sequence[mx.array]) -> dict[str, mx.array]:
        """Return the matrices that vectors hold, by name."""
        arrays: dict[str, mx.array] = {}
        for parts, vector in zip(self._parts, vectors, strict=True):
            for part, array in zip(parts, _taken(vector, [p.shape for p in parts]), strict=True):
                start = 0
                for name, shape in zip(part.names, part.shapes, strict=True):
                    end = start + shape[-1]
                    arrays[name] = array if len(part.names) == 1 else array[:, start:end]
                    start = end
        return {name: arrays[name] for name in self._shapes}

    def matrices_of_step(self, vectors: Sequence[mx.array]) -> dict[str, mx.array]:
        """Return the matrices that a step computes with, by name; see `SharedInput`."""
        arrays: dict[str, mx.array] = {}
        for groups, vector in zip(self._groups, vectors, strict=True):
            shapes = [
                (len(alike), *alike[0].shape) if alike[0].is_padded else alike[0].shape
                for alike in groups
            ]
            dtypes = {alike[0].dtype for alike in groups}
            casts = {dtype: _taken(vector.astype(dtype), shapes) for dtype in dtypes}
            for i, (one, *others) in enumerate(groups):
                array = casts[one.dtype][i]
                if not one.is_padded:
                    arrays[one.names[0]] = array
                    continue
                stack = mx.pad(array, [(0, 0), (one.above, one.below), (0, 0)])
                for part, each in zip([one, *others], mx.split(stack, len(stack)), strict=True):
                    arrays[part.names[0]] = each.squeeze(0)
        return {name: arrays[name] for name in self._shapes if name in arrays}

    def join_gradients(self, arrays: Mapping[str, mx.array]) -> list[mx.array]:
        """Return the gradients of a step's matrices as vectors, without the matrices' padding."""
        return [
            _join(
                [
                    arrays[part.names[0]][part.above : part.above + part.shape[0]]
                    if part.is_padded
                    else arrays[part.names[0]]
                    for part in parts
                ]
            )
            for parts in self._parts
        ]

    def for_file(self, vectors: Sequence[mx.array]) -> list[mx.array]:
        """Return vectors in a file's order."""
        if self._matches_file_order:
            return list(vectors)
        arrays = self.matrices(vectors)
        return [_join([arrays[name] for name in names]) for names in self._names]

    def from_file(self, vectors: Sequence[mx.array]) -> list[mx.array]:
        """Return a file's vectors in the order of this layout."""
        if self._matches_file_order:
            return list(vectors)
        arrays: dict[str, mx.array] = {}
        for names, vector in zip(self._names, vectors, strict=True):
            shapes = [self._shapes[name] for name in names]
            arrays.update(zip(names, _taken(vector, shapes), strict=True))
        return self.join(arrays)

    @property
    def _matches_file_order(self) -> bool:
        here = [[name for part in parts for name in part.names] for parts in self._parts]
        return here == self._names and all(
            len(part.names) == 1 for parts in self._parts for part in parts
        )


def _parts(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, _Part]:
    """Return the parts of a model's vectors, by the name of the first matrix in each part."""
    parts = {name: _Part((name,), (shape,)) for name, shape in shapes.items()}
    modules = adapted_modules(model)
    paths = {id(module): path for path, module in modules.items()}
    for path, module in modules.items():
        if not isinstance(module, LoRALinear) or module.input_dtype is None:
            continue
        dtype, shared, name = module.input_dtype, module.shared, f"{path}.lora_b"
        members = [module] if shared is None else shared.members
        ranks = [member.lora_a.shape[1] for member in members]
        number = next(i for i, each in enumerate(members) if each is module)
        above, below = sum(ranks[:number]), sum(ranks[number + 1 :])
        parts[name] = _Part((name,), (shapes[name],), dtype, above, below)
        names = tuple(f"{paths[id(member)]}.lora_a" for member in members)
        if number:
            del parts[names[number]]
        else:
            parts[names[0]] = _Part(names, tuple(shapes[each] for each in names), dtype)
    return parts


def _padding_key(part: _Part) -> Any:
    """Return a grouping key; adjacent parts with the same key are padded in one operation."""
    return (part.dtype, part.above, part.below, part.shape) if part.is_padded else part.names


def _beside(arrays: Sequence[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=1)


def _join(arrays: Sequence[mx.array]) -> mx.array:
    """Join arrays into one vector, pad it to a multiple of the row size, and cast it to float32."""
    flat = [array.reshape(-1) for array in arrays]
    padding = -sum(part.size for part in flat) % MULTIPLE
    # Some of CUDA's kernels cannot take empty arrays.
    if padding or not flat:
        flat.append(mx.zeros(padding, flat[0].dtype if flat else mx.float32))
    return mx.concatenate(flat).astype(mx.float32)


def _taken(vector: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """Return arrays of these shapes, cut one after the other from the start of a vector."""
    ends = list(accumulate(map(math.prod, shapes)))
    pieces = mx.split(vector, [end for end in ends if end < vector.size])
    # The vector may end with padding.
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=False)]
