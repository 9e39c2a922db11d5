"""The columns of a data file's examples: their bytes, identities and cuts."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import EncodedFile, ExampleArrays, identity
from mlxtune.core.data.problems import RowTally, SkippedRows
from tests.core.data.test_corpus import PlainRow, example, in_memory, plain, written


def test_identity_tells_where_examples_part_and_tokens_from_masks() -> None:
    def of(*examples: tuple[list[int], list[int]]) -> int:
        return identity(example(1, list(zip(*each, strict=True))) for each in examples)

    different = [
        of(([1, 2], [0, 1])),
        of(([1, 2], [1, 1])),
        of(([1, 3], [0, 1])),
        of(([1], [0]), ([2], [1])),
        of(([1, 2], [0, 1]), ([1, 2], [0, 1])),
        of(),
        # These two have equal tokens and masks, and differ only in the lengths of their examples.
        of(([5], [1]), ([0], [1])),
        of(([5, 1], [0, 1])),
    ]
    assert len(set(different)) == len(different)
    assert of(([1, 2], [0, 1])) == different[0] < 2**64


def test_columns_are_little_endian_as_the_picture_shows(tmp_path: Path) -> None:
    rows: list[PlainRow] = [
        (1, [[(1, 0), (2, 0), (3, 1), (4, 1)], [(5, 0), (6, 1)]]),
        (2, [[(7, 0), (8, 0), (9, 1)]]),
    ]
    arrays = written(tmp_path, rows, at_once=1)

    assert (tmp_path / "tokens").read_bytes() == struct.pack("<9i", *range(1, 10))
    assert (tmp_path / "mask").read_bytes() == bytes([0, 0, 1, 1, 0, 1, 0, 0, 1])
    assert (tmp_path / "ends").read_bytes() == struct.pack("<3q", 4, 6, 9)
    assert (tmp_path / "rows").read_bytes() == struct.pack("<3q", 1, 1, 2)
    assert arrays.per_row(np.array([5, 7, 11])).tolist() == [12, 11]
    assert arrays.supervised.tolist() == [2, 1, 1]
    assert arrays.truncate(3).supervised.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("mask", "limit", "kept"),
    [
        # The context is cut, and the answer stays.
        ("000000111", 5, slice(4, 9)),
        # An answer of an earlier turn is cut as a whole.
        ("001100011", 6, slice(4, 9)),
        ("001100011", 7, slice(4, 9)),
        ("001100011", 8, slice(1, 9)),
        # The last answer is kept from its start.
        ("000111111", 4, slice(2, 6)),
        ("111111", 4, slice(0, 4)),
        ("00011000", 4, slice(2, 6)),
        ("0011", 4, slice(0, 4)),
    ],
)
def test_cut_at_the_start_keeps_the_last_answer(mask: str, limit: int, kept: slice) -> None:
    pairs = [(i, int(each)) for i, each in enumerate(mask)]
    first = [(1, [[(90, 0), (91, 1)]])]  # not at the start of the arrays
    arrays = in_memory([*first, (2, [pairs])])
    cut = arrays.truncate(limit, at="start")
    corpus = Corpus([cut])
    assert plain(corpus[1]) == pairs[kept]
    assert cut.supervised.tolist() == [1, sum(mask for _, mask in pairs[kept])]
    assert corpus.part_of_example(1) == (1, 1, len(pairs))
    digest = in_memory([*first, (2, [pairs[kept]])])
    assert corpus.data_hash() == Corpus([digest.truncate()]).data_hash()


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("limit", [None, *range(1, 12)])
def test_placeholder_of_an_answer_is_in_no_count(limit: int | None, at: str) -> None:
    """Row 2 has a prompt of 6 tokens, with an answer in it; row 1 has its own answer."""
    masks = {1: "00011", 2: "000110111"}
    examples = [
        Example(row, np.arange(len(mask), dtype=np.int32), np.array([*mask], dtype=np.uint8))
        for row, mask in masks.items()
    ]
    arrays, path = ExampleArrays.of(examples), Path("a.jsonl")
    whole, own = (
        EncodedFile(arrays, SkippedRows(path, unanswered=each), RowTally()).truncate(limit, at=at)
        for each in (set[int](), {2})
    )
    ledger, answer = own.ledger(), whole.ledger()
    assert ledger.adds_up()
    assert ledger.tokens == 5 + 6 == answer.tokens - 3
    assert ledger.tokens_supervised == int(own.truncated.supervised[0])
    # What training uses stays as it is.
    assert own.truncated.lengths.tolist() == whole.truncated.lengths.tolist()
    assert own.truncated.supervised.tolist() == whole.truncated.supervised.tolist()
    assert (ledger.rows_train, ledger.examples) == (answer.rows_train, answer.examples)
    corpus = Corpus.of_files([own])
    for i in range(len(corpus)):
        shown = corpus.shown(i)
        counted = own.truncated.counts.kept[own.truncated.rows == shown.row]
        assert [len(shown)] == counted.tolist()
        assert shown.supervised == (corpus[i].supervised if shown.row == 1 else 0)
