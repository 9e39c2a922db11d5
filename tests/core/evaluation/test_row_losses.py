"""The losses of rows are sums over their examples."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mlxtune.core.data.corpus import Corpus, CorpusRows
from mlxtune.core.evaluation.row_losses import answer_sums, sums_of
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


@pytest.mark.parametrize("sums", [sums_of, answer_sums])
def test_examples_of_a_row_are_built_once(sums: Any) -> None:
    """A row of a corpus is built from columns on disk whenever it is asked for."""
    read: list[int] = []

    class Rows(CorpusRows):
        def __iter__(self) -> Any:
            read.append(len(self))
            return super().__iter__()

    corpus = Corpus.of([example(1, 6, 2), example(4, 4, 1)])
    sums(Rows(corpus, [0, 1]), lambda examples, _: np.ones(len(examples)), None)
    assert read == [2]
