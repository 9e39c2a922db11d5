"""Compares the losses of rows without and with an adapter, to judge whether it helped.

A model's loss is the mean over all supervised tokens of the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.evaluation.evaluation import (
    CANNOT_TELL,
    FEWEST_ROWS,
    HELPED,
    HURT,
    Difference,
    Evaluation,
    FileVerdict,
    Loss,
    RowLosses,
    perplexity,
)
from mlxtune.core.evaluation.interval import Floats, paired_difference
from mlxtune.core.steps.batch import predicted_tokens
from mlxtune.errors import NonFiniteLossError

# A change below this share of the loss hardly matters, however certain it is.
_HARDLY = 0.01
# The number of most improved rows, and of most worsened rows, to report.
_TOP_ROWS = 5

# Returns the summed loss of each example, float64 (B,), and reports progress.
ComputeLosses = Callable[[Sequence[Example], Callable[[int], None]], Floats]


@dataclass(frozen=True, eq=False)
class Sums:
    """Rows' summed losses under a model, `losses` float64 (R,), and their `tokens` int64 (R,)."""

    losses: Floats
    tokens: npt.NDArray[np.int64]

    def only(self, rows: npt.NDArray[np.int64]) -> "Sums":
        """Return the losses of the rows at these indices."""
        return Sums(self.losses[rows], self.tokens[rows])

    @property
    def loss(self) -> Loss:
        mean = float(self.losses.sum() / self.tokens.sum())
        return Loss(mean, perplexity(mean))


def sums_of(
    rows: CorpusRows, losses: ComputeLosses, on_progress: Callable[[int, int], None]
) -> Sums:
    """Compute the losses of rows; `on_progress` gets the numbers of finished and of all examples.

    The first token of an example is never predicted, so it does not count.
    """
    chosen = [example for row in rows for example in row]
    places = [place for place, row in enumerate(rows) for _ in row]
    totals, tokens = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
    np.add.at(totals, places, losses(chosen, lambda done: on_progress(done, len(chosen))))
    np.add.at(tokens, places, list(map(predicted_tokens, chosen)))
    return Sums(totals, tokens)


@dataclass(frozen=True)
class JudgedRows:
    """Rows to evaluate: rows that were not trained on or, if there are none, all rows.

    `candidates` is the number of adapters from which training chose the best on these rows.
    """

    rows: CorpusRows
    left_out: int
    only_trained: bool
    candidates: int = 1

    @classmethod
    def of(cls, rows: CorpusRows, trained: npt.NDArray[np.uint64]) -> "JudgedRows":
        """Leave out of `rows` those with identities in `trained`, unless no rows would remain."""
        others = rows.without(trained)
        if not others:
            return cls(rows, 0, only_trained=bool(rows))
        return cls(others, len(rows) - len(others), only_trained=False)


def evaluation_of(
    judged: JudgedRows, base: Sums, adapted: Sums | None, seed: int, start: Sums | None = None
) -> Evaluation:
    """Compare the losses of rows under the base model, the adapter, and its starting point, if any.

    With several files, each file gets a verdict. Raises NonFiniteLossError if a row's loss is not
    finite.
    """
    evaluation = compare_rows(judged, base, adapted, seed, start)
    if adapted is None:
        return evaluation

    def of_file(part: JudgedRows, places: npt.NDArray[np.int64]) -> Evaluation:
        first = None if start is None else start.only(places)
        return compare_rows(part, base.only(places), adapted.only(places), seed, first)

    return replace(evaluation, files=verdicts_by_file(judged, of_file))


def compare_rows(
    judged: JudgedRows, base: Sums, adapted: Sums | None, seed: int, start: Sums | None = None
) -> Evaluation:
    """Return the evaluation as `evaluation_of` does, but without a verdict on each file."""
    rows = judged.rows
    for name, sums in (("base", base), ("first adapted", start), ("adapted", adapted)):
        if sums is not None and not np.isfinite(sums.losses).all():
            where = rows.where(int(np.argmin(np.isfinite(sums.losses))))
            raise NonFiniteLossError(
                f"{where}: the row's loss under the {name} model is not finite: "
                "check the model, or use --dtype float32"
            )
    evaluation = Evaluation(
        len(rows),
        int(base.tokens.sum()),
        base.loss,
        left_out=judged.left_out,
        only_trained=judged.only_trained,
        candidates=judged.candidates,
    )
    if adapted is None:
        return evaluation
    from_base = paired_difference(base.losses, adapted.losses, base.tokens, seed)
    difference = from_base
    if start is not None:
        difference = paired_difference(start.losses, adapted.losses, base.tokens, seed)

    def most_changed(sign: int) -> tuple[RowLosses, ...]:
        change = sign * (adapted.losses - base.losses)
        order = np.argsort(change, kind="stable")[:_TOP_ROWS].tolist()
        return tuple(
            RowLosses(
                *rows.place(i),
                int(base.tokens[i]),
                float(base.losses[i] / base.tokens[i]),
                float(adapted.losses[i] / base.tokens[i]),
            )
            for i in order
            if change[i] < 0
        )

    verdict = CANNOT_TELL if judged.only_trained else verdict_of(difference, len(rows))
    return replace(
        evaluation,
        adapted=adapted.loss,
        difference=difference,
        verdict=verdict,
        hardly=is_hardly(verdict, difference.share),
        start=None if start is None else start.loss,
        base_difference=None if start is None else from_base,
        gained=most_changed(1),
        lost=most_changed(-1),
    )


def verdicts_by_file(
    judged: JudgedRows, evaluate: Callable[[JudgedRows, npt.NDArray[np.int64]], Evaluation]
) -> tuple[FileVerdict, ...]:
    """Return the verdict on each file; none for a single file, or if all rows were trained on.

    `evaluate` compares the losses of rows, given their places.
    """
    rows = judged.rows
    present = np.unique(rows.files).tolist()
    found = []
    for file in present if len(present) > 1 and not judged.only_trained else ():
        places = np.flatnonzero(rows.files == file)
        own = evaluate(replace(judged, rows=rows.only(places)), places)
        assert own.adapted is not None
        assert own.verdict is not None
        preference = own.preference
        found.append(
            FileVerdict(
                rows.corpus.paths[file] if rows.corpus.paths else f"file {file + 1}",
                len(places),
                own.base.loss,
                own.adapted.loss,
                own.verdict,
                own.hardly,
                preference.before if preference else None,
                preference.after if preference else None,
            )
        )
    return tuple(found)


def verdict_of(difference: Difference, rows: int) -> str:
    if rows < FEWEST_ROWS or difference.low <= 0 <= difference.high:
        return CANNOT_TELL
    return HELPED if difference.high < 0 else HURT


def is_hardly(verdict: str, share: float) -> bool:
    """Return whether a verdict rests on a negligible relative difference."""
    return verdict != CANNOT_TELL and abs(share) < _HARDLY
