"""The reference for masked cross-entropy, against its formula."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.device import memory
from mlxtune.backend.forward.loss import cross_entropies, head_losses, softmax_cross_entropies
from tests.backend.queued import queued


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_loss_of_half_precision_logits_is_computed_in_float32(dtype: mx.Dtype) -> None:
    logits = (mx.random.normal((1, 4, 1000), key=mx.random.key(3)) * 8).astype(dtype)
    targets = mx.array([[1, 20, 300, 999]])

    found = cross_entropies(lambda inputs: logits, mx.zeros((1, 4), mx.int32), targets)

    exact = np.array(logits.astype(mx.float32), dtype=np.float64)[0]
    wanted = [
        np.log(np.exp(row - row.max()).sum()) + row.max() - row[target]
        for row, target in zip(exact, [1, 20, 300, 999], strict=True)
    ]
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found)[0], wanted, rtol=1e-5)


def test_losses_of_a_head_are_lazy_and_hold_the_logits_of_few_chunks() -> None:
    positions, vocabulary = 128, 160_000
    hidden = mx.random.normal((positions, 8), key=mx.random.key(1))
    weight = mx.random.normal((vocabulary, 8), key=mx.random.key(2))
    targets = mx.arange(positions)
    mx.eval(hidden, weight, targets)
    memory.start_peak()
    before = mx.get_active_memory()
    losses = head_losses(lambda x: x @ weight.T, hidden, targets, 2, softmax_cross_entropies)
    assert mx.get_active_memory() - before < 10_000, "nothing is computed yet"
    found = np.array(losses)
    logits = 4 * positions * vocabulary
    # Each of the 64 chunks allocates its logits and their softmax.
    assert memory.last_peak_bytes() - before < logits / 3 + queued(64 * 12, 2 * logits)

    wanted = np.array(hidden, np.float64)[::16] @ np.array(weight, np.float64).T
    right = np.take_along_axis(wanted, np.arange(positions)[::16, None], axis=1)[:, 0]
    np.testing.assert_allclose(found[::16], np.log(np.exp(wanted).sum(axis=1)) - right, rtol=1e-4)
