"""The losses of rows are sums over their examples."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mlxtune.core.data.corpus import Corpus
from mlxtune.core.evaluation.row_losses import sums_of
from tests.core.evaluation.evaluations import example

Floats = npt.NDArray[np.float64]


def test_examples_of_a_row_are_summed_and_the_first_token_counts_nowhere() -> None:
    corpus = Corpus.of([example(1, 6, 2), example(1, 3, 3), example(4, 4, 1)])
    told: list[tuple[int, int]] = []

    def losses(examples: Any, on_progress: Any) -> Floats:
        on_progress(1)
        on_progress(3)
        return np.array([float(len(each)) for each in examples])

    found = sums_of(corpus.select(), losses, lambda *done: told.append(done))
    assert found.losses.tolist() == [9.0, 4.0]
    assert found.tokens.tolist() == [2 + 2, 1]
    assert found.loss.loss == pytest.approx(13 / 5)
    assert told == [(1, 3), (3, 3)]
