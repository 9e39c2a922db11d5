"""All examples of one or more data files, and selections of their rows."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import ANSWER, MISMATCHED, WHOLE
from mlxtune.core.data.encode import Example, Tokenizer
from mlxtune.core.data.encoded_file import ExampleArrays, identity, starts_of_equal_keys
from mlxtune.core.data.problems import where

RowExamples = tuple[Example, ...]
HashOf = Callable[[Example], int]

# What is left of a text: words, numbers and symbols. Hyphens and points count within numbers and
# names, and exclamation marks where they negate; other punctuation does not.
_KEPT = re.compile(
    r"""\w+(?:\.\w+)*|\.\d\w*|-(?=\s*\.?\d)|!(?=[\w=(])"""
    r"""|[^\w\s.\-!,;:?'"`¡¿‘’‚“”„‹›«»、。「」『』《》،؛؟।]"""
)
# What no reader sees, besides format characters (Unicode's Default_Ignorable_Code_Point).
_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]")
_PICTURES = re.compile("[\u2600-\u27bf\u2b50\u2b55\U0001f000-\U0001faff]")
# Marks of Markdown: around a code block, and around words.
_FENCE = re.compile(r"```[\w+-]*")
_EMPHASIS = re.compile(
    r"(?<!\S)(?:\*{1,3}|_{1,3})(?=[^\s*_])|(?<=[^\s*_])(?:\*{1,3}|_{1,3})(?![^\s.,;:!?)])"
    r"|(?<!\w)_+(?!\w)"
)
_NO_THOUGHT = re.compile(r"<think>\s*</think>")
# The number of places in a text at which a JSON object is looked for.
_MAX_OBJECTS = 100
# With fewer rows, what all of them start with may be their content.
_MIN_ROWS = 5
_DECODER = json.JSONDecoder()
_DASHES_AND_QUOTES = dict.fromkeys(map(ord, "‐‑‒–—―−"), "-") | dict.fromkeys(map(ord, "“”„«»"), '"')
# The separator of control tokens, a byte that UTF-8 never has.
_CONTROL = b"\xff"
_SYSTEM_ROLES = ("system", "developer")
_ANSWER_ROLES = ("assistant", "model")
_ROLES = (*_SYSTEM_ROLES, *_ANSWER_ROLES, "user", "tool")
# Marks of messages that are text, because the tokenizer does not know them.
_MARKS = re.compile(
    rb"(?<!\xff)(<\|im_(?:start|end)\|>|<(?:start|end)_of_turn>|<\|(?:start|end)_header_id\|>|<\|eot_id\|>)"
)
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
        found = [(index, hash_of(example)) for index, example in self._examples_of_answers()]
        indices, hashes = zip(*found, strict=True) if found else ((), ())
        return np.array(indices, dtype=np.int64), np.array(hashes, dtype=np.uint64)

    def hash_texts(self, text_hash: TextHash) -> npt.NDArray[np.uint64]:
        """Return the hashes of the texts of `answers`, and of each answer with its question."""
        found = (text_hash.with_pairs(example) for _, example in self._examples_of_answers())
        hashes = np.array([each for hashes in found for each in hashes], dtype=np.uint64)
        return np.concatenate([hashes, self._hash_without_start(text_hash)[1]])

    def _hash_without_start(
        self, text_hash: TextHash
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return `hash_answers` of the texts without the paragraphs with which all rows start.

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
        if not shared or number < _MIN_ROWS:
            return self.only(np.zeros(0, dtype=np.int64)).hash_answers(text_hash)
        length = sum(len(each) + 2 for each in shared)
        return self.hash_answers(lambda example: text_hash.without_start(example, length))

    def _examples_of_answers(self) -> Iterator[tuple[int, Example]]:
        """Yield the place of a row, and its last example, for each role that is no copy."""
        for place, row in enumerate(self):
            for example in {each.role: each for each in row if each.role not in _COPIES}.values():
                yield place, example

    def without(
        self, identities: npt.NDArray[np.uint64], text_hash: TextHash | None = None
    ) -> CorpusRows:
        """Return the rows that have neither their identity nor an answer's hash in `identities`.

        With `text_hash`, the hashes of the answers' texts count too.
        """
        known = np.isin(self.identities, identities)
        if len(identities):
            near = []
            if text_hash is not None:
                near = [self.hash_answers(text_hash), self._hash_without_start(text_hash)]
            for indices, hashes in (self.answers, *near):
                known[indices[np.isin(hashes, identities)]] = True
        return self.only(np.flatnonzero(~known))

    def only(self, indices: npt.NDArray[np.int64]) -> CorpusRows:
        """Return the rows at the given indices of this selection."""
        return CorpusRows(self.corpus, [self.indices[i] for i in indices.tolist()])

    @cached_property
    def files(self) -> npt.NDArray[np.int32]:
        """int32 (R,): the index of each row's file."""
        return self.corpus.file_of_row[np.asarray(self.indices, dtype=np.int64)]

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

    def draw(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples of the rows of a step.

        A step may use a row several times, if the weight of the row's file is above 1. Each use has
        its own `draw`, so that it counts as a separate row in a preference loss and has its own
        dropout.
        """
        used: Counter[int] = Counter()
        drawn: list[Example] = []
        for index in indices:
            row, draw = self[index], used[index]
            drawn += [replace(example, draw=draw) for example in row] if draw else row
            used[index] += 1
        return drawn


def normalize(text: str) -> str:
    """Return the normalised text, which is equal for near copies."""
    text = _folded(text)
    if "<think>" in text:
        text = _NO_THOUGHT.sub(" ", text)
    if "`" in text:
        text = _FENCE.sub(" ", text)
    if "{" in text:
        text = _folded(_with_sorted_keys(text))  # escapes are resolved now
    if "*" in text or "_" in text:
        text = _EMPHASIS.sub("", text)
    # Pictures decorate a text that has words, and are the content of others.
    plain = text if text.isascii() else _PICTURES.sub(" ", text)
    return " ".join(_KEPT.findall(plain) or _KEPT.findall(text))


def _folded(text: str) -> str:
    """Return a text in lower case, with one form of equal characters, and no unseen ones."""
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFKC", text)
    unseen = dict.fromkeys(ord(each) for each in set(text) if _is_unseen(each))
    return text.translate(_DASHES_AND_QUOTES | unseen).casefold()


def _is_unseen(character: str) -> bool:
    """Return whether a character is a joiner, a soft hyphen, a variation selector or the like."""
    return unicodedata.category(character) == "Cf" or _IGNORABLE.fullmatch(character) is not None


def _with_sorted_keys(text: str) -> str:
    """Return a text in which each JSON object has sorted keys and no escapes."""
    pieces, end = [], 0
    start = text.find("{")
    for _ in range(_MAX_OBJECTS):
        if start < 0:
            break
        try:
            value, after = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        pieces += [text[end:start], json.dumps(value, sort_keys=True, ensure_ascii=False)]
        end, start = after, text.find("{", after)
    return "".join([*pieces, text[end:]])


class TextHash:
    """Hashes the text of examples: near copies have the same 64-bit hash, whatever their tokens.

    Masks and roles do not count, so a row is a near copy under any objective, and so is plain text
    of the same messages. Neither does a system message that the template marks as such.
    `load_tokenizer` is called on the first use.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._spelled: dict[int, bytes] = {}

    def __call__(self, example: Example) -> int:
        return _hash_of_texts(text for _, text in self._messages(example))

    def with_pairs(self, example: Example) -> list[int]:
        """Return an example's hash and, of a longer conversation, those of its single exchanges.

        An exchange is an answer and the message before it. Without names of roles, every second
        message is an answer.
        """
        messages = self._messages(example)
        named = any(role for role, _ in messages)
        answers = [
            i
            for i, (role, _) in enumerate(messages)
            if i and (role in _ANSWER_ROLES if named else i % 2)
        ]
        pairs = (messages[i - 1 : i + 1] for i in answers if len(messages) > 2)
        return [_hash_of_texts(text for _, text in each) for each in (messages, *pairs)]

    def first_message(self, example: Example) -> str:
        """Return the text of an example's first message; empty without a message."""
        return next((text for _, text in self._messages(example)), "")

    def without_start(self, example: Example, length: int) -> int:
        """Return the hash of an example without the first characters of its first message."""
        texts = [text for _, text in self._messages(example)]
        return _hash_of_texts(["".join(texts[:1])[length:], *texts[1:]])

    def _messages(self, example: Example) -> list[tuple[str, str]]:
        """Return the messages of an example, without system messages, with their roles if named."""
        content = self._bytes(example)
        if b"<" in content:
            content = _MARKS.sub(_CONTROL + rb"\1" + _CONTROL, content)
        parts = _without_system([part.decode(errors="replace") for part in content.split(_CONTROL)])
        messages: list[tuple[str, str]] = []
        for text in parts[::2]:
            first, _, rest = text.partition("\n")
            if (role := first.strip()) in _ROLES:
                messages.append((role, rest))
            elif messages and messages[-1][0]:
                # A control token within a message, or a head of its own for the role.
                messages[-1] = (messages[-1][0], f"{messages[-1][1]}\n{text}")
            else:
                messages.append(("", text))
        return [(role, text.strip()) for role, text in messages if text.strip()]

    def _bytes(self, example: Example) -> bytes:
        tokens, spelled = example.tokens.tolist(), self._spelled
        if new := {token for token in tokens if token not in spelled}:
            self._spell(sorted(new))
        return b"".join([spelled[token] for token in tokens])

    def _spell(self, tokens: list[int]) -> None:
        tokenizer = self._load_tokenizer()
        for token, content in zip(tokens, tokenizer.spell(tokens), strict=True):
            is_control = token in tokenizer.control_ids
            self._spelled[token] = _CONTROL + content + _CONTROL if is_control else content


def _hash_of_texts(texts: Iterable[str]) -> int:
    content = normalize("\n".join(texts)).encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _without_system(parts: list[str]) -> list[str]:
    """Return texts and the control tokens between them, from the first text after a system message.

    In `<|start|>system<|message|>Be brief.<|end|>`, the role is a text of its own; in ChatML, it is
    the first line; elsewhere, the control token names it, as in `[SYSTEM_PROMPT]Be brief.`
    """
    is_message = False
    for i in range(0, len(parts), 2):
        control, text = parts[i - 1] if i else "", parts[i]
        if is_message:
            is_message = False
        elif text.strip() and not ("system" in control.lower() and "/" not in control):
            role, line_end, _ = text.partition("\n")
            if role.strip() not in _SYSTEM_ROLES:
                return parts[i:]
            is_message = not line_end
    return parts
