"""What `mlxtune inspect` shows of the data: numbers, findings, and rows as the model sees them.

Nothing here prints: core/inspect_page.py makes a page, inspect_console.py lines for a terminal.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import Corpus, ExampleArrays
from mlxtune.core.data.encode import Example
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.ledger import EncodedFile

SCHEMA_VERSION = 1
_SHORTEST_LIMIT = 128


class SpellingTokenizer(Protocol):
    """What is asked of a tokenizer to show tokens."""

    @property
    def control_ids(self) -> frozenset[int]: ...

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token stands for."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a number of tokens over all examples."""

    p50: int
    p95: int
    max: int
    mean: float
    total: int

    @classmethod
    def of(cls, values: npt.NDArray[np.int64]) -> Distribution:
        """Return the distribution of values (N,); percentiles are values that occur."""
        if not len(values):
            return cls(0, 0, 0, 0.0, 0)
        ordered = np.sort(values)
        p50, p95 = (int(ordered[-(-len(ordered) * p // 100) - 1]) for p in (50, 95))
        return cls(p50, p95, int(ordered[-1]), float(ordered.mean()), int(ordered.sum()))


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """What a `--max-seq-len` would cut. `rows_lost` would be left with no supervised token."""

    max_seq_len: int
    rows_cut: int
    rows_lost: int
    tokens_cut: int
    supervised_cut: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What one epoch takes: optimizer steps, and tokens through the model without padding.

    `validation_tokens` are those of one validation.
    """

    steps: int
    tokens: int
    supervised: int
    validation_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an example's text, of one or more tokens that make whole characters.

    `control` tells whether it is a control token, `supervised` whether it carries loss.
    """

    text: str
    tokens: int
    control: bool
    supervised: bool


@dataclass(frozen=True, slots=True)
class ShownExample:
    """An example as the model sees it. `part` of `parts` where a row became several examples.

    `cut` tokens beyond --max-seq-len are not among the pieces. `kinds` are those of the findings
    that name its row.
    """

    path: str
    row: int
    part: int
    parts: int
    split: str  # "train" or "validation"
    tokens: int
    supervised: int
    cut: int
    pieces: tuple[Piece, ...]
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """All of it. `files` are ledgers as ledger.json has them, lengths are before any cut."""

    model: str
    template: str
    thinking: str
    turns: str
    max_seq_len: int
    batch_size: int
    files: tuple[dict[str, Any], ...]
    examples: int
    tokens: Distribution
    supervised: Distribution
    limits: tuple[LengthLimit, ...]
    cost: Cost
    findings: tuple[Finding, ...]
    shown: tuple[ShownExample, ...]

    @property
    def errors(self) -> Sequence[Finding]:
        """The findings that `train` refuses."""
        return [finding for finding in self.findings if finding.level == "error"]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, as docs/inspect.md describes them."""
        return {"schema_version": SCHEMA_VERSION} | asdict(self)


class Examples:
    """Every example that trains or validates, in order, and how it is shown.

    `files` are those of the corpus, then those of the validation corpus; `held_out` are the rows
    of the corpus, by their index, that validate.
    """

    def __init__(
        self,
        files: Sequence[EncodedFile],
        corpus: Corpus,
        validation: Corpus | None,
        held_out: Sequence[int],
    ) -> None:
        self._files = files
        self._parts = [corpus, validation] if validation else [corpus]
        rows = [part.row_of_example for part in self._parts]
        validates = [np.isin(rows[0], np.asarray(held_out, dtype=np.int64))]
        validates += [np.ones(len(part), dtype=bool) for part in self._parts[1:]]
        self._validates = np.concatenate(validates)
        self._rows = rows
        # Before any cut, so of those too that a cut takes away.
        uncut = [file.arrays for file in files]
        self.lengths = np.concatenate([arrays.lengths for arrays in uncut])
        self.supervised = np.concatenate([arrays.supervised_within(None) for arrays in uncut])

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def total(self) -> int:
        """How many examples there are before any cut."""
        return len(self.lengths)

    def cost(self, batch_size: int) -> Cost:
        """Return what an epoch takes."""
        kept = np.concatenate([part.lengths for part in self._parts])
        supervised = np.concatenate([part.supervised for part in self._parts])
        trains = ~self._validates
        train_rows = len(np.unique(self._rows[0][trains[: len(self._rows[0])]]))
        return Cost(
            steps=math.ceil(train_rows / batch_size),
            tokens=int(kept[trains].sum()),
            supervised=int(supervised[trains].sum()),
            validation_tokens=int(kept[self._validates].sum()),
        )

    def of_row(self, row: int) -> list[int]:
        """Return the examples of the rows of this number, one in each file."""
        numbers = np.concatenate([part.row_numbers for part in self._parts])
        return [int(i) for i in np.flatnonzero(numbers == row)]

    def choose(self, findings: Sequence[Finding], count: int) -> list[int]:
        """Return examples to show: a spread over all of them, and the rows that findings name."""
        named = {(place.path, place.row) for finding in findings for place in finding.places}
        rows = {row for _, row in named}
        chosen = [i for row in rows for i in self.of_row(row) if self._place(i)[:2] in named]
        return sorted({*chosen, *self._spread(count - len(chosen))})

    def _spread(self, count: int) -> list[int]:
        count = max(min(count, len(self)), 0)
        spread: list[int] = np.linspace(0, len(self) - 1, count).astype(int).tolist()
        return spread

    def _place(self, index: int) -> tuple[str, int, Example, int]:
        """Return path, row, the example, and its index within its corpus."""
        part, at, first = self._parts[0], index, 0
        if index >= len(part):
            part, at, first = self._parts[1], index - len(part), len(part.files)
        example = part[at]
        return str(self._files[first + example.file].skipped.path), example.row, example, at

    def show(
        self, index: int, tokenizer: SpellingTokenizer, findings: Sequence[Finding]
    ) -> ShownExample:
        """Return an example as the model sees it."""
        path, row, example, at = self._place(index)
        corpus = self._parts[0] if index < len(self._parts[0]) else self._parts[1]
        part, parts, uncut = corpus.part_of_row(at)
        return ShownExample(
            path=path,
            row=row,
            part=part,
            parts=parts,
            split="validation" if self._validates[index] else "train",
            tokens=len(example),
            supervised=example.supervised,
            cut=uncut - len(example),
            pieces=tuple(pieces(example, tokenizer)),
            kinds=tuple(
                finding.kind
                for finding in findings
                if any(place.path == path and place.row == row for place in finding.places)
            ),
        )


def pieces(example: Example, tokenizer: SpellingTokenizer) -> Iterator[Piece]:
    """Yield an example's text, token by token where each holds whole characters.

    Bytes that are no UTF-8 become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids = example.tokens.tolist()
    text, tokens = "", 0
    for i, spelled in enumerate(tokenizer.spell(ids)):
        control, supervised = ids[i] in tokenizer.control_ids, bool(example.assistant_mask[i])
        last = i + 1 == len(ids) or ids[i + 1] in tokenizer.control_ids
        last = last or bool(example.assistant_mask[i + 1]) != supervised
        text += decoder.decode(spelled, final=last)
        tokens += 1
        # The rest of a character may be in the next token.
        if last or not decoder.getstate()[0]:
            yield Piece(text, tokens, control, supervised)
            text, tokens = "", 0


def limits(files: Sequence[EncodedFile], current: int) -> tuple[LengthLimit, ...]:
    """Return what each power of two up to the longest example would cut, and the current limit."""
    longest = max((int(a.lengths.max(initial=0)) for a in _arrays(files)), default=0)
    sizes = {current}
    size = _SHORTEST_LIMIT
    while size // 2 < longest:
        sizes.add(size)
        size *= 2
    every = [_limit(files, size) for size in sorted(sizes)]
    # Of limits that cut the same rows, the shortest tells enough.
    first = {(limit.rows_cut, limit.rows_lost): limit.max_seq_len for limit in reversed(every)}
    told = {current, every[-1].max_seq_len, *first.values()}
    return tuple(limit for limit in every if limit.max_seq_len in told)


def _limit(files: Sequence[EncodedFile], size: int) -> LengthLimit:
    rows_cut = rows_lost = tokens_cut = supervised_cut = 0
    for arrays in _arrays(files):
        lengths = arrays.lengths
        supervised = arrays.supervised_within(size)
        lost = supervised == 0
        cut = np.where(lost, lengths, np.maximum(lengths - size, 0))
        rows_cut += int((arrays.per_row(cut) > 0).sum())
        rows_lost += int((arrays.per_row(~lost) == 0).sum())
        tokens_cut += int(cut.sum())
        supervised_cut += int((arrays.supervised_within(None) - supervised).sum())
    return LengthLimit(size, rows_cut, rows_lost, tokens_cut, supervised_cut)


def _arrays(files: Sequence[EncodedFile]) -> Iterator[ExampleArrays]:
    return (file.arrays for file in files)
