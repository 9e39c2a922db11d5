"""The sums of a step, over its micro-batches and over workers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.step.optimizer_step import StepGradients
from mlxtune.backend.step.step_loss import StepLoss
from mlxtune.backend.workers.workers import StepCounts
from mlxtune.core.training.requests import Requests


@dataclass(frozen=True)
class KnownLoss(StepLoss):
    """A loss that forward passes may have shown; its metrics add up from one value."""

    shown: float | None = None

    @property
    def known_loss(self) -> float | None:
        return self.shown

    def zeros(self) -> list[mx.array]:
        return [mx.zeros(1)]


def sums_of(*micro_batches: tuple[float, list[float]], shown: float | None = None) -> StepGradients:
    total = StepGradients(KnownLoss([], 1, shown))
    for loss, gradient in micro_batches:
        total.add([mx.array(loss), mx.array([loss])], [mx.array(gradient)], 10, 1)
    return total


def lists(arrays: Any) -> list[list[float]]:
    return [array.tolist() for array in arrays]


@pytest.mark.parametrize("loss_scale", [1.0, 256.0])
def test_loss_scale_is_undone_in_loss_and_gradients_but_not_in_values(loss_scale: float) -> None:
    total = sums_of((256.0, [512.0, 0.0]), (512.0, [0.0, -256.0]))
    total.finish([mx.ones(2)], loss_scale)
    assert float(total.loss) == 768 / loss_scale
    assert lists(total.gradients) == [[512 / loss_scale, -256 / loss_scale]]
    assert lists(total.values) == [[768.0]]


def test_gradients_without_micro_batches_are_zeros() -> None:
    total = sums_of()
    total.finish([mx.ones(3)], 256.0)
    assert lists(total.gradients) == [[0.0, 0.0, 0.0]]
    assert float(total.loss) == 0


def test_sums_over_workers_are_part_of_the_graph() -> None:
    total = sums_of((1.0, [1.0]))
    sums = StepCounts(7, 70, 6, 0, 2)
    loss, gradients, counts = mx.array(3.0), [mx.array([5.0])], sums.to_array(1.0)
    values = [mx.ones(1)]
    total.merge(loss, gradients, counts, values)
    assert (total.loss, total.gradients, total.summed_counts) == (loss, gradients, counts)
    assert total.values == values
    assert total.graph.arrays == (loss, gradients, counts, values)
    assert (total.counts, total.all_counts()) == (StepCounts(1, 10, 1), sums)
    assert sums.requests == Requests(stop=False, save=True)


@pytest.mark.parametrize("requests", [*itertools.product([False, True], repeat=2)])
def test_counts_of_workers_add_up_and_requests_are_kept(
    requests: tuple[bool, bool],
) -> None:
    counts = StepCounts(3, 100, 7)
    # Only one of four workers requests something.
    own, others = counts.requesting(Requests(*requests)).to_array(0.25), counts.to_array(0.25)
    total = StepCounts.from_array(own + 3 * others)
    assert total[:3] == counts[:3]
    assert total.requests == Requests(*requests)


def test_loss_that_forward_passes_have_shown_replaces_the_sum() -> None:
    known, unknown = sums_of((1.0, [1.0]), shown=0.5), sums_of((1.0, [1.0]))
    for total in (known, unknown):
        total.finish([mx.ones(1)], 1.0)
    assert (float(known.loss), float(unknown.loss)) == (0.5, 1.0)
    for total in (known, unknown):
        counts = StepCounts(2, 20, 2, 0, 0).to_array(1.0)
        total.merge(mx.array(3.0), [mx.array([5.0])], counts, [mx.ones(1)])
    assert (float(known.loss), float(unknown.loss)) == (0.5, 3.0)
