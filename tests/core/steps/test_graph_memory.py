"""The predicted memory of a micro-batch, against counts by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import predict
from mlxtune.core.steps.memory_terms import BatchLoad, Factors, MemoryCorrection, load_of
from mlxtune.core.steps.micro_batch import MicroBatch
from mlxtune.core.steps.pack import StepLengths
from tests.core.steps.shapes import GRAPH_OPERATIONS, shapes

GRAPH = Execution(GRAPH_OPERATIONS, 64)


def test_weights_and_optimizer_are_counted_by_parameter() -> None:
    peak = predict(shapes(), GRAPH, BatchLoad.single(1, 1))
    # 100 parameters: matrices, two moments, gradients of the step and the micro-batch.
    assert (peak.weights, peak.optimizer) == (50_000 + 400, 1600)
    assert peak.total == sum((peak.weights, peak.optimizer, peak.activations, peak.head))


def test_graph_holds_the_logits_of_a_chunk_in_a_head_of_16_bits() -> None:
    half = shapes(itemsize=2)
    few, many, more = (predict(half, GRAPH, BatchLoad(4, 100, n, 400)) for n in (100, 256, 400))
    assert many.head - few.head == 2 * 156 * (5 * 1000 + 4 * 10)
    assert more.head - many.head == 2 * 144 * 4 * 10
    whole = predict(half, replace(GRAPH, separate_head=False), BatchLoad(4, 100, 4, 400))
    assert whole.head >= 2 * 400 * 5 * 1000


def test_linear_head_holds_nine_blocks_of_logits_however_many_positions() -> None:
    large = shapes(vocab=10**6, scores=0, layer_scores=0)
    few, many = (predict(large, GRAPH, BatchLoad(4, 4000, n, 16_000)).head for n in (1000, 4000))
    hidden = 3 * 16_000 * 10
    assert few == 4 * (hidden + 1000 * 4 * 10 + 9 * 1000 * (2**21 // 1000))
    assert many == 4 * (hidden + 4000 * 4 * 10 + 9 * 4000 * (2**21 // 4000))
    cast = predict(replace(large, head_cast=10**7), GRAPH, BatchLoad(4, 4000, 1000, 16_000)).head
    assert cast - few == 4 * 5 * 10 * (2**21 // 1000)


def test_graph_keeps_products_twice_inputs_and_scores() -> None:
    peak = predict(shapes(vocab=1), GRAPH, BatchLoad(2, 50, 1, 80))
    # All products twice, four inputs and a copy of the scores; a working layer needs three copies.
    kept = 80 * (2 * 200 + 2 * 4 * 10) + 2 * 2 * 2 * 50**2
    working = 80 * 3 * (30 + 10) + 3 * 2 * 2 * 50**2
    # Two logits are still in flight.
    assert peak.activations == 4 * (kept + working + 2)


def test_scores_are_held_where_no_kernel_serves() -> None:
    fused = shapes(vocab=1, window=64)
    narrow, wide = (predict(fused, GRAPH, BatchLoad.single(n, 1)).activations for n in (64, 65))
    assert narrow == 64 * (wide - 4 * (10 * 65**2 + 2)) // 65 + 4 * 2


def test_memory_of_experts_and_recurrences_is_counted() -> None:
    load, plain = BatchLoad(2, 50, 1, 80), shapes(vocab=1)
    experts = replace(plain, gathered=20, layer_gathered=70)
    more = predict(experts, GRAPH, load).activations - predict(plain, GRAPH, load).activations
    assert more == 4 * 80 * (20 + 2 * 70)
    # A layer with a recurrence has no scores.
    mixed = replace(plain, mixed=2000, layer_mixed=1000)
    more = predict(mixed, GRAPH, load).activations - predict(plain, GRAPH, load).activations
    # Side by side, there are 20 tokens more than on the sequence.
    kept, working = 80 * 2000 + 20 * 5 * 2000, 2 * 50 * 4 * 1000 + 20 * 3 * (30 + 10)
    assert more == 4 * (kept + working - 6 * 2 * 50**2)


def test_measured_factors_correct_the_estimate() -> None:
    measured = MemoryCorrection(
        Factors(0.5, 2.0), Factors(3.0, 0.0, fixed=1000), Factors(0.25, 0.5)
    )
    passed, load = shapes(vocab=1, measured=measured), BatchLoad(2, 50, 1, 80)
    kept = 80 * (2 * 200 + 2 * 4 * 10) / 2 + 2 * 2 * 2 * 2 * 50**2
    working = 3 * 80 * 3 * (30 + 10)
    assert predict(passed, GRAPH, load).activations == 4 * (kept + working + 2) + 1000
    again = replace(GRAPH, recompute=True)
    tokens = 80 * (3 * (30 + 10) + 2 * 100 + 4 * 10) / 4
    scores = 2 * 50**2 * (6 + 2) / 2
    # No factor corrects the kept part, the layers' inputs, because its size is known.
    assert predict(passed, again, load).activations == 4 * (80 * 2 * 10 + tokens + scores + 2)


def test_measured_memory_is_read_back_as_written_and_nothing_else_is() -> None:
    measured = MemoryCorrection(Factors(0.5, 2.0), Factors(3.0, 0.0, fixed=1000))
    assert MemoryCorrection.of(json.loads(json.dumps(asdict(measured)))) == measured
    for wrong in (None, 3, {"kept": {}, "other": {}}, {"kept": {"tokens": -1.0}}):
        assert MemoryCorrection.of(wrong) is None
    assert MemoryCorrection.of({"kept": {"tokens": float("nan")}}) is None
    assert MemoryCorrection.of({"kept": {"tokens": "1"}}) is None


def test_one_matrix_is_cast_at_a_time_with_or_without_recomputation() -> None:
    stored, cast = (shapes(largest_cast=n, vocab=1) for n in (0, 30_000))
    load = BatchLoad.single(1, 1)
    for execution in (GRAPH, replace(GRAPH, recompute=True)):
        more = predict(cast, execution, load).total - predict(stored, execution, load).total
        assert more == 4 * 2 * 30_000


def test_graph_that_recomputes_keeps_inputs_and_works_with_one_layer() -> None:
    again = replace(GRAPH, recompute=True)
    peak = predict(shapes(vocab=1), again, BatchLoad(2, 50, 1, 80))
    tokens = 80 * (2 * 10 + 3 * (30 + 10) + 2 * 100 + 4 * 10)
    assert peak.activations == 4 * (tokens + 2 * 50**2 * (6 + 2) + 2)


def test_fewer_trained_layers_keep_less() -> None:
    fewer = shapes().with_layers(1)
    assert (fewer.layers, fewer.matmuls, fewer.trainable) == (1, 100, 50)
    whole, half = (predict(each, GRAPH, BatchLoad.single(100, 1)) for each in (shapes(), fewer))
    assert whole.activations - half.activations == 4 * (100 * 240 + 2 * 100**2)


def test_load_counts_padding_and_supervised_positions() -> None:
    # The first token is supervised, but nothing predicts it.
    mask = np.array([1, 0, 0, 0, 0, 1, 1, 1], dtype=np.uint8)
    examples = [Example(i, np.arange(8, dtype=np.int32), mask) for i in range(3)]
    load = load_of(MicroBatch((0, 2), 8, 16), StepLengths.of(examples))
    assert (load.tokens, load.positions, load.scores) == (16, 6, 2 * 8 * 8)


def test_load_of_a_sequence_has_its_tokens_and_its_padded_examples() -> None:
    mask = np.array([0, 1, 1], dtype=np.uint8)
    examples = [Example(i, np.arange(3, dtype=np.int32), mask) for i in range(3)]
    load = load_of(MicroBatch((0, 2), 2, 3), StepLengths.of(examples))
    assert (load.tokens, load.positions, load.scores) == (3, 4, 2 * 2 * 2)
