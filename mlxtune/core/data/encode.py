r"""From rendered text to examples: tokens and an aligned mask of those that carry loss.

tokens          <bos> <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello ! <|im_end|> \n
assistant_mask    0        0        0   0  0      0       0      0           0      0   1   1     1       0
"""  # noqa: E501

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.bad_rows import BadRow, SkippedRows
from mlxtune.core.data.conversation import Conversation, Document, to_json
from mlxtune.core.data.notes import CONTROL_TOKEN, DOUBLE_BOS, Note, Notes
from mlxtune.core.data.template import Rendered, Rendering, Template

_CHUNK_ROWS = 512
# The texts right before answers are short and recur: their tokens are cached.
_CACHED_TAILS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Tokens and the mask of those that carry loss.

    `tokens` is int32 of shape (T,), `assistant_mask` uint8 of shape (T,), 1 where supervised.
    `row` is the 1-based number of its row in its file, and `file` the index of that file. Examples
    of one row are in the same step.
    """

    row: int
    tokens: npt.NDArray[np.int32]
    assistant_mask: npt.NDArray[np.uint8]
    file: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def supervised(self) -> int:
        """How many tokens carry loss."""
        return int(self.assistant_mask.sum())

    @property
    def key(self) -> int:
        """A number that identifies its row among the rows of all files."""
        return self.file << 40 | self.row


class Encoding(Protocol):
    """A text as tokens."""

    @property
    def ids(self) -> Sequence[int]:
        """The tokens."""

    def boundary(self, character: int) -> int | None:
        """Return how many tokens end before a character, or None if one crosses it."""

    def start(self, token: int) -> int:
        """Return the character at which a token starts."""


class Tokenizer(Protocol):
    """What encoding needs of a tokenizer.

    `bos_id` starts every sequence and `eos_id` ends a text, if the model has them. `control_tokens`
    are the texts of the special tokens and `control_ids` their ids.
    """

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def control_tokens(self) -> Sequence[str]: ...
    @property
    def control_ids(self) -> frozenset[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Encoding]:
        """Encode texts, parsing control tokens and adding none."""


@dataclass(frozen=True, slots=True)
class OffsetEncoding:
    """Tokens, and the [start, end) characters of each."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def boundary(self, character: int) -> int | None:
        """Return how many tokens end before a character, or None if one crosses it."""
        starts = [start for start, _ in self.offsets]
        tokens = bisect_left(starts, character)
        # A character split into byte tokens may give all but the last no width.
        end = max(self.offsets[tokens - 1][1], starts[tokens - 1] + 1) if tokens else 0
        return None if end > character else tokens

    def start(self, token: int) -> int:
        """Return the character at which a token starts."""
        return self.offsets[token][0]


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """The tokens of an example, and the [start, end) ranges of those that carry loss."""

    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]

    def arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return tokens (T,) and mask (T,)."""
        tokens = np.asarray(self.ids, dtype=np.int32)
        mask = np.zeros(len(tokens), dtype=np.uint8)
        for start, end in self.spans:
            mask[start:end] = 1
        return tokens, mask


def _texts(row: Conversation | Document) -> Iterator[str]:
    """Yield all text from the data, as opposed to the template's."""
    if isinstance(row, Document):
        yield row.text
        return
    for message in row.messages:
        yield message.content
        yield message.thinking
        if message.tool_calls:
            yield to_json(message.tool_calls)
    if row.tools:
        yield to_json(row.tools)


# The numbers of some rows, each with its examples.
EncodedRows = list[tuple[int, list[EncodedExample]]]


@dataclass
class Encoder:
    """Turns rows into examples. `notes` are added to every conversation."""

    template: Template
    tokenizer: Tokenizer
    notes: tuple[Note, ...] = ()
    _tails: dict[str, Sequence[int]] = field(default_factory=dict)

    def encode(
        self, rows: Iterable[Conversation | Document], skipped: SkippedRows, notes: Notes
    ) -> Iterator[EncodedRows]:
        """Yield the examples of a few rows at a time; rows that give none are added to `skipped`.

        While the tokenizer works on some rows, outside Python's lock, the next ones are rendered.
        """
        control = re.compile("|".join(map(re.escape, self.tokenizer.control_tokens)) or "(?!)")
        remaining = iter(rows)
        with ThreadPoolExecutor(max_workers=1) as tokenizing:
            pending: Future[EncodedRows] | None = None
            while True:
                chunk = list(islice(remaining, _CHUNK_ROWS))
                rendered = list(self._render(chunk, control, skipped, notes))
                if pending is not None:
                    yield list(self._check(pending.result(), skipped, notes))
                if not chunk:
                    return
                pending = tokenizing.submit(self._tokenize_rows, rendered)

    def _render(
        self,
        rows: Iterable[Conversation | Document],
        control: re.Pattern[str],
        skipped: SkippedRows,
        notes: Notes,
    ) -> Iterator[tuple[int, Rendering]]:
        for row in rows:
            try:
                rendering = self._render_row(row)
            except BadRow as problem:
                skipped.add(row.row, problem)
                continue
            row_notes = list(rendering.notes)
            if written := next(filter(None, map(control.search, _texts(row))), None):
                row_notes.append(Note(CONTROL_TOKEN, written.group()))
            if isinstance(row, Conversation):
                row_notes += self.notes
            notes.add(row.row, row_notes)
            yield row.row, rendering

    def _render_row(self, row: Conversation | Document) -> Rendering:
        if isinstance(row, Conversation):
            return self.template(row)
        if self.tokenizer.eos_id is None:
            raise BadRow("the tokenizer has no end-of-text token to close the text")
        return Rendering((Rendered(row.text, ((0, len(row.text)),), add_end=True),))

    def _check(
        self, rows: EncodedRows, skipped: SkippedRows, notes: Notes
    ) -> Iterator[tuple[int, list[EncodedExample]]]:
        bos = self.tokenizer.bos_id
        for row, examples in rows:
            if bos is not None and any(list(one.ids[:2]) == [bos, bos] for one in examples):
                notes.add(row, [Note(DOUBLE_BOS)])
            if any(start < end for one in examples for start, end in one.spans):
                yield row, examples
            else:
                skipped.add(row, BadRow("the tokenizer gives no token for the answer"))

    def _tokenize_rows(self, rendered: Sequence[tuple[int, Rendering]]) -> EncodedRows:
        tokenized = self._tokenize([text for _, row in rendered for text in row.texts])
        return [(n, [one for _ in row.texts for one in next(tokenized)]) for n, row in rendered]

    def _tokenize(self, rendered: Sequence[Rendered]) -> Iterator[list[EncodedExample]]:
        """Yield the examples of each text: one, or one for each of its turns.

        A text is tokenised as a whole. It is one example if it shows the tokens of every turn's
        prompt as inference will give them. If not, because a token crosses an edge of an answer,
        each turn is an example: the tokens of its prompt, then those of its answer.
        """
        encoded = self.tokenizer.encode_batch([text.text for text in rendered])
        for text, whole in zip(rendered, encoded, strict=True):
            ranges = [self._token_span(text.text, whole, span) for span in text.spans]
            spans = [span for span in ranges if span is not None]
            if len(spans) == len(ranges):
                yield [self._with_bos_and_end(text, EncodedExample(whole.ids, spans))]
            else:
                yield [self._with_bos_and_end(text, turn) for turn in self._split_turns(text)]

    def _token_span(
        self, text: str, whole: Encoding, span: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Return the token range of a span, or None if the whole differs from the prompt's tokens.

        Tokenizers split a text at control tokens first, so only the tail of the prompt after the
        last of them can differ and has to be compared.
        """
        start, end = whole.boundary(span[0]), whole.boundary(span[1])
        if start is None or end is None:
            return None
        control_ids, first = self.tokenizer.control_ids, start
        while first > 0:
            first -= 1
            if whole.ids[first] in control_ids:
                break
        tail = text[whole.start(first) if first else 0 : span[0]]
        return (start, end) if self._ids(tail) == list(whole.ids[first:start]) else None

    def _ids(self, tail: str) -> Sequence[int]:
        if tail not in self._tails:
            if len(self._tails) >= _CACHED_TAILS:
                self._tails.clear()
            self._tails[tail] = list(self.tokenizer.encode_batch([tail])[0].ids) if tail else []
        return self._tails[tail]

    def _split_turns(self, text: Rendered) -> Iterator[EncodedExample]:
        prompts = self.tokenizer.encode_batch([text.text[:start] for start, _ in text.spans])
        for prompt, (start, end) in zip(prompts, text.spans, strict=True):
            answer = self._continuation(text.text[start:end])
            yield EncodedExample(
                [*prompt.ids, *answer], [(len(prompt.ids), len(prompt.ids) + len(answer))]
            )

    def _continuation(self, answer: str) -> Sequence[int]:
        """Return the tokens of a text that continues a sequence.

        Some tokenizers put a space before a text; a character before it takes that space.
        """
        for before in "\n", ".", "a":
            encoded = self.tokenizer.encode_batch([before + answer])[0]
            boundary = encoded.boundary(len(before))
            if boundary is not None:
                return encoded.ids[boundary:]
        return self.tokenizer.encode_batch([answer])[0].ids

    def _with_bos_and_end(self, text: Rendered, one: EncodedExample) -> EncodedExample:
        """Add BOS before an example unless it is there, and the end-of-text token after it."""
        ids, spans = one.ids, one.spans
        if text.add_end and self.tokenizer.eos_id is not None:
            ids, spans = [*ids, self.tokenizer.eos_id], [*spans, (len(ids), len(ids) + 1)]
        bos = self.tokenizer.bos_id
        if text.add_bos and bos is not None and (not ids or ids[0] != bos):
            ids, spans = [bos, *ids], [(start + 1, end + 1) for start, end in spans]
        # Nothing predicts the first token, so it carries no loss.
        return EncodedExample(ids, [(max(start, 1), max(end, 1)) for start, end in spans])
