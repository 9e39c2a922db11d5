"""The buffers that queued operations hold, against counts by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import head_queued_bytes, queued_bytes
from mlxtune.core.steps.memory_in_flight import GraphLimits, QueuedWork
from mlxtune.core.steps.memory_plan import predict
from mlxtune.core.steps.memory_terms import BatchLoad
from tests.core.steps.shapes import GRAPH_OPERATIONS, shapes
from tests.paths import DOCS

LIMITS = GraphLimits(100, 10**9)
MB = 10**6


@pytest.mark.parametrize(
    ("each", "queued"),
    # Small operations: two graphs of 100; then 225 for each MB; at most 11 graphs.
    [(1000, 200), (MB // 2, 200), (2 * MB, 450), (4 * MB, 900), (5 * MB, 1100), (50 * MB, 1100)],
)
def test_larger_operations_queue_longer(each: int, queued: int) -> None:
    work = QueuedWork(operations=5000, allocated=5000 * each, read=0)
    assert LIMITS.queued_bytes(work) == queued * each


def test_step_holds_no_more_than_it_allocates() -> None:
    assert LIMITS.queued_bytes(QueuedWork(operations=150, allocated=15 * MB, read=0)) == 15 * MB
    assert LIMITS.queued_bytes(QueuedWork(0, 0, 0)) == 0


def test_graph_ends_at_the_entries_that_it_reads() -> None:
    # 25 operations read 10^9 entries, so that eleven graphs have 275.
    work = QueuedWork(operations=5000, allocated=5000 * 50 * MB, read=5000 * 40 * MB)
    assert LIMITS.queued_bytes(work) == 275 * 50 * MB
    # A graph has at least one operation.
    assert GraphLimits(100, 1).queued_bytes(work) == 11 * 50 * MB


def test_layers_free_what_they_allocate_and_do_not_keep() -> None:
    load, queued = BatchLoad(2, 50, 1, 80), shapes(graphs=LIMITS)
    # All products twice, four inputs and a copy of the scores, as in `GraphMemory.kept_entries`.
    kept = 80 * (2 * 200 + 2 * 4 * 10) + 2 * 2 * 2 * 50**2
    # The 212 operations of two layers free 3.5 bytes for each kept byte; 200 are in flight.
    assert queued_bytes(queued, load) == int(200 / 212 * 3.5 * 4 * kept)
    assert queued_bytes(shapes(), load) == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_peak_in_a_layer_has_its_buffers_in_flight(recompute: bool) -> None:
    execution, load = Execution(GRAPH_OPERATIONS, 64, recompute=recompute), BatchLoad(2, 50, 40, 80)
    without, queued = (
        predict(shapes(vocab=1, graphs=graphs), execution, load) for graphs in (None, LIMITS)
    )
    added = queued_bytes(shapes(vocab=1, graphs=LIMITS), load)
    assert queued == replace(without, activations=without.activations + added)


def test_head_in_16_bits_has_three_copies_of_its_logits_in_flight() -> None:
    execution, load = Execution(GRAPH_OPERATIONS, 64), BatchLoad.single(1000, 1000)
    large = shapes(vocab=10**5, itemsize=2, graphs=GraphLimits(100, 10**12))
    assert head_queued_bytes(large, execution, load) == 3 * 2 * 10**5 * 1000
    assert head_queued_bytes(replace(large, graphs=None), execution, load) == 0
    plain, queued = (
        predict(each, execution, load).head for each in (replace(large, graphs=None), large)
    )
    assert queued - plain == 3 * 2 * 10**5 * 1000


def test_head_in_blocks_has_all_its_logits_in_flight_as_on_an_h200() -> None:
    path = DOCS / "measured" / "h200-memory.json"
    case: dict[str, int] = json.loads(path.read_text())["head"]
    head = shapes(vocab=case["vocabulary"], hidden=case["hidden"], graphs=LIMITS)
    load = BatchLoad.single(case["positions"], case["positions"])
    execution = Execution(GRAPH_OPERATIONS, 64)
    alone = 4 * GRAPH_OPERATIONS.memory.head_entries(head, execution, load)
    found = alone + head_queued_bytes(head, execution, load)
    assert alone < case["peak"] < found < 1.5 * case["peak"]
