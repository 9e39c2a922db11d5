"""Tells from choices on held-out pairs whether an adapter learned preferences.

A model prefers the answer whose tokens have the higher mean log-probability; a sum would favour
short answers. An answer with a label has no counterpart, so each good answer is compared with all
bad answers, and should gain more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.conversation import CHOSEN, DESIRABLE, REJECTED, UNDESIRABLE
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.evaluation.evaluation import (
    CANNOT_TELL,
    FEWEST_ROWS,
    HELPED,
    HURT,
    Evaluation,
    Misjudged,
    PreferenceDifference,
)
from mlxtune.core.evaluation.interval import (
    CONFIDENCE,
    Floats,
    paired_share_interval,
    rank_interval,
)
from mlxtune.core.evaluation.losses import (
    ComputeLosses,
    JudgedRows,
    Sums,
    compare_rows,
    is_hardly,
    verdicts_by_file,
)
from mlxtune.core.objectives.objective import Objective
from mlxtune.core.steps.batch import predicted_tokens

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class AnswerSums:
    """Losses of rows' answers under a model: of good answers and, in pairs, of bad answers.

    The only answer of a row with a label is in `good`; `labels` (R,) is 0 for rows whose only
    answer is bad, and 1 for all other rows.
    """

    good: Sums
    bad: Sums
    labels: Floats

    def only(self, rows: npt.NDArray[np.int64]) -> "AnswerSums":
        """Return the losses of the rows at these indices."""
        return AnswerSums(self.good.only(rows), self.bad.only(rows), self.labels[rows])

    @property
    def margins(self) -> Floats:
        """The mean log-probability of good answers minus that of bad answers, (R,), per token."""
        good, bad = self.good.losses / self.good.tokens, self.bad.losses
        return bad / np.maximum(self.bad.tokens, 1) - good


def answer_sums(
    rows: CorpusRows, losses: ComputeLosses, on_progress: Callable[[int, int], None]
) -> AnswerSums:
    """Compute answers' losses; `on_progress` gets the numbers of finished and of all examples."""
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

    `start` has the answers' losses under the adapter from which training started. With several
    files, each file gets a verdict.
    """
    evaluation = _compare_rows(judged, objective, base, adapted, seed, start)
    if adapted is None:
        return evaluation

    def of_file(part: JudgedRows, places: npt.NDArray[np.int64]) -> Evaluation:
        first = None if start is None else start.only(places)
        both = base.only(places), adapted.only(places)
        return _compare_rows(part, objective, *both, seed, first)

    return replace(evaluation, files=verdicts_by_file(judged, of_file))


def _compare_rows(
    judged: JudgedRows,
    objective: Objective,
    base: AnswerSums,
    adapted: AnswerSums | None,
    seed: int,
    start: AnswerSums | None,
) -> Evaluation:
    # The losses are over the answers to learn, unless all answers are bad.
    learned = np.flatnonzero(base.labels) if base.labels.any() else np.arange(len(base.labels))
    rows = judged.rows.only(learned)
    good = [None if each is None else each.good.only(learned) for each in (base, adapted, start)]
    assert good[0] is not None
    evaluation = compare_rows(replace(judged, rows=rows), good[0], good[1], seed, good[2])
    evaluation = replace(evaluation, rows=len(judged.rows))
    before = base if start is None else start
    if adapted is None:
        preferred = float((before.margins > 0).mean()) if objective.has_pairs else None
        return replace(evaluation, preferred=preferred)
    if objective.has_pairs:
        found = _compare_pairs(judged.rows, before, adapted)
        size = found.after - found.before
    else:
        found = _compare_labelled(judged.rows, before, adapted)
        # A tiny gain may be larger in every pair, so its size counts, relative to the loss.
        loss = before.good.only(learned).loss.loss
        size = found.margin_after / loss if loss else 0.0
    found = replace(found, objective=objective.description)
    verdict = HELPED if found.low > 0 else HURT if found.high < 0 else CANNOT_TELL
    if judged.only_trained or (found.fewest or 0) < FEWEST_ROWS:
        verdict = CANNOT_TELL
    hardly = is_hardly(verdict, size)
    return replace(evaluation, verdict=verdict, hardly=hardly, preference=found)


def _compare_pairs(
    rows: CorpusRows, before: AnswerSums, adapted: AnswerSums
) -> PreferenceDifference:
    won, wins = (each.margins > 0 for each in (before, adapted))
    bounds = paired_share_interval(won, wins)
    shares = float(won.mean()), float(wins.mean())
    return _difference(rows, shares, bounds, before.margins, adapted.margins, len(rows))


def _compare_labelled(
    rows: CorpusRows, before: AnswerSums, adapted: AnswerSums
) -> PreferenceDifference:
    good = adapted.labels == 1
    gains = adapted.margins - before.margins
    share = float(_ranks(gains, good).mean())
    count = int(good.sum())
    low, high = rank_interval(share, count, len(good) - count)
    # Each answer's gain is compared with the mean gain of the answers with the other label.
    margins = np.zeros(len(good)), _against_others(gains, good)
    fewest = min(count, len(good) - count)
    found = _difference(rows, (0.5, share), (low - 0.5, high - 0.5), *margins, fewest)
    return replace(found, pairs=False)


def _difference(
    rows: CorpusRows,
    shares: tuple[float, float],
    bounds: tuple[float, float],
    before: Floats,
    after: Floats,
    fewest: int,
) -> PreferenceDifference:
    """Build the result from two shares, their difference's bounds, and the margins (R,)."""
    return PreferenceDifference(
        objective="",
        pairs=True,
        before=shares[0],
        after=shares[1],
        fewest=fewest,
        low=bounds[0],
        high=bounds[1],
        confidence=CONFIDENCE,
        margin_before=float(before.mean()),
        margin_after=float(after.mean()),
        misjudged=tuple(
            Misjudged(*rows.place(i), float(before[i]), float(after[i]))
            for i in np.argsort(after, kind="stable")[:_SHOWN].tolist()
            if after[i] < 0
        ),
    )


def _ranks(gains: Floats, good: npt.NDArray[np.bool_]) -> Floats:
    """Return, for each answer (R,), the share of its pairs in which the good answer gained more."""
    if good.all() or not good.any():
        return np.full(len(gains), 0.5)

    def share(own: float, others: Floats, sign: int) -> float:
        return float(np.mean(sign * (own - others) > 0) + np.mean(others == own) / 2)

    return np.array(
        [
            share(gain, gains[~good], 1) if is_good else share(gain, gains[good], -1)
            for gain, is_good in zip(gains, good, strict=True)
        ]
    )


def _against_others(gains: Floats, good: npt.NDArray[np.bool_]) -> Floats:
    if good.all() or not good.any():
        return np.zeros(len(gains))
    others = np.where(good, gains[~good].mean(), gains[good].mean())
    signs = np.where(good, 1.0, -1.0)
    found: Floats = signs * (gains - others)
    return found
