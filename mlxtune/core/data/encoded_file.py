"""The examples of one data file in flat arrays, mapped from files, and their account.

tokens   a b c d e f g h i      the tokens of all examples in order, before truncation
mask     0 0 1 1 0 1 0 0 1
ends           4   6     9      where each example ends
rows           1   1     2      the number of each example's row

Mapped arrays keep memory from growing with the data set.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import ANSWER
from mlxtune.core.data.encode import Example
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import TRUNCATED_ANSWER, BadRowError, RowTally, SkippedRows
from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.writing import new_file

# The number of tokens in each block of a pass over a whole file.
_BLOCK_TOKENS = 1 << 20
# The columns of a file's examples, each stored in a separate little-endian file.
COLUMNS = {
    **{"tokens": "<i4", "mask": "<u1", "ends": "<i8", "rows": "<i8"},
    **{"roles": "<u1", "identities": "<u8"},
}


class TokenCounts(NamedTuple):
    """The tokens of examples before truncation, after it, and with loss; int32 (E,) each."""

    full: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.int32]


class _Kept(NamedTuple):
    """The tokens that truncation keeps, int32 (E,) each; see `ExampleArrays`."""

    lengths: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.int32]
    dropped_at_start: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ExampleArrays:
    """The examples of one data file, whole or each cut to `max_seq_len` tokens.

    `tokens` is int32 (N,), `mask` uint8 (N,), `ends` and `rows` int64 (E,): where each example
    ends, and the 1-based number of its row. `roles` is uint8 (E,), the role of each example in its
    row. `identities` is uint64 (R,), one for each row with examples; rows with equal tokens, masks
    and roles have equal identities. All of these are before truncation.

    `lengths`, `supervised` and `dropped_at_start` are int32 (E,): the number of tokens of each
    example that are kept, that are kept and supervised, and that are dropped at its start. A cut
    example with no supervised token left keeps no token.

    `unanswered` are the numbers of rows without an answer, for which a placeholder is encoded.
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    roles: npt.NDArray[np.uint8]
    identities: npt.NDArray[np.uint64]
    max_seq_len: int | None = None
    _kept: _Kept | None = None
    unanswered: frozenset[int] = frozenset()

    @classmethod
    def of(cls, examples: Iterable[Example]) -> ExampleArrays:
        """Copy examples; adjacent examples with the same row number form one row."""
        rows = groupby(examples, key=lambda example: example.row)
        return cls.of_rows([list(row) for _, row in rows])

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Example]], start: int = 0) -> ExampleArrays:
        """Copy the examples of rows; `start` tokens of the file precede the rows."""
        examples = [example for row in rows for example in row]
        columns = {
            "tokens": np.concatenate([example.tokens for example in examples]),
            "mask": np.concatenate([example.assistant_mask for example in examples]),
            "ends": start + np.cumsum([len(example) for example in examples]),
            "rows": np.array([example.row for example in examples]),
            "roles": np.array([example.role for example in examples]),
            "identities": np.array([identity(row) for row in rows], dtype=np.uint64),
        }
        values: dict[str, Any] = {
            name: columns[name].astype(kind) for name, kind in COLUMNS.items()
        }
        return cls(**values)

    @classmethod
    def mapped(cls, folder: Path) -> ExampleArrays:
        values: dict[str, Any] = {name: _map(folder / name, kind) for name, kind in COLUMNS.items()}
        return cls(**values)

    @property
    def num_rows(self) -> int:
        return len(self.first_of_row) - 1

    @cached_property
    def first_of_row(self) -> npt.NDArray[np.int64]:
        """int64 (R + 1,): the first example of each row, then the number of examples."""
        return starts_of_equal_keys(self.rows)

    @cached_property
    def full_lengths(self) -> npt.NDArray[np.int32]:
        """int32 (E,): the number of tokens of each example before truncation."""
        return np.diff(self.ends, prepend=0).astype(np.int32)

    def per_row(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return int64 (R,): values (E,) summed over the examples of each row."""
        return np.add.reduceat(values, self.first_of_row[:-1], dtype=np.int64)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return self.full_lengths if self._kept is None else self._kept.lengths

    @cached_property
    def supervised(self) -> npt.NDArray[np.int32]:
        if self._kept is not None:
            return self._kept.supervised
        return self._supervised_within(self.full_lengths, np.zeros_like(self.full_lengths))

    @property
    def dropped_at_start(self) -> npt.NDArray[np.int32]:
        return (
            np.zeros_like(self.full_lengths) if self._kept is None else self._kept.dropped_at_start
        )

    @property
    def tokens_truncated(self) -> npt.NDArray[np.int32]:
        """int32 (E,): the number of tokens that each example loses."""
        return self.full_lengths - self.lengths

    @cached_property
    def counts(self) -> TokenCounts:
        """The data's tokens to account for, without placeholders of answers."""
        full, kept, supervised = (
            each.copy() for each in (self.full_lengths, self.lengths, self.supervised)
        )
        dropped = self.dropped_at_start
        for i in np.flatnonzero(np.isin(self.rows, sorted(self.unanswered))).tolist():
            end = int(self.ends[i])
            prompt, _ = last_stretch(self.mask[end - int(full[i]) : end])
            full[i], supervised[i] = prompt, 0
            kept[i] = min(int(kept[i]), max(prompt - int(dropped[i]), 0))
        return TokenCounts(full, kept, supervised)

    @property
    def rows_kept(self) -> npt.NDArray[np.bool_]:
        """Bool (R,): whether any example of each row is kept."""
        return self.per_row(self.lengths) > 0

    @property
    def rows_truncated(self) -> npt.NDArray[np.bool_]:
        """Bool (R,): whether each row loses tokens."""
        return self.per_row(self.tokens_truncated) > 0

    @property
    def is_plain_text(self) -> bool:
        """Whether every example's second token carries loss, which is so only in plain text."""
        starts = self.ends - self.full_lengths
        return bool(self.mask[np.minimum(starts + 1, self.ends - 1)].all())

    def truncate(self, max_seq_len: int | None = None, *, at: str = "end") -> ExampleArrays:
        """Cut every whole example to `max_seq_len` tokens, at its `end` or at its `start`."""
        full = self.full_lengths
        lengths = full if max_seq_len is None else np.minimum(full, max_seq_len)
        dropped = np.zeros_like(full)
        if max_seq_len is not None and at == "start":
            for i in np.flatnonzero(full > max_seq_len).tolist():
                end = int(self.ends[i])
                dropped[i] = _tokens_to_drop(self.mask[end - int(full[i]) : end], max_seq_len)
            lengths = np.minimum(lengths, full - dropped)
            self.release()
        supervised = self._supervised_within(lengths, dropped)
        # Preference rows are kept whole or dropped.
        incomplete = (self.roles != ANSWER) & (lengths < full)
        incomplete_rows = np.repeat(self.per_row(incomplete) > 0, np.diff(self.first_of_row))
        supervised = np.where(incomplete_rows, 0, supervised)
        kept_lengths = np.where(supervised > 0, lengths, 0)
        return replace(
            self, max_seq_len=max_seq_len, _kept=_Kept(kept_lengths, supervised, dropped)
        )

    def _supervised_within(
        self, lengths: npt.NDArray[np.int32], dropped: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return int32 (E,): how many of the `lengths` tokens after `dropped_at_start` are
        supervised.
        """
        counts = np.zeros(len(lengths), dtype=np.int32)
        # Sum block by block: numpy would convert the whole array first.
        blocks = np.searchsorted(
            self.ends, np.arange(0, len(self.mask), _BLOCK_TOKENS), side="right"
        )
        for first, last in pairwise([*np.unique(blocks).tolist(), len(lengths)]):
            start = int(self.ends[first - 1]) if first else 0
            starts = self.ends[first:last] - self.full_lengths[first:last] - start
            starts += dropped[first:last]
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


def last_stretch(mask: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Return the [start, end) range of the last stretch of tokens that carry loss."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    start, end = edges[-2:].tolist()
    return start, end


def _tokens_to_drop(mask: npt.NDArray[np.uint8], max_seq_len: int) -> int:
    """Return how many tokens to drop at the start of an example, to cut it to `max_seq_len`.

    Answers are dropped whole. The last answer and the token before it are never dropped, even if
    the end of the answer is then cut.

    With mask 0 0 1 1 0 0 0 1 1 and `max_seq_len` 6, drop 4, as the first answer does not fit whole.
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    starts, ends = edges[::2], edges[1::2]
    count = len(mask) - max_seq_len
    if not len(starts):
        return count
    answer = int(np.searchsorted(starts, count, side="right")) - 1
    if answer >= 0 and count < ends[answer]:
        count = int(ends[answer])
    return min(count, max(int(starts[-1]) - 1, 0))


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


def write_arrays(
    folder: Path,
    chunks: Iterable[Sequence[Sequence[Example]]],
    on_rows: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write examples into a folder, one file for each column; each chunk contains a few rows.

    `on_rows` is called after each chunk with the number of rows written so far.
    """
    end = written = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context(new_file(folder / name)) for name in COLUMNS}
        for rows in filter(None, chunks):
            arrays = ExampleArrays.of_rows(rows, end)
            end = int(arrays.ends[-1])
            for name, file in files.items():
                file.write(getattr(arrays, name).tobytes())
            written += len(rows)
            on_rows(written)


def starts_of_equal_keys(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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


@dataclass
class EncodedFile:
    """One data file as examples before truncation, with the skipped rows and the notes.

    `answer_tokens_truncated` counts the supervised tokens that truncation cut from kept rows.
    """

    arrays: ExampleArrays
    skipped: SkippedRows
    notes: RowTally
    answer_tokens_truncated: int = 0

    def truncate(self, max_seq_len: int | None = None, *, at: str = "end") -> TruncatedFile:
        """Return the file with every example cut to `max_seq_len` tokens, at `end` or `start`.

        Its notes count truncated answers too, and its skipped rows those with no supervised token
        left.
        """
        arrays = replace(self.arrays, unanswered=frozenset(self.skipped.unanswered))
        truncated = arrays.truncate(max_seq_len, at=at)
        kept_rows = truncated.rows_kept
        lost = arrays.per_row(arrays.supervised - truncated.supervised)
        skipped, notes = deepcopy(self.skipped), deepcopy(self.notes)
        for index in np.flatnonzero(~kept_rows):
            skipped.add(*_why_dropped(truncated, int(index)))
        numbers = arrays.rows[arrays.first_of_row[:-1]]
        for row in numbers[kept_rows & (lost > 0)]:
            notes.count(int(row), TRUNCATED_ANSWER)
        return TruncatedFile(
            arrays, skipped, notes, int(lost[kept_rows].sum()), truncated=truncated
        )


@dataclass
class TruncatedFile(EncodedFile):
    """One data file with its examples before truncation, `arrays`, and after it, `truncated`."""

    truncated: ExampleArrays = field(kw_only=True)

    @property
    def rows_kept(self) -> int:
        """The number of rows of which any example is kept."""
        return int(self.truncated.rows_kept.sum())

    def ledger(
        self, *, path: str | None = None, rows_validation: int = 0, weight: float = 1.0
    ) -> Ledger:
        """Return the account of the file; its path is `path` if given.

        All rows that are kept train, except `rows_validation` rows.
        """
        truncated = self.truncated
        full, kept, supervised = (int(each.sum()) for each in truncated.counts)
        return Ledger(
            path=str(self.skipped.path) if path is None else path,
            rows_read=self.rows_kept + self.skipped.total,
            rows_train=self.rows_kept - rows_validation,
            rows_validation=rows_validation,
            rows_skipped=self.skipped.counts,
            rows_truncated=int(truncated.rows_truncated.sum()),
            examples=int((truncated.supervised > 0).sum()),
            tokens=full,
            tokens_supervised=supervised,
            tokens_context=kept - supervised,
            tokens_truncated=full - kept,
            notes=self.notes.counts,
            weight=weight,
        )


def _why_dropped(truncated: ExampleArrays, index: int) -> tuple[int, BadRowError]:
    """Return the number of a row that truncation drops, and the reason with its remedy."""
    examples = slice(*truncated.first_of_row[index : index + 2].tolist())
    row, first = int(truncated.rows[examples.start]), examples.start
    limit = f"--max-seq-len {truncated.max_seq_len}"
    if truncated.roles[first] != ANSWER:
        longest = int(truncated.full_lengths[examples].max())
        advice = f"an answer to compare is not cut: raise the limit to {longest}"
        return row, BadRowError(f"longer than {limit}", advice)
    end = truncated.ends[first]
    mask = truncated.mask[end - truncated.full_lengths[first] : end]
    advice = f"the answer starts at token {int(mask.argmax()) + 1}: raise the limit"
    return row, BadRowError(f"no supervised token within {limit}", advice)
