"""Preference rows, with the reference model's log-probability of each example."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.config.limits import REFERENCE_LIMITS
from mlxtune.core.data.conversation import MISMATCHED
from mlxtune.core.data.corpus import CorpusRows, RowExamples
from mlxtune.core.data.encode import Example
from mlxtune.core.files.reading import read_json
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.files.writing import make_folder, write_file
from mlxtune.core.objectives.objective import with_references
from mlxtune.core.objectives.policy import StepObjective
from mlxtune.errors import OutputError

# The folder for reference log-probabilities in the user's cache.
_CACHE = "references"


@dataclass(frozen=True, eq=False)
class PreferenceRows(CorpusRows):
    """Rows of a corpus, with the examples and reference log-probabilities that an objective needs.

    With `adds_mismatched`, each row gets an example of its prompt with the previous row's answer
    (for the first row, the last row's), as in TRL. `references` has a log-probability for each
    example of each row.
    """

    adds_mismatched: bool = False
    references: Sequence[Sequence[float]] | None = None

    @classmethod
    def of(cls, rows: CorpusRows, objective: StepObjective) -> PreferenceRows:
        return cls(rows.corpus, rows.indices, adds_mismatched=objective.needs_kl)

    def __getitem__(self, index: int) -> RowExamples:
        index = range(len(self))[index]
        examples: Sequence[Example] = self.corpus.row(self.indices[index])
        if self.adds_mismatched:
            other = self.corpus.row(self.indices[index - 1])[-1]
            examples = [*examples, *self._mismatched(examples[-1], other)]
        if self.references is not None:
            examples = with_references(examples, self.references[index])
        return tuple(examples)

    def __iter__(self) -> Iterator[RowExamples]:
        return map(self.__getitem__, range(len(self)))

    def _mismatched(self, example: Example, other: Example) -> Iterator[Example]:
        start, answer = (int(each.assistant_mask.argmax()) for each in (example, other))
        limit = self.corpus.files[example.file].max_seq_len
        tokens = np.concatenate([example.tokens[:start], other.tokens[answer:]])[:limit]
        mask = np.concatenate([example.assistant_mask[:start], other.assistant_mask[answer:]])
        if (mask := mask[:limit])[1:].any():
            yield replace(example, tokens=tokens, assistant_mask=mask, role=MISMATCHED)

    def digest(self) -> str:
        """Return a hash of the tokens, masks and roles of all examples, in order."""
        digest = hashlib.sha256()
        for examples in self:
            for example in examples:
                digest.update(bytes([example.role]) + len(example).to_bytes(8, "little"))
                digest.update(example.tokens.astype("<i4", copy=False).tobytes())
                digest.update(example.assistant_mask.astype("<u1", copy=False).tobytes())
        return digest.hexdigest()

    @property
    def num_examples(self) -> int:
        return sum(map(len, self))

    def with_references(self, values: Sequence[float]) -> PreferenceRows:
        """Return the rows with reference log-probabilities, one for each example in order."""
        sizes = [len(row) for row in replace(self, references=None)]
        parts = np.split(np.asarray(values), np.cumsum(sizes)[:-1])
        return replace(self, references=[part.tolist() for part in parts])


def of_objective(rows: CorpusRows, objective: StepObjective) -> CorpusRows:
    """Return rows with the examples that an objective needs."""
    if objective.needs_reference or objective.needs_kl:
        return PreferenceRows.of(rows, objective)
    return rows


def with_reference_logps(
    parts: Sequence[PreferenceRows],
    model: Mapping[str, Any],
    stored: Path,
    cache: Path | None,
    compute: Callable[[Sequence[Example]], npt.NDArray[np.float64]],
    earlier: Path | None = None,
) -> list[PreferenceRows]:
    """Return the parts of a run's rows with the reference's log-probabilities.

    They are read from the cache, or computed and cached, and written to `stored`, in the run's
    folder. A resumed run reads the `earlier` file instead of computing them. Raises OutputError.
    """
    key = reference_key(model, parts)
    examples = [example for rows in parts for row in rows for example in row]
    kept = cached(cache, key)
    # The cache comes first: a run's folder may be untrusted, so its values are never cached.
    logps = read_references([*kept, *filter(None, [earlier])], key, len(examples))
    if logps is None:
        if earlier is not None:
            raise OutputError(
                f"{earlier} is missing, damaged, or from another model or other data, and cannot "
                "be computed again, because the reference is the model before its first step: "
                "bring back the run's files, or start over with --overwrite"
            )
        logps = [float(value) for value in compute(examples)]
        keep(kept, key, logps)
    write_references(stored, key, logps)
    left = iter(logps)
    return [rows.with_references(list(islice(left, rows.num_examples))) for rows in parts]


def reference_key(model: Mapping[str, Any], rows: Sequence[PreferenceRows]) -> str:
    """Return a hash of all that determines the log-probabilities: starting model and examples."""
    parts = {**model, "examples": [row.digest() for row in rows]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_references(paths: Sequence[Path], key: str, examples: int) -> list[float] | None:
    """Return the log-probabilities stored under a key; None if no valid file has them all."""
    for path in paths:
        with suppress(OSError, ValueError):
            content = read_json(path, REFERENCE_LIMITS)
            values: list[float] = from_json(list[float], content.get("logps"))
            if content != _content(key, values) or len(values) != examples:
                continue
            # A log-probability is at most 0, up to rounding.
            if max(values) < 1:
                return values
    return None


def check_references(path: Path) -> str:
    """Describe a file's content for `verify`. Raises OSError, or ValueError for a damaged file."""
    content = read_json(path, REFERENCE_LIMITS)
    values: list[float] = from_json(list[float], content.get("logps"))
    if content != _content(str(content.get("key")), values):
        raise ValueError("is damaged: its hash differs")
    return f"{len(values):,} log-probabilities"


def write_references(path: Path, key: str, logps: Sequence[float]) -> None:
    """Write log-probabilities under their key. Raises OutputError."""
    make_folder(path.parent)
    content = _content(key, [float(logp) for logp in logps])
    write_file(path, [json.dumps(content, allow_nan=False).encode()])


def _content(key: str, logps: Sequence[float]) -> dict[str, Any]:
    """Return a file's content: a key from `reference_key`, and log-probabilities with their hash.

    The hash reveals a damaged digit.
    """
    digest = hashlib.sha256(json.dumps(logps).encode()).hexdigest()
    return {"format": 2, "key": key, "sha256": digest, "logps": logps}


def cached(cache: Path | None, key: str) -> list[Path]:
    """Return a list with the cache's file for this key; an empty list without a cache."""
    return [] if cache is None else [cache / _CACHE / f"{key[:32]}.json"]


def keep(cache: Sequence[Path], key: str, logps: Sequence[float]) -> None:
    """Write log-probabilities to the cache; ignore a cache that cannot be written."""
    for path in cache:
        with suppress(OutputError):
            write_references(path, key, logps)
