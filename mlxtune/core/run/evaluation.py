"""Whether an adapter helped: the losses of rows with and without it, and a confidence interval.

A model's loss is the sum over all supervised tokens divided by their count. The rows are a sample
of the model's future inputs, so the bootstrap resamples rows, each with all its tokens and both
losses, which makes the interval a paired one.
"""

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
from mlxtune.core.text import count
from mlxtune.errors import NonFiniteLossError

VERDICTS = HELPED, HURT, CANNOT_TELL = "helped", "hurt", "cannot tell"
RESAMPLES, CONFIDENCE = 10_000, 0.95
_TAIL = (1 - CONFIDENCE) / 2
# With fewer rows, even a change of the same sign in all is not significant: 2 * (1/2)^5 > 0.05.
FEWEST_ROWS = 6
# How many of the most improved and most worsened rows to report.
_TOP_ROWS = 5
# Row indices drawn at once, over all resamples.
_DRAWN_AT_ONCE = 1 << 22

_Floats = npt.NDArray[np.float64]
# Returns the summed loss of each example, float64 (B,), and reports how many are done meanwhile.
Losses = Callable[[Sequence[Example], Callable[[int], None]], _Floats]


@dataclass(frozen=True)
class Loss:
    """A model's loss, in nats per supervised token."""

    loss: float
    perplexity: float


@dataclass(frozen=True)
class Difference:
    """The adapted model's loss minus the base model's, with its interval; below 0 is better."""

    loss: float
    low: float
    high: float
    confidence: float
    resamples: int
    seed: int


@dataclass(frozen=True)
class RowLosses:
    """A row's loss under both models, in nats per token; `row` is its number in the file."""

    path: str
    row: int
    tokens: int
    base_loss: float
    adapted_loss: float


@dataclass(frozen=True)
class ExactMatch:
    """How many answers equal the data's exactly."""

    base: int
    adapted: int | None


@dataclass(frozen=True)
class Sample:
    """Both models' answers to one row, and the expected answer."""

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


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Without an adapter, only the base model's values are set.

    `tokens` counts supervised tokens. `gained` and `lost` are the rows that contribute most to the
    difference, in nats, for the better and for the worse.
    """

    rows: int
    tokens: int
    base: Loss
    adapted: Loss | None = None
    difference: Difference | None = None
    verdict: str | None = None
    gained: tuple[RowLosses, ...] = ()
    lost: tuple[RowLosses, ...] = ()
    generated: Generated | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON-ready values."""
        return asdict(self)


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

    @property
    def loss(self) -> Loss:
        mean = float(self.losses.sum() / self.tokens.sum())
        return Loss(mean, perplexity(mean))


def sums_of(rows: CorpusRows, losses: Losses, on_progress: Callable[[int, int], None]) -> Sums:
    """Compute the losses of rows; `on_progress` gets the number of examples done, and of all.

    The first token of an example is never predicted, so it does not count.
    """
    # Neighbours in length share a micro-batch; the sums do not depend on the order.
    examples = [(place, example) for place, row in enumerate(rows) for example in row]
    examples.sort(key=lambda each: len(each[1]))
    chosen = [example for _, example in examples]
    places = [place for place, _ in examples]
    totals, tokens = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
    np.add.at(totals, places, losses(chosen, lambda done: on_progress(done, len(chosen))))
    np.add.at(tokens, places, list(map(predicted_tokens, chosen)))
    return Sums(totals, tokens)


def evaluation_of(rows: CorpusRows, base: Sums, adapted: Sums | None, seed: int) -> Evaluation:
    """Compare the losses of rows. Raises NonFiniteLossError if the loss of a row is not finite."""
    for name, sums in (("base", base), ("adapted", adapted)):
        if sums is not None and not np.isfinite(sums.losses).all():
            path, row = rows.place(int(np.argmin(np.isfinite(sums.losses))))
            raise NonFiniteLossError(
                f"{path}:{row}: its loss under the {name} model is not finite: "
                "check the model, or use --dtype float32"
            )
    evaluation = Evaluation(len(rows), int(base.tokens.sum()), base.loss)
    if adapted is None:
        return evaluation
    difference = paired_difference(base.losses, adapted.losses, base.tokens, seed)

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

    return replace(
        evaluation,
        adapted=adapted.loss,
        difference=difference,
        verdict=verdict_of(difference, len(rows)),
        gained=most_changed(1),
        lost=most_changed(-1),
    )


def verdict_of(difference: Difference, rows: int) -> str:
    if rows < FEWEST_ROWS or difference.low <= 0 <= difference.high:
        return CANNOT_TELL
    return HELPED if difference.high < 0 else HURT


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
    return Difference(observed, low, high, CONFIDENCE, resamples, seed)


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


def verdict_line(evaluation: Evaluation) -> str:
    """Return the verdict and its numbers in a sentence. Needs an evaluation with an adapter."""
    difference = evaluation.difference
    assert difference is not None
    rows = f"{count(evaluation.rows, 'row')}, {count(evaluation.tokens, 'supervised token')}"
    better, low, high = "more", difference.low, difference.high
    if difference.loss <= 0:
        # The sentence gives the amount without its sign.
        better, low, high = "less", -high, -low
    amount = (
        f"{abs(difference.loss):.4f} nats per token {better} than the base model "
        f"({difference.confidence:.0%} interval {low + 0.0:.4f} to {high + 0.0:.4f}) on {rows}"
    )
    if evaluation.verdict != CANNOT_TELL:
        return f"the adapter {evaluation.verdict}: {amount}"
    few = f"; at least {FEWEST_ROWS} rows are needed" * (evaluation.rows < FEWEST_ROWS)
    return f"cannot tell whether the adapter helped: {amount}{few}"
