"""Whether an adapter learned preferences: its choices on held-out pairs, before and after.

A model prefers the answer whose tokens have the higher mean log-probability; the sum would prefer
short answers. An answer with a label has no counterpart: good answers should gain more than bad
ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import CHOSEN, DESIRABLE, REJECTED, UNDESIRABLE
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.objectives.objective import Objective
from mlxtune.core.run.evaluation import (
    CANNOT_TELL,
    CONFIDENCE,
    FEWEST_ROWS,
    HELPED,
    HURT,
    Evaluation,
    JudgedRows,
    Losses,
    Misjudged,
    PreferenceDifference,
    Sums,
    evaluation_of,
    is_hardly,
    paired_difference,
    verdicts_by_file,
)
from mlxtune.core.steps.batch import predicted_tokens

_Floats = npt.NDArray[np.float64]
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class AnswerSums:
    """Losses of rows' answers under a model: of the good answers and, in pairs, the bad ones.

    The only answer of a row with a label is in `good`; `labels` (R,) has 1 or 0.
    """

    good: Sums
    bad: Sums
    labels: _Floats

    def only(self, rows: npt.NDArray[np.int64]) -> "AnswerSums":
        """Return the losses of some rows, by their index."""
        return AnswerSums(self.good.only(rows), self.bad.only(rows), self.labels[rows])

    @property
    def margins(self) -> _Floats:
        """The log-probability of good minus bad answers, (R,), in nats per token."""
        good, bad = self.good.losses / self.good.tokens, self.bad.losses
        return bad / np.maximum(self.bad.tokens, 1) - good


def answer_sums(
    rows: CorpusRows, losses: Losses, on_progress: Callable[[int, int], None]
) -> AnswerSums:
    """Compute the losses of answers; `on_progress` gets the examples done, and of all."""
    examples = [
        (place, example)
        for place, row in enumerate(rows)
        for example in row
        if example.role in (CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE)
    ]
    chosen = [example for _, example in examples]
    found = losses(chosen, lambda done: on_progress(done, len(chosen)))
    totals, tokens = np.zeros((2, len(rows))), np.zeros((2, len(rows)), dtype=np.int64)
    labels = np.ones(len(rows))
    for (place, example), loss in zip(examples, found, strict=True):
        side = int(example.role == REJECTED)
        totals[side, place] += loss
        tokens[side, place] += predicted_tokens(example)
        labels[place] = example.role != UNDESIRABLE
    return AnswerSums(Sums(totals[0], tokens[0]), Sums(totals[1], tokens[1]), labels)


def evaluate_preferences(
    judged: JudgedRows,
    objective: Objective,
    base: AnswerSums,
    adapted: AnswerSums | None,
    seed: int,
    start: AnswerSums | None = None,
) -> Evaluation:
    """Compare the preferences of models; losses are over the good answers.

    `start` are the answers under the adapter from which training started.
    """
    # The losses are of the answers to learn, unless all are bad.
    learned = np.flatnonzero(base.labels) if base.labels.any() else np.arange(len(base.labels))
    rows = judged.rows.only(learned)
    good = [None if each is None else each.good.only(learned) for each in (base, adapted, start)]
    assert good[0] is not None
    evaluation = evaluation_of(replace(judged, rows=rows), good[0], good[1], seed, good[2])
    evaluation = replace(evaluation, rows=len(judged.rows))
    before = base if start is None else start
    margins = before.margins
    if adapted is None:
        preferred = float((margins > 0).mean()) if objective.has_pairs else None
        return replace(evaluation, preferred=preferred)
    after, fewest = adapted.margins, len(margins)
    if objective.has_pairs:
        won, wins = (margins > 0).astype(float), (after > 0).astype(float)
    else:
        gains = after - margins
        won, wins = np.full(len(after), 0.5), _ranks(gains, adapted.labels == 1)
        counts = int(adapted.labels.sum()), int(len(gains) - adapted.labels.sum())
        fewest = min(counts)
        # Each row is compared with the mean of the rows with the other label.
        margins, after = np.zeros(len(after)), _against_others(gains, adapted.labels == 1)
    if objective.has_pairs:
        change = paired_difference(won, wins, np.ones(len(won), dtype=np.int64), seed)
        low, high = change.low, change.high
        if change.is_alike:
            low, high = _bounds(change.loss, len(won))
    else:
        low, high = (bound - 0.5 for bound in _rank_interval(float(wins.mean()), *counts))
    found = PreferenceDifference(
        objective=objective.description,
        pairs=objective.has_pairs,
        before=float(won.mean()),
        after=float(wins.mean()),
        fewest=fewest,
        low=low,
        high=high,
        confidence=CONFIDENCE,
        margin_before=float(margins.mean()),
        margin_after=float(after.mean()),
        misjudged=tuple(
            Misjudged(*judged.rows.place(i), float(margins[i]), float(after[i]))
            for i in np.argsort(after, kind="stable")[:_SHOWN].tolist()
            if after[i] < 0
        ),
    )
    verdict = HELPED if low > 0 else HURT if high < 0 else CANNOT_TELL
    if judged.only_trained or fewest < FEWEST_ROWS:
        verdict = CANNOT_TELL
    hardly = is_hardly(verdict, found.after - found.before)

    def of_file(part: JudgedRows, places: npt.NDArray[np.int64]) -> Evaluation:
        first = None if start is None else start.only(places)
        both = base.only(places), adapted.only(places)
        return evaluate_preferences(part, objective, *both, seed, first)

    return replace(
        evaluation,
        verdict=verdict,
        hardly=hardly,
        preference=found,
        preferred=None,
        files=verdicts_by_file(judged, of_file),
    )


def _bounds(change: float, rows: int) -> tuple[float, float]:
    """Return the interval of a change that is equal in all rows, within -1 and 1.

    Source: Clopper and Pearson (1934): if none of n rows differs, a share of at most 1 - (0.05 /
    2)^(1 / n), about 3.7 / n, may differ.
    """
    others = 1 - ((1 - CONFIDENCE) / 2) ** (1 / rows)
    return change - (change + 1) * others, change + (1 - change) * others


def _rank_interval(area: float, good: int, bad: int) -> tuple[float, float]:
    """Return the interval of the share of pairs in which the good answer gained more.

    Pairs share answers, so they are not independent. Source: Newcombe, Statistics in Medicine 25
    (2006), method 5, with the variance of Hanley and McNeil, Radiology 143 (1982).
    """
    if not good or not bad:
        return 0.0, 1.0
    z, rows = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), (good + bad) / 2

    def is_outside(share: float) -> bool:
        spread = 1 + (rows - 1) * ((1 - share) / (2 - share) + share / (1 + share))
        return (area - share) ** 2 > z**2 * share * (1 - share) * spread / (good * bad)

    def bound(outside: float) -> float:
        """Return the bound of the interval between the area and an outer share, by bisection."""
        inside = area
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if is_outside(middle) else (middle, outside)
        return inside

    return bound(0.0), bound(1.0)


def _ranks(gains: _Floats, good: npt.NDArray[np.bool_]) -> _Floats:
    """Return (R,): for each answer, the share of the other label's answers that it surpasses."""
    if good.all() or not good.any():
        return np.full(len(gains), 0.5)

    def share(own: float, others: _Floats, sign: int) -> float:
        return float(np.mean(sign * (own - others) > 0) + np.mean(others == own) / 2)

    return np.array(
        [
            share(gain, gains[~good], 1) if is_good else share(gain, gains[good], -1)
            for gain, is_good in zip(gains, good, strict=True)
        ]
    )


def _against_others(gains: _Floats, good: npt.NDArray[np.bool_]) -> _Floats:
    if good.all() or not good.any():
        return np.zeros(len(gains))
    others = np.where(good, gains[~good].mean(), gains[good].mean())
    signs = np.where(good, 1.0, -1.0)
    found: _Floats = signs * (gains - others)
    return found
