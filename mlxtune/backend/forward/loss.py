"""Cross-entropy: plain, over a vocabulary split among workers, and in chunks of positions."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.workers.split import Vocabulary


def cross_entropies(model: nn.Module, inputs: mx.array, targets: mx.array) -> mx.array:
    """Return each target's cross-entropy, in nats, float32 (B, T).

    `inputs` and `targets` are int32 (B, T). The logits z come from one forward pass without a KV
    cache and are cast to float32. The cross-entropy is logsumexp(z) - z[target].
    """
    return nn.losses.cross_entropy(model(inputs).astype(mx.float32), targets)


Losses = Callable[[mx.array, mx.array], mx.array]


def softmax_cross_entropies(logits: mx.array, targets: mx.array) -> mx.array:
    """Return the losses, float32 (P,), in nats, for float32 logits (P, V) and targets int32 (P,).

    The softmax is computed only once for the loss and its gradient.
    """
    targets = targets[:, None]

    def forward(logits: mx.array) -> list[mx.array]:
        shares = mx.softmax(logits, axis=-1)
        largest = mx.argmax(logits, axis=-1, keepdims=True)
        # Log-sum-exp is the largest logit minus the log of its probability, which is never 0.
        total = _at(logits, largest) - mx.log(_at(shares, largest))
        return [(total - _at(logits, targets))[:, 0], shares]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        cotangent, shares = cotangents[0][:, None], outputs[1]
        shares = mx.put_along_axis(shares, targets, _at(shares, targets) - 1, axis=-1)
        return shares * cotangent

    return differentiable(forward, backward)(logits)[0]


def split_cross_entropies(vocabulary: Vocabulary, logits: mx.array, targets: mx.array) -> mx.array:
    """Return the losses, float32 (P,), in nats, from a worker's part (P, v) of the logits.

    The gradient is with respect to the worker's logits.
    """
    places, here = vocabulary.find(targets[:, None])

    def forward(logits: mx.array) -> list[mx.array]:
        logits = logits.astype(mx.float32)
        highest = vocabulary.highest(logits.max(axis=-1, keepdims=True))
        shares = mx.exp(logits - highest)
        own = mx.where(here, _at(logits, places) - highest, 0)
        sums = mx.concatenate([shares.sum(axis=-1, keepdims=True), own], axis=-1)
        total, right = mx.split(vocabulary.sum(sums), 2, axis=-1)
        return [(mx.log(total) - right)[:, 0], shares / total]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        cotangent, shares = cotangents[0][:, None], outputs[1]
        shares = mx.put_along_axis(shares, places, _at(shares, places) - here, axis=-1)
        return (shares * cotangent).astype(logits.dtype)

    return differentiable(forward, backward)(logits)[0]


def _at(array: mx.array, columns: mx.array) -> mx.array:
    return mx.take_along_axis(array, columns, axis=-1)


def head_losses(
    logits: Callable[[mx.array], mx.array],
    hidden: mx.array,
    targets: mx.array,
    chunk: int,
    losses: Losses,
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
        chunks.append(losses(logits(rows), targets[at]).astype(mx.float32))
    return mx.concatenate(chunks)


def trained_head(
    logits: Callable[[mx.array], mx.array],
    targets: mx.array,
    chunk: int,
    losses: Losses,
) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """Return a function from hidden states (P, H) to their cross-entropy, in nats, float32 (P,).

    The function also returns an array for its backward pass.
    `targets` are int32 (P,); `logits` maps (p, H) to (p, V), `losses` maps logits and targets (p,)
    to (p,). So that the logits of at most `chunk` positions are in memory at a time, the forward
    pass also computes the gradients of the hidden states, on each of which only one loss depends.
    """

    def chunk_losses(rows: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
        each = losses(logits(rows), targets).astype(mx.float32)
        return each.sum(), each

    losses_and_gradient = mx.value_and_grad(chunk_losses)

    def forward(hidden: mx.array) -> tuple[mx.array, mx.array]:
        found: list[mx.array] = []
        gradients: list[mx.array] = []
        for start in range(0, hidden.shape[0], chunk):
            at = slice(start, start + chunk)
            rows = hidden[at]
            if gradients:
                # Chunks run one after the other; otherwise the graph would hold all logits.
                rows = mx.depends(rows, [gradients[-1], found[-1]])
            (_, each), gradient = losses_and_gradient(rows, targets[at])
            found.append(each)
            gradients.append(gradient)
        whole = mx.concatenate(found)
        # The gradient is computed together with the losses, so that no inputs are kept for it.
        return whole, mx.depends(mx.concatenate(gradients), whole)

    def scaled(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        return cotangents[0].astype(outputs[1].dtype)[:, None] * outputs[1]

    return differentiable(forward, scaled)
