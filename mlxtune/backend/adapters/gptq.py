"""Rounds merged projections by GPTQ, so that their outputs on training rows change least.

GPTQ rounds a matrix column by column, and spreads the error of each column over the columns that
are not rounded yet. Source: Frantar et al., arXiv:2210.17323, algorithm 1.

The model runs once, over all examples. Each projection is rounded as soon as its inputs are known,
and then gives the outputs of its rounded weight, so that the projections below it are rounded too.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.adapters.storage import Storage, format_of, layer_like, quantized_among
from mlxtune.backend.device import allocator
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.stored_layers import dequantized_weight, dimensions
from mlxtune.backend.models.token_array import TokenArrays
from mlxtune.core.data.encode import Example

# Frantar's damping: the fraction of the mean diagonal entry that is added to the diagonal.
_DAMPING = 0.01
# More tokens take longer and hardly change the result.
_MAX_TOKENS = 1 << 15
# The fraction of the free memory to plan for.
_MEMORY_FRACTION = 0.8
# The number of float32 copies of a projection's inputs, Hessian and weight at the peak.
_INPUT_COPIES, _HESSIAN_COPIES, _WEIGHT_COPIES = 10, 4, 5

# Projections by name, each with its merged weight, which is computed lazily.
Merged = dict[str, tuple[nn.Module, mx.array]]


def quantize_gptq(
    weight: mx.array, hessian: mx.array, *, group_size: int, bits: int, mode: str
) -> tuple[mx.array, mx.array, mx.array] | None:
    """Return a matrix (out, in), rounded by GPTQ, as `mx.quantize` stores it in the affine mode.

    `hessian`, float32 (in, in), is the sum of x xᵀ over the inputs x. Each group gets its scale and
    bias when its first column is rounded. Returns None if the Hessian is singular or not finite.
    """
    if (factor := _inverse_factor(hessian)) is None:
        return None
    left, parts, most = weight.astype(mx.float32), [], 2**bits - 1
    for start in range(0, weight.shape[1], group_size):
        block, left = left[:, :group_size], left[:, group_size:]
        own = factor[start : start + group_size, start:]
        stored = block.astype(weight.dtype)
        _, scales, biases = mx.quantize(stored, group_size, bits, mode=mode)
        codes, errors = [], []
        for k in range(group_size):
            column = block[:, k : k + 1]
            code = mx.clip(mx.round((column - biases) / scales), 0, most)
            error = (column - (scales * code + biases)) / own[k, k]
            block = block - error @ own[k : k + 1, :group_size]
            codes.append(code)
            errors.append(error)
        left = left - mx.concatenate(errors, axis=1) @ own[:, group_size:]
        parts.append((_packed(mx.concatenate(codes, axis=1), bits), scales, biases))
        mx.eval(left, parts[-1])
    packed, scales, biases = (mx.concatenate([*part], axis=1) for part in zip(*parts, strict=True))
    return packed, scales, biases


def _inverse_factor(hessian: mx.array) -> mx.array | None:
    """Return the upper Cholesky factor of the damped Hessian's inverse; None if it has none."""
    # MLX has no linear algebra on a GPU.
    with mx.stream(mx.cpu):
        damping = _DAMPING * mx.mean(mx.diag(hessian))
        lower = mx.linalg.cholesky(hessian + damping * mx.eye(len(hessian)))
        factor = mx.linalg.cholesky(mx.linalg.cholesky_inv(lower), upper=True)
        try:
            return factor if mx.isfinite(factor).all() else None
        except RuntimeError:  # of LAPACK
            return None


def _packed(codes: mx.array, bits: int) -> mx.array:
    """Return codes (out, in) in 32-bit words, the lowest bits first."""
    each = codes.astype(mx.uint32)[..., None] >> mx.arange(bits, dtype=mx.uint32)
    words = (each & 1).reshape(len(codes), -1, 32)
    return (words << mx.arange(32, dtype=mx.uint32)).sum(axis=-1)


@dataclass(frozen=True)
class Calibration:
    """The examples on which a model runs: token ids (B, T), and which of the B * T are not padding.

    `memory` is the predicted peak in bytes, the model included.
    """

    ids: npt.NDArray[np.int32]
    real: npt.NDArray[np.int64]
    memory: int


def calibration(base: BaseModel, merged: Merged, examples: Iterable[Example]) -> Calibration | None:
    """Return the first of the examples, as many as free memory and time allow; None if none.

    `base` may be opened without reading its weights.
    """
    shapes = [dimensions(module) for module, _ in merged.values()]
    widest = max(map(max, shapes))
    matrices = 4 * max(
        # The columns of a group are one graph, in which each changes a copy of the group.
        _HESSIAN_COPIES * n * n + (_WEIGHT_COPIES * n * _count(module) + _group(module) ** 2) * m
        for (n, m), (module, _) in zip(shapes, merged.values(), strict=True)
    )
    held = matrices + sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    # On the CPU, attention keeps its scores.
    heads = int(base.text_config.get("num_attention_heads") or 0) if on_cpu() else 0
    available = allocator.free_now()
    free = math.inf if available is None else _MEMORY_FRACTION * available - held
    selected: list[npt.NDArray[np.int32]] = []
    length = used = 0
    for example in examples:
        longest = max(length, len(example))
        tokens = (len(selected) + 1) * longest
        needed = 4 * tokens * (_INPUT_COPIES * widest + 2 * heads * longest)
        if needed > free or (selected and tokens > _MAX_TOKENS):
            break
        selected.append(example.tokens)
        length, used = longest, needed
    if not selected:
        return None
    # An example's own tokens are the padding, because experts cannot tell it apart.
    ids = np.stack([np.resize(tokens, length) for tokens in selected])
    lengths = np.array([len(tokens) for tokens in selected])
    real = np.flatnonzero(np.arange(length) < lengths[:, None])
    return Calibration(ids, real, held + used)


def round_projections(
    base: BaseModel,
    merged: Merged,
    storage: Storage,
    calibration: Calibration,
    on_predicted: Callable[[float], None] = lambda seconds: None,
) -> tuple[Storage, int]:
    """Return a storage format with the merged projections, rounded by GPTQ.

    Also returns the number of matrices that are rounded to nearest: matrices in other modes than
    affine, or without enough inputs. `base` is changed, and `merged` is emptied, so that the memory
    of a merged weight is freed once it is rounded. `on_predicted` gets the predicted seconds, once
    a layer is rounded.
    """
    work = {name: _work(module, len(calibration.real)) for name, (module, _) in merged.items()}
    started = time.monotonic()

    def on_progress(done: Sequence[str]) -> None:
        before, after = (sum(work[name] for name in done[:end]) for end in (-1, None))
        if before < sum(work.values()) / base.num_layers <= after:
            on_predicted((time.monotonic() - started) * sum(work.values()) / after)

    rounding = _Rounding(merged, storage, calibration, on_progress)
    stand_ins = [(name, _Projection(rounding, name)) for name in merged]
    base.model.eval()
    base.model.update_modules(tree_unflatten(stand_ins))
    base.model(TokenArrays(base.model).array(calibration.ids))
    # Projections that the model does not call.
    for name in sorted(merged):
        rounding.made[name] = layer_like(*merged.pop(name), storage)
        rounding.nearest += 1
    parameters = {name: module.parameters() for name, module in rounding.made.items()}
    return replace(storage, rounded=parameters), rounding.nearest


class _Projection(nn.Module):
    """Stands in for a projection, and rounds its merged weight when it gets its inputs."""

    def __init__(self, rounding: "_Rounding", name: str) -> None:
        super().__init__()
        self._rounding, self._name = rounding, name

    @property
    def weight(self) -> mx.array:
        """The merged weight, which some models read directly."""
        layer = self._rounding.made.get(self._name)
        return self._rounding.merged[self._name][1] if layer is None else dequantized_weight(layer)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        layer: Any = self._rounding.rounded(self._name, x, *args)
        weight = dequantized_weight(layer).astype(x.dtype).swapaxes(-1, -2)
        if args:
            y = mx.gather_mm(x, weight, rhs_indices=args[0], **kwargs)
            y = y + mx.expand_dims(layer.bias[args[0]], -2) if "bias" in layer else y
        else:
            y = x @ weight + (layer.bias if "bias" in layer else 0)
        y = y.astype(x.dtype)
        mx.eval(y)
        return y


class _Rounding:
    """The projections rounded so far, and the number of matrices rounded to nearest."""

    def __init__(
        self,
        merged: Merged,
        storage: Storage,
        calibration: Calibration,
        on_progress: Callable[[Sequence[str]], None],
    ) -> None:
        self.merged, self._storage, self._calibration = merged, storage, calibration
        self._on_progress = on_progress
        self.made: dict[str, nn.Module] = {}
        self.nearest = 0

    def rounded(self, name: str, x: mx.array, indices: mx.array | None = None) -> nn.Module:
        """Return a projection's rounded layer, given its inputs and, for experts, their indices."""
        if name in self.made:  # called again, by a layer that shares it
            return self.made[name]
        module, weight = self.merged.pop(name)
        layer = layer_like(module, weight, self._storage)
        if quantized_among([layer]):
            inputs = [self._real(x)] if indices is None else _by_expert(x, indices, len(weight))
            self._round(layer, weight.reshape(len(inputs), *weight.shape[-2:]), inputs)
        mx.eval(layer.parameters())
        self.made[name] = layer
        self._on_progress([*self.made])
        mx.clear_cache()
        return layer

    def _round(self, layer: nn.Module, matrices: mx.array, inputs: Sequence[mx.array]) -> None:
        """Round a layer's matrices (E, out, in), given the inputs (T, in) of each."""
        form, names = format_of(layer), ("weight", "scales", "biases")
        fewest = 1 if len(inputs) == 1 else matrices.shape[-1]
        arrays = [layer[n].reshape(len(inputs), *layer[n].shape[-2:]) for n in names if n in layer]
        for number, (matrix, own) in enumerate(zip(matrices, inputs, strict=True)):
            own, quantized = own.astype(mx.float32), None
            if form["mode"] == "affine" and len(own) >= fewest:
                quantized = quantize_gptq(matrix, own.T @ own, **form)
            if quantized is None:
                self.nearest += 1
                continue
            for array, part in zip(arrays, quantized, strict=True):
                array[number] = part
        for name, array in zip(names, arrays, strict=False):
            layer[name] = array.reshape(layer[name].shape)

    def _real(self, x: mx.array) -> mx.array:
        """Return a projection's inputs (T, in) without padding."""
        inputs = x.reshape(-1, x.shape[-1])
        return (
            inputs[mx.array(self._calibration.real)]
            if len(inputs) == self._calibration.ids.size
            else inputs
        )


def _work(module: nn.Module, tokens: int) -> int:
    """Return the multiplications for a projection: Hessian, factors, rounding and outputs."""
    inputs, outputs = dimensions(module)
    return inputs * (inputs + outputs) * (tokens + _count(module) * inputs)


def _count(module: nn.Module) -> int:
    """Return the number of a layer's matrices: one, or the number of experts."""
    return len(module.weight) if module.weight.ndim == 3 else 1


def _group(module: nn.Module) -> int:
    return getattr(module, "group_size", 0)


def _by_expert(x: mx.array, indices: mx.array, experts: int) -> list[mx.array]:
    """Return the inputs (T, in) of each expert, from x (..., 1, in) and the experts' indices."""
    inputs = mx.broadcast_to(x[..., 0, :], (*indices.shape, x.shape[-1])).reshape(-1, x.shape[-1])
    own = np.array(indices).reshape(-1)
    return [inputs[mx.array(np.flatnonzero(own == expert))] for expert in range(experts)]
