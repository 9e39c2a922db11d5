"""The cross-entropy of a linear head, by MLX's operations and by the CPU's kernels."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.forward import linear_head
from tests.backend.cpu.compared import assert_same_function, random
from tests.backend.kernels import kernel_module
from tests.backend.queued import queued

products = kernel_module("blas_products")

STORED = [mx.float32, mx.bfloat16, mx.float16]


@pytest.fixture(params=[linear_head, products], ids=["mlx", "cpu"])
def head(request: pytest.FixtureRequest) -> Any:
    return request.param


def cross_entropy(weight: mx.array, hidden: mx.array, targets: mx.array) -> mx.array:
    logits = hidden @ weight.astype(mx.float32).T
    losses: mx.array = nn.losses.cross_entropy(logits, targets, reduction="sum")
    return losses


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("size", [11, 4096, 4097, 9000])
def test_head_loss_and_gradient(head: Any, size: int, dtype: mx.Dtype) -> None:
    weight = random(size, 16).astype(dtype)
    targets = mx.array([0, size - 1, size // 2, 3, 3])
    assert_same_function(
        lambda hidden: head.trained_head_losses(weight, hidden, targets).sum(),
        lambda hidden: cross_entropy(weight, hidden, targets),
        random(5, 16),
        tolerance=5e-6,
    )


def test_each_loss_has_its_own_weight_in_the_gradient(head: Any) -> None:
    weight, targets = random(9000, 16), mx.array([0, 8999, 4500, 3, 3])
    weights = mx.array([1.0, -2.0, 0.0, 0.5, 3.0])

    def wanted(hidden: mx.array) -> mx.array:
        return (nn.losses.cross_entropy(hidden @ weight.T, targets) * weights).sum()

    assert_same_function(
        lambda hidden: (head.trained_head_losses(weight, hidden, targets) * weights).sum(),
        wanted,
        random(5, 16),
        tolerance=5e-6,
    )


def test_head_loss_of_one_position(head: Any) -> None:
    weight, targets = random(50, 8), mx.array([7])
    assert_same_function(
        lambda hidden: head.trained_head_losses(weight, hidden, targets).sum(),
        lambda hidden: cross_entropy(weight, hidden, targets),
        random(1, 8),
    )


@pytest.mark.parametrize("order", [1, -1])
def test_logits_of_ten_thousand(head: Any, order: int) -> None:
    """The first row's largest logit is in the first or the last block of the vocabulary."""
    weight, hidden = random(9000, 16), 2500 * random(4, 16)
    weight = weight[np.argsort(np.array(hidden @ weight.T)[0])[::-order].tolist()]
    assert mx.abs(hidden @ weight.T).max() > 1e4
    targets = mx.array([0, 8999, 4500, 17])
    assert_same_function(
        lambda hidden: head.trained_head_losses(weight, hidden, targets).sum(),
        lambda hidden: cross_entropy(weight, hidden, targets),
        hidden,
        tolerance=1e-5,
    )


def test_certain_prediction_costs_nothing(head: Any) -> None:
    weight = mx.eye(8) * 1e4
    found = head.trained_head_losses(weight, mx.eye(8), mx.arange(8))
    assert found.max().item() == 0
    losses = head.head_losses(weight, mx.eye(8), mx.arange(8))
    assert losses.max().item() == 0


def test_head_gives_each_position_its_own_loss(head: Any) -> None:
    rng = np.random.default_rng(0)
    # The vocabulary of 5,000 needs more than one block.
    weight, hidden = rng.standard_normal((5000, 8)), rng.standard_normal((7, 8))
    targets = rng.integers(0, 5000, 7)
    logits = hidden @ weight.T
    wanted = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(7), targets]
    arrays = mx.array(weight.astype(np.float32)), mx.array(hidden.astype(np.float32))
    found = np.array(head.head_losses(*arrays, mx.array(targets)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_head_holds_a_few_blocks_of_logits(head: Any) -> None:
    weight, hidden = random(40_000, 32).astype(mx.bfloat16), random(300, 32)
    targets = mx.arange(300)
    mx.eval(weight, hidden, targets)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loss = mx.value_and_grad(lambda each: head.trained_head_losses(weight, each, targets).sum())
    mx.eval(loss(hidden))
    logits = 4 * 300 * 40_000
    # Each of the ten blocks allocates its logits twice.
    assert mx.get_peak_memory() - before < logits + queued(10 * 14, 2 * logits)
