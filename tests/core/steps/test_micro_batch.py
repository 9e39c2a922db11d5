"""The plan of a padded step: laws over any examples, and the lowest cost, found by a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.encode import Example, forward_tokens
from mlxtune.core.steps.micro_batch import MicroBatch, collate, padded_micro_batches

COSTS = st.integers(0, 40)


def of_lengths(*runs: int) -> list[Example]:
    """Return examples that run these numbers of tokens."""
    return [
        Example(i, np.arange(run + 1, dtype=np.int32) + 7 * i, np.ones(run + 1, dtype=np.uint8))
        for i, run in enumerate(runs)
    ]


def lengths_of(examples: Sequence[Example]) -> list[int]:
    return [forward_tokens(example) for example in examples]


@st.composite
def steps(draw: st.DrawFn, max_size: int = 7) -> list[Example]:
    """Draw examples of any lengths and masks."""
    masks = st.lists(st.integers(0, 1), min_size=1, max_size=60)
    return [
        Example(i, np.arange(len(mask), dtype=np.int32) + 9 * i, np.array(mask, np.uint8))
        for i, mask in enumerate(draw(st.lists(masks, min_size=1, max_size=max_size)))
    ]


def least(examples: Sequence[Example], max_tokens: int, fixed: int) -> int:
    """Return the cost of the cheapest plan, found by a search over all micro-batches."""

    def cost(members: tuple[int, ...]) -> int:
        width = max(forward_tokens(examples[i]) for i in members)
        fits = width * len(members) <= max_tokens or len(members) == 1
        return fixed + width * len(members) if fits else 10**9

    def rest(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        if left not in found:
            first, others = left[0], left[1:]
            found[left] = min(
                cost((first, *chosen)) + rest(tuple(i for i in others if i not in chosen))
                for size in range(len(left))
                for chosen in combinations(others, size)
            )
        return found[left]

    found: dict[tuple[int, ...], int] = {}
    return rest(tuple(range(len(examples))))


@settings(deadline=None)
@given(steps(), st.integers(1, 300), COSTS)
def test_no_plan_costs_less(examples: list[Example], max_tokens: int, fixed: int) -> None:
    plan = padded_micro_batches(lengths_of(examples), max_tokens, fixed)
    found = sum(micro_batch.tokens + fixed for micro_batch in plan)
    assert found == least(examples, max_tokens, fixed)


@settings(deadline=None)
@given(steps(12), st.integers(1, 300), COSTS)
def test_plan_holds_each_example_once_and_keeps_its_bounds(
    examples: list[Example], max_tokens: int, fixed: int
) -> None:
    plan = padded_micro_batches(lengths_of(examples), max_tokens, fixed)

    assert sorted(i for micro_batch in plan for i in micro_batch.examples) == list(
        range(len(examples))
    )
    for micro_batch in plan:
        runs = [forward_tokens(examples[i]) for i in micro_batch.examples]
        assert runs == sorted(runs, reverse=True)
        assert micro_batch.width == max(runs)
        assert micro_batch.tokens <= max_tokens or len(runs) == 1
    tokens = [micro_batch.tokens for micro_batch in plan]
    assert tokens == sorted(tokens, reverse=True)


@settings(deadline=None)
@given(steps(12), st.integers(1, 300), COSTS)
def test_padded_labels_equal_those_of_single_examples(
    examples: list[Example], max_tokens: int, fixed: int
) -> None:
    taught: Counter[tuple[int, ...]] = Counter()
    for micro_batch in padded_micro_batches(lengths_of(examples), max_tokens, fixed):
        batch = collate([examples[i] for i in micro_batch.examples], micro_batch.width)
        assert batch.inputs.shape == (len(micro_batch.examples), micro_batch.width)
        assert batch.row_ids == tuple(examples[i].key for i in micro_batch.examples)
        for inputs, labels, mask in zip(batch.inputs, batch.labels, batch.mask, strict=True):
            taught.update(
                (*inputs[: i + 1].tolist(), int(labels[i])) for i in np.flatnonzero(mask).tolist()
            )

    plain: Counter[tuple[int, ...]] = Counter()
    for one in examples:
        supervised = np.flatnonzero(one.assistant_mask[1:]).tolist()
        plain.update(tuple(one.tokens[: i + 2].tolist()) for i in supervised)
    assert taught == plain


def test_similar_lengths_are_batched_if_padding_is_cheaper() -> None:
    examples = of_lengths(50, 100, 55, 90)

    assert padded_micro_batches(lengths_of(examples), 1000, 32) == [
        MicroBatch((1, 3), 100, 200),
        MicroBatch((2, 0), 55, 110),
    ]
    assert padded_micro_batches(lengths_of(examples), 1000, 500) == [
        MicroBatch((1, 3, 2, 0), 100, 400)
    ]
    assert [
        len(micro_batch.examples)
        for micro_batch in padded_micro_batches(lengths_of(examples), 1000, 0)
    ] == [1] * 4
    assert padded_micro_batches([], 1000, 32) == []


def test_example_longer_than_the_bound_has_its_own_sequence() -> None:
    assert padded_micro_batches(lengths_of(of_lengths(30, 300, 30)), 100, 32) == [
        MicroBatch((1,), 300, 300),
        MicroBatch((0, 2), 30, 60),
    ]


def test_tokens_after_the_last_answer_are_not_run() -> None:
    tokens, mask = np.arange(100, dtype=np.int32), np.zeros(100, dtype=np.uint8)
    mask[10:20] = 1

    assert padded_micro_batches(lengths_of([Example(1, tokens, mask)]), 1000, 32) == [
        MicroBatch((0,), 19, 19)
    ]


def test_large_step_is_planned_in_parts_and_whole() -> None:
    drawn = np.random.default_rng(0).integers(1, 60, 700).tolist()
    plan = padded_micro_batches(lengths_of(of_lengths(*drawn)), 2048, 32)

    assert sorted(i for micro_batch in plan for i in micro_batch.examples) == list(range(700))
    assert all(micro_batch.tokens <= 2048 for micro_batch in plan)
    assert sum(micro_batch.tokens for micro_batch in plan) < 1.02 * sum(drawn)


# The arrays of a micro-batch


def example(row: int, tokens: list[int], mask: list[int] | None = None) -> Example:
    return Example(
        row,
        np.array(tokens, dtype=np.int32),
        np.array(mask or [0] * (len(tokens) - 1) + [1], dtype=np.uint8),
    )


def test_collated_targets_are_the_next_tokens_as_in_the_picture() -> None:
    a, b, c, d, e, f, g = range(11, 18)

    batch = collate([example(7, [a, b, c, d, e], [0, 0, 1, 1, 0]), example(9, [f, g], [0, 1])])

    assert batch.inputs.tolist() == [[a, b, c], [f, 0, 0]]
    assert batch.labels.tolist() == [[b, c, d], [g, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.row_ids == (7, 9)
    kinds = [array.dtype for array in (batch.inputs, batch.labels, batch.mask)]
    assert kinds == [np.int32, np.int32, np.float32]


def test_lines_are_as_wide_as_asked_for() -> None:
    a, b, c, d = range(11, 15)

    batch = collate([example(1, [a, b, c, d]), example(1, [d, a])], width=4)

    assert batch.inputs.tolist() == [[a, b, c, 0], [d, 0, 0, 0]]
    assert batch.labels.tolist() == [[b, c, d, 0], [a, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    with pytest.raises(ValueError, match="broadcast"):
        collate([example(1, [a, b, c, d])], width=2)


def test_rows_of_several_files_have_their_own_names() -> None:
    examples = [
        Example(row, np.array([1, 2], dtype=np.int32), np.array([0, 1], dtype=np.uint8), file)
        for file in range(3)
        for row in (1, 2, 10**6)
    ]

    rows = collate(examples).row_ids

    assert rows[:3] == (1, 2, 10**6)
    assert len(set(rows)) == 9


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 2**31 - 1), st.integers(0, 1)), min_size=1, max_size=12),
        min_size=1,
        max_size=6,
    )
)
def test_collating_loses_no_supervised_token_and_masks_all_padding(
    pairs: list[list[tuple[int, int]]],
) -> None:
    examples = [
        example(i, [token for token, _ in row], [one for _, one in row])
        for i, row in enumerate(pairs)
    ]

    batch = collate(examples)

    runs = [max([k for k in range(1, len(row)) if row[k][1]], default=1) for row in pairs]
    assert [forward_tokens(one) for one in examples] == runs
    assert batch.inputs.shape == batch.labels.shape == batch.mask.shape
    assert batch.inputs.shape == (len(pairs), max(runs))
    for i, (row, run) in enumerate(zip(pairs, runs, strict=True)):
        predicted = list(zip(batch.labels[i].tolist(), batch.mask[i].tolist(), strict=True))
        assert predicted[: len(row) - 1][:run] == row[1 : run + 1]
        assert batch.inputs[i, :run].tolist() == [token for token, _ in row[:run]]
        assert batch.mask[i].sum() == sum(one for _, one in row[1:])
        assert not batch.inputs[i, run:].any()
        assert not batch.labels[i, run:].any()
