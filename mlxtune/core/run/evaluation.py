"""Whether an adapter helped: the losses of rows with and without it, and a confidence interval.

A model's loss is the sum over all supervised tokens divided by their count. The rows are a sample
of the model's future inputs, so the bootstrap resamples rows, each with all its tokens and both
losses: the interval is paired.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.run.metrics import perplexity
from mlxtune.core.steps.batch import predicted_tokens
from mlxtune.errors import NonFiniteLossError

VERDICTS = HELPED, HURT, CANNOT_TELL = "helped", "hurt", "cannot tell"
RESAMPLES, CONFIDENCE = 10_000, 0.95
_TAIL = (1 - CONFIDENCE) / 2
# With fewer rows, not even a change of equal sign in all rows is significant: 2 * (1/2)^5 > 0.05.
FEWEST_ROWS = 6
# A smaller share of the loss hardly matters, however certain it is.
_HARDLY = 0.01
# How many of the most improved, and of the most worsened, rows are reported.
_TOP_ROWS = 5
# Row indices drawn at once, over all resamples.
_DRAWN_AT_ONCE = 1 << 22

_Floats = npt.NDArray[np.float64]
# Returns the summed loss of each example, float64 (B,), and reports its progress.
Losses = Callable[[Sequence[Example], Callable[[int], None]], _Floats]


@dataclass(frozen=True)
class Loss:
    """A model's loss, in nats per supervised token."""

    loss: float
    perplexity: float


@dataclass(frozen=True)
class Difference:
    """The adapted model's loss minus another model's, with its interval; below 0 is better.

    `share` is the difference as a share of the other model's loss.
    """

    loss: float
    share: float
    low: float
    high: float
    confidence: float
    resamples: int
    seed: int

    @property
    def is_alike(self) -> bool:
        """Whether all rows changed equally, so that resampling says nothing about other rows."""
        return math.isclose(self.low, self.high, rel_tol=1e-9, abs_tol=1e-12)


@dataclass(frozen=True)
class RowLosses:
    """A row's loss under both models, in nats per token; `row` is its number in the file."""

    path: str
    row: int
    tokens: int
    base_loss: float
    adapted_loss: float


@dataclass(frozen=True)
class FileVerdict:
    """The loss of one file's rows under both models, in nats per token, and their verdict.

    Under an objective of preferences, it also has the preferred shares before and after.
    """

    path: str
    rows: int
    base_loss: float
    adapted_loss: float
    verdict: str
    hardly: bool = False
    preferred_before: float | None = None
    preferred_after: float | None = None

    @property
    def words(self) -> str:
        """The verdict, with `hardly` before it if the change is small."""
        return "hardly " * self.hardly + self.verdict


@dataclass(frozen=True)
class ExactMatch:
    """The number of answers that equal the data's answer."""

    base: int
    adapted: int | None


@dataclass(frozen=True)
class Matches:
    """The number of answers that match the data's, `by` json, contains or regex=PATTERN."""

    by: str
    base: int
    adapted: int | None


@dataclass(frozen=True)
class Sample:
    """The answers of both models to one row, and the expected answer."""

    path: str
    row: int
    prompt: str
    expected: str
    base: str
    adapted: str | None


@dataclass(frozen=True)
class Generated:
    """Greedy answers to the last turn of each row with a prompt and a complete answer."""

    rows: int
    exact_match: ExactMatch
    samples: list[Sample]
    matches: Matches | None = None


@dataclass(frozen=True)
class StepSamples:
    """Answers after a validation within a run, stored as the `base` answers of the samples."""

    step: int
    samples: list[Sample]


@dataclass(frozen=True)
class Misjudged:
    """A row whose bad answer the adapted model prefers, in nats per token; `row` is its number."""

    path: str
    row: int
    margin_before: float
    margin_after: float


@dataclass(frozen=True)
class PreferenceDifference:
    """The share of pairs whose chosen answer a model prefers, before and after training.

    For answers with a label (not `pairs`), the share of all pairs of a good and a bad answer in
    which the good answer gained more, 0.5 by chance. `low` and `high` are the interval of the
    difference. Margins are means, in nats per token. `fewest` counts pairs, or the answers of the
    rarer label.
    """

    objective: str
    pairs: bool
    before: float
    after: float
    low: float
    high: float
    confidence: float
    margin_before: float
    margin_after: float
    misjudged: tuple[Misjudged, ...] = ()
    fewest: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Without an adapter, only the base model's values are set.

    `tokens` counts supervised tokens. The difference and the verdict compare with the base model,
    or with the adapter from which training started: then `start` is its loss, and `base_difference`
    compares with the base model. Below 1% of the loss, the adapter `hardly` helped or hurt.
    `gained` and `lost` are the rows that contribute most to the difference from the base model, in
    nats, for the better and for the worse.

    Under an objective of preferences, the losses are of the good answers, the verdict is about
    `preference`, and without an adapter `preferred` is the share of pairs that the base prefers.

    `left_out` counts rows that are left out because they were trained on too; with `only_trained`,
    no other rows remained, and all were evaluated. `files` has a verdict on each file of several.
    """

    rows: int
    tokens: int
    base: Loss
    adapted: Loss | None = None
    difference: Difference | None = None
    verdict: str | None = None
    hardly: bool = False
    gained: tuple[RowLosses, ...] = ()
    lost: tuple[RowLosses, ...] = ()
    generated: Generated | None = None
    start: Loss | None = None
    base_difference: Difference | None = None
    left_out: int = 0
    only_trained: bool = False
    files: tuple[FileVerdict, ...] = ()
    preference: PreferenceDifference | None = None
    preferred: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values.

        `matches` only if counted, `files` only if there are several.
        """
        values = asdict(self)
        if not self.files:
            del values["files"]
        if self.generated is not None and self.generated.matches is None:
            del values["generated"]["matches"]
        return values


def parse_evaluation(values: Any) -> Evaluation:
    """Return an evaluation from the JSON of `as_dict`. Raises ValueError if it is not one."""
    evaluation: Evaluation = from_json(Evaluation, values)
    if evaluation.verdict not in (None, *VERDICTS):
        raise ValueError(f"no such verdict: {evaluation.verdict!r}")
    return evaluation


@dataclass(frozen=True, eq=False)
class Sums:
    """Losses of rows under a model: `losses` float64 (R,), each summed over `tokens` int64 (R,)."""

    losses: _Floats
    tokens: npt.NDArray[np.int64]

    def only(self, rows: npt.NDArray[np.int64]) -> "Sums":
        """Return the losses of some rows, by their index."""
        return Sums(self.losses[rows], self.tokens[rows])

    @property
    def loss(self) -> Loss:
        mean = float(self.losses.sum() / self.tokens.sum())
        return Loss(mean, perplexity(mean))


def sums_of(rows: CorpusRows, losses: Losses, on_progress: Callable[[int, int], None]) -> Sums:
    """Compute the losses of rows; `on_progress` gets the number of examples done, and of all.

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
    """Rows to evaluate: rows that were not trained on or, if there are none, all rows."""

    rows: CorpusRows
    left_out: int
    only_trained: bool

    @classmethod
    def of(cls, rows: CorpusRows, trained: npt.NDArray[np.uint64]) -> "JudgedRows":
        """Choose from `rows` by the identities of the rows that were trained on."""
        others = rows.without(trained)
        if not others:
            return cls(rows, 0, only_trained=bool(rows))
        return cls(others, len(rows) - len(others), only_trained=False)


def evaluation_of(
    judged: JudgedRows, base: Sums, adapted: Sums | None, seed: int, start: Sums | None = None
) -> Evaluation:
    """Compare the losses of rows, also with the adapter from which training started, if any.

    Raises NonFiniteLossError if the loss of a row is not finite.
    """
    rows = judged.rows
    for name, sums in (("base", base), ("first adapted", start), ("adapted", adapted)):
        if sums is not None and not np.isfinite(sums.losses).all():
            where = rows.where(int(np.argmin(np.isfinite(sums.losses))))
            raise NonFiniteLossError(
                f"{where}: its loss under the {name} model is not finite: "
                "check the model, or use --dtype float32"
            )
    evaluation = Evaluation(
        len(rows),
        int(base.tokens.sum()),
        base.loss,
        left_out=judged.left_out,
        only_trained=judged.only_trained,
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

    def of_file(part: JudgedRows, places: npt.NDArray[np.int64]) -> Evaluation:
        first = None if start is None else start.only(places)
        return evaluation_of(part, base.only(places), adapted.only(places), seed, first)

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
        files=verdicts_by_file(judged, of_file),
    )


def verdicts_by_file(
    judged: JudgedRows, evaluate: Callable[[JudgedRows, npt.NDArray[np.int64]], Evaluation]
) -> tuple[FileVerdict, ...]:
    """Return the verdict on each file; none for a single file, or if rows were trained on.

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


def paired_difference(
    base: _Floats,
    adapted: _Floats,
    tokens: npt.NDArray[np.int64],
    seed: int,
    *,
    resamples: int = RESAMPLES,
) -> Difference:
    """Return the difference of two losses over the same rows, with its bootstrap interval.

    `base`, `adapted` and `tokens` are (R,): the summed losses of each row, and its tokens. Each
    resample draws rows with replacement and divides the difference of their sums by their tokens.

    Source: the bias-corrected and accelerated interval, Efron, Better Bootstrap Confidence
    Intervals, JASA 82 (1987), equations 2.3 and 6.6; Efron and Tibshirani, An Introduction to the
    Bootstrap (1993), equations 14.9, 14.10, 14.14 and 14.15. Plain percentiles are too
    narrow if few rows contribute most of the difference.
    """
    change = adapted - base
    observed = float(change.sum() / tokens.sum())
    drawn = _resampled(change, tokens, seed, resamples)
    normal = NormalDist()
    # Equal values count half, so that many of them cause no bias.
    below = float((drawn < observed).mean() + (drawn == observed).mean() / 2)
    least = 1 / (2 * resamples)
    bias = normal.inv_cdf(min(max(below, least), 1 - least))
    acceleration = _acceleration(change, tokens)
    levels = []
    for share in (_TAIL, 1 - _TAIL):
        z = bias + normal.inv_cdf(share)
        divisor = 1 - acceleration * z
        # The correction diverges if, for example, a single row differs; then it is skipped.
        levels.append(normal.cdf(bias + z / divisor) if divisor > 0 else share)
    low, high = np.quantile(drawn, levels).tolist()
    share = observed * float(tokens.sum()) / float(base.sum()) if base.any() else 0.0
    return Difference(observed, share, low, high, CONFIDENCE, resamples, seed)


def _resampled(
    change: _Floats, tokens: npt.NDArray[np.int64], seed: int, resamples: int
) -> _Floats:
    generator = np.random.default_rng(seed)
    rows = len(change)
    at_once = max(1, _DRAWN_AT_ONCE // rows)
    parts = []
    for start in range(0, resamples, at_once):
        chosen = generator.integers(0, rows, (min(at_once, resamples - start), rows))
        parts.append(change[chosen].sum(axis=1) / tokens[chosen].sum(axis=1))
    return np.concatenate(parts)


def _acceleration(change: _Floats, tokens: npt.NDArray[np.int64]) -> float:
    """Return the skewness of the statistic without each row in turn (the jackknife), over 6."""
    if len(change) < 2:
        return 0.0
    without = (change.sum() - change) / (tokens.sum() - tokens)
    deviation = without.mean() - without
    spread = float((deviation**2).sum())
    return float((deviation**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
