"""Examples in flat arrays, mapped from files: memory does not grow with the data set.

tokens   a b c d e f g h i      the tokens of all examples in order, before truncation
mask     0 0 1 1 0 1 0 0 1
ends           4   6     9      where each example ends
rows           1   1     2      the number of each example's row
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import ANSWER, MISMATCHED, WHOLE
from mlxtune.core.data.encode import Example
from mlxtune.core.data.places import where
from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.writing import new_file

RowExamples = tuple[Example, ...]

# Roles of examples that repeat an answer of their row, or have another row's answer.
_COPIES = (WHOLE, MISMATCHED)
# The number of tokens in each block of a pass over a whole file.
_AT_ONCE = 1 << 20
# The columns of a file's examples, each stored in a separate little-endian file.
COLUMNS = {
    **{"tokens": "<i4", "mask": "<u1", "ends": "<i8", "rows": "<i8"},
    **{"roles": "<u1", "identities": "<u8"},
}
_NO_COLUMNS = tuple(np.zeros(0, dtype=kind) for kind in ("i4", "i8", "i4", "i4", "i8", "u1", "u8"))


@dataclass(frozen=True, eq=False)
class ExampleArrays:
    """The examples of one data file, before truncation.

    `tokens` is int32 (N,), `mask` uint8 (N,), `ends` and `rows` int64 (E,): where each example
    ends, and the 1-based number of its row. `roles` is uint8 (E,), the role of each example in its
    row. `identities` is uint64 (R,), one for each row with examples; rows with equal tokens, masks
    and roles have equal identities.
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    roles: npt.NDArray[np.uint8]
    identities: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, examples: Iterable[Example]) -> ExampleArrays:
        """Copy examples; adjacent examples with the same row number form one row."""
        rows = groupby(examples, key=lambda example: example.row)
        return cls(**_as_columns([list(row) for _, row in rows]))

    @classmethod
    def mapped(cls, folder: Path) -> ExampleArrays:
        return cls(**{name: _map(folder / name, kind) for name, kind in COLUMNS.items()})

    @property
    def num_rows(self) -> int:
        return len(self.first_of_row) - 1

    @cached_property
    def first_of_row(self) -> npt.NDArray[np.int64]:
        """int64 (R + 1,): the first example of each row, then the number of examples."""
        return _starts(self.rows)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """int32 (E,): the number of tokens of each example."""
        return np.diff(self.ends, prepend=0).astype(np.int32)

    def per_row(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return int64 (R,): values (E,) summed over the examples of each row."""
        return np.add.reduceat(values, self.first_of_row[:-1], dtype=np.int64)

    @cached_property
    def supervised(self) -> npt.NDArray[np.int32]:
        """int32 (E,): the number of supervised tokens of each example."""
        return self._supervised_within(self.lengths, np.zeros_like(self.lengths))

    @property
    def plain_text(self) -> bool:
        """Whether every example's second token carries loss, which is so only in plain text."""
        starts = self.ends - self.lengths
        return bool(self.mask[np.minimum(starts + 1, self.ends - 1)].all())

    def cut(self, max_seq_len: int | None = None, *, at: str = "end") -> CutExamples:
        """Cut every example to `max_seq_len` tokens, at its `end` or at its `start`."""
        lengths = self.lengths if max_seq_len is None else np.minimum(self.lengths, max_seq_len)
        skipped = np.zeros_like(self.lengths)
        if max_seq_len is not None and at == "start":
            for i in np.flatnonzero(self.lengths > max_seq_len).tolist():
                end = int(self.ends[i])
                mask = self.mask[end - int(self.lengths[i]) : end]
                skipped[i] = _tokens_to_skip(mask, max_seq_len)
            lengths = np.minimum(lengths, self.lengths - skipped)
            self.release()
        supervised = self._supervised_within(lengths, skipped)
        # Preference rows are kept whole or dropped.
        incomplete = (self.roles != ANSWER) & (lengths < self.lengths)
        lost = np.repeat(self.per_row(incomplete) > 0, np.diff(self.first_of_row))
        supervised = np.where(lost, 0, supervised)
        kept = np.where(supervised > 0, lengths, 0)
        return CutExamples(self, max_seq_len, kept, supervised, skipped)

    def _supervised_within(
        self, lengths: npt.NDArray[np.int32], skipped: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return int32 (E,): how many of the `lengths` tokens after `skipped` are supervised."""
        counts = np.zeros(len(lengths), dtype=np.int32)
        # Sum block by block: numpy would convert the whole array first.
        blocks = np.searchsorted(self.ends, np.arange(0, len(self.mask), _AT_ONCE), side="right")
        for first, last in pairwise([*np.unique(blocks).tolist(), len(lengths)]):
            start = int(self.ends[first - 1]) if first else 0
            starts = self.ends[first:last] - self.lengths[first:last] - start
            starts += skipped[first:last]
            edges = np.stack([starts, starts + lengths[first:last]], axis=1).reshape(-1)
            mask = self.mask[start : int(self.ends[last - 1])]
            # reduceat rejects an index at the end of the array.
            edges = edges[:-1] if edges[-1] == len(mask) else edges
            counts[first:last] = np.add.reduceat(mask, edges, dtype=np.int32)[::2]
        self.release()
        return counts

    def release(self) -> None:
        """Free the pages of mapped files; the system reads them again when they are needed."""
        for column in (self.tokens, self.mask):
            mapped = getattr(column.base, "obj", None)
            # In-memory arrays have no map, and some systems have no madvise.
            if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, eq=False)
class CutExamples:
    """The examples of one data file, each cut to `max_seq_len`.

    `lengths`, `supervised` and `skipped` are int32 (E,): the number of tokens of each example that
    are kept, that are kept and supervised, and that are skipped at its start. An example with no
    supervised token left keeps no token.
    """

    arrays: ExampleArrays
    max_seq_len: int | None
    lengths: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.int32]
    skipped: npt.NDArray[np.int32]

    @property
    def cut(self) -> npt.NDArray[np.int32]:
        """int32 (E,): the number of tokens that each example loses."""
        return self.arrays.lengths - self.lengths

    @property
    def rows_kept(self) -> npt.NDArray[np.bool_]:
        """Bool (R,): whether any example of each row is kept."""
        return self.arrays.per_row(self.lengths) > 0

    @property
    def rows_cut(self) -> npt.NDArray[np.bool_]:
        """Bool (R,): whether each row loses tokens."""
        return self.arrays.per_row(self.cut) > 0


def _tokens_to_skip(mask: npt.NDArray[np.uint8], max_seq_len: int) -> int:
    """Return how many tokens to skip at the start of an example, to cut it to `max_seq_len`.

    Answers are skipped whole. The last answer and the token before it are not skipped, even if the
    end of the answer is then cut.

    With mask 0 0 1 1 0 0 0 1 1 and `max_seq_len` 6, skip 4, as the first answer does not fit whole.
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    starts, ends = edges[::2], edges[1::2]
    skip = len(mask) - max_seq_len
    if not len(starts):
        return skip
    answer = int(np.searchsorted(starts, skip, side="right")) - 1
    if answer >= 0 and skip < ends[answer]:
        skip = int(ends[answer])
    return min(skip, max(int(starts[-1]) - 1, 0))


def _as_columns(rows: Sequence[Sequence[Example]], start: int = 0) -> dict[str, Any]:
    """Return the columns of rows; `start` tokens of the file precede the rows."""
    examples = [example for row in rows for example in row]
    columns = {
        "tokens": np.concatenate([example.tokens for example in examples]),
        "mask": np.concatenate([example.assistant_mask for example in examples]),
        "ends": start + np.cumsum([len(example) for example in examples]),
        "rows": np.array([example.row for example in examples]),
        "roles": np.array([example.role for example in examples]),
        "identities": np.array([identity(row) for row in rows], dtype=np.uint64),
    }
    return {name: columns[name].astype(kind) for name, kind in COLUMNS.items()}


def identity(row: Iterable[Example]) -> int:
    """Return a 64-bit hash of the tokens, masks and roles of a row's examples."""
    digest = hashlib.blake2b(digest_size=8)
    for example in row:
        digest.update(len(example).to_bytes(8, "little"))
        digest.update(example.tokens.astype("<i4", copy=False).tobytes())
        digest.update(example.assistant_mask.astype("<u1", copy=False).tobytes())
        if example.role != ANSWER:
            digest.update(bytes([example.role]))
    return int.from_bytes(digest.digest(), "little")


def _unmasked(example: Example) -> Example:
    return replace(example, assistant_mask=np.zeros_like(example.assistant_mask), role=ANSWER)


def _prompt(example: Example) -> Example:
    """Return an example of the tokens before the first token that carries loss."""
    start = int(example.assistant_mask.argmax())
    mask = example.assistant_mask[:start]
    return replace(example, tokens=example.tokens[:start], assistant_mask=mask, role=ANSWER)


def write_arrays(folder: Path, chunks: Iterable[Sequence[Sequence[Example]]]) -> None:
    """Write examples into a folder, one file for each column; each chunk contains a few rows."""
    end = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context(new_file(folder / name)) for name in COLUMNS}
        for rows in filter(None, chunks):
            columns = _as_columns(rows, end)
            end = int(columns["ends"][-1])
            for name, file in files.items():
                file.write(columns[name].tobytes())


def rows_used(rows: int, weight: float) -> tuple[int, int]:
    """Return how often an epoch uses every row of a file, and how many of these rows once more."""
    whole, part = int(weight), round(weight % 1 * rows)
    return whole, part if whole or not rows else max(part, 1)


class Corpus(Sequence[Example]):
    """All examples with a supervised token, from one or more files. `paths` name the files.

    A row with no such example is left out. `weights` say how often the rows of each file are used
    in an epoch, once by default.

    `lengths` and `supervised` are int32 (E,): the number of each example's tokens after truncation,
    and how many of these tokens carry loss. `row_numbers` and `row_of_example` are int64 (E,): the
    number of each example's row in its file, and the index of that row in the corpus. `identities`
    is uint64 (R,).
    """

    def __init__(
        self,
        files: Sequence[CutExamples],
        paths: Sequence[str] = (),
        weights: Sequence[float] = (),
    ) -> None:
        self.files = files
        self.paths = paths
        self.weights = tuple(weights) or (1.0,) * len(files)
        kept = (_kept(i, file) for i, file in enumerate(files))
        columns = [np.concatenate(column) for column in zip(_NO_COLUMNS, *kept, strict=True)]
        self._file, self._start, self.lengths, self.supervised, self.row_numbers, *columns = columns
        self.roles, identities = columns
        # Row numbers repeat from file to file.
        self._first_of_row = _starts(self.row_numbers + (self._file.astype(np.int64) << 40))
        self.row_of_example = np.repeat(np.arange(self.num_rows), np.diff(self._first_of_row))
        self.identities: npt.NDArray[np.uint64] = identities[self._first_of_row[:-1]]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Corpus:
        """Return the examples as a corpus; return a corpus unchanged."""
        if isinstance(examples, Corpus):
            return examples
        files = (list(group) for _, group in groupby(examples, key=lambda example: example.file))
        return cls([ExampleArrays.of(group).cut() for group in files])

    def __len__(self) -> int:
        return len(self._start)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        file, start = int(self._file[index]), int(self._start[index])
        end = start + int(self.lengths[index])
        arrays = self.files[file].arrays
        return Example(
            int(self.row_numbers[index]),
            arrays.tokens[start:end],
            arrays.mask[start:end],
            file,
            int(self.roles[index]),
        )

    @property
    def num_rows(self) -> int:
        return len(self._first_of_row) - 1

    @cached_property
    def file_of_row(self) -> npt.NDArray[np.int32]:
        """int32 (R,): the index of each row's file."""
        file: npt.NDArray[np.int32] = self._file[self._first_of_row[:-1]]
        return file

    @cached_property
    def groups(self) -> npt.NDArray[np.uint64]:
        """uint64 (R,): the group of each row; a group is never both trained on and held out.

        Equal rows are in one group, as are preference rows with the same prompt.
        """
        if not self.roles.any():
            return self.identities
        prompts = [_prompt(self[int(first)]) for first in self._first_of_row[:-1]]
        return np.array([identity([prompt]) for prompt in prompts], dtype=np.uint64)

    def row(self, index: int) -> RowExamples:
        """Return the examples of a row, which are all in the same step."""
        first, end = self._first_of_row[index], self._first_of_row[index + 1]
        return tuple(self[i] for i in range(int(first), int(end)))

    def select(self, rows: Sequence[int] | None = None) -> CorpusRows:
        """Return rows by their indices, by default all rows."""
        return CorpusRows(self, range(self.num_rows) if rows is None else rows)

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the index of a row's file, and the row's number in that file."""
        first = self._first_of_row[index]
        return int(self._file[first]), int(self.row_numbers[first])

    def part_of_example(self, index: int) -> tuple[int, int, int]:
        """Return an example's part number in its row, the number of parts, and its full length.

        Parts are numbered from 1. Only parts with the example's role count, including parts that
        truncation removed.
        """
        arrays = self.files[int(self._file[index])].arrays
        own = int(np.searchsorted(arrays.ends, self._start[index], side="right"))
        row = int(np.searchsorted(arrays.first_of_row, own, side="right")) - 1
        first, end = arrays.first_of_row[row : row + 2].tolist()
        same = first + np.flatnonzero(arrays.roles[first:end] == arrays.roles[own])
        return int(np.searchsorted(same, own)) + 1, len(same), int(arrays.lengths[own])

    def largest_token(self) -> int:
        largest = 0
        for file in self.files:
            largest = max(largest, int(file.arrays.tokens.max(initial=0)))
            file.arrays.release()
        return largest

    def data_hash(self) -> str:
        """Return the corpus's SHA-256 as `sha256:HASH`.

        The hash covers the number of examples per row, lengths, tokens and masks, each
        little-endian. It also covers roles unless all are answers, and weights of files unless all
        are 1. It leaves out row numbers, so that an added comment does not change the hash.
        """
        digest = hashlib.sha256()
        digest.update(np.diff(self._first_of_row).astype("<i8").tobytes())
        digest.update(self.lengths.astype("<i8").tobytes())
        if self.roles.any():
            digest.update(self.roles.astype("<u1").tobytes())
        for column, kind in (("tokens", "<i4"), ("mask", "<u1")):
            for part in self._stretches(column):
                digest.update(part.astype(kind, copy=False).data)
        for file in self.files:
            file.arrays.release()
        if any(weight != 1 for weight in self.weights):
            counts = np.bincount(self.file_of_row, minlength=len(self.weights))
            digest.update(np.repeat(self.weights, counts).astype("<f8").tobytes())
        return f"sha256:{digest.hexdigest()}"

    def _stretches(self, column: str) -> Iterator[npt.NDArray[Any]]:
        """Yield a column of the kept examples in order; adjacent examples come in one array."""
        ends = self._start + self.lengths
        apart = (self._start[1:] != ends[:-1]) | (self._file[1:] != self._file[:-1])
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(self)] if len(self) else []
        for first, last in pairwise(edges):
            values = getattr(self.files[int(self._file[first])].arrays, column)
            yield values[int(self._start[first]) : int(ends[last - 1])]


def _kept(number: int, file: CutExamples) -> tuple[npt.NDArray[Any], ...]:
    """Return the file, start, length, supervised count, row, role and identity of kept examples."""
    arrays, kept = file.arrays, np.flatnonzero(file.supervised)
    identities = np.repeat(arrays.identities, np.diff(arrays.first_of_row))[kept]
    starts = arrays.ends[kept] - arrays.lengths[kept] + file.skipped[kept]
    numbers = np.full(len(kept), number, dtype=np.int32)
    values = file.lengths[kept], file.supervised[kept], arrays.rows[kept], arrays.roles[kept]
    return numbers, starts, *values, identities


@dataclass(frozen=True, eq=False)
class CorpusRows:
    """Some rows of a corpus, by index; a row's examples are built on access."""

    corpus: Corpus
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 (R,): the number of tokens of each row, over all its examples."""
        lengths = np.zeros(self.corpus.num_rows, dtype=np.int64)
        np.add.at(lengths, self.corpus.row_of_example, self.corpus.lengths)
        return lengths[np.asarray(self.indices, dtype=np.int64)]

    @property
    def identities(self) -> npt.NDArray[np.uint64]:
        return self.corpus.identities[np.asarray(self.indices, dtype=np.int64)]

    @cached_property
    def answers(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The place of each answer's row, int64 (A,), and a hash of the answer, uint64 (A,).

        An answer's tokens, its prompt included, are the same under every objective.
        """
        found = [
            (place, identity([_unmasked(example)]))
            for place, row in enumerate(self)
            for example in {each.role: each for each in row if each.role not in _COPIES}.values()
        ]
        places, hashes = zip(*found, strict=True) if found else ((), ())
        return np.array(places, dtype=np.int64), np.array(hashes, dtype=np.uint64)

    def without(self, identities: npt.NDArray[np.uint64]) -> CorpusRows:
        """Return the rows that have neither their identity nor an answer's hash in `identities`."""
        known = np.isin(self.identities, identities)
        if len(identities):
            places, hashes = self.answers
            known[places[np.isin(hashes, identities)]] = True
        return self.only(np.flatnonzero(~known))

    def only(self, places: npt.NDArray[np.int64]) -> CorpusRows:
        """Return the rows at the given places of this selection."""
        return CorpusRows(self.corpus, [self.indices[i] for i in places.tolist()])

    @cached_property
    def files(self) -> npt.NDArray[np.int32]:
        """int32 (R,): the index of each row's file."""
        return self.corpus.file_of_row[np.asarray(self.indices, dtype=np.int64)]

    def place(self, place: int) -> tuple[str, int]:
        """Return the path of a row's file, if known, and the row's number in that file."""
        file, row = self.corpus.place_of(self.indices[place])
        return self.corpus.paths[file] if self.corpus.paths else "", row

    def where(self, index: int) -> str:
        path, row = self.place(index)
        return where(path, row) if path else f"row {row}"

    def __getitem__(self, place: int) -> RowExamples:
        return self.corpus.row(self.indices[place])

    def __iter__(self) -> Iterator[RowExamples]:
        return map(self.corpus.row, self.indices)


def _starts(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the start of each run of equal keys, and the end of the last run."""
    changes = np.flatnonzero(np.diff(keys)) + 1
    first = [0] if len(keys) else []
    return np.concatenate([first, changes, [len(keys)]]).astype(np.int64)


def _map(path: Path, kind: str) -> npt.NDArray[Any]:
    with open_regular(path) as file:
        # An empty file cannot be mapped.
        if not os.fstat(file.fileno()).st_size:
            return np.zeros(0, dtype=kind)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=kind)
