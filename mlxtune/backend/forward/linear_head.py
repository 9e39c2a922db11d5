"""Cross-entropy of a single-product head, in float32, one block of logits at a time."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.layers import QuantizedRows
from mlxtune.backend.workers.split import Vocabulary
from mlxtune.core.steps.graph_memory import vocabulary_block


class _OnlineSoftmax:
    """The softmax of each row, whose logits arrive in blocks: arXiv:1805.02867, algorithm 3."""

    def __init__(self, rows: int) -> None:
        self._highest = mx.full((rows, 1), -mx.inf)
        self.total = mx.zeros((rows, 1))

    def take(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Add a block; return exp(logit - highest so far), and a factor to rescale earlier sums."""
        highest = mx.maximum(self._highest, logits.max(axis=1, keepdims=True))
        shares, correction = mx.exp(logits - highest), mx.exp(self._highest - highest)
        self.total = self.total * correction + shares.sum(axis=1, keepdims=True)
        self._highest = highest
        return shares, correction

    def merge(self, vocabulary: Vocabulary) -> mx.array:
        """Merge the other workers' sums; return the factor that rescales this worker's sums."""
        highest = vocabulary.highest(self._highest)
        correction = mx.exp(self._highest - highest)
        self._highest, self.total = highest, vocabulary.sum(self.total * correction)
        return correction

    def log_sums(self) -> mx.array:
        """Return the logarithm of each row's sum of exp(logit), (P,)."""
        return (self._highest + mx.log(self.total))[:, 0]


def trained_head_losses(
    weight: mx.array | QuantizedRows,
    hidden: mx.array,
    targets: mx.array,
    vocabulary: Vocabulary | None = None,
) -> mx.array:
    """Return the cross-entropy of each hidden state, float32 (P,), for a single-product head.

    `weight` is (V, H), in any dtype, or a worker's rows if the `vocabulary` is split; `hidden` is
    float32 (P, H), `targets` int32 (P,). The forward pass also computes the gradient of the hidden
    states.
    """

    def forward(hidden: mx.array) -> tuple[mx.array, mx.array]:
        softmax = _OnlineSoftmax(len(hidden))
        expected = mx.zeros_like(hidden)
        for block in _blocks(weight, len(hidden)):
            # Blocks run one after the other; otherwise the graph would hold several together.
            rows = mx.depends([hidden], [expected, softmax.total])[0]
            shares, correction = softmax.take(rows @ block.T)
            expected = mx.addmm(expected * correction, shares, block)
        right = _rows(weight, targets, vocabulary)
        logits = (hidden * right).sum(axis=1)
        if vocabulary is None:
            return softmax.log_sums() - logits, expected / softmax.total - right
        correction = softmax.merge(vocabulary)
        gradient = vocabulary.sum(expected * correction / softmax.total - right)
        return softmax.log_sums() - vocabulary.sum(logits), gradient

    def scaled(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        return cotangents[0][:, None] * outputs[1]

    return differentiable(forward, scaled)(hidden)[0]


def head_losses(
    weight: mx.array | QuantizedRows,
    hidden: mx.array,
    targets: mx.array,
    vocabulary: Vocabulary | None = None,
) -> mx.array:
    """Return the cross-entropy of each hidden state, float32 (P,), with no gradient."""
    softmax = _OnlineSoftmax(len(hidden))
    for block in _blocks(weight, len(hidden)):
        rows = mx.depends([hidden], [softmax.total])[0]
        softmax.take(rows @ block.T)
    logits = (hidden * _rows(weight, targets, vocabulary)).sum(axis=1)
    if vocabulary is not None:
        softmax.merge(vocabulary)
        logits = vocabulary.sum(logits)
    return softmax.log_sums() - logits


def _blocks(weight: mx.array | QuantizedRows, positions: int) -> Iterator[mx.array]:
    """Yield blocks of a weight's rows in float32, sized for `positions` rows of logits."""
    rows = vocabulary_block(positions)
    for start in range(0, weight.shape[0], rows):
        yield weight[start : start + rows].astype(mx.float32)


def _rows(
    weight: mx.array | QuantizedRows, tokens: mx.array, vocabulary: Vocabulary | None
) -> mx.array:
    """Return the weight's rows for tokens, float32 (P, H); zeros for other workers' tokens."""
    if vocabulary is None:
        return weight[tokens].astype(mx.float32)
    places, here = vocabulary.find(tokens)
    return mx.where(here[:, None], weight[places].astype(mx.float32), 0)
