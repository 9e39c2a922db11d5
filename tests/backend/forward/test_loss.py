"""Cross-entropies, against their formula."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.device import allocator
from mlxtune.backend.forward.loss import (
    VocabularyBlocks,
    cross_entropies,
    head_losses,
    softmax_cross_entropies,
)
from tests.backend.cpu.compared import assert_same_function, random
from tests.backend.kernels import kernel_module
from tests.backend.queued import queued

matmuls = kernel_module("blas_matmuls")

STORED = [mx.float32, mx.bfloat16, mx.float16]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_loss_of_half_precision_logits_is_computed_in_float32(dtype: mx.Dtype) -> None:
    logits = (mx.random.normal((1, 4, 1000), key=mx.random.key(3)) * 8).astype(dtype)
    labels = mx.array([[1, 20, 300, 999]])

    found = cross_entropies(lambda inputs: logits, mx.zeros((1, 4), mx.int32), labels)

    exact = np.array(logits.astype(mx.float32), dtype=np.float64)[0]
    wanted = [
        np.log(np.exp(row - row.max()).sum()) + row.max() - row[label]
        for row, label in zip(exact, [1, 20, 300, 999], strict=True)
    ]
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found)[0], wanted, rtol=1e-5)


def test_losses_of_a_head_are_lazy_and_hold_the_logits_of_few_chunks() -> None:
    positions, vocabulary = 128, 160_000
    hidden = mx.random.normal((positions, 8), key=mx.random.key(1))
    weight = mx.random.normal((vocabulary, 8), key=mx.random.key(2))
    labels = mx.arange(positions)
    mx.eval(hidden, weight, labels)
    allocator.start_peak()
    before = mx.get_active_memory()
    losses = head_losses(lambda x: x @ weight.T, hidden, labels, 2, softmax_cross_entropies)
    assert mx.get_active_memory() - before < 10_000, "nothing is computed yet"
    found = np.array(losses)
    logits = 4 * positions * vocabulary
    # Each of the 64 chunks allocates its logits and their softmax.
    assert allocator.last_peak_bytes() - before < logits / 3 + queued(64 * 12, 2 * logits)

    wanted = np.array(hidden, np.float64)[::16] @ np.array(weight, np.float64).T
    right = np.take_along_axis(wanted, np.arange(positions)[::16, None], axis=1)[:, 0]
    np.testing.assert_allclose(found[::16], np.log(np.exp(wanted).sum(axis=1)) - right, rtol=1e-4)


# Heads that are one product, by MLX's operations and by the CPU's kernels


@pytest.fixture(params=[VocabularyBlocks, matmuls], ids=["mlx", "cpu"])
def head(request: pytest.FixtureRequest) -> Any:
    return request.param


def cross_entropy(weight: mx.array, hidden: mx.array, labels: mx.array) -> mx.array:
    logits = hidden @ weight.astype(mx.float32).T
    losses: mx.array = nn.losses.cross_entropy(logits, labels, reduction="sum")
    return losses


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("size", [11, 4096, 4097, 9000])
def test_head_loss_and_gradient(head: Any, size: int, dtype: mx.Dtype) -> None:
    weight = random(size, 16).astype(dtype)
    labels = mx.array([0, size - 1, size // 2, 3, 3])
    assert_same_function(
        lambda hidden: head.trained_head_losses(weight, hidden, labels).sum(),
        lambda hidden: cross_entropy(weight, hidden, labels),
        random(5, 16),
        tolerance=5e-6,
    )


def test_each_loss_has_its_own_weight_in_the_gradient(head: Any) -> None:
    weight, labels = random(9000, 16), mx.array([0, 8999, 4500, 3, 3])
    weights = mx.array([1.0, -2.0, 0.0, 0.5, 3.0])

    def wanted(hidden: mx.array) -> mx.array:
        return (nn.losses.cross_entropy(hidden @ weight.T, labels) * weights).sum()

    assert_same_function(
        lambda hidden: (head.trained_head_losses(weight, hidden, labels) * weights).sum(),
        wanted,
        random(5, 16),
        tolerance=5e-6,
    )


def test_head_loss_of_one_position(head: Any) -> None:
    weight, labels = random(50, 8), mx.array([7])
    assert_same_function(
        lambda hidden: head.trained_head_losses(weight, hidden, labels).sum(),
        lambda hidden: cross_entropy(weight, hidden, labels),
        random(1, 8),
    )


@pytest.mark.parametrize("order", [1, -1])
def test_large_logits_do_not_overflow(head: Any, order: int) -> None:
    """The first row's largest logit is in the first or the last block of the vocabulary."""
    weight, hidden = random(9000, 16), 2500 * random(4, 16)
    weight = weight[np.argsort(np.array(hidden @ weight.T)[0])[::-order].tolist()]
    assert mx.abs(hidden @ weight.T).max() > 1e4
    labels = mx.array([0, 8999, 4500, 17])
    assert_same_function(
        lambda hidden: head.trained_head_losses(weight, hidden, labels).sum(),
        lambda hidden: cross_entropy(weight, hidden, labels),
        hidden,
        tolerance=1e-5,
    )


def test_loss_of_a_certain_prediction_is_zero(head: Any) -> None:
    weight = mx.eye(8) * 1e4
    found = head.trained_head_losses(weight, mx.eye(8), mx.arange(8))
    assert found.max().item() == 0
    losses = head.head_losses(weight, mx.eye(8), mx.arange(8))
    assert losses.max().item() == 0


def test_head_gives_each_position_its_own_loss(head: Any) -> None:
    rng = np.random.default_rng(0)
    # The vocabulary of 5,000 needs more than one block.
    weight, hidden = rng.standard_normal((5000, 8)), rng.standard_normal((7, 8))
    labels = rng.integers(0, 5000, 7)
    logits = hidden @ weight.T
    wanted = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(7), labels]
    arrays = mx.array(weight.astype(np.float32)), mx.array(hidden.astype(np.float32))
    found = np.array(head.head_losses(*arrays, mx.array(labels)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_head_holds_a_few_blocks_of_logits(head: Any) -> None:
    weight, hidden = random(40_000, 32).astype(mx.bfloat16), random(300, 32)
    labels = mx.arange(300)
    mx.eval(weight, hidden, labels)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loss = mx.value_and_grad(lambda each: head.trained_head_losses(weight, each, labels).sum())
    mx.eval(loss(hidden))
    logits = 4 * 300 * 40_000
    # Each of the ten blocks allocates its logits twice.
    assert mx.get_peak_memory() - before < logits + queued(10 * 14, 2 * logits)
