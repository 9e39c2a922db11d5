"""Holds out validation rows of the training data: for given data and options, the seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import Corpus, CorpusRows


@dataclass(frozen=True, eq=False)
class RunRows:
    """The rows that a run trains on, and the rows that it validates on, which may be none.

    The validation rows are rows held out of the training data, or all rows of another corpus.
    """

    train: CorpusRows
    validation: CorpusRows

    @classmethod
    def of(
        cls, corpus: Corpus, validation: Corpus | None, val_split: float, seed: int, val_rows: int
    ) -> RunRows:
        """Hold out a fraction of each file's rows, unless the validation data is given.

        Raises ValueError if rows must be held out, but all rows are in one cluster.
        """
        if validation is not None:
            return cls(corpus.select(), validation.select())
        train, held_out = hold_out_rows(
            corpus.clusters, val_split, seed, val_rows, corpus.file_of_row
        )
        return cls(corpus.select(train), corpus.select(held_out))

    @property
    def corpora(self) -> list[Corpus]:
        """The corpus of the training rows and, if it is another one, of the validation rows."""
        train, validation = self.train.corpus, self.validation.corpus
        return [train] if validation is train else [train, validation]

    def validation_rows_of_files(self) -> list[int]:
        """Return the number of validation rows in each file of all corpora."""
        files = len(self.validation.corpus.files)
        counts: list[int] = np.bincount(self.validation.file_of_row, minlength=files).tolist()
        return [0 for corpus in self.corpora[:-1] for _ in corpus.files] + counts


def hold_out_rows(
    clusters: Sequence[int] | npt.NDArray[np.uint64],
    val_split: float,
    seed: int,
    val_rows: int,
    files: npt.NDArray[np.int32] | None = None,
) -> tuple[list[int], list[int]]:
    """Return the training rows and the held-out rows, as ascending indices.

    ceil(n * val_split) of n rows are held out, at most `val_rows`, with at least one row in each
    list. `files` gives each row's file; the same fraction of each file is then held out. Duplicates
    stay together, so fewer rows may be held out. Deterministic for given arguments.

    Raises ValueError if all rows are in one cluster.
    """
    _, first, cluster_of_row, copies = np.unique(
        np.asarray(clusters, dtype=np.uint64),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    cluster_of_row = cluster_of_row.reshape(-1)
    if len(copies) < 2:
        raise ValueError("a split needs at least two rows that differ")
    files = np.zeros(len(cluster_of_row), dtype=np.int32) if files is None else files
    left = _held_out_counts(np.bincount(files), val_split, val_rows)
    selected = np.zeros(len(copies), dtype=bool)
    rows_of = np.argsort(cluster_of_row, kind="stable")
    ends = np.cumsum(copies)
    for i in permutation(len(cluster_of_row), f"{seed}/split"):
        # Only the first row of a cluster is drawn, so that copies do not raise its chance.
        if first[cluster_of_row[i]] != i or not left[files[i]]:
            continue
        same = rows_of[
            ends[cluster_of_row[i]] - copies[cluster_of_row[i]] : ends[cluster_of_row[i]]
        ]
        needed = np.bincount(files[same], minlength=len(left))
        if (needed <= left).all():
            selected[cluster_of_row[i]] = True
            left -= needed
        if not left.any():
            break
    if not selected.any():  # each cluster has too many rows
        selected[copies.argmin()] = True
    held_out = selected[cluster_of_row]
    return np.flatnonzero(~held_out).tolist(), np.flatnonzero(held_out).tolist()


def _held_out_counts(
    rows: npt.NDArray[np.int64], val_split: float, val_rows: int
) -> npt.NDArray[np.int64]:
    """Return the number of held-out rows of each file; `rows` has each file's number of rows."""
    wanted: npt.NDArray[np.int64] = np.ceil(rows * val_split).astype(np.int64)
    wanted = np.minimum(wanted, np.maximum(rows - 1, 0))
    if (total := int(wanted.sum())) <= val_rows:
        return wanted
    # Each file gets its fraction of the maximum, rounded down; the largest remainders get the rest.
    counts: npt.NDArray[np.int64] = wanted * val_rows // total
    for file in np.argsort(-(wanted * val_rows % total), kind="stable")[: val_rows - counts.sum()]:
        counts[file] += 1
    return counts


def permutation(n: int, key: str) -> list[int]:
    """Return a permutation of range(n) seeded by `key`."""
    # Seeded with text, Python's generator gives the same order on every platform and version.
    order = list(range(n))
    random.Random(key).shuffle(order)
    return order
