"""The contents of `mlxtune inspect`: numbers, findings, and rows as the model sees them.

views/inspection_view.py prints them, and turns them into a page.
"""

from __future__ import annotations

import codecs
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import ANSWER, CHOSEN, REJECTED, ROLE_NAMES
from mlxtune.core.data.corpus import Corpus, rows_used
from mlxtune.core.data.encode import Example, Tokenizer
from mlxtune.core.data.encoded_file import EncodedFile
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.problems import where

SCHEMA_VERSION = 1
_MIN_LIMIT = 128
# In pairs with more pieces than this, the most frequent pieces are not compared, to save time.
_MAX_EXACT_PIECES = 1000
# The fraction of the supervised tokens that may be truncated without a warning.
_MAX_TRUNCATED_FRACTION = 0.01


@dataclass(frozen=True, slots=True)
class Distribution:
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
    """How many rows and tokens a --max-seq-len cuts; `rows_lost` rows keep no supervised token."""

    max_seq_len: int
    rows_cut: int
    rows_lost: int
    tokens_cut: int
    supervised_cut: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an epoch: its numbers of optimizer steps, tokens and supervised tokens.

    `validation_tokens` is the number of tokens of one validation. No count includes padding.
    """

    steps: int
    tokens: int
    supervised: int
    validation_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an example's text: one token, or the fewest tokens that form whole characters.

    `differs` says whether the other answer of the example's pair lacks the piece.
    """

    text: str
    tokens: int
    control: bool
    supervised: bool
    differs: bool = False


@dataclass(frozen=True, slots=True)
class ShownExample:
    """An example as the model sees it: part `part` of the `parts` parts of its row.

    `role` is the name of the example's role in its row. `cut` tokens beyond --max-seq-len are not
    in `pieces`. `kinds` are the kinds of the findings that name the row.
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
    role: str = "answer"

    @property
    def where(self) -> str:
        return where(self.path, self.row)

    @property
    def differing(self) -> int:
        """The number of tokens that the other answer of the example's pair lacks."""
        return sum(piece.tokens for piece in self.pieces if piece.differs)


@dataclass(frozen=True, slots=True)
class ShownPair:
    """The two answers of a pair, whose first `common` pieces are the same."""

    chosen: ShownExample
    rejected: ShownExample

    @property
    def common(self) -> int:
        return _common(self.chosen.pieces, self.rejected.pieces)

    @property
    def answers(self) -> tuple[ShownExample, ShownExample]:
        return self.chosen, self.rejected


def together(shown: Sequence[ShownExample]) -> list[ShownExample | ShownPair]:
    """Group examples for display: the two answers of a pair together, other examples alone."""
    roles = ROLE_NAMES[CHOSEN], ROLE_NAMES[REJECTED]
    by_place = {(each.path, each.row, each.part, each.role): each for each in shown}
    grouped: list[ShownExample | ShownPair] = []
    for (path, row, part, role), example in by_place.items():
        chosen, rejected = (by_place.get((path, row, part, each)) for each in roles)
        if role not in roles or chosen is None or rejected is None:
            grouped.append(example)
        elif example is chosen:
            grouped.append(ShownPair(chosen, rejected))
    return grouped


@dataclass(frozen=True)
class Inspection:
    """An inspection's result. `files` are ledgers as in ledger.json.

    `tokens` and `supervised` are distributions over the examples before truncation.
    """

    model: str
    template: str
    thinking: str
    turns: str
    max_seq_len: int
    batch_size: int
    files: tuple[dict[str, Any], ...] = field(repr=False)
    examples: int
    tokens: Distribution
    supervised: Distribution
    limits: tuple[LengthLimit, ...] = field(repr=False)
    cost: Cost
    findings: tuple[Finding, ...] = field(repr=False)
    shown: tuple[ShownExample, ...] = field(repr=False)

    @property
    def errors(self) -> Sequence[Finding]:
        """The findings for which `train` refuses the data."""
        return [finding for finding in self.findings if finding.level == "error"]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, as docs/inspect.md describes them."""
        return {"schema_version": SCHEMA_VERSION} | asdict(self)


class InspectedExamples:
    """All training and validation examples, in order.

    `validates` has the indices of the validation rows among the rows of all files.
    """

    def __init__(self, parts: Sequence[Corpus], validates: Sequence[int]) -> None:
        files = [file for part in parts for file in part.files]
        paths = [path for part in parts for path in part.paths]
        self._corpus = Corpus(files, paths, [weight for part in parts for weight in part.weights])
        held_out = np.asarray(validates, dtype=np.int64)
        self._validates = np.isin(self._corpus.row_of_example, held_out)
        # Lengths before truncation, dropped examples included.
        self.lengths = np.concatenate([each.counts.full for each in files])
        self.supervised = np.concatenate([each.truncate().counts.supervised for each in files])

    def __len__(self) -> int:
        return len(self._corpus)

    def cost(self, batch_size: int) -> Cost:
        corpus, trains, counts = self._corpus, ~self._validates, self._corpus.counts
        files = corpus.file_of_row[corpus.row_of_example]
        uses = np.asarray(corpus.weights)[files] * trains
        rows = 0
        for file, weight in enumerate(corpus.weights):
            own = len(np.unique(corpus.row_of_example[trains & (files == file)]))
            whole, part = rows_used(own, weight)
            rows += whole * own + part
        return Cost(
            steps=math.ceil(rows / batch_size),
            tokens=round(float((counts.kept * uses).sum())),
            supervised=round(float((counts.supervised * uses).sum())),
            validation_tokens=int(counts.kept[self._validates].sum()),
        )

    def of_row(self, row: int) -> list[int]:
        """Return the indices of the examples of the rows with this number, one row in each file."""
        return [int(i) for i in np.flatnonzero(self._corpus.row_numbers == row)]

    def choose(self, findings: Sequence[Finding], count: int) -> list[int]:
        """Return indices of examples to show: those that findings name, and evenly spaced others.

        Preference rows are shown whole.
        """
        problems = (finding for finding in findings if finding.level != "note")
        named = {(place.path, place.row) for finding in problems for place in finding.places}
        rows = {row for _, row in named}
        selected = [i for row in rows for i in self.of_row(row) if (self._path_of(i), row) in named]
        others = max(min(count - len(selected), len(self)), 0)
        selected += np.linspace(0, len(self) - 1, others).astype(int).tolist()
        if self._corpus.roles.any():
            row_of = self._corpus.row_of_example
            selected = np.flatnonzero(np.isin(row_of, row_of[np.unique(selected)])).tolist()
        return sorted(set(selected))

    def _path_of(self, index: int) -> str:
        return self._corpus.paths[self._corpus[index].file]

    def show(
        self, indices: Sequence[int], tokenizer: Tokenizer, findings: Sequence[Finding]
    ) -> tuple[ShownExample, ...]:
        """Return examples as the model sees them; in pairs, differences are marked."""
        shown: list[ShownExample] = []
        for each in together([self._show(index, tokenizer, findings) for index in indices]):
            shown += _marked(each) if isinstance(each, ShownPair) else [each]
        return tuple(shown)

    def _show(self, index: int, tokenizer: Tokenizer, findings: Sequence[Finding]) -> ShownExample:
        example, path = self._corpus.shown(index), self._path_of(index)
        part, parts, full_length = self._corpus.part_of_example(index)
        cut = full_length - len(self._corpus[index])
        return ShownExample(
            path=path,
            row=example.row,
            part=part,
            parts=parts,
            split="validation" if self._validates[index] else "train",
            tokens=len(example),
            supervised=example.supervised,
            cut=cut,
            pieces=tuple(text_pieces(example, tokenizer)),
            kinds=tuple(
                finding.kind
                for finding in findings
                if finding.level != "note"
                and any((place.path, place.row) == (path, example.row) for place in finding.places)
            ),
            role=ROLE_NAMES[example.role],
        )


def text_pieces(example: Example, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield an example's text piece by piece; bytes that are not UTF-8 become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids = example.tokens.tolist()
    text, tokens = "", 0
    for i, spelled in enumerate(tokenizer.token_bytes(ids)):
        control, supervised = ids[i] in tokenizer.control_ids, bool(example.assistant_mask[i])
        last = i + 1 == len(ids) or ids[i + 1] in tokenizer.control_ids
        last = last or bool(example.assistant_mask[i + 1]) != supervised
        text += decoder.decode(spelled, final=last)
        tokens += 1
        # A character may continue in the next token.
        if last or not decoder.getstate()[0]:
            yield Piece(text, tokens, control, supervised)
            text, tokens = "", 0


def _common(one: Sequence[Piece], other: Sequence[Piece]) -> int:
    """Return how many leading pieces are equal, up to the first piece that carries loss."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if (a.text, a.control) != (b.text, b.control) or a.supervised or b.supervised:
            return i
    return min(len(one), len(other))


def _marked(pair: ShownPair) -> tuple[ShownExample, ShownExample]:
    """Return the answers of a pair; pieces that the other answer lacks are marked."""
    start = pair.common
    one, other = (
        [(piece.text, piece.control) for piece in answer.pieces[start:]] for answer in pair.answers
    )
    matcher = SequenceMatcher(None, one, other, autojunk=len(one) > _MAX_EXACT_PIECES)
    blocks = matcher.get_matching_blocks()
    same = (
        {start + block.a + i for block in blocks for i in range(block.size)},
        {start + block.b + i for block in blocks for i in range(block.size)},
    )

    def marked(example: ShownExample, kept: set[int]) -> ShownExample:
        marked = [
            replace(piece, differs=i >= start and i not in kept)
            for i, piece in enumerate(example.pieces)
        ]
        return replace(example, pieces=tuple(marked))

    return marked(pair.chosen, same[0]), marked(pair.rejected, same[1])


@dataclass(frozen=True)
class TruncationReport:
    """The fraction of supervised tokens that --max-seq-len truncates, and a limit that keeps 99%.

    `skipped` counts preference rows that are longer: they are not cut but skipped.
    """

    fraction: float
    enough: int
    skipped: int = 0


def truncation_report(
    files: Sequence[EncodedFile], max_seq_len: int, at: str
) -> TruncationReport | None:
    """Return what a --max-seq-len cuts off, or None if it is at most 1% of the supervised tokens.

    `enough` is a power of two, or halfway between two powers.
    """
    most, fraction = 1 - _MAX_TRUNCATED_FRACTION, _supervised_fraction(files, max_seq_len, at)
    if fraction >= most:
        return None
    longest = max(int(file.arrays.lengths.max(initial=0)) for file in files)
    powers = [2**k for k in range(1, longest.bit_length() + 1)]
    sizes = sorted({*powers, *(3 * power // 2 for power in powers)})
    sizes = [size for size in sizes if size > max_seq_len]
    first = bisect_left(sizes, most, key=lambda size: _supervised_fraction(files, size, at))
    paired = [file.arrays for file in files if (file.arrays.roles != ANSWER).any()]
    skipped = sum(int((~each.truncate(max_seq_len, at=at).rows_kept).sum()) for each in paired)
    return TruncationReport(1 - fraction, sizes[first], skipped)


def _supervised_fraction(files: Sequence[EncodedFile], max_seq_len: int, at: str) -> float:
    kept = sum(int(file.arrays.truncate(max_seq_len, at=at).supervised.sum()) for file in files)
    return kept / max(sum(int(file.arrays.supervised.sum()) for file in files), 1)


def limits(files: Sequence[EncodedFile], current: int, at: str) -> tuple[LengthLimit, ...]:
    """Return what is cut off at the current limit, and at powers of two that may cut rows."""
    longest = max((int(file.arrays.lengths.max(initial=0)) for file in files), default=0)
    sizes = {current}
    size = _MIN_LIMIT
    while size // 2 < longest:
        sizes.add(size)
        size *= 2
    every = [_limit(files, size, at) for size in sorted(sizes)]
    # Among limits that cut equally many rows, show only the smallest.
    first = {(limit.rows_cut, limit.rows_lost): limit.max_seq_len for limit in reversed(every)}
    shown = {current, every[-1].max_seq_len, *first.values()}
    return tuple(limit for limit in every if limit.max_seq_len in shown)


def _limit(files: Sequence[EncodedFile], size: int, at: str) -> LengthLimit:
    cuts = [file.arrays.truncate(size, at=at) for file in files]
    return LengthLimit(
        max_seq_len=size,
        rows_cut=sum(int(cut.rows_truncated.sum()) for cut in cuts),
        rows_lost=sum(int((~cut.rows_kept).sum()) for cut in cuts),
        tokens_cut=sum(int(cut.tokens_truncated.sum()) for cut in cuts),
        supervised_cut=sum(
            int((file.arrays.supervised - each.supervised).sum())
            for file, each in zip(files, cuts, strict=True)
        ),
    )
