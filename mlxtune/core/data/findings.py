"""What in the data is worth a look before it is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mlxtune.core.data import notes
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.inspection import Finding, Place
from mlxtune.core.data.ledger import EncodedFile
from mlxtune.core.data.notes import ADVICE, ERRORS, Note

_PLACES = 5


def find(files: Sequence[EncodedFile], corpus: Corpus, validation: Corpus | None) -> list[Finding]:
    """Return what was noted on the rows that are kept, errors first.

    `files` are those of `corpus`, then those of `validation`. Duplicates and leaks are noted on
    their files, so this is done once.
    """
    note_duplicates(files, corpus)
    if validation is not None:
        note_leaks(files[len(corpus.files) :], corpus, validation)
    return sorted(_noted(files), key=lambda finding: finding.level != "error")


def of_template(source: str, thinking: str) -> Iterator[Finding]:
    """Yield what a template, by its text, makes worth a look, whatever the rows.

    --thinking means nothing to one that does not ask for it; and one may write the date.
    """
    if "strftime_now" in source:
        advice = "the same rows give other tokens on another day, at inference too"
        yield Finding("warning", "the template writes today's date", 0, advice)
    if thinking != "auto" and "enable_thinking" not in source:
        advice = "the template has no thinking mode: leave the option out"
        yield Finding("warning", f"--thinking {thinking} changes nothing", 0, advice)


def note_duplicates(files: Sequence[EncodedFile], corpus: Corpus) -> None:
    """Note each row of the corpus that repeats an earlier one."""
    ordered = np.sort(corpus.identities)
    if not (ordered[1:] == ordered[:-1]).any():
        return
    _, first, which = np.unique(corpus.identities, return_index=True, return_inverse=True)
    original = first[which.reshape(-1)]
    for index in np.flatnonzero(original != np.arange(corpus.num_rows)):
        file, row = corpus.place_of(int(index))
        other, other_row = corpus.place_of(int(original[index]))
        detail = f"same as {files[other].skipped.path}:{other_row}"
        files[file].notes.add(row, [Note(notes.DUPLICATE, detail)])


def note_leaks(files: Sequence[EncodedFile], corpus: Corpus, validation: Corpus) -> None:
    """Note each validation row that stands in the corpus too; `files` are the validation's."""
    for index in np.flatnonzero(np.isin(validation.identities, corpus.identities)):
        file, row = validation.place_of(int(index))
        files[file].notes.add(row, [Note(notes.LEAK)])


def _noted(files: Sequence[EncodedFile]) -> Iterator[Finding]:
    for kind in dict.fromkeys(kind for file in files for kind in file.notes.counts):
        places = [
            Place(str(file.skipped.path), row, detail)
            for file in files
            for row, detail in file.notes.places.get(kind, ())
        ]
        rows = sum(file.notes.counts[kind] for file in files)
        level = "error" if kind in ERRORS else "warning"
        yield Finding(level, kind, rows, ADVICE[kind], tuple(places[:_PLACES]))


def skipped(files: Sequence[EncodedFile]) -> Iterator[Finding]:
    """Yield a finding for each reason that rows are skipped for."""
    for kind in dict.fromkeys(kind for file in files for kind in file.skipped.counts):
        places = [
            Place(str(file.skipped.path), row, problem.detail)
            for file in files
            for row, problem in file.skipped.shown.get(kind, ())
        ]
        rows = sum(file.skipped.counts[kind] for file in files)
        advice = "the row is skipped: mend it or take it out"
        yield Finding("warning", kind, rows, advice, tuple(places[:_PLACES]))
