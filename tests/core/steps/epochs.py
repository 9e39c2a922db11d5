"""Epochs of rows with the lengths of real data, for laws of the planner."""

from __future__ import annotations

import numpy as np

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.order import shuffled_steps

# The distribution of row lengths: the mean and deviation of the length's logarithm, the bounds of
# the length, and the length of the prefix that all rows share.
LENGTHS = {
    "short": (5.3, 0.7, 40, 2048, 0),
    "long": (6.5, 0.6, 100, 2040, 0),
    "behind a prefix": (4.8, 0.6, 20, 1000, 400),
}


def epoch_of(name: str, rows: int = 1000, vocabulary: int = 256) -> list[list[Example]]:
    """Return an epoch's shuffled steps of 4 rows, with 20 to 70% of each row supervised."""
    mean, deviation, shortest, longest, prefix = LENGTHS[name]
    rng = np.random.default_rng(1)
    shared, examples = rng.integers(0, vocabulary, prefix), []
    for row in range(1, rows + 1):
        length = int(np.clip(rng.lognormal(mean, deviation), shortest, longest))
        supervised = int(length * rng.uniform(0.2, 0.7))
        tokens = np.concatenate([shared, rng.integers(0, vocabulary, length)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(tokens) - supervised
        examples.append(Example(row, tokens, mask.astype(np.uint8)))
    return [[examples[i] for i in step] for step in shuffled_steps(rows, 4, 42, 1)]
