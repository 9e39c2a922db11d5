"""Findings: problems in the data, to look at before training on it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import (
    ANSWER,
    CHOSEN,
    DESIRABLE,
    REJECTED,
    ROLE_NAMES,
    UNDESIRABLE,
)
from mlxtune.core.data.corpus import Corpus, HashOf, first_turn
from mlxtune.core.data.encoded_file import EncodedFile, identity
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.data.problems import (
    ANOTHER_ANSWER,
    DUPLICATE,
    ERRORS,
    LEAK,
    LEAKED_PROMPT,
    MARK_REASONS,
    OPPOSITE,
    REMARKS,
    TRUNCATED_ANSWER,
    RowTally,
    advice_on,
    where,
)

_MAX_PLACES = 5
_NEAR_COPY_NOTE = " but for white space, case, punctuation, Unicode form or the system message"
# The ratio of mean lengths at which length alone could identify preferred answers.
_MIN_LENGTH_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class Place:
    """A row to look at; `row` is its 1-based number in the file, and `detail` may be empty."""

    path: str
    row: int
    detail: str = ""

    @property
    def where(self) -> str:
        return where(self.path, self.row)

    def __str__(self) -> str:
        return self.where + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in the data. `train` warns about it, or refuses the data if it is an `error`.

    A `note` needs no attention.

    `rows` counts the rows with the problem, and `places` contains the first few of these rows.
    `tokens` counts the lost supervised tokens; for a skipped row, the mean of the file's examples
    is assumed.
    """

    level: str  # "error", "warning" or "note"
    kind: str
    rows: int
    advice: str
    places: tuple[Place, ...] = ()
    tokens: int = 0


def row_findings(
    files: Sequence[EncodedFile], rows: RunRows, text_hash: HashOf | None = None
) -> list[Finding]:
    """Return a finding for each kind of note on the rows that are kept.

    With `text_hash`, near copies count as leaks too. `files` are the files of the corpora of
    `rows`. Call this once: it adds notes on duplicates, opposites, leaks and other answers to
    `files`.
    """
    corpus = rows.train.corpus
    _note_duplicates(files, corpus)
    _note_opposites(files, corpus)
    _note_leaks(files, rows, text_hash)
    _note_contradictions(files, corpus, text_hash)
    return _findings([(file, file.notes) for file in files], advice_on)


def by_loss(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in reading order: by level, then by counts of lost tokens and of rows."""
    levels = ("error", "warning", "note")
    return sorted(findings, key=lambda each: (levels.index(each.level), -each.tokens, -each.rows))


def skip_findings(files: Sequence[EncodedFile]) -> list[Finding]:
    return _findings([(file, file.skipped) for file in files], _advice_on_skipped)


def template_findings(source: str, thinking: str) -> Iterator[Finding]:
    """Yield the findings about a template that do not depend on the rows."""
    if "strftime_now" in source:
        advice = "the same rows give different tokens on another day, also at inference"
        yield Finding("warning", "the template writes today's date", 0, advice)
    yield from thinking_findings(source, thinking)


def thinking_findings(source: str, thinking: str) -> Iterator[Finding]:
    """Yield a finding if the template ignores the given --thinking."""
    if thinking != "auto" and "enable_thinking" not in source:
        advice = "the template has no thinking mode: leave the option out"
        yield Finding("warning", f"--thinking {thinking} changes nothing", 0, advice)


def _note_duplicates(files: Sequence[EncodedFile], corpus: Corpus) -> None:
    _, first, cluster_of_row = np.unique(corpus.identities, return_index=True, return_inverse=True)
    original = first[cluster_of_row.reshape(-1)]
    for index in np.flatnonzero(original != np.arange(corpus.num_rows)):
        file, row = corpus.source_of(int(index))
        other, other_row = corpus.source_of(int(original[index]))
        detail = f"same as {where(files[other].skipped.path, other_row)}"
        files[file].notes.count(row, DUPLICATE, detail)


def _note_leaks(files: Sequence[EncodedFile], rows: RunRows, text_hash: HashOf | None) -> None:
    """Note validation rows that are also trained on; among rows held out, only near copies are."""
    train, validation = rows.train, rows.validation
    same = _first_equal(validation.identities, train.identities)
    near = np.full(len(same), -1)
    if text_hash is not None and (same < 0).any():
        indices, hashes = validation.hash_answers(text_hash)
        trained, trained_hashes = train.hash_answers(text_hash)
        equal = _first_equal(hashes, trained_hashes)
        near[indices[equal >= 0]] = trained[equal[equal >= 0]]
    # Without preferences, rows are in one cluster only if they are equal.
    prompt = _first_equal(validation.clusters, train.clusters)
    kinds = ((LEAK, "same as ", same, ""), (LEAK, "same as ", near, _NEAR_COPY_NOTE))
    left = np.ones(len(same), dtype=bool)
    held_out = files[len(files) - len(validation.corpus.files) :]
    for kind, like, others, but in (*kinds, (LEAKED_PROMPT, "same prompt as ", prompt, "")):
        for index in np.flatnonzero(left & (others >= 0)):
            file, row = validation.corpus.source_of(validation.indices[int(index)])
            other, other_row = train.corpus.source_of(train.indices[int(others[index])])
            detail = f"{like}{where(files[other].skipped.path, other_row)}{but}"
            held_out[file].notes.count(row, kind, detail)
        left &= others < 0


def _first_equal(values: npt.NDArray[Any], among: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the first index in `among` of each value, or -1."""
    distinct, first = np.unique(among, return_index=True)
    if not len(distinct):
        return np.full(len(values), -1)
    indices = np.searchsorted(distinct, values).clip(max=len(distinct) - 1)
    return np.where(distinct[indices] == values, first[indices], -1)


def _note_opposites(files: Sequence[EncodedFile], corpus: Corpus) -> None:
    if not (corpus.roles == CHOSEN).any():
        return
    first: dict[tuple[int, ...], int] = {}
    for index in range(corpus.num_rows):
        examples = corpus.row(index)
        answers = tuple(
            identity(replace(example, role=ANSWER) for example in examples if example.role == role)
            for role in (CHOSEN, REJECTED)
        )
        if (other := first.get(answers[::-1])) is not None:
            file, row = corpus.source_of(index)
            other_file, other_row = corpus.source_of(other)
            detail = f"the opposite of {where(files[other_file].skipped.path, other_row)}"
            files[file].notes.count(row, OPPOSITE, detail)
        first.setdefault(answers, index)


def _note_contradictions(
    files: Sequence[EncodedFile], corpus: Corpus, text_hash: HashOf | None
) -> None:
    """Note rows whose first answer differs from an earlier row's answer to the same prompt.

    Prompts are compared by their tokens, as `text_hash` needs the tokenizer; near copies of an
    answer are the same answer.
    """
    if corpus.roles.any():
        return
    first: dict[int, int] = {}
    for index in range(corpus.num_rows):
        prompt, turn = first_turn(corpus.row(index)[0])
        # Plain text has only its first token before the loss.
        other = first.setdefault(identity([prompt]), index) if len(prompt) > 1 else index
        if other == index:
            continue
        _, other_turn = first_turn(corpus.row(other)[0])
        if np.array_equal(turn.tokens, other_turn.tokens):
            continue
        if text_hash is None or text_hash(turn) != text_hash(other_turn):
            file, row = corpus.source_of(index)
            other_file, other_row = corpus.source_of(other)
            detail = f"same prompt as {where(files[other_file].skipped.path, other_row)}"
            files[file].notes.count(row, ANOTHER_ANSWER, detail)


def length_findings(corpus: Corpus) -> Iterator[Finding]:
    """Yield a finding if good answers are much longer than bad ones, or vice versa."""
    for roles in ((CHOSEN, REJECTED), (DESIRABLE, UNDESIRABLE)):
        if not np.isin(roles, corpus.roles).all():
            continue
        means = [_mean_length(corpus, role) for role in roles]
        longer = int(means[1] > means[0])
        if means[longer] < _MIN_LENGTH_RATIO * means[1 - longer]:
            continue
        names = [ROLE_NAMES[roles[i]] for i in (longer, 1 - longer)]
        yield Finding(
            "warning",
            f"{names[0]} answers much longer than {names[1]} ones",
            0,
            f"{means[longer]:.0f} and {means[1 - longer]:.0f} tokens on average: the model will "
            "learn length, so add rows where it is the other way round",
        )


def _mean_length(corpus: Corpus, role: int) -> float:
    """Return the mean number of supervised tokens per row in answers with the given role."""
    there = corpus.roles == role
    return float(corpus.supervised[there].sum() / len(np.unique(corpus.row_of_example[there])))


def _findings(
    tallies: Sequence[tuple[EncodedFile, RowTally]], advise: Callable[[str], str]
) -> list[Finding]:
    """Return a finding for each kind, over all files."""
    findings = []
    for kind in dict.fromkeys(kind for _, tally in tallies for kind in tally.counts):
        sources = [
            Place(str(file.skipped.path), row, detail)
            for file, tally in tallies
            for row, detail in tally.places.get(kind, ())
        ]
        findings.append(
            Finding(
                level="error" if kind in ERRORS else "note" if kind in REMARKS else "warning",
                kind=kind,
                rows=sum(tally.counts[kind] for _, tally in tallies),
                advice=advise(kind),
                places=tuple(sources[:_MAX_PLACES]),
                tokens=sum(_lost(file, tally, kind) for file, tally in tallies),
            )
        )
    return findings


def _advice_on_skipped(kind: str) -> str:
    if kind in MARK_REASONS.values():
        return "the row is skipped, as its mark says"
    remedy = "raise --max-seq-len" if "--max-seq-len" in kind else "fix it or remove it"
    return f"the row is skipped: {remedy}"


def _lost(file: EncodedFile, tally: RowTally, kind: str) -> int:
    """Return the number of supervised tokens that a kind of problem costs in a file."""
    if kind == TRUNCATED_ANSWER:
        return file.answer_tokens_truncated
    if tally is file.skipped and len(file.arrays.supervised):
        return int(tally.counts[kind] * file.arrays.supervised.mean())
    return 0
