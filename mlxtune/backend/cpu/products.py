"""Products with frozen weights on the CPU, by numpy's BLAS, and the cross-entropy of a linear head.

The weights may be stored in bfloat16 or float16, which halves them: each use casts one matrix to
float32, which is exact and takes a few percent of the product.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.backend.cpu import kernels
from mlxtune.backend.cpu.arrays import Floats, by_rows, copied, empty, matrix, view
from mlxtune.backend.model.autograd import differentiable
from mlxtune.backend.model.layers import PackedRows

# A frozen matrix (out, in), as it is or quantised.
Weight = mx.array | PackedRows

# Rows of the vocabulary in a block.
_VOCABULARY = 4096
# Smaller weights, in elements, one thread casts faster than two.
_SHARED = 1 << 19
# The largest weight, in elements, that is cast whole.
_LARGEST = 1 << 26


# Weights are cast here, one at a time: new memory for each would have to be faulted in.
_scratch: dict[str, npt.NDArray[np.uint32]] = {}


def in_float32(weight: Weight) -> Floats:
    """Return a weight (m, n) as float32, for numpy, until the next call."""
    if isinstance(weight, PackedRows):
        return view(weight[:])
    if weight.dtype == mx.float32:
        return view(weight)
    if weight.dtype != mx.bfloat16:
        return view(weight.astype(mx.float32))
    return widened(np.array(weight.view(mx.uint16), copy=False))


def widened(narrow: npt.NDArray[np.uint16]) -> Floats:
    """Return bfloat16 (m, n), given as uint16, as float32, until the next call."""
    if "weight" not in _scratch or _scratch["weight"].size < narrow.size:
        _scratch["weight"] = np.empty(narrow.size, dtype=np.uint32)
    wide = _scratch["weight"][: narrow.size].reshape(narrow.shape)
    if narrow.size < _SHARED:
        kernels.widen(0, len(narrow), narrow, wide)
    else:
        by_rows(kernels.widen, narrow, wide)
    return wide.view(np.float32)


def forward(x: mx.array, weight: Weight) -> mx.array:
    """Return x (..., in) times the transpose of weight (out, in)."""
    made = empty(*x.shape[:-1], weight.shape[0])
    rows, outs = matrix(x), matrix(made)
    if weight.size <= _LARGEST:
        np.matmul(rows, in_float32(weight).T, out=outs)
        return made
    for start in range(0, weight.shape[0], _VOCABULARY):
        at = slice(start, start + _VOCABULARY)
        outs[:, at] = rows @ in_float32(weight[at]).T
    return made


def backward(cotangent: mx.array, weight: Weight) -> mx.array:
    """Return the gradient with respect to x (..., in) of `forward`."""
    made = empty(*cotangent.shape[:-1], weight.shape[1])
    rows, outs = matrix(cotangent), matrix(made)
    if weight.size <= _LARGEST:
        np.matmul(rows, in_float32(weight), out=outs)
        return made
    for start in range(0, weight.shape[0], _VOCABULARY):
        at = slice(start, start + _VOCABULARY)
        outs += rows[:, at] @ in_float32(weight[at])
    return made


def add_update(y: mx.array, x: mx.array, a: mx.array, b: mx.array, scale: float) -> None:
    """Add scale * (x A) B to y (..., out), in place; A is (in, r), B (r, out)."""
    low = matrix(x) @ view(a)
    low *= np.float32(scale)
    by_rows(kernels.add_product_, matrix(y), low, view(b))


def update_gradients(
    x: mx.array, a: mx.array, b: mx.array, cotangent: mx.array, weight: Weight, scale: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the gradients with respect to x, A and B of x W^T + scale * (x A) B."""
    rows, d, down, up = matrix(x), matrix(cotangent), view(a), view(b)
    d_x = backward(cotangent, weight)
    d_low = d @ up.T
    d_low *= np.float32(scale)
    by_rows(kernels.add_product_, matrix(d_x), d_low, np.ascontiguousarray(down.T))
    low = rows @ down
    low *= np.float32(scale)
    return d_x, mx.array(rows.T @ d_low), mx.array(low.T @ d)


def head_loss_sum(weight: Weight, hidden: mx.array, targets: mx.array) -> mx.array:
    """Return the summed cross-entropy, in nats, of a head that is one product.

    weight is (V, H), hidden float32 (P, H), targets int32 (P,). Loss and gradient with respect to
    the hidden states are made in one pass over blocks of the vocabulary, with an online softmax
    (arXiv:1805.02867): the logits of a block are all that is held.
    """

    def summed(hidden: mx.array) -> tuple[mx.array, mx.array]:
        loss, gradient = _loss_and_gradient(weight, view(hidden), targets)
        return mx.array(loss, dtype=mx.float32), mx.array(gradient)

    def scaled(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        return cotangents[0] * outputs[1]

    return differentiable(summed, scaled)(hidden)[0]


def head_losses(weight: Weight, hidden: mx.array, targets: mx.array) -> mx.array:
    """Return the cross-entropy of each hidden state, float32 (P,), as `head_loss_sum` has them."""
    states = view(hidden)
    softmax = _OnlineSoftmax(len(states))
    for z, _ in _blocks(weight, states):
        softmax.take(z)
    right = np.einsum("ph,ph->p", states, in_float32(weight[targets]))
    return mx.array(softmax.log_sums() - right)


def losses(logits: mx.array, targets: mx.array) -> mx.array:
    """Return the cross-entropy (P,), in nats, of float32 logits (P, V) against targets (P,)."""
    wanted = np.array(targets)
    at = np.arange(len(wanted))

    def run(logits: mx.array) -> mx.array:
        rows = matrix(copied(logits))
        right = rows[at, wanted]
        softmax = _OnlineSoftmax(len(rows))
        softmax.take(rows)
        return mx.array(softmax.log_sums() - right)

    def gradient(logits: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        made = copied(logits)
        out = matrix(made)
        by_rows(kernels.softmax_, out, 1, False)
        out[at, wanted] -= 1
        out *= view(cotangent)[:, None]
        return made

    return differentiable(run, gradient)(logits)


class _OnlineSoftmax:
    """The softmax of some rows whose logits are taken in blocks."""

    def __init__(self, rows: int) -> None:
        self.highest = np.full(rows, -np.inf, dtype=np.float32)
        self.total, self.correction = np.zeros((2, rows), dtype=np.float32)

    def take(self, logits: Floats) -> None:
        """Replace a block of logits by exp(logit - the highest so far)."""
        by_rows(kernels.online_softmax_, logits, self.highest, self.total, self.correction)

    def log_sums(self) -> Floats:
        """Return the logarithm of each row's sum of exp(logit)."""
        return self.highest + np.log(self.total)


def _loss_and_gradient(weight: Weight, hidden: Floats, targets: mx.array) -> tuple[float, Floats]:
    softmax = _OnlineSoftmax(len(hidden))
    expected = np.zeros_like(hidden)
    for z, block in _blocks(weight, hidden):
        softmax.take(z)
        # The correction of the first block is 0, as is what it corrects.
        if (softmax.correction != 1).any():
            expected *= softmax.correction[:, None]
        expected += z @ block
    rows = in_float32(weight[targets])
    right = np.einsum("ph,ph->p", hidden, rows)
    loss = float(softmax.log_sums().sum(dtype=np.float64) - right.sum(dtype=np.float64))
    expected /= softmax.total[:, None]
    expected -= rows
    return loss, expected


def _blocks(weight: Weight, hidden: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield the logits (P, v) of a block of the vocabulary after the other, and its weights (v, H).

    Both are overwritten by the next block.
    """
    logits = np.empty(len(hidden) * _VOCABULARY, dtype=np.float32)
    for start in range(0, weight.shape[0], _VOCABULARY):
        block = in_float32(weight[start : start + _VOCABULARY])
        z = logits[: len(hidden) * len(block)].reshape(len(hidden), -1)
        np.matmul(hidden, block.T, out=z)
        yield z, block
