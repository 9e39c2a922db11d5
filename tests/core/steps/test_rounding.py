"""Lengths rounded up for a GPU."""

import numpy as np
import pytest

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import BatchLoad, load_of
from mlxtune.core.steps.micro_batch import MicroBatch
from mlxtune.core.steps.pack import StepLengths
from mlxtune.core.steps.rounding import Rounding
from tests.core.steps.shapes import GRAPH_OPERATIONS


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [
        (2030, 2048),
        (1989, 2048),
        (1985, 2016),  # 2,048 would be 3.2% more
        (1000, 1024),
        (700, 704),
        (95, 96),
        (97, 97),  # even a multiple of 8 would add 7%
        (64, 64),
        (1, 1),
    ],
)
def test_sequence_is_padded_to_the_largest_multiple_that_costs_little(
    tokens: int, padded: int
) -> None:
    assert tokens + Rounding(length=64).padding(tokens, 10_000) == padded


def test_sequence_is_not_padded_beyond_the_bound_of_a_micro_batch() -> None:
    rounding = Rounding(length=64)
    assert rounding.padding(1000, 1010) == 8
    assert rounding.padding(1000, 1000) == 0
    # A single longer example is alone on its sequence, without rounding.
    assert rounding.padding(1001, 1000) == 0


def test_width_is_a_multiple() -> None:
    assert [Rounding(width=32).rounded_width(each) for each in (1, 32, 33)] == [32, 32, 64]


def test_nothing_is_rounded_by_default() -> None:
    assert [Rounding().padding(each, 10_000) for each in range(1, 3000)] == [0] * 2999
    assert Rounding().rounded_width(97) == 97


def test_memory_of_one_example_matches_its_sequence() -> None:
    execution = Execution(GRAPH_OPERATIONS, rounding=Rounding(64, 128))
    assert execution.rounded(BatchLoad.single(1000, 7)) == BatchLoad(1, 1024, 7, 1024)
    tokens, mask = np.zeros(1001, np.int32), np.ones(1001, np.uint8)
    mask[:994] = 0
    lengths = StepLengths.of([Example(1, tokens, mask)])
    (group,) = execution.micro_batches(lengths)
    assert group == MicroBatch((0,), 1024, 1024, 24)
    assert load_of(group, lengths) == execution.rounded(BatchLoad.single(1000, 7))
