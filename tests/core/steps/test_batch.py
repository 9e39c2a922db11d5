"""Examples laid out in arrays: laws over any rows, and exact pictures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import collate, forward_tokens


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
    assert batch.targets.tolist() == [[b, c, d], [g, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.row_ids == (7, 9)
    kinds = [array.dtype for array in (batch.inputs, batch.targets, batch.mask)]
    assert kinds == [np.int32, np.int32, np.float32]


def test_padded_rows_are_as_wide_as_asked_for() -> None:
    a, b, c, d = range(11, 15)

    batch = collate([example(1, [a, b, c, d]), example(1, [d, a])], width=4)

    assert batch.inputs.tolist() == [[a, b, c, 0], [d, 0, 0, 0]]
    assert batch.targets.tolist() == [[b, c, d, 0], [a, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    with pytest.raises(ValueError, match="broadcast"):
        collate([example(1, [a, b, c, d])], width=2)


def test_rows_of_several_files_have_names_of_their_own() -> None:
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
    assert batch.inputs.shape == batch.targets.shape == batch.mask.shape
    assert batch.inputs.shape == (len(pairs), max(runs))
    for i, (row, run) in enumerate(zip(pairs, runs, strict=True)):
        predicted = list(zip(batch.targets[i].tolist(), batch.mask[i].tolist(), strict=True))
        assert predicted[: len(row) - 1][:run] == row[1 : run + 1]
        assert batch.inputs[i, :run].tolist() == [token for token, _ in row[:run]]
        assert batch.mask[i].sum() == sum(one for _, one in row[1:])
        assert not batch.inputs[i, run:].any()
        assert not batch.targets[i, run:].any()
