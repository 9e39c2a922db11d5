"""The predicted memory of the CPU's kernels, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

from mlxtune.backend.cpu import CPU
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import predict
from mlxtune.core.steps.memory_terms import BatchLoad
from tests.core.steps.shapes import shapes

KERNELS = Execution(CPU, 64)


def test_cpu_keeps_inputs_and_products_of_each_layer_but_the_last() -> None:
    peak = predict(shapes(), KERNELS, BatchLoad(2, 50, 4, 100))
    # The last product is as wide as the input. A layer's backward pass holds the layer's products
    # again, the layer's input, and the gradients.
    assert peak.activations == 4 * 100 * (2 * 10 + 2 * (100 - 10) + (100 + 10 + 3 * (30 + 10)))
    assert peak.head == 0


def test_recomputing_keeps_inputs_alone() -> None:
    peak = predict(shapes(), replace(KERNELS, recompute=True), BatchLoad(2, 50, 4, 100))
    assert peak.activations == 4 * 100 * (2 * 10 + (2 * 100 + 10 + 3 * (30 + 10)))


def test_numpy_memory_in_attention_is_counted_up_to_a_block() -> None:
    attends = shapes(heads=2, head_size=16, vocab=1)
    for width, scores in ((100, 2 * 128 * 100), (10_000, 1 << 21)):
        load = BatchLoad.single(width, 1)
        more = predict(attends, KERNELS, load).total - predict(shapes(vocab=1), KERNELS, load).total
        assert more == 4 * (2 * scores + 3 * width * 2 * 16)
