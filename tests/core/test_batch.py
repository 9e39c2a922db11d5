"""What a step trains on and how it is laid out: laws over any rows, and exact pictures."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxtune
from mlxtune.core.batch import (
    Row,
    collate,
    data_hash,
    epoch_order,
    group_rows,
    plan_micro_batches,
    split_rows,
)
from mlxtune.core.encode import Example


def example(row: int, tokens: list[int], mask: list[int] | None = None) -> Example:
    return Example(
        row,
        np.array(tokens, dtype=np.int32),
        np.array(mask or [0] * (len(tokens) - 1) + [1], dtype=np.uint8),
    )


def rows_of(count: int) -> list[Row]:
    return [(example(i, [i, 1]),) for i in range(1, count + 1)]


def numbers(rows: list[Row]) -> list[int]:
    return [row[0].row for row in rows]


def test_neighbouring_examples_of_a_row_are_gathered() -> None:
    examples = [example(row, [1, 2]) for row in (1, 1, 4, 9, 9, 9)]

    rows = group_rows(examples)

    assert [len(row) for row in rows] == [2, 1, 3]
    assert [one for row in rows for one in row] == examples


@settings(deadline=None)
@given(
    count=st.integers(2, 200),
    share=st.integers(1, 32),
    seed=st.integers(0, 2**70),
    val_rows=st.integers(1, 300),
)
def test_split_holds_out_the_ceiling_of_the_share_within_its_bounds(
    count: int, share: int, seed: int, val_rows: int
) -> None:
    rows = rows_of(count)

    # In 64ths, which floats hold exactly, so that whole numbers give the ceiling too.
    training, validation = split_rows(rows, share / 64, seed, val_rows)

    assert len(validation) == min(-(-count * share // 64), val_rows, count - 1)
    assert len(validation) >= 1
    assert len(training) >= 1
    assert sorted(numbers(training) + numbers(validation)) == numbers(rows)
    assert numbers(training) == sorted(numbers(training))
    assert numbers(validation) == sorted(numbers(validation))
    again = split_rows(rows, share / 64, seed, val_rows)
    assert (numbers(again[0]), numbers(again[1])) == (numbers(training), numbers(validation))


@pytest.mark.parametrize(
    ("count", "val_split", "held_out"),
    [(2, 0.2, 1), (5, 0.2, 1), (6, 0.2, 2), (10, 0.2, 2), (2, 0.5, 1), (3, 0.5, 2), (100, 0.01, 1)],
)
def test_split_of_a_few_rows_is_what_one_counts_by_hand(
    count: int, val_split: float, held_out: int
) -> None:
    training, validation = split_rows(rows_of(count), val_split, seed=42, val_rows=1000)

    assert (len(training), len(validation)) == (count - held_out, held_out)


@pytest.mark.parametrize("count", [0, 1])
def test_split_needs_a_row_for_each_side(count: int) -> None:
    with pytest.raises(ValueError, match="at least two rows"):
        split_rows(rows_of(count), 0.2, seed=42, val_rows=1000)


def test_split_differs_by_seed_and_keeps_the_first_choice_when_capped() -> None:
    rows = rows_of(100)
    splits = [numbers(split_rows(rows, 0.2, seed, 1000)[1]) for seed in range(20)]
    assert len({tuple(split) for split in splits}) == 20

    capped = numbers(split_rows(rows, 0.2, 7, val_rows=5)[1])
    assert len(capped) == 5
    assert set(capped) <= set(splits[7])


def test_split_holds_out_every_row_about_equally_often() -> None:
    # 2,000 draws at a fifth: each row 400 times, standard deviation 18.
    counts = np.zeros(50)
    for seed in range(2000):
        for row in numbers(split_rows(rows_of(50), 0.2, seed, 1000)[1]):
            counts[row - 1] += 1

    assert counts.sum() == 2000 * 10
    assert np.abs(counts - 400).max() < 6 * 18


@settings(deadline=None)
@given(rows=st.integers(0, 100), seed=st.integers(0, 2**70), epoch=st.integers(1, 1000))
def test_epoch_order_is_a_permutation_that_depends_on_seed_and_epoch_alone(
    rows: int, seed: int, epoch: int
) -> None:
    order = epoch_order(rows, seed, epoch)

    assert sorted(order) == list(range(rows))
    assert epoch_order(rows, seed, epoch) == order


def test_epoch_order_differs_by_epoch_by_seed_and_from_the_file() -> None:
    orders = [tuple(epoch_order(30, seed, epoch)) for seed in range(10) for epoch in range(1, 11)]

    assert len(set(orders)) == 100
    assert tuple(range(30)) not in orders


def test_orders_and_split_are_the_same_in_another_process() -> None:
    program = (
        "from mlxtune.core import batch\n"
        "print(batch.epoch_order(20, 42, 3), batch.data_hash([]))\n"
        "print(batch.split_rows(list(range(20)), 0.25, 42, 1000))\n"
    )
    package = str(Path(mlxtune.__file__).parents[1])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": package},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }

    empty = f"sha256:{hashlib.sha256().hexdigest()}"
    split = split_rows(list(range(20)), 0.25, 42, 1000)  # type: ignore[arg-type]
    assert outputs == {f"{epoch_order(20, 42, 3)} {empty}\n{split}\n"}


def test_orders_and_split_are_those_of_earlier_versions() -> None:
    # Written down when they were made: a change here changes every run that anyone has made.
    assert epoch_order(10, 42, 1) == [0, 1, 4, 7, 3, 2, 9, 8, 6, 5]
    assert epoch_order(10, 42, 2) == [8, 5, 4, 9, 3, 6, 0, 7, 1, 2]
    assert numbers(split_rows(rows_of(10), 0.3, 42, 1000)[1]) == [3, 5, 7]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 600), max_size=40), max_tokens=st.integers(1, 2000))
def test_micro_batches_hold_each_example_once_within_the_budget(
    lengths: list[int], max_tokens: int
) -> None:
    plan = plan_micro_batches(lengths, max_tokens)

    assert sorted(i for group in plan for i in group) == list(range(len(lengths)))
    for group in plan:
        padded = len(group) * max(lengths[i] for i in group)
        assert padded <= max_tokens or len(group) == 1


def test_micro_batches_group_examples_of_similar_length() -> None:
    assert plan_micro_batches([5, 90, 4, 100, 6], 200) == [[3, 1], [4, 0, 2]]
    assert plan_micro_batches([300, 10, 10], 200) == [[0], [1, 2]]
    assert plan_micro_batches([], 200) == []


def test_collated_targets_are_the_next_tokens_as_in_the_picture() -> None:
    a, b, c, d, e, f = range(11, 17)

    batch = collate([example(7, [a, b, c, d], [0, 0, 1, 1]), example(9, [e, f], [0, 1])])

    assert batch.inputs.tolist() == [[a, b, c], [e, f, 0]]
    assert batch.targets.tolist() == [[b, c, d], [f, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.rows == (7, 9)
    assert (batch.inputs.dtype, batch.targets.dtype) == (np.int32, np.int32)
    assert batch.mask.dtype == np.float32


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 2**31 - 1), st.integers(0, 1)), min_size=2, max_size=12),
        min_size=1,
        max_size=6,
    )
)
def test_collating_loses_no_token_and_masks_all_padding(
    pairs: list[list[tuple[int, int]]],
) -> None:
    examples = [
        example(i, [token for token, _ in row], [one for _, one in row])
        for i, row in enumerate(pairs)
    ]

    batch = collate(examples)

    longest = max(len(row) for row in pairs)
    assert batch.inputs.shape == batch.targets.shape == batch.mask.shape
    assert batch.inputs.shape == (len(pairs), longest - 1)
    for i, row in enumerate(pairs):
        width = len(row) - 1
        assert [(int(t), int(m)) for t, m in zip(batch.targets[i], batch.mask[i], strict=True)][
            :width
        ] == row[1:]
        assert batch.inputs[i, :width].tolist() == [token for token, _ in row[:-1]]
        assert not batch.mask[i, width:].any()
        assert not batch.targets[i, width:].any()


HASHED = [
    (example(1, [1, 70_000, 3], [0, 1, 1]), example(1, [5, 6], [0, 1])),
    (example(3, [2**31 - 1, 0], [0, 1]),),
]


def test_data_hash_is_sha256_over_lengths_tokens_and_masks() -> None:
    content = b"".join(
        [
            struct.pack("<qq", 2, 3) + struct.pack("<3i", 1, 70_000, 3) + b"\0\1\1",
            struct.pack("<q", 2) + struct.pack("<2i", 5, 6) + b"\0\1",
            struct.pack("<qq", 1, 2) + struct.pack("<2i", 2**31 - 1, 0) + b"\0\1",
        ]
    )

    assert data_hash(HASHED) == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert data_hash(HASHED) == (
        "sha256:c8f0edcdc143dc7327e5bec4d83f2455319fda5906553e0acbcfcb637691775c"
    )


def test_data_hash_does_not_depend_on_how_arrays_lie_in_memory() -> None:
    def stored(one: Example, tokens: str, mask: str) -> Example:
        strided = np.repeat(one.tokens, 2).astype(tokens)[::2]
        return Example(one.row, strided, one.assistant_mask.astype(mask))

    for tokens, mask in ((">i4", ">u1"), (">i8", ">i4"), ("<i8", "<i8"), ("<u4", "?")):
        rows = [tuple(stored(one, tokens, mask) for one in row) for row in HASHED]
        assert data_hash(rows) == data_hash(HASHED)


def test_data_hash_does_not_depend_on_line_numbers() -> None:
    moved = [
        tuple(Example(one.row + 7, one.tokens, one.assistant_mask) for one in row) for row in HASHED
    ]
    assert data_hash(moved) == data_hash(HASHED)


def test_data_hash_changes_with_rows_tokens_mask_order_and_where_an_example_ends() -> None:
    base = [(example(1, [1, 2, 3]),), (example(2, [4, 5]),)]
    others = [
        [(example(1, [1, 2, 4]),), (example(2, [4, 5]),)],
        [(example(1, [1, 2, 3], [0, 1, 1]),), (example(2, [4, 5]),)],
        [(example(1, [1, 2, 3]), example(1, [4, 5]))],
        [(example(2, [4, 5]),), (example(1, [1, 2, 3]),)],
        [(example(1, [1, 2, 3]),)],
        [(example(1, [1, 2]),), (example(2, [3, 4, 5]),)],
    ]

    assert len({data_hash(rows) for rows in [base, *others]}) == 1 + len(others)
