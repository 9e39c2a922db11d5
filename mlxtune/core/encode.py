r"""Rendered text to examples: tokens and an aligned mask of those that carry loss.

tokens          <bos> <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello ! <|im_end|> \n
assistant_mask    0        0        0   0  0      0       0      0           0      0   1   1     1       0
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxtune.core.conversation import BadRow, Conversation, SkippedRows
from mlxtune.core.template import Rendered, Template

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Tokens and the mask of those that carry loss.

    `tokens` is int32 of shape (T,), `assistant_mask` uint8 of shape (T,), 1 where supervised.
    Examples with the same `row`, a 1-based line number, stand in the same step.
    """

    row: int
    tokens: npt.NDArray[np.int32]
    assistant_mask: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def supervised(self) -> int:
        """How many tokens carry loss."""
        return int(self.assistant_mask.sum())


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as tokens; `offsets` are the [start, end) characters that each token stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer(Protocol):
    """What the core asks of a tokenizer."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins every sequence, if the model has one."""

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts, control tokens parsed and none added."""


@dataclass
class Ledger:
    """Where every row and every token of a file went. It adds up:

    rows_read = rows_train + rows_validation + the skipped ones, and
    tokens = tokens_supervised + tokens_context + tokens_truncated.
    """

    path: str = ""
    rows_read: int = 0
    rows_train: int = 0
    rows_validation: int = 0
    rows_skipped: Counter[str] = field(default_factory=Counter)
    rows_truncated: int = 0
    tokens: int = 0
    tokens_supervised: int = 0
    tokens_context: int = 0
    tokens_truncated: int = 0

    def hold_out(self, rows: int) -> None:
        """Move rows from training to validation."""
        self.rows_train -= rows
        self.rows_validation += rows

    def as_dict(self) -> dict[str, Any]:
        """Return the ledger as JSON-ready values."""
        return vars(self) | {"rows_skipped": dict(sorted(self.rows_skipped.items()))}

    def adds_up(self) -> bool:
        """Tell whether no row and no token is unaccounted for."""
        kept = self.rows_train + self.rows_validation + self.rows_skipped.total()
        seen = self.tokens_supervised + self.tokens_context + self.tokens_truncated
        return self.rows_read == kept and self.tokens == seen


@dataclass
class Encoder:
    """Turns conversations into examples and keeps the ledger."""

    template: Template
    tokenizer: Tokenizer
    max_seq_len: int

    def encode(
        self, conversations: Iterable[Conversation], skipped: SkippedRows
    ) -> tuple[list[Example], Ledger]:
        """Encode each conversation; those that cannot be are added to `skipped`.

        An example longer than `max_seq_len` is cut there, and one that is left with no
        supervised token is skipped.
        """
        ledger, examples = Ledger(str(skipped.path)), []
        for conversation, rendered, encoded in self._tokenized(conversations, skipped):
            tokens, mask = supervise(rendered, encoded, self.tokenizer)
            cut = len(tokens) - self.max_seq_len
            ledger.tokens += len(tokens)
            ledger.rows_truncated += cut > 0
            example = Example(
                conversation.row, tokens[: self.max_seq_len], mask[: self.max_seq_len]
            )
            if example.supervised == 0:
                ledger.tokens_truncated += len(tokens)
                skipped.add(conversation.row, self._unsupervised(mask))
                continue
            ledger.tokens_truncated += max(cut, 0)
            ledger.tokens_supervised += example.supervised
            ledger.tokens_context += len(example) - example.supervised
            examples.append(example)
        ledger.rows_train = len(examples)
        ledger.rows_skipped = skipped.counts
        ledger.rows_read = len(examples) + skipped.total
        return examples, ledger

    def _unsupervised(self, mask: npt.NDArray[np.uint8]) -> BadRow:
        if not mask.any():
            return BadRow("the tokenizer gives no token for the answer")
        return BadRow(
            f"no supervised token within --max-seq-len {self.max_seq_len}",
            f"the answer begins at token {int(mask.argmax()) + 1}: raise it",
        )

    def _tokenized(
        self, conversations: Iterable[Conversation], skipped: SkippedRows
    ) -> Iterator[tuple[Conversation, Rendered, Encoded]]:
        remaining = iter(conversations)
        while chunk := list(islice(remaining, _ROWS_AT_ONCE)):
            rendered = []
            for conversation in chunk:
                try:
                    rendered.append((conversation, self.template(conversation)))
                except BadRow as problem:
                    skipped.add(conversation.row, problem)
            encoded = self.tokenizer.encode_batch([text.text for _, text in rendered])
            for (conversation, text), tokens in zip(rendered, encoded, strict=True):
                yield conversation, text, tokens


def supervise(
    rendered: Rendered, encoded: Encoded, tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return tokens (T,) and mask (T,) of a rendered conversation, with BOS exactly once.

    The text is tokenised as a whole, as an inference tool would. Where a token of the whole
    crosses the edge of a span, the pieces between the edges are tokenised by themselves: the
    model is given the prompt's tokens and has to begin with a token of its own.
    """
    ids, mask = _mask_of_whole(rendered, encoded) or _mask_of_pieces(rendered, tokenizer)
    if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids, mask = [tokenizer.bos_id, *ids], [0, *mask]
    return np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8)


def _mask_of_whole(rendered: Rendered, encoded: Encoded) -> tuple[list[int], list[int]] | None:
    """Mask the tokens of the whole text, or return None where one crosses the edge of a span."""
    mask = [0] * len(encoded.ids)
    spans = iter(rendered.spans)
    span_start, span_end = next(spans, (0, 0))
    for i, (start, offset_end) in enumerate(encoded.offsets):
        # The bytes of one character may be tokens of no width before its last.
        end = max(offset_end, start + 1)
        while start >= span_end and span_end:
            span_start, span_end = next(spans, (0, 0))
        if end <= span_start or start >= span_end:
            continue
        if start < span_start or end > span_end:
            return None
        mask[i] = 1
    return encoded.ids, mask


def _mask_of_pieces(rendered: Rendered, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    edges = [0, *(edge for span in rendered.spans for edge in span), len(rendered.text)]
    pieces = [rendered.text[start:end] for start, end in pairwise(edges)]
    ids: list[int] = []
    mask: list[int] = []
    for i, encoded in enumerate(tokenizer.encode_batch(pieces)):
        ids += encoded.ids
        mask += [i % 2] * len(encoded.ids)
    return ids, mask
