"""Examples in flat arrays, in memory and mapped, against lists of lists."""

from __future__ import annotations

import hashlib
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data import encoded_file
from mlxtune.core.data.conversation import ANSWER, CHOSEN, REJECTED, WHOLE
from mlxtune.core.data.corpus import Corpus, CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import ExampleArrays, write_arrays
from mlxtune.core.run.trained_rows import identities_of

# A row's number, and the (token, mask) pairs of each of its examples.
Pairs = list[tuple[int, int]]
PlainRow = tuple[int, list[Pairs]]


def corpus_of(files: Sequence[ExampleArrays], limit: int | None = None) -> Corpus:
    return Corpus([file.truncate(limit) for file in files])


def example(row: int, pairs: Pairs, file: int = 0) -> Example:
    tokens = np.array([token for token, _ in pairs], dtype=np.int32)
    return Example(row, tokens, np.array([mask for _, mask in pairs], dtype=np.uint8), file)


def in_memory(rows: Sequence[PlainRow]) -> ExampleArrays:
    return ExampleArrays.of([example(row, pairs) for row, several in rows for pairs in several])


def written(folder: Path, rows: Sequence[PlainRow], at_once: int = 2) -> ExampleArrays:
    examples = [[example(row, pairs) for pairs in each] for row, each in rows]
    write_arrays(folder, (examples[i : i + at_once] for i in range(0, len(rows), at_once)))
    return ExampleArrays.mapped(folder)


def plain(one: Example) -> Pairs:
    return list(zip(one.tokens.tolist(), one.assistant_mask.tolist(), strict=True))


def kept_rows(
    files: Sequence[Sequence[PlainRow]], limit: int | None
) -> Iterator[tuple[int, int, list[tuple[Pairs, int]], list[Pairs]]]:
    """Yield file, row, cut examples with their length before the cut, and all uncut examples."""
    for i, rows in enumerate(files):
        for row, several in rows:
            cut = [(pairs[:limit], len(pairs)) for pairs in several]
            kept = [(pairs, length) for pairs, length in cut if any(mask for _, mask in pairs)]
            if kept:
                yield i, row, kept, several


PAIRS = st.lists(
    st.tuples(st.integers(0, 3) | st.just(2**31 - 1), st.integers(0, 1)), min_size=1, max_size=6
)
FILES = st.lists(
    st.dictionaries(
        st.integers(1, 5) | st.just(2**33), st.lists(PAIRS, min_size=1, max_size=3), max_size=4
    ).map(lambda rows: list(rows.items())),
    max_size=3,
)


@settings(deadline=None)
@given(
    files=FILES,
    limit=st.none() | st.integers(1, 7),
    mapped=st.booleans(),
    at_once=st.integers(1, 12) | st.just(1 << 20),
)
def test_corpus_holds_what_lists_of_rows_would_hold(
    files: list[list[PlainRow]], limit: int | None, mapped: bool, at_once: int
) -> None:
    with mock.patch.object(encoded_file, "_BLOCK_TOKENS", at_once):
        check_corpus(files, limit, mapped)


def check_corpus(files: list[list[PlainRow]], limit: int | None, mapped: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arrays = []
        for i, rows in enumerate(files):
            (Path(folder) / str(i)).mkdir()
            filled = mapped or not rows
            arrays.append(written(Path(folder) / str(i), rows) if filled else in_memory(rows))
    corpus = corpus_of(arrays, limit)

    kept = list(kept_rows(files, limit))
    assert corpus.num_rows == len(kept)
    assert len(corpus) == sum(len(examples) for _, _, examples, _ in kept)
    flat = [(i, row, *each) for i, row, examples, _ in kept for each in examples]
    assert [(e.file, e.row, plain(e)) for e in corpus] == [array[:3] for array in flat]
    assert [(e.tokens.dtype, e.assistant_mask.dtype) for e in corpus] == [
        (np.dtype("i4"), np.dtype("u1"))
    ] * len(flat)
    assert corpus.lengths.tolist() == [len(pairs) for _, _, pairs, _ in flat]
    parts = [corpus.part_of_example(i) for i in range(len(corpus))]
    assert [uncut for _, _, uncut in parts] == [length for *_, length in flat]
    assert [(part, of) for part, of, _ in parts] == [
        (part, len(several))
        for *_, several in kept
        for part, pairs in enumerate(several, start=1)
        if any(mask for _, mask in pairs[:limit])
    ]
    assert corpus.row_numbers.tolist() == [row for _, row, _, _ in flat]
    assert corpus.supervised.tolist() == [sum(m for _, m in pairs) for _, _, pairs, _ in flat]
    assert corpus.row_of_example.tolist() == [
        n for n, (_, _, examples, _) in enumerate(kept) for _ in examples
    ]
    for n, (i, row, examples, _) in enumerate(kept):
        assert [plain(e) for e in corpus.row(n)] == [pairs for pairs, _ in examples]
        assert corpus.source_of(n) == (i, row)
    assert corpus.largest_token() == max(
        (token for rows in files for _, several in rows for pairs in several for token, _ in pairs),
        default=0,
    )
    identities = corpus.identities.tolist()
    for n, (*_, uncut) in enumerate(kept):
        assert [one == identities[n] for one in identities] == [
            other == uncut for *_, other in kept
        ]
    assert corpus.data_hash() == data_hash([examples for _, _, examples, _ in kept])


def data_hash(rows: Sequence[Sequence[tuple[Pairs, int]]]) -> str:
    """Return the SHA-256 over one column after another: row sizes, lengths, tokens, masks."""
    examples = [pairs for row in rows for pairs, _ in row]
    pairs = [pair for one in examples for pair in one]
    content = struct.pack(f"<{len(rows)}q", *map(len, rows))
    content += struct.pack(f"<{len(examples)}q", *map(len, examples))
    content += struct.pack(f"<{len(pairs)}i", *(token for token, _ in pairs))
    content += struct.pack(f"<{len(pairs)}B", *(mask for _, mask in pairs))
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


ROWS: list[PlainRow] = [
    (1, [[(1, 0), (70_000, 1), (3, 1)], [(5, 0), (6, 1)]]),
    (3, [[(2**31 - 1, 0), (0, 1)]]),
]


def test_data_hash_is_sha256_over_lengths_tokens_and_masks() -> None:
    content = b"".join(
        [
            struct.pack("<qq", 2, 1),
            struct.pack("<qqq", 3, 2, 2),
            struct.pack("<3i2i2i", 1, 70_000, 3, 5, 6, 2**31 - 1, 0),
            b"\0\1\1\0\1\0\1",
        ]
    )

    assert (
        corpus_of([in_memory(ROWS)]).data_hash() == f"sha256:{hashlib.sha256(content).hexdigest()}"
    )
    # This hash must not change, because checkpoints contain it.
    assert corpus_of([in_memory(ROWS)]).data_hash() == (
        "sha256:a917442208e2c27f49f1e8fe2a854a465085bfd1231d5af5ff774d236e64f95f"
    )


def test_data_hash_ignores_array_layout_in_memory_and_files() -> None:
    base = [example(row, pairs) for row, several in ROWS for pairs in several]
    for tokens, mask in ((">i4", ">u1"), (">i8", ">i4"), ("<i8", "<i8"), ("<u4", "?")):
        stored = [
            Example(
                one.row,
                np.repeat(one.tokens, 2).astype(tokens)[::2],
                one.assistant_mask.astype(mask),
            )
            for one in base
        ]
        assert Corpus.of(stored).data_hash() == Corpus.of(base).data_hash()
    apart = corpus_of([in_memory(ROWS[:1]), in_memory(ROWS[1:])])
    assert apart.data_hash() == Corpus.of(base).data_hash()


def test_data_hash_does_not_depend_on_line_numbers() -> None:
    moved = [(row + 7, several) for row, several in ROWS]

    assert corpus_of([in_memory(moved)]).data_hash() == corpus_of([in_memory(ROWS)]).data_hash()


def test_data_hash_covers_tokens_mask_order_and_boundaries() -> None:
    base = [(1, [[(1, 0), (2, 0), (3, 1)]]), (2, [[(4, 0), (5, 1)]])]
    others: list[list[PlainRow]] = [
        [(1, [[(1, 0), (2, 0), (4, 1)]]), (2, [[(4, 0), (5, 1)]])],
        [(1, [[(1, 0), (2, 1), (3, 1)]]), (2, [[(4, 0), (5, 1)]])],
        [(1, [[(1, 0), (2, 0), (3, 1)], [(4, 0), (5, 1)]])],
        [(2, [[(4, 0), (5, 1)]]), (1, [[(1, 0), (2, 0), (3, 1)]])],
        [(1, [[(1, 0), (2, 0), (3, 1)]])],
        [(1, [[(1, 0), (2, 0)]]), (2, [[(3, 1), (4, 0), (5, 1)]])],
    ]

    hashes = {corpus_of([in_memory(rows)]).data_hash() for rows in [base, *others]}

    assert len(hashes) == 1 + len(others)


def test_data_hash_continues_across_files() -> None:
    # The omitted example of the second file is as long as the first example.
    files: list[list[PlainRow]] = [
        [(1, [[(1, 0), (2, 1)]])],
        [(1, [[(3, 0), (4, 0)]]), (2, [[(5, 0), (6, 1)]])],
    ]

    corpus = corpus_of([in_memory(rows) for rows in files])

    kept: list[PlainRow] = [files[0][0], files[1][1]]
    assert corpus.data_hash() == corpus_of([in_memory(kept)]).data_hash()


def test_example_longer_than_a_block_is_counted_and_hashed_whole() -> None:
    tokens = np.arange((1 << 20) + 7, dtype=np.int32)
    mask = (tokens % 3 == 0).astype(np.uint8)
    content = struct.pack("<qq", 1, len(tokens)) + tokens.tobytes() + mask.tobytes()

    corpus = Corpus.of([Example(1, tokens, mask)])

    assert corpus.data_hash() == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert corpus.supervised.tolist() == [-(-len(tokens) // 3)]


def test_corpus_of_examples_is_used_unchanged() -> None:
    corpus = corpus_of([in_memory(ROWS)], 2)

    assert Corpus.of(corpus) is corpus


def test_examples_of_several_files_keep_their_rows_apart() -> None:
    files = [in_memory([(1, [[(1, 1)]])]), in_memory([(1, [[(2, 1)], [(3, 1)]])])]
    corpus = corpus_of(files)

    again = Corpus.of(list(corpus))

    assert [len(again.row(i)) for i in range(again.num_rows)] == [1, 2]
    assert again.source_of(1) == (1, 1)
    assert again.data_hash() == corpus.data_hash()


@pytest.mark.parametrize("corpus", [Corpus([]), Corpus.of([]), corpus_of([in_memory(ROWS)], 1)])
def test_corpus_may_be_empty(corpus: Corpus) -> None:
    assert not corpus
    assert corpus.num_rows == len(corpus.select()) == 0
    assert list(corpus) == corpus[:] == []
    assert corpus.supervised.tolist() == corpus.identities.tolist() == []
    assert corpus.data_hash() == f"sha256:{hashlib.sha256().hexdigest()}"


@pytest.mark.parametrize(
    ("paths", "names"),
    [((), ["file 1", "file 3"]), (("a.jsonl", "b.jsonl", "c.jsonl"), ["a.jsonl", "c.jsonl"])],
)
def test_rows_by_file_name_the_files_that_have_rows(paths: Sequence[str], names: list[str]) -> None:
    files = [in_memory([(row, [[(row, 0), (1, 1)]]) for row in range(1, 4)]) for _ in range(3)]
    corpus = Corpus([file.truncate() for file in files], paths)
    found = corpus.select([8, 0, 7, 2]).by_file()
    assert [name for name, _ in found] == names
    assert [indices.tolist() for _, indices in found] == [[1, 3], [0, 2]]
    assert corpus.select([3, 4]).by_file() == corpus.select([]).by_file() == []


def test_selected_rows_are_built_on_access_in_the_given_order() -> None:
    corpus = corpus_of([in_memory([(row, [[(row, 1)]]) for row in range(1, 8)])])

    rows = corpus.select([5, 0, 3])

    assert len(rows) == 3
    assert [one.row for row in rows for one in row] == [6, 1, 4]
    assert rows[2][0].row == 4
    assert [row[0].row for row in corpus.select()] == list(range(1, 8))
    assert [e.row for e in corpus[-2:]] == [6, 7]
    with pytest.raises(IndexError):
        corpus[7]


def test_rows_are_known_again_by_their_answers_under_another_objective() -> None:
    def answer(row: int, tokens: list[int], mask: list[int], role: int = ANSWER) -> Example:
        return Example(row, np.array(tokens), np.array(mask, dtype=np.uint8), 0, role)

    plain = [answer(1, [1, 2, 3], [0, 1, 1]), answer(2, [5], [1]), answer(2, [5, 6], [0, 1])]
    pairs = [
        *(answer(1, [1, 2, 3], [0, 0, 1], CHOSEN), answer(1, [1, 9], [0, 1], REJECTED)),
        *(answer(2, [5, 7], [0, 1], CHOSEN), answer(2, [5, 6], [0, 1], REJECTED)),
        *(answer(3, [5, 7], [0, 1], CHOSEN), answer(3, [5], [1], REJECTED)),
        answer(4, [1, 2, 3], [0, 0, 1], WHOLE),
    ]
    one, other = (Corpus.of(each).select() for each in (plain, pairs))
    assert other.without(identities_of(one)).indices == [2, 3]
    assert one.without(identities_of(other)).indices == []
    assert one.without(identities_of(CorpusRows(other.corpus, [2]))).indices == [0, 1]
