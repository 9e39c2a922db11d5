"""Tokenizers that are easy to follow, and functions that encode with them, for tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlxtune.core.data.cache import encode_file
from mlxtune.core.data.conversation import Conversation, Message, Row
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import EncodedRows, Encoder, Example, OffsetEncoding, Tokenizer
from mlxtune.core.data.encoded_file import EncodedFile
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import RowTally, SkippedRows
from mlxtune.core.data.template import TEMPLATES, Template

NO_LIMIT = 10**9
PATH = Path("chat.jsonl")
CONTROL_TOKENS = (
    *("<bos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
CONTROL = "|".join(map(re.escape, CONTROL_TOKENS))


@dataclass
class PatternTokenizer:
    """Makes a token of each match of a pattern that covers any text; numbers tokens in order."""

    pattern: str
    bos: str | None = None
    eos: str | None = None
    # The control tokens that the pattern matches in any text.
    control_tokens: tuple[str, ...] = ()
    vocabulary: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for token in (*self.control_tokens, self.bos, self.eos):
            if token is not None:
                self.id_of(token)

    def id_of(self, token: str) -> int:
        if token not in self.vocabulary:
            self.vocabulary.append(token)
        return self.vocabulary.index(token)

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else self.id_of(self.bos)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos is None else self.id_of(self.eos)

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset(map(self.id_of, self.control_tokens))

    def encode_batch(self, texts: Sequence[str]) -> list[OffsetEncoding]:
        found = [list(re.finditer(self.pattern, text, re.DOTALL)) for text in texts]
        return [
            OffsetEncoding([self.id_of(m.group()) for m in matches], [m.span() for m in matches])
            for matches in found
        ]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [self.vocabulary[i].encode() for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)


@dataclass(frozen=True)
class ByteTokenizer:
    """Makes a token of each byte. If `narrow`, only the last token of a character has a width.

    character    a        é
    byte         61     c3     a9
    wide       (0, 1) (1, 2) (1, 2)      as tokenizers' byte fallback
    narrow     (0, 1) (1, 1) (1, 2)      as sentencepiece's
    """

    narrow: bool
    bos: str | None = None
    eos: str | None = None
    control_tokens: tuple[str, ...] = ()
    control_ids: frozenset[int] = frozenset()

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else 256

    @property
    def eos_id(self) -> int | None:
        return None if self.eos is None else 257

    def encode_batch(self, texts: Sequence[str]) -> list[OffsetEncoding]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> OffsetEncoding:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for i, character in enumerate(text):
            encoded = character.encode()
            ids += encoded
            offsets += [(i, i if self.narrow else i + 1)] * (len(encoded) - 1) + [(i, i + 1)]
        return OffsetEncoding(ids, offsets)

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        special = {256: self.bos, 257: self.eos}
        return [(special[i] or "").encode() if i in special else bytes([i]) for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.token_bytes(list(ids))).decode()


def words(bos: str | None = None, eos: str | None = None) -> PatternTokenizer:
    return PatternTokenizer(rf"{CONTROL}|\n|\w+|.", bos, eos, CONTROL_TOKENS)


def merged_newlines(bos: str | None = None, eos: str | None = None) -> PatternTokenizer:
    """Return a tokenizer that joins neighbouring newlines, even the header's with the answer's."""
    return PatternTokenizer(rf"{CONTROL}|\n+|\w+|.", bos, eos, CONTROL_TOKENS)


def triples(bos: str | None = None, eos: str | None = None) -> PatternTokenizer:
    """Return a tokenizer that makes a token of every three characters, regardless of edges."""
    return PatternTokenizer(r".{1,3}", bos, eos)


SmallTokenizer = PatternTokenizer | ByteTokenizer

TOKENIZERS: dict[str, Callable[[str | None, str | None], SmallTokenizer]] = {
    "words": words,
    "merged_newlines": merged_newlines,
    "triples": triples,
    "newline_with_word": lambda bos, eos: PatternTokenizer(r"\s*\S+|\s+", bos, eos),
    "bytes": lambda bos, eos: ByteTokenizer(narrow=False, bos=bos, eos=eos),
    "narrow_bytes": lambda bos, eos: ByteTokenizer(narrow=True, bos=bos, eos=eos),
}


def converse(*messages: tuple[str, str], row: int = 1) -> Conversation:
    return Conversation(row, tuple(Message(*message) for message in messages))


def example(row: int, ids: Iterable[int], *spans: tuple[int, int]) -> Example:
    """Return an example that is supervised in the [start, end) ranges."""
    tokens = np.array(list(ids), dtype=np.int32)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    for start, end in spans:
        mask[start:end] = 1
    return Example(row, tokens, mask)


def encoded_file(tokenizer: Tokenizer, template: Template, rows: Iterable[Row]) -> EncodedFile:
    """Return the uncut examples of a file, as `train` gets them."""

    def run(skipped: SkippedRows, told: RowTally) -> Iterable[EncodedRows]:
        return Encoder(template, tokenizer).encode(rows, skipped, told)

    return encode_file(PATH, run, cache=None, key="")


def encode(
    tokenizer: Tokenizer,
    *rows: Row,
    template: str | Template = "qwen3",
    max_seq_len: int = NO_LIMIT,
) -> tuple[list[Example], Ledger, SkippedRows]:
    rendered = TEMPLATES[template] if isinstance(template, str) else template
    file = encoded_file(tokenizer, rendered, rows)
    truncated = file.truncate(max_seq_len)
    return list(Corpus.of_files([truncated])), truncated.ledger(), truncated.skipped


def supervised_runs(example: Example) -> list[list[int]]:
    """Return the ids of each stretch of supervised tokens."""
    edges = np.flatnonzero(np.diff(example.assistant_mask.astype(int), prepend=0, append=0))
    return [example.tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]
