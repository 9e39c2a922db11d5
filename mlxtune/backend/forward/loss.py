"""Cross-entropy: plain, over a vocabulary sharded among workers, and in parts that fit in memory.

A head that is one matmul runs in blocks of the vocabulary, and any other head in chunks of
positions.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.stored_layers import QuantizedHead
from mlxtune.backend.workers.shards import Vocabulary
from mlxtune.core.steps.graph_memory import vocabulary_block


def cross_entropies(
    model: nn.Module, inputs: mx.array, labels: mx.array, temperature: float = 1.0
) -> mx.array:
    """Return each label's cross-entropy, in nats, float32 (B, T).

    `inputs` and `labels` are int32 (B, T). The logits z come from one forward pass without a KV
    cache, are cast to float32, and divided by the temperature. The cross-entropy is
    logsumexp(z) - z[label].
    """
    logits = at_temperature(model(inputs).astype(mx.float32), temperature)
    return nn.losses.cross_entropy(logits, labels)


def at_temperature(logits: mx.array, temperature: float) -> mx.array:
    """Return logits divided by a temperature, or hidden states for a head that is one matmul."""
    return logits if temperature == 1 else logits / temperature


LossFn = Callable[[mx.array, mx.array], mx.array]
Weight = mx.array | QuantizedHead


def softmax_cross_entropies(logits: mx.array, labels: mx.array) -> mx.array:
    """Return the losses, float32 (P,), in nats, for float32 logits (P, V) and labels int32 (P,).

    The softmax is computed only once for the loss and its gradient.
    """
    labels = labels[:, None]

    def forward(logits: mx.array) -> list[mx.array]:
        probabilities = mx.softmax(logits, axis=-1)
        largest = mx.argmax(logits, axis=-1, keepdims=True)
        # Log-sum-exp is the largest logit minus the log of its probability, which is never 0.
        total = _entries_at(logits, largest) - mx.log(_entries_at(probabilities, largest))
        return [(total - _entries_at(logits, labels))[:, 0], probabilities]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        cotangent, probabilities = cotangents[0][:, None], outputs[1]
        probabilities = mx.put_along_axis(
            probabilities, labels, _entries_at(probabilities, labels) - 1, axis=-1
        )
        return probabilities * cotangent

    return differentiable(forward, backward)(logits)[0]


def sharded_cross_entropies(vocabulary: Vocabulary, logits: mx.array, labels: mx.array) -> mx.array:
    """Return the losses, float32 (P,), in nats, from a worker's part (P, v) of the logits.

    The gradient is with respect to the worker's logits.
    """
    columns, here = vocabulary.find(labels[:, None])

    def forward(logits: mx.array) -> list[mx.array]:
        logits = logits.astype(mx.float32)
        highest = vocabulary.highest(logits.max(axis=-1, keepdims=True))
        exponentials = mx.exp(logits - highest)
        own = mx.where(here, _entries_at(logits, columns) - highest, 0)
        sums = mx.concatenate([exponentials.sum(axis=-1, keepdims=True), own], axis=-1)
        total, right = mx.split(vocabulary.sum(sums), 2, axis=-1)
        return [(mx.log(total) - right)[:, 0], exponentials / total]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        cotangent, probabilities = cotangents[0][:, None], outputs[1]
        probabilities = mx.put_along_axis(
            probabilities, columns, _entries_at(probabilities, columns) - here, axis=-1
        )
        return (probabilities * cotangent).astype(logits.dtype)

    return differentiable(forward, backward)(logits)[0]


def _entries_at(array: mx.array, columns: mx.array) -> mx.array:
    return mx.take_along_axis(array, columns, axis=-1)


def head_losses(
    logits: Callable[[mx.array], mx.array],
    hidden: mx.array,
    labels: mx.array,
    chunk: int,
    losses: LossFn,
) -> mx.array:
    """Return the cross-entropy of each hidden state, in nats, float32 (P,), with no gradient.

    The arguments are as in `trained_head_losses`. The logits of at most `chunk` positions are in
    memory at a time.
    """
    chunks: list[mx.array] = []
    for start in range(0, hidden.shape[0], chunk):
        at = slice(start, start + chunk)
        rows = hidden[at]
        if chunks:
            # Chunks run one after the other; otherwise the device would hold the logits of several.
            rows = mx.depends(rows, chunks[-1])
        chunks.append(losses(logits(rows), labels[at]).astype(mx.float32))
    return mx.concatenate(chunks)


def trained_head(
    logits: Callable[[mx.array], mx.array],
    labels: mx.array,
    chunk: int,
    losses: LossFn,
) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """Return a function from hidden states (P, H) to their cross-entropy, in nats, float32 (P,).

    The function also returns an array for its backward pass.
    `labels` are int32 (P,); `logits` maps (p, H) to (p, V), `losses` maps logits and labels (p,)
    to (p,). So that the logits of at most `chunk` positions are in memory at a time, the forward
    pass also computes the gradients of the hidden states, on each of which only one loss depends.
    """

    def chunk_losses(rows: mx.array, labels: mx.array) -> tuple[mx.array, mx.array]:
        each = losses(logits(rows), labels).astype(mx.float32)
        return each.sum(), each

    losses_and_gradient = mx.value_and_grad(chunk_losses)

    def forward(hidden: mx.array) -> tuple[mx.array, mx.array]:
        losses_of_chunks: list[mx.array] = []
        gradients: list[mx.array] = []
        for start in range(0, hidden.shape[0], chunk):
            at = slice(start, start + chunk)
            rows = hidden[at]
            if gradients:
                # Chunks run one after the other; otherwise the graph would hold all logits.
                rows = mx.depends(rows, [gradients[-1], losses_of_chunks[-1]])
            (_, each), gradient = losses_and_gradient(rows, labels[at])
            losses_of_chunks.append(each)
            gradients.append(gradient)
        whole = mx.concatenate(losses_of_chunks)
        # The gradient is computed together with the losses, so that no inputs are kept for it.
        return whole, mx.depends(mx.concatenate(gradients), whole)

    def scaled(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        return cotangents[0].astype(outputs[1].dtype)[:, None] * outputs[1]

    return differentiable(forward, scaled)


# Heads that are one matmul


class LinearHead(Protocol):
    """The cross-entropy, computed in blocks, of an output head that is one matmul.

    `weight` is (V, H), in any dtype, `hidden` float32 (P, H) and `labels` int32 (P,); the losses
    are float32 (P,). Workers that shard `weight` by rows also pass their parts as `vocabulary`.
    """

    def trained_head_losses(self, weight: Weight, hidden: mx.array, labels: mx.array) -> mx.array:
        """Return the losses, differentiable with respect to `hidden`."""

    def head_losses(self, weight: Weight, hidden: mx.array, labels: mx.array) -> mx.array:
        """Return the losses, without a gradient."""


class VocabularyBlocks:
    """The loss of a `LinearHead` in float32, with one block of logits in memory at a time."""

    @staticmethod
    def trained_head_losses(
        weight: Weight,
        hidden: mx.array,
        labels: mx.array,
        vocabulary: Vocabulary | None = None,
    ) -> mx.array:
        """Return the losses; the forward pass also computes the gradient of the hidden states."""

        def forward(hidden: mx.array) -> tuple[mx.array, mx.array]:
            softmax = _BlockwiseSoftmax(len(hidden))
            expected = mx.zeros_like(hidden)
            for block in _blocks(weight, len(hidden)):
                # Blocks run one after the other; otherwise the graph would hold several together.
                rows = mx.depends([hidden], [expected, softmax.total])[0]
                exponentials, correction = softmax.add_block(rows @ block.T)
                expected = mx.addmm(expected * correction, exponentials, block)
            right = _weight_rows(weight, labels, vocabulary)
            logits = (hidden * right).sum(axis=1)
            if vocabulary is None:
                return softmax.log_sums() - logits, expected / softmax.total - right
            correction = softmax.merge(vocabulary)
            gradient = vocabulary.sum(expected * correction / softmax.total - right)
            return softmax.log_sums() - vocabulary.sum(logits), gradient

        def scaled(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
            return cotangents[0][:, None] * outputs[1]

        return differentiable(forward, scaled)(hidden)[0]

    @staticmethod
    def head_losses(
        weight: Weight,
        hidden: mx.array,
        labels: mx.array,
        vocabulary: Vocabulary | None = None,
    ) -> mx.array:
        """Return the losses, without a gradient."""
        softmax = _BlockwiseSoftmax(len(hidden))
        for block in _blocks(weight, len(hidden)):
            rows = mx.depends([hidden], [softmax.total])[0]
            softmax.add_block(rows @ block.T)
        logits = (hidden * _weight_rows(weight, labels, vocabulary)).sum(axis=1)
        if vocabulary is not None:
            softmax.merge(vocabulary)
            logits = vocabulary.sum(logits)
        return softmax.log_sums() - logits


class _BlockwiseSoftmax:
    """The softmax of each row, whose logits arrive in blocks: arXiv:1805.02867, algorithm 3."""

    def __init__(self, rows: int) -> None:
        self._highest = mx.full((rows, 1), -mx.inf)
        self.total = mx.zeros((rows, 1))

    def add_block(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Add a block; return exp(logit - highest so far), and a factor to rescale earlier sums."""
        highest = mx.maximum(self._highest, logits.max(axis=1, keepdims=True))
        exponentials, correction = mx.exp(logits - highest), mx.exp(self._highest - highest)
        self.total = self.total * correction + exponentials.sum(axis=1, keepdims=True)
        self._highest = highest
        return exponentials, correction

    def merge(self, vocabulary: Vocabulary) -> mx.array:
        """Merge the other workers' sums; return the factor that rescales this worker's sums."""
        highest = vocabulary.highest(self._highest)
        correction = mx.exp(self._highest - highest)
        self._highest, self.total = highest, vocabulary.sum(self.total * correction)
        return correction

    def log_sums(self) -> mx.array:
        """Return the logarithm of each row's sum of exp(logit), (P,)."""
        return (self._highest + mx.log(self.total))[:, 0]


def _blocks(weight: Weight, positions: int) -> Iterator[mx.array]:
    """Yield blocks of a weight's rows in float32, sized for `positions` rows of logits."""
    rows = vocabulary_block(positions)
    for start in range(0, weight.shape[0], rows):
        yield weight[start : start + rows].astype(mx.float32)


def _weight_rows(weight: Weight, tokens: mx.array, vocabulary: Vocabulary | None) -> mx.array:
    """Return the weight's rows for tokens, float32 (P, H); zeros for other workers' tokens."""
    if vocabulary is None:
        return weight[tokens].astype(mx.float32)
    indices, here = vocabulary.find(tokens)
    return mx.where(here[:, None], weight[indices].astype(mx.float32), 0)
