"""Matmuls with frozen weights on the CPU, by numpy's BLAS, and the cross-entropy of a linear head.

The weights may be stored in bfloat16 or float16, which halves their memory: each use casts one
matrix to float32. The cast is exact and takes a few percent of the matmul's time.
"""

import math
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.backend.cpu import numba_kernels
from mlxtune.backend.cpu.arrays import (
    MIN_THREADED_MULTIPLICATIONS,
    THREADS,
    Floats,
    copied,
    empty,
    in_blocks,
    matrix,
    multiply,
    on_threads,
    view,
)
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.stored_layers import QuantizedHead

# A frozen matrix (out, in), plain or quantised.
Weight = mx.array | QuantizedHead

# The number of vocabulary rows that fit in a thread's cache, and the number in a block for all
# threads.
_THREAD_ROWS = 1024
_BLOCK_ROWS = _THREAD_ROWS * THREADS
# One thread casts weights with fewer elements faster than two threads do.
_MIN_THREADED_SIZE = 1 << 19
# The maximum number of elements of a weight that is cast whole.
_MAX_SIZE = 1 << 26


class _Scratch(threading.local):
    """A thread's buffer for one cast weight. Reusing it avoids page faults."""

    weight = np.empty(0, dtype=np.uint32)

    def widened(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint32]:
        """Return the buffer for a matrix; the next call overwrites it."""
        size = math.prod(shape)
        if self.weight.size < size:
            self.weight = np.empty(size, dtype=np.uint32)
        return self.weight[:size].reshape(shape)


_scratch = _Scratch()


def in_float32(weight: Weight) -> Floats:
    """Return a weight (m, n) in float32; the next call on this thread may overwrite it."""
    if isinstance(weight, QuantizedHead):
        return view(weight[:])
    stored = _castable_matrix(weight)
    return view(weight.astype(mx.float32)) if stored is None else widened(stored)


def _castable_matrix(weight: Weight) -> npt.NDArray[Any] | None:
    """Return a weight's matrix in a form that `widened` accepts; None if only MLX can cast it."""
    if isinstance(weight, QuantizedHead) or weight.dtype not in (mx.float32, mx.bfloat16):
        return None
    return view(weight) if weight.dtype == mx.float32 else view(weight.view(mx.uint16))


def widened(narrow: npt.NDArray[Any]) -> Floats:
    """Return a matrix (m, n) as float32; `narrow` is float32, or bfloat16 given as uint16.

    The next call on this thread may overwrite the result.
    """
    if narrow.dtype == np.float32:
        return narrow
    wide = _scratch.widened(narrow.shape)
    if narrow.size < _MIN_THREADED_SIZE:
        numba_kernels.widen(0, len(narrow), narrow, wide)
    else:
        in_blocks(numba_kernels.widen, narrow, wide)
    return wide.view(np.float32)


def forward(x: mx.array, weight: Weight) -> mx.array:
    """Return x (..., in) times the transpose of weight (out, in)."""
    y = empty(*x.shape[:-1], weight.shape[0])
    rows, outs = matrix(x), matrix(y)
    stored = _castable_matrix(weight)
    whole = slice(0, weight.shape[0])
    for at in [whole] if weight.size <= _MAX_SIZE else _blocks(weight):
        if stored is None:
            multiply(rows, in_float32(weight[at]).T, outs[:, at])
        else:
            _multiply_stored(rows, stored[at], outs[:, at])
    return y


def _multiply_stored(rows: Floats, stored: npt.NDArray[Any], outs: Floats) -> None:
    """Set `outs` to rows times the transpose of `stored`; each thread casts a part of `stored`."""

    def run(_: int, start: int, end: int) -> None:
        np.matmul(rows, widened(stored[start:end]).T, out=outs[:, start:end])

    if len(rows) * stored.size < MIN_THREADED_MULTIPLICATIONS:
        run(0, 0, len(stored))
    else:
        on_threads(run, len(stored))


def backward(cotangent: mx.array, weight: Weight) -> mx.array:
    """Return the gradient of `forward` with respect to x (..., in)."""
    d_x = empty(*cotangent.shape[:-1], weight.shape[1])
    rows, outs = matrix(cotangent), matrix(d_x)
    if weight.size <= _MAX_SIZE:
        multiply(rows, in_float32(weight), outs)
        return d_x
    matmul = np.empty_like(outs)
    for at in _blocks(weight):
        multiply(rows[:, at], in_float32(weight[at]), matmul)
        outs += matmul
    return d_x


def _blocks(weight: Weight) -> Iterator[slice]:
    for start in range(0, weight.shape[0], _BLOCK_ROWS):
        yield slice(start, min(start + _BLOCK_ROWS, weight.shape[0]))


def add_update(y: mx.array, x: mx.array, a: mx.array, b: mx.array, scale: float) -> None:
    """Add scale * (x A) B to y (..., out), in place; A is (in, r), B (r, out)."""
    low = matrix(x) @ view(a)
    low *= np.float32(scale)
    in_blocks(numba_kernels.add_matmul_, matrix(y), low, view(b))


def update_gradients(
    x: mx.array, a: mx.array, b: mx.array, cotangent: mx.array, weight: Weight, scale: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the gradients with respect to x, A and B of x W^T + scale * (x A) B."""
    rows, d, down, up = matrix(x), matrix(cotangent), view(a), view(b)
    d_x = backward(cotangent, weight)
    d_low = d @ up.T
    d_low *= np.float32(scale)
    in_blocks(numba_kernels.add_matmul_, matrix(d_x), d_low, np.ascontiguousarray(down.T))
    low = rows @ down
    low *= np.float32(scale)
    return d_x, mx.array(rows.T @ d_low), mx.array(low.T @ d)


def trained_head_losses(weight: Weight, hidden: mx.array, labels: mx.array) -> mx.array:
    """Return the cross-entropy of each hidden state, float32 (P,), for a single-matmul head.

    weight is (V, H), hidden float32 (P, H), labels int32 (P,). The losses and their gradients with
    respect to the hidden states take one pass over blocks of the vocabulary, with an online softmax
    (arXiv:1805.02867), so that each thread holds only one block of logits.
    """

    def forward(hidden: mx.array) -> tuple[mx.array, mx.array]:
        losses, gradient = _losses_and_gradient(weight, view(hidden), labels)
        return mx.array(losses, dtype=mx.float32), mx.array(gradient)

    def scaled(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        return cotangents[0][:, None] * outputs[1]

    return differentiable(forward, scaled)(hidden)[0]


def head_losses(weight: Weight, hidden: mx.array, labels: mx.array) -> mx.array:
    """Return the cross-entropy of each hidden state, float32 (P,), without a gradient."""
    states = view(hidden)
    head = _over_vocabulary(weight, states, expects=False)
    return mx.array(head.log_sums() - _right(weight, states, labels)[0])


def losses(logits: mx.array, labels: mx.array) -> mx.array:
    """Return the cross-entropy (P,), in nats, of float32 logits (P, V) against labels (P,)."""
    wanted = np.array(labels)
    at = np.arange(len(wanted))

    def run(logits: mx.array) -> mx.array:
        rows = matrix(copied(logits))
        right = rows[at, wanted]
        softmax = _OnlineSoftmax(len(rows))
        softmax.add_block(rows)
        return mx.array(softmax.log_sums() - right)

    def gradient(logits: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        d_logits = copied(logits)
        out = matrix(d_logits)
        in_blocks(numba_kernels.softmax_, out, 1, False)
        out[at, wanted] -= 1
        out *= view(cotangent)[:, None]
        return d_logits

    return differentiable(run, gradient)(logits)


class _OnlineSoftmax:
    """The softmax of each row, whose logits arrive in blocks."""

    def __init__(self, rows: int) -> None:
        self.highest = np.full(rows, -np.inf, dtype=np.float32)
        self.total, self.correction = np.zeros((2, rows), dtype=np.float32)

    def add_block(self, logits: Floats) -> None:
        """Add a block of logits, and replace each logit with exp(logit - the highest so far)."""
        in_blocks(numba_kernels.online_softmax_, logits, self.highest, self.total, self.correction)

    def log_sums(self) -> Floats:
        """Return each row's log-sum-exp."""
        return self.highest + np.log(self.total)


class _HeadSoftmax(_OnlineSoftmax):
    """The softmax of the head's logits (P, V); if `expects`, also a weighted sum of head rows."""

    def __init__(self, hidden: Floats, *, expects: bool) -> None:
        super().__init__(len(hidden))
        self._hidden = hidden
        self.expected = np.zeros(hidden.shape if expects else (0, 0), dtype=np.float32)
        self._logits, self._matmul = np.empty(0, np.float32), np.empty_like(hidden)

    def take_block(self, block: Floats) -> None:
        """Add a block (v, H) of the head's weight."""
        size = len(self._hidden) * len(block)
        if self._logits.size < size:
            self._logits = np.empty(size, dtype=np.float32)
        z = self._logits[:size].reshape(len(self._hidden), -1)
        np.matmul(self._hidden, block.T, out=z)
        self.add_block(z)
        if not self.expected.size:
            return
        # At the first block, `expected` and the correction are 0.
        if (self.correction != 1).any():
            self.expected *= self.correction[:, None]
        self.expected += np.matmul(z, block, out=self._matmul)

    def add(self, other: Self) -> None:
        """Merge the sums of another `_HeadSoftmax` over the same hidden states."""
        highest = np.maximum(self.highest, other.highest)
        own, its = np.exp(self.highest - highest), np.exp(other.highest - highest)
        self.total *= own
        self.total += its * other.total
        if self.expected.size:
            self.expected *= own[:, None]
            self.expected += its[:, None] * other.expected
        self.highest = highest


def _over_vocabulary(weight: Weight, hidden: Floats, *, expects: bool) -> _HeadSoftmax:
    """Return the softmax over the whole vocabulary, of which each thread takes a part."""
    heads = [_HeadSoftmax(hidden, expects=expects) for _ in range(THREADS)]
    stored = _castable_matrix(weight)
    if stored is None:
        for at in _blocks(weight):
            _take_block(in_float32(weight[at]), heads)
    else:
        on_threads(partial(_take_stored, stored, heads), len(stored))
    whole, *others = heads
    for other in others:
        if other.total.any():
            whole.add(other)
    return whole


def _take_stored(
    stored: npt.NDArray[Any], heads: list[_HeadSoftmax], part: int, start: int, end: int
) -> None:
    for at in range(start, end, _THREAD_ROWS):
        heads[part].take_block(widened(stored[at : min(at + _THREAD_ROWS, end)]))


def _take_block(block: Floats, heads: list[_HeadSoftmax]) -> None:
    on_threads(lambda part, start, end: heads[part].take_block(block[start:end]), len(block))


def _right(weight: Weight, hidden: Floats, labels: mx.array) -> tuple[Floats, Floats]:
    """Return the labels' logits (P,), and the labels' rows (P, H) of the weight."""
    rows = in_float32(weight[labels])
    logits: Floats = np.einsum("ph,ph->p", hidden, rows)
    return logits, rows


def _losses_and_gradient(weight: Weight, hidden: Floats, labels: mx.array) -> tuple[Floats, Floats]:
    head = _over_vocabulary(weight, hidden, expects=True)
    right, rows = _right(weight, hidden, labels)
    losses = head.log_sums() - right
    head.expected /= head.total[:, None]
    head.expected -= rows
    return losses, head.expected
