"""Tokenizers small enough to follow, and a short way to encode with them, for tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlxtune.core.conversation import Conversation, Message, SkippedRows
from mlxtune.core.encode import Encoded, Encoder, Example, Ledger, Tokenizer
from mlxtune.core.template import TEMPLATES

NO_LIMIT = 10**9
CONTROL = r"<bos>|<\|\w+\|>|<\w+_of_turn>"


@dataclass
class PatternTokenizer:
    """A token for each match of a pattern, which leaves nothing out; ids as they are met."""

    pattern: str
    bos: str | None = None
    vocabulary: list[str] = field(default_factory=list)

    def id_of(self, token: str) -> int:
        if token not in self.vocabulary:
            self.vocabulary.append(token)
        return self.vocabulary.index(token)

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else self.id_of(self.bos)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        found = [list(re.finditer(self.pattern, text, re.DOTALL)) for text in texts]
        return [
            Encoded([self.id_of(m.group()) for m in matches], [m.span() for m in matches])
            for matches in found
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)


@dataclass(frozen=True)
class ByteTokenizer:
    """A token for each byte. Those of one character have its offsets, or all but the last no width.

    character    a        é
    byte         61     c3     a9
    wide       (0, 1) (1, 2) (1, 2)      as tokenizers' byte fallback
    narrow     (0, 1) (1, 1) (1, 2)      as sentencepiece's
    """

    narrow: bool
    bos: str | None = None

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else 256

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Encoded:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for i, character in enumerate(text):
            encoded = character.encode()
            ids += encoded
            offsets += [(i, i if self.narrow else i + 1)] * (len(encoded) - 1) + [(i, i + 1)]
        return Encoded(ids, offsets)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode()


def words(bos: str | None = None) -> PatternTokenizer:
    return PatternTokenizer(rf"{CONTROL}|\n|\w+|.", bos)


def merged_newlines(bos: str | None = None) -> PatternTokenizer:
    """Neighbouring newlines are one token, also where the header's meets the answer's."""
    return PatternTokenizer(rf"{CONTROL}|\n+|\w+|.", bos)


def triples(bos: str | None = None) -> PatternTokenizer:
    """Three characters a token, wherever the edges are."""
    return PatternTokenizer(r".{1,3}", bos)


TOKENIZERS = {
    "words": words,
    "merged_newlines": merged_newlines,
    "triples": triples,
    "newline_with_word": lambda bos=None: PatternTokenizer(r"\s*\S+|\s+", bos),
    "bytes": lambda bos=None: ByteTokenizer(narrow=False, bos=bos),
    "narrow_bytes": lambda bos=None: ByteTokenizer(narrow=True, bos=bos),
}


def converse(*messages: tuple[str, str], row: int = 1) -> Conversation:
    return Conversation(row, tuple(Message(*message) for message in messages))


def encode(
    tokenizer: Tokenizer,
    *conversations: Conversation,
    template: str = "qwen3",
    max_seq_len: int = NO_LIMIT,
) -> tuple[list[Example], Ledger, SkippedRows]:
    skipped = SkippedRows(Path("chat.jsonl"))
    encoder = Encoder(TEMPLATES[template], tokenizer, max_seq_len)
    return *encoder.encode(conversations, skipped), skipped


def supervised_runs(example: Example) -> list[list[int]]:
    """The ids of each stretch of supervised tokens."""
    edges = np.flatnonzero(np.diff(example.assistant_mask.astype(int), prepend=0, append=0))
    return [example.tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]
