"""What a micro-batch is predicted to take, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution, Load, load_of, predict
from mlxtune.core.steps.groups import Group
from tests.core.steps.shapes import GRAPH_OPERATIONS, KERNEL_OPERATIONS, shapes

KERNELS, GRAPH = Execution(KERNEL_OPERATIONS, 64), Execution(GRAPH_OPERATIONS, 64)


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
    few, many, more = (predict(half, GRAPH, Load(4, 100, n, 400)) for n in (100, 256, 400))
    assert many.head - few.head == 2 * 156 * (5 * 1000 + 4 * 10)
    assert more.head - many.head == 2 * 144 * 4 * 10
    whole = predict(half, replace(GRAPH, split_head=False), Load(4, 100, 4, 400))
    assert whole.head >= 2 * 400 * 5 * 1000


def test_linear_head_holds_nine_blocks_of_logits_however_many_positions() -> None:
    large = shapes(vocab=10**6)
    few, many = (predict(large, GRAPH, Load(4, 4000, n, 16_000)).head for n in (1000, 4000))
    hidden = 3 * 16_000 * 10
    assert few == 4 * (hidden + 1000 * 4 * 10 + 9 * 1000 * (2**21 // 1000))
    assert many == 4 * (hidden + 4000 * 4 * 10 + 9 * 4000 * (2**21 // 4000))
    cast = predict(replace(large, head_cast=10**7), GRAPH, Load(4, 4000, 1000, 16_000)).head
    assert cast - few == 4 * 5 * 10 * (2**21 // 1000)


def test_scores_grow_with_the_square_of_the_width() -> None:
    def held(width: int) -> int:
        with_scores = predict(
            shapes(vocab=1), replace(GRAPH, holds_scores=True), Load.single(width, 1)
        )
        return with_scores.total - predict(shapes(vocab=1), GRAPH, Load.single(width, 1)).total

    assert held(2000) == 4 * held(1000) > 0


def test_one_matrix_is_cast_at_a_time_whether_recomputed_or_not() -> None:
    stored, cast = (shapes(cast=n, largest_matrix=30_000, vocab=1) for n in (0, 60_000))
    load = Load.single(1, 1)
    for execution in (GRAPH, replace(GRAPH, recompute=True)):
        more = predict(cast, execution, load).total - predict(stored, execution, load).total
        assert more == 4 * 2 * 30_000


def test_updates_keep_what_they_read_and_add_to_products_that_are_made_again() -> None:
    few, many = shapes(read=0, updated=0), shapes(read=20, updated=40)
    load = Load.single(100, 1)
    kept = [predict(each, GRAPH, load).activations for each in (few, many)]
    assert kept[1] - kept[0] == 4 * 100 * 20
    again = [predict(e, replace(GRAPH, recompute=True), load).activations for e in (few, many)]
    assert again[1] - again[0] == 4 * 100 * 50


def test_fewer_trained_layers_keep_less() -> None:
    fewer = shapes().with_layers(1)
    assert (fewer.layers, fewer.products, fewer.trainable, fewer.read) == (1, 100, 50, 10)


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
