"""Evaluations of rows for tests."""

import numpy as np

from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.evaluation.outcome import Evaluation
from mlxtune.core.evaluation.row_losses import RowLossSums
from mlxtune.core.evaluation.verdict import JudgedRows, evaluate_losses


def example(row: int, length: int, supervised: int) -> Example:
    mask = np.zeros(length, dtype=np.uint8)
    mask[length - supervised :] = 1
    return Example(row, np.full(length, row, dtype=np.int32), mask)


def evaluated(
    changes: list[float], trained: list[int] | None = None, start: float | None = None
) -> Evaluation:
    """Evaluate rows whose base loss is 8; the adapter adds `changes`, the first adapter `start`."""
    corpus = Corpus.of([example(10 + i, 9, 4) for i in range(len(changes))])
    corpus.paths = ["a.jsonl"]
    judged = JudgedRows.of(corpus.select(), corpus.identities[trained or []])
    tokens = np.full(len(judged.rows), 4)
    base = RowLossSums(np.full(len(judged.rows), 8.0), tokens)
    adapted = RowLossSums(base.losses + [changes[i] for i in judged.rows.indices], tokens)
    first = None if start is None else RowLossSums(base.losses + start, tokens)
    return evaluate_losses(judged, base, adapted, 0, first)
