"""What a micro-batch is predicted to take, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution, GraphMemory, Load, load_of, predict
from mlxtune.core.steps.groups import Group
from tests.core.steps.shapes import (
    GRAPH_OPERATIONS,
    HEAD_OPERATIONS,
    KERNEL_OPERATIONS,
    shapes,
)

KERNELS, GRAPH = Execution(KERNEL_OPERATIONS, 64), Execution(GRAPH_OPERATIONS, 64)
HEAD = Execution(HEAD_OPERATIONS, 64)


def test_weights_and_optimizer_are_counted_by_parameter() -> None:
    peak = predict(shapes(), KERNELS, Load.single(1, 1))
    # 100 parameters: the matrices; two moments, the step's gradients and the micro-batch's.
    assert (peak.weights, peak.optimizer) == (50_000 + 400, 1600)
    assert peak.total == sum((peak.weights, peak.optimizer, peak.activations, peak.head))


def test_cpu_keeps_inputs_and_products_of_each_layer_but_the_last() -> None:
    peak = predict(shapes(), KERNELS, Load(2, 50, 4, 100))
    # The last product is as wide as the input. In a layer's backward pass: as much again as its
    # products, its input, and the gradients.
    assert peak.activations == 4 * 100 * (2 * 10 + 2 * (100 - 10) + (100 + 10 + 3 * (30 + 10)))
    assert peak.head == 0


def test_recomputing_keeps_inputs_alone() -> None:
    peak = predict(shapes(), replace(KERNELS, recompute=True), Load(2, 50, 4, 100))
    assert peak.activations == 4 * 100 * (2 * 10 + (2 * 100 + 10 + 3 * (30 + 10)))


def test_graph_holds_the_logits_of_a_chunk_in_a_head_of_16_bits() -> None:
    half = shapes(itemsize=2)
    few, many, more = (predict(half, HEAD, Load(4, 100, n, 400)) for n in (100, 256, 400))
    assert many.head - few.head == 2 * 156 * (5 * 1000 + 4 * 10)
    assert more.head - many.head == 2 * 144 * 4 * 10
    whole = predict(half, replace(HEAD, split_head=False), Load(4, 100, 4, 400))
    assert whole.head >= 2 * 400 * 5 * 1000


def test_linear_head_holds_nine_blocks_of_logits_however_many_positions() -> None:
    large = shapes(vocab=10**6)
    few, many = (predict(large, HEAD, Load(4, 4000, n, 16_000)).head for n in (1000, 4000))
    hidden = 3 * 16_000 * 10
    assert few == 4 * (hidden + 1000 * 4 * 10 + 9 * 1000 * (2**21 // 1000))
    assert many == 4 * (hidden + 4000 * 4 * 10 + 9 * 4000 * (2**21 // 4000))
    cast = predict(replace(large, head_cast=10**7), HEAD, Load(4, 4000, 1000, 16_000)).head
    assert cast - few == 4 * 5 * 10 * (2**21 // 1000)


def test_graph_keeps_and_works_with_what_was_traced() -> None:
    peak = predict(shapes(vocab=1), GRAPH, Load(2, 50, 1, 80))
    # Two logits are still in flight.
    assert peak.activations == 80 * (2 * 400 + 100) + 2 * 50**2 * (2 * 8 + 24) + 4 * 2
    small = predict(shapes(vocab=1), GRAPH, Load.single(1, 1))
    assert small.activations == 2 * 408 + 800 + 4 * 2


def test_one_matrix_is_cast_at_a_time_whether_recomputed_or_not() -> None:
    stored, cast = (shapes(largest_cast=n, vocab=1) for n in (0, 30_000))
    load = Load.single(1, 1)
    for execution in (GRAPH, replace(GRAPH, recompute=True)):
        more = predict(cast, execution, load).total - predict(stored, execution, load).total
        assert more == 4 * 2 * 30_000


def test_graph_that_recomputes_keeps_inputs_and_works_with_one_layer() -> None:
    again = replace(GRAPH, recompute=True)
    peak = predict(shapes(vocab=1), again, Load(2, 50, 1, 80))
    assert peak.activations == 80 * (2 * 4 * 10 + 500) + 2 * 50**2 * 32 + 4 * 2


def test_layers_that_cannot_be_traced_are_taken_to_keep_rather_much() -> None:
    untraced = replace(GRAPH, operations=SimpleNamespace(memory=GraphMemory()))
    load = Load.single(50, 1)
    # All products twice, four inputs and a copy of the scores; and while one layer works, three.
    kept = 50 * (2 * 200 + 2 * 4 * 10) + 2 * 2 * 50**2
    working = 50 * 3 * (30 + 10) + 3 * 2 * 50**2
    assert predict(shapes(vocab=1), untraced, load).activations == 4 * (kept + working + 2)


def test_fewer_trained_layers_keep_less() -> None:
    fewer = shapes().with_layers(1)
    assert (fewer.layers, fewer.products, fewer.trainable) == (1, 100, 50)
    whole, half = (predict(each, GRAPH, Load.single(100, 1)) for each in (shapes(), fewer))
    assert whole.activations - half.activations == 100 * 400 + 8 * 100**2


def test_load_counts_padding_and_supervised_positions() -> None:
    # The first token is supervised, but nothing predicts it.
    mask = np.array([1, 0, 0, 0, 0, 1, 1, 1], dtype=np.uint8)
    examples = [Example(i, np.arange(8, dtype=np.int32), mask) for i in range(3)]
    load = load_of(Group((0, 2), 8, 16), examples)
    assert (load.tokens, load.positions, load.scores) == (16, 6, 2 * 8 * 8)


def test_load_of_a_line_is_what_stands_in_it_and_its_examples_side_by_side() -> None:
    mask = np.array([0, 1, 1], dtype=np.uint8)
    examples = [Example(i, np.arange(3, dtype=np.int32), mask) for i in range(3)]
    load = load_of(Group((0, 2), 2, 3), examples)
    assert (load.tokens, load.positions, load.scores) == (3, 4, 2 * 2 * 2)
