"""Judges from losses on held-out rows whether an adapter helped, or learned preferences.

A model's loss is the mean over all supervised tokens of the rows. A model prefers the answer whose
tokens have the higher mean log-probability; a sum would favour short answers. An answer with a
label has no counterpart, so each good answer is compared with all bad answers, and should gain
more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.near_copies import TextHash
from mlxtune.core.evaluation.interval import (
    CONFIDENCE,
    Floats,
    paired_difference,
    paired_fraction_interval,
    rank_interval,
)
from mlxtune.core.evaluation.outcome import (
    CANNOT_TELL,
    HELPED,
    HURT,
    MIN_ROWS,
    Evaluation,
    FileVerdict,
    MisjudgedAnswer,
    PreferenceDifference,
    RewardChange,
    RowLosses,
    baseline_of,
)
from mlxtune.core.evaluation.row_losses import AnswerLossSums, RowLossSums
from mlxtune.core.objectives.objective import Objective
from mlxtune.errors import NonFiniteLossError

# A change below this fraction of the loss hardly matters, however certain it is.
_NEGLIGIBLE_FRACTION = 0.01
# The number of rows to report of each kind: most improved, most worsened, and misjudged.
_TOP_ROWS = 5

_Losses = TypeVar("_Losses", RowLossSums, AnswerLossSums)


@dataclass(frozen=True)
class JudgedRows:
    """Rows to evaluate: rows that were not trained on or, if there are none, all rows.

    Rows that say the same count once, and `copies` is the number of the others: resampled copies
    would vary less than rows that users will send, so the interval would be too narrow.
    `candidates` is the number of adapters from which training chose the best on these rows. With
    `unknown_rows`, it is unknown which rows were trained on. `against` names another adapter, whose
    losses are the baseline.
    """

    rows: CorpusRows
    left_out: int
    only_trained: bool
    candidates: int = 1
    unknown_rows: bool = False
    against: str | None = None
    copies: int = 0

    @classmethod
    def of(
        cls,
        rows: CorpusRows,
        trained: npt.NDArray[np.uint64],
        candidates: int = 1,
        text_hash: TextHash | None = None,
        *,
        by_prompt: bool = False,
    ) -> "JudgedRows":
        """Leave out of `rows` those with identities in `trained`, unless no rows would remain.

        With `text_hash`, near copies of rows in `trained` are left out too. Rows count `by_prompt`,
        whatever their answers, where rewards judge the model's own answers.
        """
        others = rows.without(trained, text_hash, by_prompt=by_prompt)
        kept = others or rows
        distinct = kept.distinct(text_hash, by_prompt=by_prompt)
        return cls(
            distinct,
            len(rows) - len(kept),
            only_trained=bool(rows) and not others,
            candidates=candidates,
            copies=len(kept) - len(distinct),
        )


@dataclass(frozen=True, eq=False)
class ModelLosses(Generic[_Losses]):
    """The losses of rows under the base model, the adapter, and its starting point, if any."""

    base: _Losses
    adapted: _Losses | None
    start: _Losses | None

    @property
    def baseline(self) -> _Losses:
        """The losses with which the adapter's are compared."""
        return baseline_of(self.base, self.start)

    def only(self, rows: npt.NDArray[np.int64]) -> "ModelLosses[_Losses]":
        """Return the losses of the rows at these indices."""
        return ModelLosses(
            self.base.only(rows),
            None if self.adapted is None else self.adapted.only(rows),
            None if self.start is None else self.start.only(rows),
        )


def evaluate_losses(
    judged: JudgedRows,
    base: RowLossSums,
    adapted: RowLossSums | None,
    seed: int,
    start: RowLossSums | None = None,
) -> Evaluation:
    """Compare the losses of rows under the base model, the adapter, and its starting point, if any.

    With several files, each file gets a verdict. Raises NonFiniteLossError if a row's loss is not
    finite.
    """
    losses = ModelLosses(base, adapted, start)
    return _with_verdicts_by_file(judged, partial(_judge_losses, seed), losses)


def evaluate_preferences(
    judged: JudgedRows,
    objective: Objective,
    base: AnswerLossSums,
    adapted: AnswerLossSums | None,
    seed: int,
    start: AnswerLossSums | None = None,
) -> Evaluation:
    """Compare the preferences of models; losses are over the good answers.

    `start` has the answers' losses under the adapter from which training started. With several
    files, each file gets a verdict.
    """
    compare = partial(_judge_preferences, seed, objective)
    return _with_verdicts_by_file(judged, compare, ModelLosses(base, adapted, start))


@dataclass(frozen=True, eq=False)
class RowRewards:
    """The rewards of answers to rows, float64 (R,), NaN for a row without one.

    `name` is empty for the weighted sum of all rewards; the answers are greedy or `sampled`.
    """

    name: str
    sampled: bool
    before: Floats
    after: Floats


def evaluate_rewards(
    judged: JudgedRows, rewards: Sequence[RowRewards], seed: int
) -> Evaluation | None:
    """Compare the rewards of answers before and after training; the first one decides.

    Returns None if no row has its reward both times.
    """
    first = rewards[0]
    usable = np.flatnonzero(np.isfinite(first.before) & np.isfinite(first.after))
    if not len(usable):
        return None
    ones = np.ones(len(usable), dtype=np.int64)
    before, after = (RowLossSums(-each[usable], ones) for each in (first.before, first.after))
    rows = replace(judged, rows=judged.rows.only(usable))
    evaluation = _compare_losses(seed, rows, ModelLosses(before, after, None))
    verdict = verdict_of(evaluation)
    changes = tuple(change for each in rewards if (change := _reward_change(each, seed)))
    return replace(evaluation, verdict=verdict, gained=(), lost=(), rewards=changes)


def _reward_change(rewards: RowRewards, seed: int) -> RewardChange | None:
    usable = np.isfinite(rewards.before) & np.isfinite(rewards.after)
    before, after = rewards.before[usable], rewards.after[usable]
    if not len(before):
        return None
    interval = paired_difference(before, after, np.ones(len(before), dtype=np.int64), seed)
    means = float(before.mean()), float(after.mean())
    return RewardChange(rewards.name, rewards.sampled, *means, interval.low, interval.high)


def _with_verdicts_by_file(
    judged: JudgedRows,
    compare: Callable[[JudgedRows, ModelLosses[_Losses]], Evaluation],
    losses: ModelLosses[_Losses],
) -> Evaluation:
    """Compare the losses of all rows and, if there are several files, of each file's rows.

    There is no verdict on a file if all rows were trained on.
    """
    evaluation, rows = compare(judged, losses), judged.rows
    if losses.adapted is None or judged.only_trained:
        return evaluation
    verdicts = []
    for name, indices in rows.by_file():
        part = replace(judged, rows=rows.only(indices))
        evaluation_of_file = compare(part, losses.only(indices))
        verdicts.append(_file_verdict(name, len(indices), evaluation_of_file))
    return replace(evaluation, files=tuple(verdicts))


def _file_verdict(path: str, rows: int, evaluation: Evaluation) -> FileVerdict:
    assert evaluation.adapted is not None
    assert evaluation.verdict is not None
    preference = evaluation.preference
    return FileVerdict(
        path,
        rows,
        evaluation.baseline.loss,
        evaluation.adapted.loss,
        evaluation.verdict,
        evaluation.hardly,
        preference.before if preference else None,
        preference.after if preference else None,
    )


def _judge_losses(seed: int, judged: JudgedRows, losses: ModelLosses[RowLossSums]) -> Evaluation:
    evaluation = _compare_losses(seed, judged, losses)
    difference = evaluation.difference
    return evaluation if difference is None else _with_verdict(evaluation, difference.share)


def _compare_losses(seed: int, judged: JudgedRows, losses: ModelLosses[RowLossSums]) -> Evaluation:
    rows, base, adapted, start = judged.rows, losses.base, losses.adapted, losses.start
    for name, sums in (("base", base), ("initial", start), ("adapted", adapted)):
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
        unknown_rows=judged.unknown_rows,
        against=judged.against,
        copies=judged.copies,
    )
    if adapted is None:
        return evaluation
    baseline = losses.baseline
    difference = paired_difference(baseline.losses, adapted.losses, base.tokens, seed)
    from_base = None
    if baseline is not base:
        from_base = paired_difference(base.losses, adapted.losses, base.tokens, seed)

    def most_changed(sign: int) -> tuple[RowLosses, ...]:
        change = sign * (adapted.losses - baseline.losses)
        order = np.argsort(change, kind="stable")[:_TOP_ROWS].tolist()
        return tuple(
            RowLosses(
                *rows.source(i),
                int(base.tokens[i]),
                float(baseline.losses[i] / base.tokens[i]),
                float(adapted.losses[i] / base.tokens[i]),
            )
            for i in order
            if change[i] < 0
        )

    return replace(
        evaluation,
        adapted=adapted.loss,
        difference=difference,
        start=None if start is None else start.loss,
        base_difference=from_base,
        gained=most_changed(1),
        lost=most_changed(-1),
    )


def verdict_of(evaluation: Evaluation) -> str:
    """Return the verdict on the preferences of an evaluation with an adapter, or else its losses.

    A difference in preferences above 0 is better, one in losses below 0.
    """
    preference, difference = evaluation.preference, evaluation.difference
    assert difference is not None
    low, high, rows = -difference.high, -difference.low, evaluation.rows
    if preference is not None:
        low, high, rows = preference.low, preference.high, preference.fewest or 0
    if evaluation.only_trained or rows < MIN_ROWS or low <= 0 <= high:
        return CANNOT_TELL
    return HELPED if low > 0 else HURT


def _with_verdict(evaluation: Evaluation, size: float) -> Evaluation:
    """Return an evaluation with its verdict; `size` is the relative size of the difference."""
    verdict = verdict_of(evaluation)
    return replace(evaluation, verdict=verdict, hardly=is_negligible(verdict, size))


def is_negligible(verdict: str, fraction: float) -> bool:
    """Return whether a verdict rests on a negligible relative difference."""
    return verdict != CANNOT_TELL and abs(fraction) < _NEGLIGIBLE_FRACTION


def _judge_preferences(
    seed: int,
    objective: Objective,
    judged: JudgedRows,
    losses: ModelLosses[AnswerLossSums],
) -> Evaluation:
    adapted, labels, baseline = losses.adapted, losses.base.labels, losses.baseline
    # The losses are over the answers to learn, unless all answers are bad.
    learned = np.flatnonzero(labels) if labels.any() else np.arange(len(labels))
    rows = judged.rows.only(learned)
    good = ModelLosses(
        losses.base.good,
        None if adapted is None else adapted.good,
        None if losses.start is None else losses.start.good,
    )
    evaluation = _compare_losses(seed, replace(judged, rows=rows), good.only(learned))
    evaluation = replace(evaluation, rows=len(judged.rows))
    if adapted is None:
        preferred = float((baseline.margins > 0).mean()) if objective.has_pairs else None
        return replace(evaluation, preferred=preferred)
    if objective.has_pairs:
        difference = _compare_pairs(judged.rows, baseline, adapted)
        size = difference.after - difference.before
    else:
        difference = _compare_labeled(judged.rows, baseline, adapted)
        # A tiny gain may be larger in every pair, so its size counts, relative to the loss.
        loss = baseline.good.only(learned).loss.loss
        size = difference.margin_after / loss if loss else 0.0
    difference = replace(difference, objective=objective.description)
    return _with_verdict(replace(evaluation, preference=difference), size)


def _compare_pairs(
    rows: CorpusRows, before: AnswerLossSums, adapted: AnswerLossSums
) -> PreferenceDifference:
    won_before, won_after = (each.margins > 0 for each in (before, adapted))
    bounds = paired_fraction_interval(won_before, won_after)
    fractions = float(won_before.mean()), float(won_after.mean())
    return _difference(rows, fractions, bounds, before.margins, adapted.margins, len(rows))


def _compare_labeled(
    rows: CorpusRows, before: AnswerLossSums, adapted: AnswerLossSums
) -> PreferenceDifference:
    good = adapted.labels == 1
    gains = adapted.margins - before.margins
    fraction = float(_win_rate_per_answer(gains, good).mean())
    count = int(good.sum())
    low, high = rank_interval(fraction, count, len(good) - count)
    # Each answer's gain is compared with the mean gain of the answers with the other label.
    margins = np.zeros(len(good)), _against_others(gains, good)
    smaller_count = min(count, len(good) - count)
    difference = _difference(
        rows, (0.5, fraction), (low - 0.5, high - 0.5), *margins, smaller_count
    )
    return replace(difference, pairs=False)


def _difference(
    rows: CorpusRows,
    fractions: tuple[float, float],
    bounds: tuple[float, float],
    before: Floats,
    after: Floats,
    fewest: int,
) -> PreferenceDifference:
    """Build the result from two fractions, the bounds of their difference, and the margins (R,)."""
    return PreferenceDifference(
        objective="",
        pairs=True,
        before=fractions[0],
        after=fractions[1],
        fewest=fewest,
        low=bounds[0],
        high=bounds[1],
        confidence=CONFIDENCE,
        margin_before=float(before.mean()),
        margin_after=float(after.mean()),
        misjudged=tuple(
            MisjudgedAnswer(*rows.source(i), float(before[i]), float(after[i]))
            for i in np.argsort(after, kind="stable")[:_TOP_ROWS].tolist()
            if after[i] < 0
        ),
    )


def _win_rate_per_answer(gains: Floats, good: npt.NDArray[np.bool_]) -> Floats:
    """Return, for each answer (R,), the fraction of pairs in which the good answer gained more."""
    if good.all() or not good.any():
        return np.full(len(gains), 0.5)

    def fraction(own: float, others: Floats, sign: int) -> float:
        return float(np.mean(sign * (own - others) > 0) + np.mean(others == own) / 2)

    return np.array(
        [
            fraction(gain, gains[~good], 1) if is_good else fraction(gain, gains[good], -1)
            for gain, is_good in zip(gains, good, strict=True)
        ]
    )


def _against_others(gains: Floats, good: npt.NDArray[np.bool_]) -> Floats:
    if good.all() or not good.any():
        return np.zeros(len(gains))
    others = np.where(good, gains[~good].mean(), gains[good].mean())
    signs = np.where(good, 1.0, -1.0)
    margins: Floats = signs * (gains - others)
    return margins
