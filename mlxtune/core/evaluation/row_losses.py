"""The losses of rows, and of their answers, under a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import CHOSEN, DESIRABLE, REJECTED, UNDESIRABLE
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.encode import Example, predicted_tokens
from mlxtune.core.evaluation.interval import Floats
from mlxtune.core.evaluation.outcome import Loss, perplexity

# Returns the summed loss of each example, float64 (B,), and reports progress.
ComputeLosses = Callable[[Sequence[Example], Callable[[int], None]], Floats]


@dataclass(frozen=True, eq=False)
class RowLossSums:
    """Rows' summed losses under a model, `losses` float64 (R,), and their `tokens` int64 (R,)."""

    losses: Floats
    tokens: npt.NDArray[np.int64]

    def only(self, rows: npt.NDArray[np.int64]) -> "RowLossSums":
        """Return the losses of the rows at these indices."""
        return RowLossSums(self.losses[rows], self.tokens[rows])

    @property
    def loss(self) -> Loss:
        mean = float(self.losses.sum() / self.tokens.sum())
        return Loss(mean, perplexity(mean))


def sums_of(
    rows: CorpusRows, losses: ComputeLosses, on_progress: Callable[[int, int], None]
) -> RowLossSums:
    """Compute the losses of rows; `on_progress` gets the numbers of finished and of all examples.

    The first token of an example is never predicted, so it does not count.
    """
    examples = [(index, example) for index, row in enumerate(rows) for example in row]
    row_of_example = [index for index, _ in examples]
    flat_examples = [example for _, example in examples]
    losses_of = losses(flat_examples, lambda done: on_progress(done, len(flat_examples)))
    totals, tokens = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
    np.add.at(totals, row_of_example, losses_of)
    np.add.at(tokens, row_of_example, list(map(predicted_tokens, flat_examples)))
    return RowLossSums(totals, tokens)


@dataclass(frozen=True, eq=False)
class AnswerLossSums:
    """Losses of rows' answers under a model: of good answers and, in pairs, of bad answers.

    The only answer of a row with a label is in `good`; `labels` (R,) is 0 for rows whose only
    answer is bad, and 1 for all other rows.
    """

    good: RowLossSums
    bad: RowLossSums
    labels: Floats

    def only(self, rows: npt.NDArray[np.int64]) -> "AnswerLossSums":
        """Return the losses of the rows at these indices."""
        return AnswerLossSums(self.good.only(rows), self.bad.only(rows), self.labels[rows])

    @property
    def margins(self) -> Floats:
        """The mean log-probability of good answers minus that of bad answers, (R,), per token."""
        good, bad = self.good.losses / self.good.tokens, self.bad.losses
        return bad / np.maximum(self.bad.tokens, 1) - good


def answer_sums(
    rows: CorpusRows, losses: ComputeLosses, on_progress: Callable[[int, int], None]
) -> AnswerLossSums:
    """Compute answers' losses; `on_progress` gets the numbers of finished and of all examples."""
    examples = [
        (index, example)
        for index, row in enumerate(rows)
        for example in row
        if example.role in (CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE)
    ]
    flat_examples = [example for _, example in examples]
    losses_of = losses(flat_examples, lambda done: on_progress(done, len(flat_examples)))
    totals, tokens = np.zeros((2, len(rows))), np.zeros((2, len(rows)), dtype=np.int64)
    labels = np.ones(len(rows))
    for (index, example), loss in zip(examples, losses_of, strict=True):
        column = int(example.role == REJECTED)
        totals[column, index] += loss
        tokens[column, index] += predicted_tokens(example)
        labels[index] = example.role != UNDESIRABLE
    return AnswerLossSums(
        RowLossSums(totals[0], tokens[0]), RowLossSums(totals[1], tokens[1]), labels
    )
