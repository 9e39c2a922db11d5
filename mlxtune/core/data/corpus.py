"""All examples of one or more data files, and selections of their rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import ANSWER, MISMATCHED, WHOLE
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import (
    ExampleArrays,
    TokenCounts,
    TruncatedFile,
    identity,
    starts_of_equal_keys,
)
from mlxtune.core.data.near_copies import NO_PROMPT, TextHash
from mlxtune.core.data.problems import where

RowExamples = tuple[Example, ...]
HashOf = Callable[[Example], int]

# With fewer rows, what all of them start with may be their content.
_MIN_ROWS = 5
# Roles of examples that repeat an answer of their row, or have another row's answer.
_COPIES = (WHOLE, MISMATCHED)
_NO_COLUMNS = tuple(np.zeros(0, dtype=kind) for kind in ("i4", "i8", "i4", "i4", "i8", "u1", "u8"))


def _unmasked(example: Example) -> Example:
    return replace(example, assistant_mask=np.zeros_like(example.assistant_mask), role=ANSWER)


def _until(example: Example, end: int) -> Example:
    mask = example.assistant_mask[:end]
    return replace(example, tokens=example.tokens[:end], assistant_mask=mask, role=ANSWER)


def _prompt(example: Example) -> Example:
    """Return an example of the tokens before the first token that carries loss."""
    return _until(example, int(example.assistant_mask.argmax()))


def first_turn(example: Example) -> tuple[Example, Example]:
    """Return the prompt of an example's first answer, and the prompt with this answer."""
    prompt = _prompt(example)
    after = example.assistant_mask[len(prompt) :] == 0
    end = len(prompt) + int(after.argmax()) if after.any() else len(example)
    return prompt, _until(example, end)


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
        files: Sequence[ExampleArrays],
        paths: Sequence[str] = (),
        weights: Sequence[float] = (),
    ) -> None:
        self.files = files
        self.paths = paths
        self.weights = tuple(weights) or (1.0,) * len(files)
        kept_examples = (_kept(i, file) for i, file in enumerate(files))
        columns = [
            np.concatenate(column) for column in zip(_NO_COLUMNS, *kept_examples, strict=True)
        ]
        self._file, self._start, self.lengths, self.supervised, self.row_numbers, *columns = columns
        self.roles, identities = columns
        # Row numbers repeat from file to file.
        self._first_of_row = starts_of_equal_keys(
            self.row_numbers + (self._file.astype(np.int64) << 40)
        )
        self.row_of_example = np.repeat(np.arange(self.num_rows), np.diff(self._first_of_row))
        self.identities: npt.NDArray[np.uint64] = identities[self._first_of_row[:-1]]

    @classmethod
    def of_files(
        cls,
        files: Sequence[TruncatedFile],
        paths: Sequence[str] = (),
        weights: Sequence[float] = (),
    ) -> Corpus:
        return cls([file.truncated for file in files], paths, weights)

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Corpus:
        """Return the examples as a corpus; return a corpus unchanged."""
        if isinstance(examples, Corpus):
            return examples
        files = (list(file) for _, file in groupby(examples, key=lambda example: example.file))
        return cls([ExampleArrays.of(file).truncate() for file in files])

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
        arrays = self.files[file]
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
    def clusters(self) -> npt.NDArray[np.uint64]:
        """uint64 (R,): the cluster of each row; a cluster is never both trained on and held out.

        Equal rows are in one cluster, as are preference rows with the same prompt.
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

    def source_of(self, index: int) -> tuple[int, int]:
        """Return the index of a row's file, and the row's number in that file."""
        first = self._first_of_row[index]
        return int(self._file[first]), int(self.row_numbers[first])

    @cached_property
    def counts(self) -> TokenCounts:
        """The tokens of the examples to account for; see `ExampleArrays.counts`."""
        columns = [[each[file.supervised > 0] for each in file.counts] for file in self.files]
        none = [np.zeros(0, dtype=np.int32)] * 3  # there may be no file
        return TokenCounts(*map(np.concatenate, zip(none, *columns, strict=True)))

    def shown(self, index: int) -> Example:
        """Return an example as the data has it: without the placeholder of an answer."""
        example = self[index]
        arrays = self.files[example.file]
        if example.row not in arrays.unanswered:
            return example
        place = np.searchsorted(arrays.ends, int(self._start[index]), side="right")
        prompt = int(arrays.counts.kept[place])
        mask = np.zeros(prompt, dtype=np.uint8)
        return replace(example, tokens=example.tokens[:prompt], assistant_mask=mask)

    def part_of_example(self, index: int) -> tuple[int, int, int]:
        """Return an example's part number in its row, the number of parts, and its full length.

        Parts are numbered from 1. Only parts with the example's role count, including parts that
        truncation removed.
        """
        arrays = self.files[int(self._file[index])]
        own = int(np.searchsorted(arrays.ends, self._start[index], side="right"))
        row = int(np.searchsorted(arrays.first_of_row, own, side="right")) - 1
        first, end = arrays.first_of_row[row : row + 2].tolist()
        same = first + np.flatnonzero(arrays.roles[first:end] == arrays.roles[own])
        return int(np.searchsorted(same, own)) + 1, len(same), int(arrays.full_lengths[own])

    def largest_token(self) -> int:
        largest = 0
        for file in self.files:
            largest = max(largest, int(file.tokens.max(initial=0)))
            file.release()
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
            file.release()
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
            values = getattr(self.files[int(self._file[first])], column)
            yield values[int(self._start[first]) : int(ends[last - 1])]


def _kept(number: int, file: ExampleArrays) -> tuple[npt.NDArray[Any], ...]:
    """Return the file, start, length, supervised count, row, role and identity of kept examples."""
    with_loss = np.flatnonzero(file.supervised)
    identities = np.repeat(file.identities, np.diff(file.first_of_row))[with_loss]
    starts = file.ends[with_loss] - file.full_lengths[with_loss] + file.dropped_at_start[with_loss]
    numbers = np.full(len(with_loss), number, dtype=np.int32)
    values = (
        file.lengths[with_loss],
        file.supervised[with_loss],
        file.rows[with_loss],
        file.roles[with_loss],
    )
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

    @property
    def clusters(self) -> npt.NDArray[np.uint64]:
        return self.corpus.clusters[np.asarray(self.indices, dtype=np.int64)]

    @cached_property
    def answers(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The index of each answer's row, int64 (A,), and a hash of the answer, uint64 (A,).

        An answer's tokens, its prompt included, are the same under every objective.
        """
        return self.hash_answers(lambda example: identity([_unmasked(example)]))

    def hash_answers(self, hash_of: HashOf) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the indices and hashes of `answers`, by another hash of an answer's example."""
        hashed = [(index, hash_of(example)) for index, example in self._examples_of_answers()]
        indices, hashes = zip(*hashed, strict=True) if hashed else ((), ())
        return np.array(indices, dtype=np.int64), np.array(hashes, dtype=np.uint64)

    def hash_texts(self, text_hash: TextHash) -> npt.NDArray[np.uint64]:
        """Return the hashes of the texts of `answers`, and of each answer with its question."""
        hashes_of_examples = (
            text_hash.with_pairs(example) for _, example in self._examples_of_answers()
        )
        hashes = np.array(
            [each for hashes in hashes_of_examples for each in hashes], dtype=np.uint64
        )
        return np.concatenate([hashes, self._hash_without_start(text_hash)[1]])

    def hash_prompts(self, text_hash: TextHash) -> npt.NDArray[np.uint64]:
        """Return the hashes of the prompts of all answers.

        They include the hash without a system message, unless rows have several system messages
        before the same words: then the system message may be what the model is asked.
        """
        examples = [each for row in self for each in row if each.role not in _COPIES]
        pairs = [pair for each in examples for pair in text_hash.of_prompts(each)]
        full, bare = np.unique(np.array(pairs, dtype=np.uint64).reshape(-1, 2), axis=0).T
        single, counts = np.unique(bare, return_counts=True)
        hashes = [full, single[counts == 1]]
        if skipped := self._shared_start(text_hash):
            rest = [pair[1] for each in examples for pair in text_hash.of_prompts(each, skipped)]
            hashes.append(np.array(rest, dtype=np.uint64))
        hashed: npt.NDArray[np.uint64] = np.setdiff1d(np.concatenate(hashes), [NO_PROMPT])
        return hashed

    def _hash_last_prompts(self, text_hash: TextHash) -> npt.NDArray[np.uint64]:
        """Return the hashes of each row's last prompt, uint64 (R, 3).

        They are with a system message, without it, and without what all rows start with.
        """
        skipped = self._shared_start(text_hash)
        lasts = [text_hash.of_prompts(row[-1])[-1] for row in self]
        rest = [text_hash.of_prompts(row[-1], skipped)[-1][1] for row in self] if skipped else []
        hashes = np.full((len(lasts), 3), NO_PROMPT, dtype=np.uint64)
        hashes[:, :2] = np.array(lasts, dtype=np.uint64).reshape(-1, 2)
        hashes[: len(rest), 2] = rest
        return hashes

    def _hash_without_start(
        self, text_hash: TextHash
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return `hash_answers` of the texts without the paragraphs with which all rows start."""
        if not (length := self._shared_start(text_hash)):
            return self.only(np.zeros(0, dtype=np.int64)).hash_answers(text_hash)
        return self.hash_answers(lambda example: text_hash.hash_without_start(example, length))

    def _shared_start(self, text_hash: TextHash) -> int:
        """Return the number of characters of the paragraphs with which all rows start.

        Templates without system messages put such a message there.
        """
        shared: list[str] = []
        number = 0
        for number, (_, example) in enumerate(self._examples_of_answers(), start=1):
            *paragraphs, _ = text_hash.first_message(example).split("\n\n")
            both = zip(shared if number > 1 else paragraphs, paragraphs, strict=False)
            shared = [own for own, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
            if not shared:
                break
        return sum(len(each) + 2 for each in shared) if number >= _MIN_ROWS else 0

    def _examples_of_answers(self) -> Iterator[tuple[int, Example]]:
        """Yield the index of a row, and its last example, for each role that is no copy."""
        for index, row in enumerate(self):
            for example in {each.role: each for each in row if each.role not in _COPIES}.values():
                yield index, example

    def without(
        self,
        identities: npt.NDArray[np.uint64],
        text_hash: TextHash | None = None,
        *,
        by_prompt: bool = False,
    ) -> CorpusRows:
        """Return the rows that have neither their identity nor an answer's hash in `identities`.

        With `text_hash`, the hashes of the answers' texts count too and, `by_prompt`, the hash of
        the last prompt, whatever its answer.
        """
        excluded = np.isin(self.identities, identities)
        if len(identities):
            near = []
            if text_hash is not None:
                near = [self.hash_answers(text_hash), self._hash_without_start(text_hash)]
            for indices, hashes in (self.answers, *near):
                excluded[indices[np.isin(hashes, identities)]] = True
            if text_hash is not None and by_prompt:
                excluded |= np.isin(self._hash_last_prompts(text_hash), identities).any(axis=1)
        return self.only(np.flatnonzero(~excluded))

    def distinct(self, text_hash: TextHash | None = None, *, by_prompt: bool = False) -> CorpusRows:
        """Return the first of the rows that say the same; without `text_hash`, of equal rows.

        Rows with the same last prompt are the same `by_prompt`, whatever their answers.
        """
        keys: Sequence[Any] = self.identities.tolist()
        if text_hash is not None and by_prompt:
            prompts = self._hash_last_prompts(text_hash)[:, 0]
            keys = np.where(prompts == NO_PROMPT, self.identities, prompts).tolist()
        elif text_hash is not None:
            keys = [tuple((each.role, text_hash(each)) for each in row) for row in self]
        first = {key: i for i, key in reversed([*enumerate(keys)])}
        return self.only(np.array(sorted(first.values()), dtype=np.int64))

    def only(self, indices: npt.NDArray[np.int64]) -> CorpusRows:
        """Return the rows at the given indices of this selection."""
        return CorpusRows(self.corpus, [self.indices[i] for i in indices.tolist()])

    @cached_property
    def file_of_row(self) -> npt.NDArray[np.int32]:
        """int32 (R,): the index of each row's file."""
        return self.corpus.file_of_row[np.asarray(self.indices, dtype=np.int64)]

    def by_file(self) -> list[tuple[str, npt.NDArray[np.int64]]]:
        """Return each file's name and the indices of its rows (F,); empty unless there are several.

        A file without a known path is named by its number.
        """
        present = np.unique(self.file_of_row).tolist()
        if len(present) < 2:
            return []
        names = self.corpus.paths or [f"file {i + 1}" for i in range(len(self.corpus.files))]
        return [(names[file], np.flatnonzero(self.file_of_row == file)) for file in present]

    def source(self, index: int) -> tuple[str, int]:
        """Return the path of a row's file, if known, and the row's number in that file."""
        file, row = self.corpus.source_of(self.indices[index])
        return self.corpus.paths[file] if self.corpus.paths else "", row

    def where(self, index: int) -> str:
        path, row = self.source(index)
        return where(path, row) if path else f"row {row}"

    def __getitem__(self, index: int) -> RowExamples:
        return self.corpus.row(self.indices[index])

    def __iter__(self) -> Iterator[RowExamples]:
        return map(self.corpus.row, self.indices)

    def examples_of(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples of the rows of a step.

        A step may use a row several times, if the weight of the row's file is above 1. Each use
        counts as a separate row in a preference loss and has its own dropout.
        """
        uses: Counter[int] = Counter()
        examples: list[Example] = []
        for index in indices:
            row, use = self[index], uses[index]
            examples += [replace(example, use=use) for example in row] if use else row
            uses[index] += 1
        return examples
