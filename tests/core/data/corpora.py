"""Corpora of several files, for tests of the rows that a run uses."""

from __future__ import annotations

import numpy as np

from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import ExampleArrays


def corpus(counts: list[int], weights: list[float] | None = None) -> Corpus:
    """Return rows of several files, with numbers that are all different."""
    numbers = iter(range(1, sum(counts) + 1))
    files = [
        ExampleArrays.of(
            Example(n, np.array([1, n], dtype=np.int32), np.array([0, 1], dtype=np.uint8))
            for n in (next(numbers) for _ in range(count))
        ).truncate()
        for count in counts
    ]
    return Corpus(files, weights=weights or ())
