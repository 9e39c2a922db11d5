r"""Turns rendered text into examples: tokens, and an aligned mask of tokens that carry loss.

tokens          <bos> <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello ! <|im_end|> \n
assistant_mask    0        0        0   0  0      0       0      0           0      0   1   1     1       0
"""  # noqa: E501

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import (
    ANSWER,
    MISMATCHED,
    Conversation,
    Document,
    Pair,
    Row,
    to_json,
)
from mlxtune.core.data.problems import (
    CONTROL_TOKEN,
    DOUBLE_BOS,
    RENDERED_CHAT,
    TWO_PROMPTS,
    BadRowError,
    RowTally,
    SkippedRows,
    bounded,
)
from mlxtune.core.data.sources.notes import ControlTokens, notes_on, notes_on_keys
from mlxtune.core.data.template import PendingRendering, RenderedText, Rendering, Template

_CHUNK_ROWS = 512
# Tokenizers take some 200 bytes of memory for each character of a batch.
_CHUNK_CHARACTERS, _MAX_CHARS = 2**21, 2**22
# The maximum number of characters of prompts, or of their tails, to encode singly: 30 s of work.
_MAX_PROMPTS = 2**24
_ROWS_PER_START = 32
# Texts before answers are short and recur, so their tokens are cached.
_CACHED_TAILS, _MAX_TAIL_CHARS = 4096, 1000

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """The tokens of an example, and the mask of the tokens that carry loss.

    `tokens` is int32 of shape (T,), `assistant_mask` uint8 of shape (T,), 1 where supervised. `row`
    is the 1-based number of the example's row in its file, and `file` the index of that file.
    `role` is the example's role in a preference row, and `reference` the summed log-probability of
    the supervised tokens under the model before the first step, if the objective needs it. Examples
    of one row are in the same step. `use` counts from 0 the times that a step uses the row.
    """

    row: int
    tokens: npt.NDArray[np.int32]
    assistant_mask: npt.NDArray[np.uint8]
    file: int = 0
    role: int = ANSWER
    reference: float = 0.0
    use: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def supervised(self) -> int:
        """The number of tokens that carry loss."""
        return int(self.assistant_mask.sum())

    @property
    def has_gradient(self) -> bool:
        """Whether the example has a part in a step's gradient."""
        return self.role != MISMATCHED

    @property
    def key(self) -> int:
        """A number that identifies the example's row across all files, and its use."""
        return self.use << 80 | self.file << 40 | self.row


def forward_tokens(example: Example) -> int:
    """Return how many tokens the model must process: those before the last supervised token.

    Later tokens predict nothing that carries loss. The result is at least 1.
    """
    supervised = example.assistant_mask[:0:-1]
    return len(supervised) - int(supervised.argmax()) if supervised.any() else 1


@dataclass(frozen=True, slots=True)
class StepExamples:
    """The examples of a step: `training` have a part in its gradient, `others` only in its loss.

    The indices of a step's examples, in lengths and micro-batches, index `training`.
    """

    training: Sequence[Example]
    others: Sequence[Example]

    @classmethod
    def of(cls, examples: Iterable[Example]) -> Self:
        training, others = list[Example](), list[Example]()
        for example in examples:
            (training if example.has_gradient else others).append(example)
        return cls(training, others)


def predicted_tokens(example: Example) -> int:
    """Return the number of supervised tokens after the first token, which nothing predicts."""
    return int(example.assistant_mask[1:].sum())


class Encoding(Protocol):
    """A tokenised text."""

    @property
    def ids(self) -> Sequence[int]:
        """The tokens."""

    def boundary(self, character: int) -> int | None:
        """Return the number of tokens before a character, or None if a token spans its start."""

    def start(self, token: int) -> int:
        """Return the character at which a token starts."""


class Tokenizer(Protocol):
    """The part of a tokenizer's interface that encoding texts and showing tokens need.

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
        """Encode texts, including control tokens in them, without adding control tokens."""

    def token_bytes(self, ids: Sequence[int]) -> Sequence[bytes]:
        """Return the bytes of each token."""


@dataclass(frozen=True, slots=True)
class OffsetEncoding:
    """Tokens, and the [start, end) range of each token's characters."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def boundary(self, character: int) -> int | None:
        """Return the number of tokens before a character, or None if a token spans its start."""
        tokens = bisect_left(self.offsets, (character, -1))
        start, end = self.offsets[tokens - 1] if tokens else (-1, 0)
        # If a character is split into byte tokens, only the last token may have a width.
        end = max(end, start + 1)
        return None if end > character else tokens

    def start(self, token: int) -> int:
        """Return the character at which a token starts."""
        return self.offsets[token][0]


def _texts(row: Row) -> Iterator[str]:
    """Yield all text that comes from the data, not from the template."""
    if isinstance(row, Document):
        yield row.text
        return
    if isinstance(row, Pair):
        for answer in row.answers:
            yield from _texts(answer)
        return
    for message in row.messages:
        yield to_json(message.fields) if len(message.fields) > 2 else message.content
    if row.tools:
        yield to_json(row.tools)


# A row, and the pending renderings of its conversations.
StartedRow = tuple[Row, Sequence[PendingRendering]]
# A few rows, each as a list of its examples.
EncodedRows = list[list[Example]]


def _conversations(row: Row) -> Sequence[Conversation]:
    if isinstance(row, Pair):
        return row.answers
    return [row] if isinstance(row, Conversation) else []


@dataclass
class Encoder:
    """Turns rows into examples.

    `notes` are added to every conversation's notes. `start`, if given, starts to render the next
    conversations with the template while the previous rows are encoded.
    """

    template: Template
    tokenizer: Tokenizer
    notes: Mapping[str, str] = field(default_factory=dict)
    start: Callable[[Sequence[Conversation]], Iterable[PendingRendering]] | None = None
    # The source of the model's own template.
    template_text: str = ""
    # If true, pairs also get an example whose chosen text carries loss from its first token on.
    trains_prompts: bool = False
    _tails: dict[str, Sequence[int]] = field(default_factory=dict)
    _prompt_budget: int = _MAX_PROMPTS

    def encode(
        self, rows: Iterable[Row], skipped: SkippedRows, notes: RowTally
    ) -> Iterator[EncodedRows]:
        """Yield the examples of a few rows at a time; add rows without examples to `skipped`.

        While the tokenizer works on some rows, outside Python's lock, the next rows are rendered.
        """
        control = ControlTokens(self.tokenizer.control_tokens)
        with ThreadPoolExecutor(max_workers=1) as tokenizing:
            pending: Future[EncodedRows] | None = None
            for rendered in _chunks(self._render(rows, control, skipped, notes), _total):
                if pending is not None:
                    yield list(self._check(pending.result(), skipped, notes))
                pending = tokenizing.submit(self._tokenize, rendered)
            if pending is not None:
                yield list(self._check(pending.result(), skipped, notes))

    def _render(
        self,
        rows: Iterable[Row],
        control: ControlTokens,
        skipped: SkippedRows,
        notes: RowTally,
    ) -> Iterator[Rendering]:
        for batch in self._started(iter(rows)):
            for row, pending in batch:
                try:
                    text = "\0".join(_texts(row))
                    _check_surrogates(text)
                    rendering = self._render_row(row, iter(pending))
                    together = (
                        sum if len(rendering.texts) > 1 and _has_preference(rendering) else max
                    )
                    if (longest := together(map(_length, rendering.texts))) > _MAX_CHARS:
                        raise BadRowError(
                            "its text is too long", f"{longest:,} characters: split it"
                        )
                except BadRowError as problem:
                    skipped.add(row.row, problem)
                    continue
                conversation = row.chosen if isinstance(row, Pair) else row
                noted = dict(rendering.notes) | dict(notes_on(conversation, text))
                noted |= notes_on_keys(row, self.template_text)
                if RENDERED_CHAT not in noted and (written := control.search(text)):
                    noted[CONTROL_TOKEN] = written
                if not isinstance(row, Document):
                    noted |= self.notes
                for kind, detail in noted.items():
                    notes.count(row.row, bounded(kind, notes.counts), detail)
                yield rendering

    def _started(self, rows: Iterator[Row]) -> Iterator[list[StartedRow]]:
        """Yield a few rows at a time, once the rendering of the next rows has started."""
        following: list[StartedRow] = []
        while batch := list(islice(rows, _ROWS_PER_START)):
            pending = iter(self._start([each for row in batch for each in _conversations(row)]))
            started: list[StartedRow] = [
                (row, list(islice(pending, len(_conversations(row))))) for row in batch
            ]
            if following:
                yield following
            following = started
        if following:
            yield following

    def _start(self, conversations: Sequence[Conversation]) -> Iterable[PendingRendering]:
        if self.start is not None:
            return self.start(conversations)
        return [partial(self.template, conversation) for conversation in conversations]

    def _render_row(self, row: Row, pending: Iterator[PendingRendering]) -> Rendering:
        if isinstance(row, Pair):
            return self._render_pair(row, pending)
        if isinstance(row, Conversation):
            rendering = next(pending)()
            return rendering if row.role == ANSWER else rendering.in_role(row.role)
        if self.tokenizer.eos_id is None:
            raise BadRowError("the tokenizer has no end-of-text token to close the text")
        text = RenderedText(row.text, ((0, len(row.text)),), add_end=True)
        return Rendering(row.row, (text,))

    def _render_pair(self, pair: Pair, pending: Iterator[PendingRendering]) -> Rendering:
        chosen, rejected = (self._render_row(answer, pending) for answer in pair.answers)
        if [text.text for text in chosen.texts] == [text.text for text in rejected.texts]:
            raise BadRowError("the template renders chosen and rejected alike")
        notes = {**rejected.notes, **chosen.notes}
        if chosen.texts[0].prompt != rejected.texts[0].prompt:
            notes[TWO_PROMPTS] = ""
        whole = [text.whole() for text in chosen.texts] if self.trains_prompts else []
        return Rendering(pair.row, (*chosen.texts, *rejected.texts, *whole), notes)

    def _check(
        self, rows: EncodedRows, skipped: SkippedRows, notes: RowTally
    ) -> Iterator[list[Example]]:
        bos = self.tokenizer.bos_id
        for examples in rows:
            row = examples[0].row
            if bos is not None and any(one.tokens[:2].tolist() == [bos, bos] for one in examples):
                notes.count(row, DOUBLE_BOS)
            supervised = [bool(one.assistant_mask.any()) for one in examples]
            if not all(map(len, examples)):
                skipped.add(row, BadRowError("it has too many turns to encode"))
            elif all(supervised) or (examples[0].role == ANSWER and any(supervised)):
                yield examples
            else:
                skipped.add(row, BadRowError("the answer tokenises to nothing"))

    def _tokenize(self, rendered: Sequence[Rendering]) -> EncodedRows:
        texts = [text.text for rendering in rendered for text in rendering.texts]
        encoded = self._encoded(texts)
        return [
            [
                example
                for text in rendering.texts
                for example in self._examples(rendering.row, text, next(encoded))
            ]
            for rendering in rendered
        ]

    def _encoded(self, texts: Iterable[str]) -> Iterator[Encoding]:
        return chain.from_iterable(map(self.tokenizer.encode_batch, _chunks(texts, len)))

    def _examples(self, row: int, text: RenderedText, whole: Encoding) -> Iterator[Example]:
        """Yield the examples of a text: one, or one for each of its turns.

        A text is tokenised as a whole. The text becomes one example if its tokens contain every
        turn's prompt as inference tokenises that prompt. If not, because a token crosses an edge of
        an answer, each turn is an example: the tokens of its prompt, then the tokens of its answer.
        """
        self._prompt_budget = _MAX_PROMPTS
        ranges = [self._token_span(text.text, whole, span) for span in text.spans]
        spans = [span for span in ranges if span is not None]
        if len(spans) == len(ranges):
            yield self._example(row, text, whole.ids, spans)
            return
        if sum(start for start, _ in text.spans) > _MAX_PROMPTS:
            yield Example(row, np.zeros(0, np.int32), np.zeros(0, np.uint8))
            return
        prompts = self._encoded(text.text[:start] for start, _ in text.spans)
        for prompt, (start, end) in zip(prompts, text.spans, strict=True):
            ids = [*prompt.ids, *self._continuation(text.text[start:end])]
            yield self._example(row, text, ids, [(len(prompt.ids), len(ids))])

    def _token_span(
        self, text: str, whole: Encoding, span: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Return the range of a span's tokens; None if each turn must be a separate example.

        That is so if a token crosses an edge of the span, or if the span's prompt alone is
        tokenised differently. Tokenizers split a text at control tokens first, so only the prompt's
        tail after the last control token can differ and is compared.
        """
        start, end = whole.boundary(span[0]), whole.boundary(span[1])
        if start is None or end is None or self._prompt_budget < 0:
            return None
        control_ids, first = self.tokenizer.control_ids, start
        while first > 0:
            first -= 1
            if whole.ids[first] in control_ids:
                break
        tail = text[whole.start(first) if first else 0 : span[0]]
        return (start, end) if self._ids(tail) == list(whole.ids[first:start]) else None

    def _ids(self, tail: str) -> Sequence[int]:
        if (ids := self._tails.get(tail)) is None:
            self._prompt_budget -= len(tail)
            ids = list(self.tokenizer.encode_batch([tail])[0].ids) if tail else []
            if len(self._tails) >= _CACHED_TAILS:
                self._tails.clear()
            if len(tail) <= _MAX_TAIL_CHARS:
                self._tails[tail] = ids
        return ids

    def _continuation(self, answer: str) -> Sequence[int]:
        """Return the tokens of a text that continues a sequence.

        Some tokenizers put a space before a text, so the text is encoded after another character,
        which gets that space.
        """
        for before in "\n", ".", "a":
            encoded = self.tokenizer.encode_batch([before + answer])[0]
            boundary = encoded.boundary(len(before))
            if boundary is not None:
                return encoded.ids[boundary:]
        return self.tokenizer.encode_batch([answer])[0].ids

    def _example(
        self, row: int, text: RenderedText, ids: Sequence[int], spans: Iterable[tuple[int, int]]
    ) -> Example:
        """Return an example; add BOS (once) and the end-of-text token if `text` asks for them."""
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        before = [bos] if text.add_bos and bos is not None and (not ids or ids[0] != bos) else []
        after = [eos] if text.add_end and eos is not None else []
        tokens = np.array([*before, *ids, *after], dtype=np.int32)
        mask = np.zeros(len(tokens), dtype=np.uint8)
        for start, end in spans:
            mask[len(before) + start : len(before) + end] = 1
        mask[len(tokens) - len(after) :] = 1
        mask[:1] = 0  # nothing precedes the first token
        return Example(row, tokens, mask, role=text.role)


def _has_preference(rendering: Rendering) -> bool:
    """Return whether the texts come from a preference row, whose examples are used together."""
    return rendering.texts[0].role != ANSWER


def _length(text: RenderedText) -> int:
    return len(text.text)


def _total(rendering: Rendering) -> int:
    return sum(map(_length, rendering.texts))


def _chunks(items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    chunk: list[T] = []
    characters = 0
    for item in items:
        if chunk and (len(chunk) == _CHUNK_ROWS or characters + length(item) > _CHUNK_CHARACTERS):
            yield chunk
            chunk, characters = [], 0
        chunk.append(item)
        characters += length(item)
    if chunk:
        yield chunk


def _check_surrogates(text: str) -> None:
    """Raise BadRowError for a lone surrogate, which comes from a JSON escape or a bad byte."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError("text contains half a surrogate pair") from error
